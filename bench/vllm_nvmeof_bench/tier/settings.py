# SPDX-License-Identifier: Apache-2.0
"""What is measured: parts, arms, sizes. Everything here is fixed before a run starts.

    load       one load of `sizes` × the CPU tier from a throttled pool, without vLLM:
                 ours       one LoadCommand: streamed, and landing as the manager has it land
                 read       the bare I/O engine reads and checks the same chunks, no copy
                 copy       the bare copy engine moves as many bytes from cache slots
                 two_phase  all chunks into the CPU tier first, then from there; beyond the
                            tier in rounds of one tier (vLLM's tiering would call that a miss)
               case "memory": copies as fast as memory is; "paced": as slow as the target, as
               a DMA engine would be that takes no CPU: only what overlaps reaches the ratio
    resume     a crowd that preempts: from room to the next token; arms reload, recompute
    prefetch   requests that wait behind another, their KV in a throttled pool; arms on, off:
               case "turn", from the end of the one before to the first token; case "total"
    admission  prompts that return while the target is throttled to `admission_mb_per_s`, time
               to first token; arms auto, always (load) and never (no offloading: recompute)

The last three run `vllm serve` with a small random model on vLLM's CPU engine. Resume and
prefetch run one server at a time, so that their arms follow each other; within a server everything
goes round by round. The servers of admission run side by side and are asked in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes

__all__ = ["ARMS", "MB", "PARTS", "Settings"]

PARTS = ("load", "resume", "prefetch", "admission")
ARMS = {
    "load": ("ours", "read", "copy", "two_phase"),
    "resume": ("reload", "recompute"),
    "prefetch": ("on", "off"),
    "admission": ("auto", "always", "never"),
}
#: Throttles are in MB/s, as block devices are described; sizes are in MiB.
MB = 1_000_000
_STREAM_SLOTS_MAX = 64


@dataclass(frozen=True)
class Settings:
    """One run.

    throttle_mb_per_s: of the part "load"; 0: none. tier_bytes: payload that its cache slots
    hold. sizes, paced_sizes: multiples of it, of the cases "memory" and "paced".
    land_cache_share: of the cache slots that a load may fill, the product's default.
    pause_s: before each load, so that none starts in what the throttle's slice has left over.
    admission_mb_per_s: 0: not throttled. warm_requests, requests: at each of them, in each
    round; the warm ones are for learning and not kept. server_rounds_max: rounds of the parts
    with servers, if there are more.
    """

    parts: tuple[str, ...] = PARTS
    rounds: int = 3
    throttle_mb_per_s: int = 100
    seed: int = 1
    tier_bytes: int = 64 * MIB
    chunk_bytes: int = 512 * KIB
    block_bytes: int = 128 * KIB
    sizes: tuple[float, ...] = (0.25, 0.5, 1, 2, 4, 8)
    paced_sizes: tuple[float, ...] = (0.5, 2)
    land_cache_share: float = 0.5
    pause_s: float = 0.25
    io_engine: str = "auto"
    models: Path = Path("build/models")
    server_rounds_max: int = 3
    prefetch_mb_per_s: int = 25
    admission_mb_per_s: tuple[int, ...] = (10, 50, 200, 0)
    warm_requests: int = 2
    requests: int = 4

    def __post_init__(self) -> None:
        for name in self.parts:
            if name not in PARTS:
                raise BenchError(f"no part {name!r}; there are {', '.join(PARTS)}")
        if not self.parts:
            raise BenchError("nothing to measure: give at least one part")
        if self.rounds < 1:
            raise BenchError("rounds are at least 1")
        if self.throttle_mb_per_s < 0:
            raise BenchError("the throttle is a number of MB/s, or 0 for none")
        assert self.chunk_bytes % self.block_bytes == 0
        assert self.tier_bytes % self.chunk_bytes == 0

    @property
    def cache_slots(self) -> int:
        return self.tier_bytes // self.chunk_bytes

    @property
    def stream_slots(self) -> int:
        """As the product splits staging: streams take at most a quarter of it."""
        return max(1, min(_STREAM_SLOTS_MAX, self.cache_slots // 3))

    @property
    def slot_bytes(self) -> int:
        return slot_stride_bytes(self.chunk_bytes)

    @property
    def cases(self) -> tuple[tuple[str, float], ...]:
        """(case, multiple of the CPU tier) of the part "load"."""
        paced = self.paced_sizes if self.throttle_mb_per_s else ()  # as slow as what?
        return (
            *(("memory", size) for size in self.sizes),
            *(("paced", size) for size in paced),
        )

    def chunks(self, size: float) -> int:
        return max(1, round(size * self.cache_slots))

    @property
    def chunks_max(self) -> int:
        return max(self.chunks(size) for _, size in self.cases)

    @property
    def server_rounds(self) -> int:
        return min(self.rounds, self.server_rounds_max)

    @property
    def disk_bytes_max(self) -> int:
        """The most that lies on the disk at any time."""
        load = self.chunks_max * (self.slot_bytes + 4 * KIB) if "load" in self.parts else 0
        return max(load, GIB if set(self.parts) - {"load"} else 0) + 16 * MIB
