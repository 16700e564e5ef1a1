# SPDX-License-Identifier: Apache-2.0
"""`python -m research.cluster`: simulate prefill and decode engines on a virtual clock."""
