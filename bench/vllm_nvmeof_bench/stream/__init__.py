# SPDX-License-Identifier: Apache-2.0
"""`bench stream`: loads larger than the CPU tier, prefetch, admission."""
