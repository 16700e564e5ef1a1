# SPDX-License-Identifier: Apache-2.0
"""What is measured."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_nvmeof_offload.units import GIB, KIB, MIB

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """sizes: bytes of a block in one transfer of `blocks` blocks, or of as many as fit into
    `bytes_max`. counts: for `small_sizes`, where `auto` has to choose. loop_s: of each loop of
    compute, alone and beside copies.
    """

    rounds: int = 5
    blocks: int = 1000
    bytes_max: int = 4 * GIB
    sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(13))  # 4 KiB … 16 MiB
    small_sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(7))  # 4 KiB … 256 KiB
    counts: tuple[int, ...] = (4, 16, 64, 256)
    both_size: int = 2 * MIB
    submit_size: int = 512 * KIB
    loop_s: float = 2.0

    def count_of(self, size: int) -> int:
        return max(1, min(self.blocks, self.bytes_max // size))
