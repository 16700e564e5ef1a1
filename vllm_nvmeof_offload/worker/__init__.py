# SPDX-License-Identifier: Apache-2.0
"""The worker side: it moves bytes between KV cache, staging and pool, and decides nothing."""
