# SPDX-License-Identifier: Apache-2.0
"""Pools on disk: targets, slabs, slot headers, index tables, superblocks, locks and leases."""
