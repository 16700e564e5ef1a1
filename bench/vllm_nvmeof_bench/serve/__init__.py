# SPDX-License-Identifier: Apache-2.0
"""`bench serve ttft`, `hits` and `turns`: whole servers, ours or any by its URL."""
