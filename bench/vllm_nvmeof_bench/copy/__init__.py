# SPDX-License-Identifier: Apache-2.0
"""Copies between a GPU and pinned memory: by DMA, by the kernel, or by `auto`'s choice."""
