# SPDX-License-Identifier: Apache-2.0
"""`bench pool`: the pool's I/O compared with other engines', interleaved in one run on one disk.

Cases, all with O_DIRECT on previously written storage:

    batch_write, batch_read   `bytes_per_round` in blocks, submitted at once
    mixed                     the same number of bytes, with alternating reads and writes
    single_write, single_read one job of `single_bytes` in blocks
    read_beside_writes        single-block reads, each `read_gap_s` after the end of the previous
                              one, while a writer keeps `queued_bytes` queued
    writes_beside_read        the writer's throughput during these reads
    writes_alone              the same writer without reads

Every arm runs batches and mixed. The other cases need arms with jobs and a queue of writes: `ours`,
`ours_threads` and `vllm_fs`. The last three run only with 2 MiB blocks.

Each block size has separate files. For each size, a round runs all kinds, and for each kind all
arms in random order. Compared arms are thus measured within seconds of each other, and none always
follows the same arm, whose I/O can still occupy the disk. Dirty pages are written out before every
measurement (syncfs). Deletions keep a disk mounted with `discard` busy, so a pause follows.

Block i is at index i in staging memory and in the arm's storage. An arm in this process is a
`Mover`; its CPU time includes all threads, io_uring's kernel workers and the loop itself. fio and
the ring loop are separate processes on our pool's slab, because a ring's write rate differed by up
to 17 % between files in different locations on a disk. Like our arms, the ring has separate memory
for each block: some disks write buffers that are still in cache, such as fio's, up to 10 % faster.

Latencies are per job for `single_*` (p50 only: a round has one job), per demand read for
`read_beside_writes`, and per block for fio and the rings. Batches have none, because the latency of
blocks that are submitted at once would depend on their order.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import hashlib
import inspect
import io
import itertools
import json
import os
import random
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_nvmeof_bench import conditions
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import (
    OnProgress,
    home_in,
    progress,
    quiet_interpreter,
    sync_file_system,
    unheard,
)
from vllm_nvmeof_bench.reports.pool import ARMS, CASES, KINDS, Sample
from vllm_nvmeof_bench.results import BenchError, dump, percentile, size_name
from vllm_nvmeof_bench.settings import check_names, check_positive, option, recorded, size_option
from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.errors import OK, EngineError, Outcome
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import Completion, IoEngine, IoOp
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, SLAB_FILE, Keyspace
from vllm_nvmeof_offload.pool.log import with_log
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    NOWHERE,
    ChunkBatch,
    OpKind,
    OpReport,
    SlotIdentity,
    Urgency,
    WriteCommand,
    place_of,
    unpacked,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes
from vllm_nvmeof_offload.worker.pipeline import TransferLimits, TransferPipeline

_STALL_S = 60.0
_POLL_S_MAX = 0.05
#: The kinds that every arm runs; the other kinds need arms with jobs.
FLAT_KINDS = frozenset({"batch_write", "batch_read", "mixed"})
_BESIDE_KINDS = frozenset({"beside", "writes_alone"})
_FLAT_ARMS = frozenset({"fio", "ring", "ring_slots"})
_BLOCKS = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)


@dataclass(frozen=True)
class Settings:
    """Settings for the run. With less than 1 GiB per round, engines do not reach a steady state.

    queued_bytes: bytes that the writer keeps queued. episode_bytes: bytes that it writes before
    each pause, in which the fs tier's files are deleted, because they would grow without bound.
    reads: demand reads per round. settle_s: pause after a deletion.
    """

    directory: Path = option(
        Path("build/bench/disk"), "Directory on the disk to measure.", flag="--dir"
    )
    arms: tuple[str, ...] = option(ARMS, "Arms to measure.")
    cases: tuple[str, ...] = option(CASES, "Cases to measure.")
    blocks: tuple[int, ...] = size_option(_BLOCKS, "Block sizes.")
    rounds: int = option(5, "Samples per measurement.", min=1)
    bytes_per_round: int = size_option(GIB, "Bytes per batch.")
    depth: int = option(32, "Blocks in flight for fio and the ring.")
    seed: int = option(1, "Seed for contents and orders.")
    single_bytes: int = 128 * MIB
    queued_bytes: int = 64 * MIB
    episode_bytes: int = GIB
    reads: int = 100
    read_gap_s: float = 0.02
    beside_block_bytes: int = 2 * MIB
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        check_names("arm", self.arms, ARMS)
        check_names("case", self.cases, CASES)
        check_positive(self, "blocks", "rounds", "depth", "reads")
        for block in self.blocks:
            if block < 4 * KIB or block % (4 * KIB):
                raise BenchError(f"block size {block}: O_DIRECT needs multiples of 4 KiB")
            if self.bytes_per_round < 8 * block:
                raise BenchError(
                    f"{self.bytes_per_round} bytes per round are fewer than 8 blocks of {block}"
                )

    def kinds(self, arm: str, block_bytes: int) -> tuple[str, ...]:
        """Return the kinds of measurements that `arm` runs with this block size."""
        return tuple(
            kind
            for kind, cases in KINDS.items()
            if set(cases) & set(self.cases)
            and (kind in FLAT_KINDS or arm not in _FLAT_ARMS)
            and (kind not in _BESIDE_KINDS or block_bytes == self.beside_block_bytes)
        )

    def batch_blocks(self, block_bytes: int) -> int:
        return self.bytes_per_round // block_bytes

    def single_blocks(self, block_bytes: int) -> int:
        return max(1, self.single_bytes // block_bytes)

    def blocks_needed(self, block_bytes: int) -> int:
        """Return the number of blocks in memory and storage."""
        return max(self.batch_blocks(block_bytes), self.single_blocks(block_bytes))

    @property
    def disk_bytes_max(self) -> int:
        """The maximum disk space used at a time: a pool or flat file, and the fs tier's files."""
        data = max(self.blocks_needed(block) * (block + 8 * KIB) for block in self.blocks)
        fs_writes = max(self.bytes_per_round, self.single_bytes)
        if set(self.cases) & {"read_beside_writes", "writes_beside_read", "writes_alone"}:
            fs_writes = max(fs_writes, self.episode_bytes + 2 * self.queued_bytes)
        return data + (data + fs_writes if "vllm_fs" in self.arms else 0)


@dataclass(frozen=True)
class Moved:
    """A result. payload_bytes: without header pages and table entries. cpu_s: user and system time;
    None if it cannot be attributed."""

    payload_bytes: int
    seconds: float
    cpu_s: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None

    def sample(self, arm: str, case: str, block_bytes: int, number: int) -> Sample:
        cpu_s = None if self.cpu_s is None else round(self.cpu_s * GIB / self.payload_bytes, 5)
        rate = round(self.payload_bytes / MIB / self.seconds, 2)
        p50_us, p99_us = (
            None if value is None else round(value, 1) for value in (self.p50_us, self.p99_us)
        )
        return Sample(arm, case, block_bytes, number, rate, cpu_s, p50_us, p99_us)


class Job(NamedTuple):
    """A transfer of blocks. Concurrent write jobs never share a block."""

    is_read: bool
    blocks: Sequence[int]


class Mover(abc.ABC):
    """An arm in this process, which moves blocks."""

    #: Bytes per job in a batch; 0: one block.
    batch_job_bytes = 0

    def prepare(self, jobs: Sequence[Job]) -> None:  # noqa: B027 - ours have nothing to prepare
        """Create the blocks that jobs read, and keys for writes; not timed."""

    @abc.abstractmethod
    def run(self, jobs: Sequence[Job]) -> None:
        """Submit all jobs at once; return when all are done."""

    @abc.abstractmethod
    def submit(self, token: int, is_read: bool, block: int) -> None:
        """Submit one block."""

    @abc.abstractmethod
    def poll(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for a completion; return the tokens of completed blocks."""

    def wait(self) -> list[int]:
        """Poll until a block has completed; raise BenchError if none does for a minute."""
        end_s = time.perf_counter() + _STALL_S
        while time.perf_counter() < end_s:
            if finished := self.poll(_POLL_S_MAX):
                return finished
        raise BenchError(f"nothing completed for {_STALL_S:.0f} s")

    def tidy(self) -> bool:
        """Delete unused files; return whether any was deleted, which can keep the disk busy."""
        return False


#: Bytes submitted beyond `queued_bytes`, so that these stay queued while writes complete.
_EXTRA_BYTES = 16 * MIB
_EPISODES_MAX = 40


class Beside:
    """Single demand reads while a writer keeps its queue full, in episodes.

    In an episode, the writer fills its queue, and timing starts after the first writes. Reads run
    one after another with pauses; the writer submits a new write for each completed one. The
    episode ends when `episode_bytes` are written or all reads are done. Then the queue is drained,
    and unused files are deleted. Throughput and CPU time are those of the timed parts. Without
    reads there is one episode.
    """

    def __init__(
        self, mover: Mover, settings: Settings, block_bytes: int, dice: random.Random
    ) -> None:
        self._mover = mover
        self._settings = settings
        self._block_bytes = block_bytes
        self._dice = dice
        blocks = settings.blocks_needed(block_bytes)
        self._read_blocks = range(blocks // 4)
        write_blocks = range(blocks // 4, blocks)
        queue = (settings.queued_bytes + _EXTRA_BYTES) // block_bytes
        self._queue_max = max(2, min(queue, len(write_blocks) // 2))
        self._next_block = itertools.cycle(write_blocks)
        self._tokens = itertools.count(1)
        self._queued = 0
        self._seconds = self._cpu_s = 0.0  # of all timed parts
        self._writes = 0
        self._latencies_s: list[float] = []

    def run(self, reads: int) -> dict[str, Moved]:
        self._mover.prepare([Job(True, self._read_blocks)])
        for _ in range(_EPISODES_MAX):
            self._episode(reads)
            self._mover.tidy()
            if len(self._latencies_s) >= reads:
                return self._moved()
        raise BenchError(f"only {len(self._latencies_s)} of {reads} reads completed")

    def _moved(self) -> dict[str, Moved]:
        written = self._writes * self._block_bytes
        if not self._latencies_s:
            return {"writes_alone": Moved(written, self._seconds, self._cpu_s)}
        read = len(self._latencies_s) * self._block_bytes
        latencies_us = [1e6 * latency_s for latency_s in self._latencies_s]
        p50_us, p99_us = (percentile(latencies_us, share) for share in (0.5, 0.99))
        # The CPU time of reads and writes cannot be separated: apportion it by bytes.
        cpu_s = self._cpu_s * written / (written + read)
        return {
            "read_beside_writes": Moved(read, sum(self._latencies_s), None, p50_us, p99_us),
            "writes_beside_read": Moved(written, self._seconds, cpu_s),
        }

    def _episode(self, reads: int) -> None:
        while self._queued < self._queue_max:
            self._write()
        ended = 0
        while ended < max(1, self._queue_max // 4):
            ended += self._top_up(self._mover.wait())
        cpu_s, start_s = time.process_time(), time.perf_counter()
        self._timed(reads)
        self._seconds += time.perf_counter() - start_s
        self._cpu_s += time.process_time() - cpu_s
        while self._queued:
            self._queued -= len(self._mover.wait())

    def _timed(self, reads: int) -> None:
        budget = max(1, self._settings.episode_bytes // self._block_bytes)
        written, reading, submitted_s = 0, 0, 0.0
        due_s = time.perf_counter() + self._settings.read_gap_s / 4
        end_s = time.perf_counter() + _STALL_S
        # Even beyond the budget, wait for a submitted read and, to have a rate, for a first write.
        while True:
            more = len(self._latencies_s) < reads
            if written and not reading and (written >= budget or (reads and not more)):
                break
            now_s = time.perf_counter()
            if now_s > end_s and not written:
                raise BenchError(f"no write finished in {_STALL_S:.0f} s during reads")
            if more and not reading and now_s >= due_s:
                reading, submitted_s = next(self._tokens), now_s
                self._mover.submit(reading, True, self._dice.choice(self._read_blocks))
            pause_s = due_s - now_s if more and not reading else _POLL_S_MAX
            finished = self._mover.poll(min(max(pause_s, 0.0), _POLL_S_MAX))
            if reading in finished:
                now_s = time.perf_counter()
                self._latencies_s.append(now_s - submitted_s)
                finished.remove(reading)
                reading, due_s = 0, now_s + self._settings.read_gap_s
            written += self._top_up(finished)
        self._writes += written

    def _write(self) -> None:
        self._queued += 1
        self._mover.submit(next(self._tokens), False, next(self._next_block))

    def _top_up(self, finished: list[int]) -> int:
        """Submit a new write for each finished one; return the number of finished writes."""
        self._queued -= len(finished)
        for _ in finished:
            self._write()
        return len(finished)


def measure_moves(
    mover: Mover, settings: Settings, block_bytes: int, dice: random.Random, kind: str
) -> dict[str, Moved]:
    """Prepare a measurement of a kind and run it; return case → result. Raise BenchError if a
    transfer fails."""
    if kind in ("beside", "writes_alone"):
        reads = settings.reads if kind == "beside" else 0
        return Beside(mover, settings, block_bytes, dice).run(reads)
    jobs = _jobs(settings, block_bytes, mover.batch_job_bytes, kind)
    mover.prepare(jobs)
    cpu_s, start_s = time.process_time(), time.perf_counter()
    mover.run(jobs)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    payload_bytes = sum(len(job.blocks) for job in jobs) * block_bytes
    p50_us = 1e6 * seconds if kind.startswith("single_") else None
    return {kind: Moved(payload_bytes, seconds, cpu_s, p50_us)}


def _jobs(settings: Settings, block_bytes: int, job_bytes: int, kind: str) -> list[Job]:
    """Return one job for `single_*`, or a batch's jobs of `job_bytes` each."""
    if kind.startswith("single_"):
        return [Job(kind == "single_read", range(settings.single_blocks(block_bytes)))]
    blocks = range(settings.batch_blocks(block_bytes))
    step = max(1, job_bytes // block_bytes)
    if kind != "mixed":
        return [Job(kind == "batch_read", part) for part in _cut(blocks, step)]
    half = len(blocks) // 2
    reads = [Job(True, part) for part in _cut(blocks[:half], step)]
    writes = [Job(False, part) for part in _cut(blocks[half:], step)]
    pairs = itertools.zip_longest(reads, writes)
    return [job for pair in pairs for job in pair if job is not None]


def _cut(blocks: Sequence[int], step: int) -> list[Sequence[int]]:
    return [blocks[start : start + step] for start in range(0, len(blocks), step)]


KEY_BYTES = 36  # as in vLLM: a SHA-256 hash and a group number
#: The fields of the product's `Tuning` that affect the measurements.
_BOUNDS = (
    "io_threads",
    "io_depth",
    "io_split_bytes",
    "read_bytes_in_flight_max",
    "write_bytes_in_flight_max",
    "write_bytes_beside_reads_max",
)


def limits() -> dict[str, int]:
    """Return the product's limits, or those that the environment sets for an experiment."""
    return Tuning.from_env(os.environ).model_dump(include=set(_BOUNDS))


class Ground:
    """A pool that our engines share, used as in the product: whole slots, and populated staging.

    Times include sealing, both checksums, the table entry after a write and the identity check
    after a read. Only payload counts as bytes, not a slot's header page of 4 KiB. `identities[i]`:
    the identity of the last write to slot i.
    """

    def __init__(self, directory: Path, block_bytes: int, blocks: int, staging: Staging) -> None:
        self.slot_bytes = slot_stride_bytes(block_bytes)
        self.staging = staging
        self.checksums = core.choose_crc(staging.map.base_address, len(staging.view))
        spec = PoolSpec(
            targets=(directory,),
            pool_bytes=with_log(blocks * (self.slot_bytes + ENTRY_BYTES)),
            payload_bytes=block_bytes,
            keyspace=Keyspace.of({"bench": block_bytes}),
            o_direct="auto",
        )
        self.pool = Pool.open(spec)
        if self.pool.slots < blocks:
            self.pool.close()
            raise BenchError(f"no space for a pool of {blocks} blocks of {block_bytes} bytes")
        self.slab = self.pool.directories[0] / SLAB_FILE
        self.identities = [
            SlotIdentity(number.to_bytes(KEY_BYTES, "little"), 0) for number in range(blocks)
        ]
        self.written = False

    def op(self, token: int, is_read: bool, block: int) -> IoOp:
        identity = self.identities[block]
        if not is_read:
            identity = SlotIdentity(identity.key, identity.generation + 1)
            self.identities[block] = identity
        slot, target = divmod(block, self.pool.target_count)
        return IoOp(
            token,
            OpKind.FETCH if is_read else OpKind.WRITE,
            Urgency.DEMAND if is_read else Urgency.WRITE,
            place_of(target, slot),
            self.staging.map.base_address + block * self.slot_bytes,
            identity,
            self.pool.payload_bytes,
            stamp=self.pool.stamp,
        )


def fill(staging: Staging, seed: int) -> None:
    """Fill staging with random bytes, which no device can compress."""
    memory = np.frombuffer(staging.view, np.uint8)
    chunk = np.frombuffer(np.random.default_rng(seed).bytes(16 * MIB), np.uint8)
    for start in range(0, len(memory), len(chunk)):
        part = memory[start : start + len(chunk)]
        part[:] = chunk[: len(part)]


class EngineMover(Mover):
    """A mover that is the only caller of an engine. wanted: "uring" or "threads". Raises
    EngineError if the kernel refuses io_uring."""

    def __init__(self, wanted: str, ground: Ground) -> None:
        staging, bounds = ground.staging, Tuning.from_env(os.environ)
        self._engine: IoEngine = choose_io_engine(
            wanted, ground.pool, staging.view, staging.map.base_address, bounds
        )[0]
        self.name = self._engine.name
        self._ground = ground
        self._ready = select.poll()
        self._ready.register(self._engine.fileno(), select.POLLIN)

    def about(self) -> dict[str, Any]:
        return {"runs": self.name, "checksums": self._ground.checksums}

    def fill(self) -> None:
        """Write every block once, because writes to unwritten space are only half as fast."""
        if not self._ground.written:
            self.run([self._everything()])
            self._ground.written = True

    def _everything(self) -> Job:
        return Job(False, range(len(self._ground.identities)))

    def run(self, jobs: Sequence[Job]) -> None:
        moves = [(job.is_read, block) for job in jobs for block in job.blocks]
        started = ended = 0
        while ended < len(moves):
            while started < len(moves) and self._engine.room().writes:
                self.submit(started, *moves[started])
                started += 1
            ended += len(self.wait())

    def submit(self, token: int, is_read: bool, block: int) -> None:
        self._engine.submit([self._ground.op(token, is_read, block)])

    def poll(self, timeout_s: float) -> list[int]:
        self.sleep(timeout_s)
        return [completion.token for completion in self.take()]

    def sleep(self, timeout_s: float) -> None:
        """Wait until the engine wakes the caller."""
        self._ready.poll(timeout_s * 1000)

    def take(self) -> list[Completion]:
        """Return the completions; raise BenchError if an operation failed."""
        completions = self._engine.poll()
        for completion in completions:
            if not completion.outcome.ok:
                raise BenchError(f"{self.name}: an operation failed: {completion.outcome}")
        return completions

    def close(self) -> None:
        if not self._engine.close():
            raise BenchError(f"{self.name}: an I/O hangs in the kernel")


class PipelineMover(EngineMover):
    """A mover that uses an engine through the worker's pipeline, with its order and limits.

    Cache slot i holds block i from the start, and no bytes are copied to or from a KV cache. The
    scheduler sends one command for all chunks of a request, so each of a batch's jobs moves 64 MiB,
    which is 512 tokens for Llama-3.1-8B. In single-block jobs, the cost of Python would dominate.
    """

    batch_job_bytes = 64 * MIB

    def __init__(self, wanted: str, ground: Ground) -> None:
        super().__init__(wanted, ground)
        tuning = Tuning.from_env(os.environ)
        by_threads = "threads" in self.name
        at_work = tuning.io_threads if by_threads else tuning.io_depth
        self._copy = InstantCopy()
        self._pipeline = TransferPipeline(
            ground.staging.map,
            self._copy,
            self._engine,
            TransferLimits(
                group_bytes=(ground.pool.payload_bytes,),
                reads_in_flight_max=2 * at_work,
                writes_in_flight_max=2 * at_work,
                read_bytes_in_flight_max=tuning.read_bytes_in_flight_max,
                write_bytes_in_flight_max=tuning.write_bytes_in_flight_max,
                write_bytes_beside_reads_max=tuning.write_bytes_beside_reads_max,
                read_deadline_s=_STALL_S,
                write_deadline_s=_STALL_S,
            ),
        )
        self._ops = itertools.count(1)
        self._tokens: dict[int, list[int]] = {}  # op → tokens by row
        self._gathered: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # by is_read
        blocks = range(len(ground.identities))
        # Pages of no bytes: without a piece, a chunk would count as omitted by vLLM.
        tensor = CacheTensor(address=0, stride_bytes=0, page_bytes=0, block_count=len(blocks))
        self._geometry = CacheGeometry([(Group(0, GroupKind.FULL, 1), [tensor])])
        self._transfer(next(self._ops), True, self._batch(blocks, pool=False))
        self._step()
        assert self._pipeline.idle()

    def about(self) -> dict[str, Any]:
        return {**super().about(), "job_bytes_in_batches": self.batch_job_bytes}

    def run(self, jobs: Sequence[Job]) -> None:
        left = 0
        for job in jobs:
            for block in job.blocks:
                self.submit(left, job.is_read, block)
                left += 1
            self._hand_over()
        while left:
            left -= len(self.wait())

    def lend(self, measure: Callable[[str], dict[str, Moved]], kind: str) -> dict[str, Moved]:
        """Let another arm measure on our slab, then rewrite the slots that it overwrote."""
        found = measure(kind)
        if kind != "batch_read":
            self.run([self._everything()])
        return found

    def submit(self, token: int, is_read: bool, block: int) -> None:
        self._gathered[is_read].append((token, block))

    def poll(self, timeout_s: float) -> list[int]:
        self._hand_over()
        tokens = self._step()
        if not tokens:
            self._ready.poll(timeout_s * 1000)
            tokens = self._step()
        return tokens

    def _hand_over(self) -> None:
        """Pass submitted blocks to the pipeline with one command for reads and one for writes."""
        for is_read, gathered in self._gathered.items():
            if not gathered:
                continue
            tokens, blocks = zip(*gathered, strict=True)
            gathered.clear()
            op, batch = next(self._ops), self._batch(blocks)
            self._tokens[op] = list(tokens)
            if is_read:
                self._transfer(op, False, batch)
            else:
                self._pipeline.command(WriteCommand(op, batch))

    def _transfer(self, op: int, is_store: bool, batch: ChunkBatch) -> None:
        transfer = op, is_store, batch, batch.cache, [len(batch)], [0]
        self._pipeline.transfer(self._geometry, [transfer], 0)

    def _step(self) -> list[int]:
        """Advance the pipeline; return the tokens of completed blocks."""
        self._pipeline.step()
        while self._copy.ended:
            self._pipeline.step()
        self._pipeline.take_finished()
        ended = []
        for report in unpacked(self._pipeline.take_reports()):
            if not isinstance(report, OpReport):
                continue
            if report.codes is not None:
                raise BenchError(f"{self.name}: operations failed: {set(report.codes.tolist())}")
            if tokens := self._tokens.get(report.op):
                rows = range(len(tokens)) if report.indexes is None else report.indexes.tolist()
                ended += [tokens[row] for row in rows]
        return ended

    def _batch(self, blocks: Sequence[int], *, pool: bool = True) -> ChunkBatch:
        identities = [self._ground.identities[block] for block in blocks]
        count = len(blocks)
        return ChunkBatch.of(
            b"".join(identity.key for identity in identities),
            np.array([identity.generation for identity in identities], np.uint64),
            np.array(blocks, np.int32),
            np.array([place_of(0, block) if pool else NOWHERE for block in blocks], np.int64),
            np.zeros(count, np.uint8),
        )


class InstantCopy:
    """A copy engine that completes copies on submission. wake: called for each batch of copies,
    because real engines wake the pipeline's thread."""

    asleep = False
    makes_checksums = False

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.ended: list[tuple[int, Outcome]] = []
        self._wake = wake
        self._tickets = itertools.count()

    def record_fence(self) -> object:
        return None

    def has_passed(self, fence: object) -> bool:
        return True

    def submit(self, *_: object) -> int:
        self.ended.append((next(self._tickets), OK))
        if len(self.ended) == 1:
            self._wake()
        return self.ended[-1][0]

    def poll(self) -> list[tuple[int, Outcome]]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None: ...


_RING_SOURCE = Path(__file__).with_name("ring_loop.c")
_TIMEOUT_S = 300.0


def write_flat(path: Path, size: int, seed: int) -> None:
    """Create a file of random bytes that is not in the page cache."""
    chunk = np.random.default_rng(seed).bytes(16 * MIB)
    with path.open("wb") as file:
        for start in range(0, size, len(chunk)):
            file.write(chunk[: size - start])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(command: list[str], what: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{what}: {error}") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise BenchError(f"{what}: exit code {done.returncode}: {lines[-1]}")
    return done.stdout


class Fio:
    """fio with io_uring and O_DIRECT. Its buffers are filled once, as ours are. Raises BenchError
    if fio is not installed."""

    def __init__(self) -> None:
        if shutil.which("fio") is None:
            raise BenchError("fio is not installed")
        #: False if the kernel refused to register buffers (memlock limit).
        self.registered = True

    def run(self, options: Mapping[str, object], files: Sequence[Path]) -> dict[str, Any]:
        """Run one process per file; return fio's report. Raise BenchError if fio fails even without
        registered buffers and files."""
        try:
            output = _run(self._command(options, files), "fio")
        except BenchError:
            if not self.registered:
                raise
            self.registered = False
            output = _run(self._command(options, files), "fio")
        report: dict[str, Any] = json.loads(output[output.index("{") :])
        return report

    def _command(self, options: Mapping[str, object], files: Sequence[Path]) -> list[str]:
        common = {
            "name": "global",
            **options,
            "ioengine": "io_uring",
            "direct": 1,
            "fixedbufs": int(self.registered),
            "registerfiles": int(self.registered),
            "scramble_buffers": 0,
            "unified_rw_reporting": "mixed",
            "group_reporting": 1,
            "percentile_list": "50:99",
            "output-format": "json",
        }
        command = ["fio", *(f"--{key}={value}" for key, value in common.items())]
        for number, path in enumerate(files):
            name = str(path).replace(":", "\\:")
            command += [f"--name=job{number}", f"--filename={name}"]
        return command


def fio_moved(report: dict[str, Any], latency: str = "clat_ns") -> Moved:
    """Convert fio's JSON with `unified_rw_reporting=mixed`. Times exclude the jobs' start, because
    fio's CPU percentages do. latency: a key in the JSON; `lat_ns` includes submission."""
    job = report["jobs"][0]
    total = job["mixed"]
    found = total[latency].get("percentile", {})
    p50_us, p99_us = (
        found[key] / 1000 if key in found else None for key in ("50.000000", "99.000000")
    )
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Moved(total["io_bytes"], total["io_bytes"] / total["bw_bytes"], cpu_s, p50_us, p99_us)


def measure_fio(
    fio: Fio, path: Path, settings: Settings, block_bytes: int, kind: str
) -> dict[str, Moved]:
    """Measure a batch with fio, with `depth` blocks in flight."""
    options = {
        "rw": {"batch_write": "write", "batch_read": "read", "mixed": "rw"}[kind],
        "bs": block_bytes,
        "size": settings.batch_blocks(block_bytes) * block_bytes,
        "iodepth": settings.depth,
        "randseed": settings.seed,
    }
    return {kind: fio_moved(fio.run(options, [path]))}


def build_ring(directory: Path) -> Path:
    """Compile the ring loop into `directory` unless an up-to-date program exists there; raise
    BenchError if the C compiler or liburing's headers are missing."""
    program = directory.resolve() / "ring_loop"
    if program.exists() and program.stat().st_mtime >= _RING_SOURCE.stat().st_mtime:
        return program
    directory.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "gcc")
    command = [compiler, "-O2", "-o", str(program), str(_RING_SOURCE), "-luring"]
    try:
        _run(command, f"the ring loop does not compile (needs {compiler} and liburing-dev)")
    except BenchError:
        program.unlink(missing_ok=True)
        raise
    return program


def measure_ring(
    program: Path, path: Path, settings: Settings, block_bytes: int, kind: str, size_bytes: int = 0
) -> dict[str, Moved]:
    """Measure a batch with a bare io_uring loop. size_bytes: bytes per operation, which counts as
    one block; 0: the block's size."""
    blocks, size_bytes = settings.batch_blocks(block_bytes), size_bytes or block_bytes
    numbers = size_bytes, blocks * size_bytes, settings.depth
    command = [str(program), str(path), kind.removeprefix("batch_"), *map(str, numbers)]
    row = json.loads(_run(command, "ring"))
    took = (row[key] for key in ("seconds", "cpu_s", "p50_us", "p99_us"))
    return {kind: Moved(row["bytes"] // size_bytes * block_bytes, *took)}


def measure_ring_slots(
    program: Path, path: Path, settings: Settings, block_bytes: int, kind: str
) -> dict[str, Moved]:
    """Measure the ring with operations as large as our slots, with a header page per block: a loss
    at this size is due to the format, not to our engine."""
    size_bytes = slot_stride_bytes(block_bytes)
    return measure_ring(program, path, settings, block_bytes, kind, size_bytes)


_FS_POLL_S = 0.0002


def import_fs() -> Any:
    """Import vLLM's fs tier without log output; raise BenchError if it is missing."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from vllm.v1.kv_offload.tiering.fs import manager
    except ImportError as error:
        raise BenchError(f"vLLM's fs tier cannot be imported ({error})") from None
    return manager


class FsMover(Mover):
    """vLLM's own fs tier with default threads, driven by its manager as under vLLM's scheduler.

    The tier writes each block to a file with a temporary name, and renames it. It never overwrites
    files, so every write has a new key; files of old keys are deleted between measurements. It uses
    O_DIRECT if the directory supports it, and never syncs.

    A job runs on one thread. Batches therefore consist of many jobs of 2 MiB (or of one block),
    which occupy all threads without the cost of tiny jobs. Reads during writes are jobs of one
    block. The tier cannot wait for one job, so it is polled every 0.2 ms.
    """

    batch_job_bytes = 2 * MIB

    def __init__(self, directory: Path, block_bytes: int, blocks: int, staging: Staging) -> None:
        manager = import_fs()
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._make_key, self._make_job = make_offload_key, TransferJob
        self._context = ReqContext(req_id="bench")
        self._step = max(1, self.batch_job_bytes // block_bytes)
        self._writes = itertools.count()
        self._keys: dict[int, bytes] = {}  # block → key of its last write
        self._new_keys: list[bytes] = []
        self._stale: list[bytes] = []
        self._view = staging.view[: blocks * block_bytes].cast("B", [blocks, block_bytes])
        self._tier = manager.FileSystemTierManager(_fs_spec(), self._view, "fs", str(directory))

    def about(self) -> dict[str, Any]:
        from vllm.v1.kv_offload.tiering.fs import io as fs_io

        parameters = inspect.signature(type(self._tier)).parameters
        threads = {
            name: parameters[f"n_{name}"].default if f"n_{name}" in parameters else None
            for name in ("read_threads", "write_threads")
        }
        return {
            # Buffered reads would measure the page cache.
            "runs": "O_DIRECT" if self._tier._use_o_direct else "buffered",
            "c_extension": bool(fs_io._HAS_FSIO_C),
            **threads,
            "job_bytes_in_batches": self.batch_job_bytes,
        }

    def prepare(self, jobs: Sequence[Job]) -> None:
        missing = [b for job in jobs if job.is_read for b in job.blocks if b not in self._keys]
        if missing:
            self._name(len(missing))
            self.run([Job(False, part) for part in _cut(missing, self._step)])
        self._name(sum(len(job.blocks) for job in jobs if not job.is_read))

    def _name(self, count: int) -> None:
        """Create the keys of the next `count` writes."""
        for number in itertools.islice(self._writes, count):
            digest = hashlib.sha256(str(number).encode()).digest()
            self._new_keys.append(bytes(self._make_key(digest, 0)))

    def run(self, jobs: Sequence[Job]) -> None:
        for number, job in enumerate(jobs):
            self._submit(number, job)
        self._tier.drain_jobs()
        count = len(self._finished())
        if count != len(jobs):
            raise BenchError(f"vLLM's fs tier finished {count} of {len(jobs)} jobs")

    def submit(self, token: int, is_read: bool, block: int) -> None:
        if not is_read:
            self._name(1)
        self._submit(token, Job(is_read, (block,)))

    def _submit(self, number: int, job: Job) -> None:
        transfer = self._make_job(
            job_id=number,
            keys=[self._key_of(block, job.is_read) for block in job.blocks],
            chunk_ids=np.asarray(job.blocks, np.int32),
            is_promotion=job.is_read,
            req_context=self._context,
        )
        (self._tier.submit_load if job.is_read else self._tier.submit_store)(transfer)

    def _key_of(self, block: int, is_read: bool) -> bytes:
        if not is_read:
            if block in self._keys:
                self._stale.append(self._keys[block])
            self._keys[block] = self._new_keys.pop()
        return self._keys[block]

    def poll(self, timeout_s: float) -> list[int]:
        end_s = time.perf_counter() + timeout_s
        while not (finished := self._finished()) and time.perf_counter() < end_s:
            time.sleep(_FS_POLL_S)
        return finished

    def _finished(self) -> list[int]:
        results = list(self._tier.get_finished_jobs())
        if not all(result.success for result in results):
            raise BenchError("vLLM's fs tier: a job failed")
        return [result.job_id for result in results]

    def tidy(self) -> bool:
        stale, self._stale = self._stale, []
        for key in stale:
            path = self._tier.file_mapper.get_file_name(key)
            os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
        return bool(stale)

    def close(self) -> None:
        self._tier.shutdown()
        self._view.release()


def _fs_spec() -> Any:
    """Return an `OffloadingSpec` with one group and one rank, used only for its configuration."""
    from vllm.v1.kv_offload import config as fields
    from vllm.v1.kv_offload.base import OffloadingSpec

    class Spec(OffloadingSpec):  # type: ignore[misc]
        def get_manager(self) -> Any:
            raise AssertionError("not used")

        def get_worker(self, kv_caches: Any) -> Any:
            raise AssertionError("not used")

    return Spec(
        fields.OffloadingConfig(
            groups=(fields.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=1,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=fields.OffloadingModelConfig(name="bench", dtype="bfloat16"),
            cache=fields.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=fields.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
    )


#: Our arms → their engines.
_OURS = {"ours": "uring", "ours_threads": "threads"}
_FLAT = {"fio": measure_fio, "ring": measure_ring, "ring_slots": measure_ring_slots}
_BUILD_DIR = Path("build/bench")
_REMEDY = "give another --dir, or fewer --bytes-per-round"
#: Descriptions with more parts describe single measurements, and are not logged.
_LOGGED_PARTS = 2


def run(
    settings: Settings, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Return samples and conditions; raise BenchError if there is too little space, no arm can run,
    or an arm failed."""
    limit = settings.disk_bytes_max
    with home_in(settings.directory, limit, _REMEDY) as home, quiet_interpreter():
        on_progress(0, 0, "finding the arms that can run")
        one = _Run(settings, home, on_progress)
        gc.collect()
        gc.freeze()  # exclude vLLM's modules from the collections before each measurement
        found = conditions.at_start(home)
        for block_bytes in settings.blocks:
            one.block(block_bytes)
    if not one.samples:
        missing = ((name, arm.get("reason")) for name, arm in one.arms.items())
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing if reason)
        raise BenchError(f"no arm can run here ({reasons})")
    found["settings"] = {**recorded(settings), "block_bytes": settings.blocks, "engine": limits()}
    found["arms"] = one.arms
    return one.samples, {**found, "load_average_at_end": conditions.load_average()}


class _Run:
    """A run. arms: name → the arm's description, or the reason why it cannot run."""

    def __init__(self, settings: Settings, home: Path, on_progress: OnProgress) -> None:
        self.samples: list[Sample] = []
        self.arms: dict[str, dict[str, Any]] = {}
        self._settings = settings
        self._home = home
        self._on_progress = on_progress
        self._done = 0
        self._tidy: Callable[[], bool] = lambda: False
        needs: dict[str, Callable[[], Any]] = {
            "fio": Fio,
            "ring": partial(build_ring, _BUILD_DIR),
            "ring_slots": partial(build_ring, _BUILD_DIR),
            "vllm_fs": import_fs,
        }
        self._needed: dict[str, Any] = {}
        for name in settings.arms:
            self.arms[name] = {"available": True}
            try:
                self._needed[name] = needs[name]() if name in needs else None
            except BenchError as error:
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self.arms[name] = {"available": False, "reason": str(error)}

    def _available(self) -> list[str]:
        return [name for name, arm in self.arms.items() if arm["available"]]

    def block(self, block_bytes: int) -> None:
        """Measure all kinds and arms with one block size."""
        size = size_name(block_bytes)
        self._report(f"{size} · writing all files")
        with contextlib.ExitStack() as stack:
            arms = self._open(stack, block_bytes)
            for number in range(self._settings.rounds):
                dice = random.Random(f"{self._settings.seed} {block_bytes} {number}")
                for kind in KINDS:
                    for name in dice.sample(list(arms), len(arms)):
                        if kind in self._settings.kinds(name, block_bytes):
                            self._report(f"{size} · round {number + 1} · {kind} · {name}")
                            found = self._measured(partial(arms[name], kind))
                            self.samples += [
                                moved.sample(name, case, block_bytes, number)
                                for case, moved in found.items()
                                if case in self._settings.cases
                            ]
        if "fio" in arms:
            self.arms["fio"]["registered"] = self._needed["fio"].registered

    def _measured(self, measure: Callable[[], dict[str, Moved]]) -> dict[str, Moved]:
        gc.collect()
        sync_file_system(self._home)
        found = measure()
        if self._tidy():
            sync_file_system(self._home)
            time.sleep(self._settings.settle_s)
        self._done += 1
        return found

    def _open(
        self, stack: contextlib.ExitStack, block_bytes: int
    ) -> dict[str, Callable[[str], dict[str, Moved]]]:
        """Open the arms until `stack` closes them; return a function per arm that measures a kind.

        All arms in this process share one staging memory. fio and the rings use the slab of our
        arms' pool or, if none of our arms runs, a flat file. Arms that cannot run are left out.
        """
        directory, given = self._home / f"block-{block_bytes}", (self._settings, block_bytes)
        directory.mkdir()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        blocks, wanted = self._settings.blocks_needed(block_bytes), self._available()
        staging = Staging(slot_stride_bytes(block_bytes), blocks, 0)
        stack.callback(staging.close)
        fill(staging, self._settings.seed)
        arms: dict[str, Callable[[str], dict[str, Moved]]] = {}
        flat, owner = directory / "flat", None

        def add(name: str, mover: PipelineMover | FsMover) -> None:
            stack.callback(mover.close)
            self.arms[name] |= mover.about()
            arms[name] = partial(measure_moves, mover, *given, random.Random(self._settings.seed))

        ours = [name for name in _OURS if name in wanted]
        if ours:
            ground = Ground(directory / "pool", block_bytes, blocks, staging)
            stack.callback(ground.pool.close)
            for name in ours:
                try:
                    mover = PipelineMover(_OURS[name], ground)
                except EngineError as error:
                    self._leave_out(name, error)
                else:
                    add(name, mover)
                    mover.fill()
                    flat, owner = ground.slab, owner or mover
        if "vllm_fs" in wanted:
            tier = FsMover(directory / "fs", block_bytes, blocks, staging)
            add("vllm_fs", tier)
            self._tidy = tier.tidy
        if owner is None and any(name in wanted for name in _FLAT):
            write_flat(flat, blocks * slot_stride_bytes(block_bytes), self._settings.seed)
        for name, measure_flat in _FLAT.items():
            if name in wanted:
                measure = partial(measure_flat, self._needed[name], flat, *given)
                arms[name] = partial(owner.lend, measure) if owner else measure
        return arms

    def _report(self, what: str) -> None:
        settings = self._settings
        kinds = [
            settings.kinds(name, size) for name in self._available() for size in settings.blocks
        ]
        self._on_progress(self._done, sum(map(len, kinds)) * settings.rounds, what)


def measure(settings: Settings, json_path: Path) -> None:
    """Run the benchmark, and write the JSON file. Raises as `run` does."""
    with progress(lambda what: what.count(" · ") <= _LOGGED_PARTS) as on_progress:
        dump(json_path, "pool", *run(settings, on_progress))


COMMANDS = (
    Command(
        "pool",
        """Compare the pool's I/O with other engines', interleaved in one run on one disk.

        Takes about 8 minutes and up to 3 GiB of disk, freed at the end. Nothing else should run at
        the same time.
        """,
        Settings,
        measure,
    ),
)
