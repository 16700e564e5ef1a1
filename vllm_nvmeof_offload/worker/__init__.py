# SPDX-License-Identifier: Apache-2.0
"""The worker side, which moves bytes between KV cache, staging and pool, and makes no decisions."""
