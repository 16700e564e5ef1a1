# SPDX-License-Identifier: Apache-2.0
"""What is measured.

Cases; a value is GB/s (1e9 bytes of payload) unless it says otherwise:

    transfer  one transfer of `blocks` blocks, and one contiguous copy of the same bytes
    few       transfers of few small fragments, where `auto` has to choose
    model     one transfer of `blocks` fragments, or blocks, of each model of vLLM's table
    both      both directions at once at `both_size`, half of the blocks each, and each alone
    mix       the same blocks, another share of them loads: "load 25%"
    submit    host time of one submit of the engine, µs
    loop_…    steps/s of a loop of compute beside copies
    sweep     the kernel by its thread blocks: arms kernel_2 … kernel_32
    sweep_matrix  steps/s of a bf16 matrix product beside each of them, copying both ways
    crc       CRC-32C of chunks in GPU memory, by the GPU: alone, and beside the product below
    crc_join  host time to join the parts of one chunk, µs
    crc_matrix  steps/s of a bf16 matrix product, alone and beside the CRC
    disk      a load from disk to the GPU: streamed, in two phases, and each half alone
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_nvmeof_bench.gpu.models import model_blocks
from vllm_nvmeof_offload.units import GIB, KIB, MIB

__all__ = ["PARTS", "USUAL_PARTS", "Settings"]

#: What is measured unless parts are named.
USUAL_PARTS = ("transfer", "few", "model", "both", "submit", "loops", "disk")
PARTS = (*USUAL_PARTS, "sweep", "crc")


def _model_sizes() -> tuple[int, ...]:
    sizes = {size for one in model_blocks() for size in (one.fragment_bytes, one.block_bytes)}
    return tuple(sorted(sizes))


@dataclass(frozen=True)
class Settings:
    """sizes: bytes of a block in one transfer of `blocks` blocks, or of as many as fit into
    `bytes_max`. counts: for `small_sizes`, where `auto` has to choose. loop_s: of each loop of
    compute, alone and beside copies. sweep_blocks: thread blocks of the kernel. mix_percent:
    shares of loads beside those of `both`. crc_chunks: bytes of a piece, and pieces of a chunk;
    crc_bytes: of all chunks of one run. disk_bytes: of one load; disk_chunk_bytes: of one slot
    of the pool; disk_tier_slots: cache slots that the two phases go through.
    """

    rounds: int = 5
    blocks: int = 1000
    bytes_max: int = 4 * GIB
    parts: tuple[str, ...] = USUAL_PARTS
    sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(13))  # 4 KiB … 16 MiB
    small_sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(7))  # 4 KiB … 256 KiB
    counts: tuple[int, ...] = (4, 16, 64, 256)
    model_sizes: tuple[int, ...] = _model_sizes()
    both_size: int = 2 * MIB
    mix_percent: tuple[int, ...] = (10, 25, 75, 90)
    submit_size: int = 512 * KIB
    loop_s: float = 2.0
    sweep_blocks: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32)
    sweep_sizes: tuple[int, ...] = (8 * KIB, 32 * KIB, 128 * KIB, 2 * MIB)
    crc_chunks: tuple[tuple[int, int], ...] = ((2 * MIB, 1), (64 * KIB, 8), (72 * KIB, 5))
    crc_bytes: int = 256 * MIB
    disk_bytes: int = 4 * GIB
    disk_chunk_bytes: int = 2 * MIB
    disk_tier_slots: int = 512

    def count_of(self, size: int) -> int:
        return max(1, min(self.blocks, self.bytes_max // size))
