# SPDX-License-Identifier: Apache-2.0
"""Copies between a GPU and pinned memory: DMA, the kernel, what `auto` chooses; beside compute."""
