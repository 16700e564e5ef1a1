# SPDX-License-Identifier: Apache-2.0
"""Copies between a GPU and pinned memory by DMA, by a kernel, or by the choice of `auto`."""
