# SPDX-License-Identifier: Apache-2.0
"""`bench cluster`: a cluster of prefill and decode engines on a virtual clock."""
