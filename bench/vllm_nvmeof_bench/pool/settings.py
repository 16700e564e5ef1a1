# SPDX-License-Identifier: Apache-2.0
"""What is measured: arms, cases, sizes. Everything here is fixed before a run starts.

Cases, all with O_DIRECT on storage that was written before (`arms` says how each arm does it):

    batch_write, batch_read   `bytes_per_round`, handed over at once, until all of it is done
    mixed                     the same bytes, half reads and half writes, alternating
    single_write, single_read one job of `single_bytes`, made of blocks, until it is done
    read_beside_writes        one read of a block at a time, `read_gap_s` after the one before
                              has finished, while a writer keeps `queued_bytes` queued
    writes_beside_read        that writer's throughput meanwhile
    writes_alone              the same writer without reads

Who takes part: batches and mixed, every arm; the others, the arms that have jobs and a queue
of writes of their own: `ours`, `ours_threads`, `vllm_fs`. The last three cases run at one block
size alone, 2 MiB, and not at all if that is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_offload.units import GIB, KIB, MIB

__all__ = ["ARMS", "BLOCKS", "CASES", "KINDS", "BenchError", "Settings"]

ARMS = ("ours", "ours_threads", "fio", "ring", "vllm_fs")
BLOCKS = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)

#: One kind of measurement → the cases that it yields.
KINDS: dict[str, tuple[str, ...]] = {
    "batch_write": ("batch_write",),
    "batch_read": ("batch_read",),
    "mixed": ("mixed",),
    "single_write": ("single_write",),
    "single_read": ("single_read",),
    "beside": ("read_beside_writes", "writes_beside_read"),
    "writes_alone": ("writes_alone",),
}
CASES = tuple(case for cases in KINDS.values() for case in cases)
#: Measured by every arm; the rest only by those that take jobs.
FLAT_KINDS = frozenset({"batch_write", "batch_read", "mixed"})
BESIDE_KINDS = frozenset({"beside", "writes_alone"})
_FLAT_ARMS = frozenset({"fio", "ring"})


@dataclass(frozen=True)
class Settings:
    """One run.

    depth: blocks in flight of fio and the ring; ours run with the product's configuration, as
    `conditions` says. bytes_per_round: less than 1 GiB measures how an engine starts, not how it
    runs. queued_bytes: what the saturating writer keeps queued. episode_bytes: what it may write
    before it pauses and the fs tier's files, which nothing else bounds, are deleted. reads:
    demand reads a round.
    settle_s: the disk's time after a deletion, before the next measurement.
    """

    arms: tuple[str, ...] = ARMS
    cases: tuple[str, ...] = CASES
    blocks: tuple[int, ...] = BLOCKS
    rounds: int = 5
    bytes_per_round: int = GIB
    single_bytes: int = 128 * MIB
    depth: int = 32
    seed: int = 1
    queued_bytes: int = 64 * MIB
    episode_bytes: int = GIB
    reads: int = 100
    read_gap_s: float = 0.02
    beside_block_bytes: int = 2 * MIB
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        for what, given, known in (("arm", self.arms, ARMS), ("case", self.cases, CASES)):
            for name in given:
                if name not in known:
                    raise BenchError(f"no {what} {name!r}; there are {', '.join(known)}")
        if not self.arms or not self.cases or not self.blocks:
            raise BenchError("nothing to measure: give at least one arm, case and block size")
        if self.rounds < 1 or self.depth < 1 or self.reads < 1:
            raise BenchError("rounds, depth and reads are at least 1")
        for block in self.blocks:
            if block < 4 * KIB or block % (4 * KIB):
                raise BenchError(f"block size {block}: a multiple of 4 KiB, for O_DIRECT")
            if self.bytes_per_round < 8 * block:
                raise BenchError(
                    f"{self.bytes_per_round} bytes a round are fewer than 8 blocks of {block}"
                )

    def kinds(self, arm: str, block_bytes: int) -> tuple[str, ...]:
        """What `arm` measures at this block size."""
        wanted = [kind for kind, cases in KINDS.items() if set(cases) & set(self.cases)]
        if arm in _FLAT_ARMS:
            wanted = [kind for kind in wanted if kind in FLAT_KINDS]
        if block_bytes != self.beside_block_bytes:
            wanted = [kind for kind in wanted if kind not in BESIDE_KINDS]
        return tuple(wanted)

    def batch_blocks(self, block_bytes: int) -> int:
        return self.bytes_per_round // block_bytes

    def single_blocks(self, block_bytes: int) -> int:
        return max(1, self.single_bytes // block_bytes)

    def blocks_needed(self, block_bytes: int) -> int:
        """Blocks that memory and storage must hold."""
        return max(self.batch_blocks(block_bytes), self.single_blocks(block_bytes))

    @property
    def disk_bytes_max(self) -> int:
        """The most that lies on the disk at any time: pool, flat file, the fs tier's files."""
        data = max(self.blocks_needed(block) * (block + 8 * KIB) for block in self.blocks)
        fs_writes = max(self.bytes_per_round, self.single_bytes)
        if set(self.cases) & {"read_beside_writes", "writes_beside_read", "writes_alone"}:
            fs_writes = max(fs_writes, self.episode_bytes + 2 * self.queued_bytes)
        return 2 * data + (data + fs_writes if "vllm_fs" in self.arms else 0)
