# SPDX-License-Identifier: Apache-2.0
"""`bench ttft`, `hits` and `turns`: whole servers, ours or any by its URL."""
