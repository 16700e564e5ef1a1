# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the product without vLLM, for `bench copy` and `bench peers`.

The rig is the product's pipeline over a pool, with a separate I/O engine for reads without a
pipeline. "GPU memory" is an ordinary array with the chunks' blocks in random order. Chunk i is in
pool slot i; all chunks were written once. The blocks are zeroed before each load and then compared
with what was written, so that a load of wrong data gives no result. The arms for `measure_arm`:

    ours       one load, streamed
    two_phase  fetches into the CPU tier and loads from it, one full tier at a time
    read       only the I/O engine's reads
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_offload import protocol
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import outcome_of
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import IoEngine, IoOp, Waker
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.manager.handshake import CoreConfig
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Keyspace
from vllm_nvmeof_offload.pool.log import with_log
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    NOWHERE,
    ChunkBatch,
    OpKind,
    SlotIdentity,
    Urgency,
    place_of,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import KIB, MIB, slot_stride_bytes
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

_STREAM_SLOTS_MAX = 64
_KEY_BYTES = 36
_STALL_S = 120.0
_POLL_S = 0.002
_CHECKED = ("ours", "two_phase")


@dataclass(frozen=True)
class Settings:
    """A rig's settings. tier_bytes: payload of all cache slots. sizes: load sizes as multiples of
    tier_bytes. pause_s: pause before each load."""

    sizes: tuple[float, ...]
    tier_bytes: int = 64 * MIB
    chunk_bytes: int = 512 * KIB
    block_bytes: int = 128 * KIB
    seed: int = 1
    pause_s: float = 0.25
    io_engine: str = "auto"

    def __post_init__(self) -> None:
        assert self.chunk_bytes % self.block_bytes == 0
        assert self.tier_bytes % self.chunk_bytes == 0

    @property
    def cache_slots(self) -> int:
        return self.tier_bytes // self.chunk_bytes

    @property
    def stream_slots(self) -> int:
        """The number of stream slots: at most a quarter of staging, as in the product."""
        return max(1, min(_STREAM_SLOTS_MAX, self.cache_slots // 3))

    @property
    def slot_bytes(self) -> int:
        return slot_stride_bytes(self.chunk_bytes)

    def chunks(self, size: float) -> int:
        return max(1, round(size * self.cache_slots))

    @property
    def chunks_max(self) -> int:
        return max(map(self.chunks, self.sizes))

    @property
    def disk_bytes_max(self) -> int:
        """The maximum disk space used at a time."""
        return self.chunks_max * (self.slot_bytes + 4 * KIB) + 16 * MIB


class Rig:
    """A pool, a pipeline and a separate engine. Call `write_all` first and `close` last."""

    def __init__(self, directory: Path, settings: Settings, serve_slots: int = 0) -> None:
        self.settings = settings
        self._serve_slots = serve_slots
        self._op = itertools.count(1).__next__
        self._rows_left: dict[int, int] = {}  # op → its unfinished rows
        self._stack = contextlib.ExitStack()
        try:
            self._open(directory, settings)
        except BaseException:
            self.close()
            raise

    def _open(self, directory: Path, settings: Settings) -> None:
        count, per_chunk = settings.chunks_max, settings.chunk_bytes // settings.block_bytes
        rng = np.random.default_rng(settings.seed)
        self._written = np.frombuffer(rng.bytes(count * settings.chunk_bytes), np.uint8)
        self._written = self._written.reshape(count * per_chunk, settings.block_bytes)
        self._ids = rng.permutation(count * per_chunk).astype(np.int32).reshape(count, per_chunk)
        block = settings.block_bytes
        tensor = CacheTensor(self._allocate(), block, block, count * per_chunk)
        group = Group(0, GroupKind.FULL, per_chunk, per_chunk)
        self._geometry = CacheGeometry([(group, [tensor])])
        self._nothing = CacheGeometry([(group, [])])  # a load over it copies no bytes
        self.identities = [
            SlotIdentity(number.to_bytes(_KEY_BYTES, "little"), 1) for number in range(count)
        ]
        spec = PoolSpec(
            targets=(directory,),
            pool_bytes=with_log(count * (settings.slot_bytes + ENTRY_BYTES)),
            payload_bytes=settings.chunk_bytes,
            keyspace=Keyspace.of({"bench": "tier"}),
        )
        self.pool = pool = Pool.open(spec)
        self._stack.callback(pool.close)
        if pool.slots < count:
            raise BenchError(f"no space for a pool of {count} chunks in {directory}")
        slots = settings.cache_slots, settings.stream_slots
        self.memory = Staging(
            settings.slot_bytes,
            *slots,
            numa_node=self._numa_node(),
            serve_slots=self._serve_slots,
        )
        self._stack.callback(self.memory.close)
        self.staging = self.memory.map
        io, self._bare_io = (self.open_engine(self._stack) for _ in range(2))
        self.engine = io.name
        self._reads_max = self._handed_over_max(io)
        self.copy, self.runner = self.open_worker(self._stack, Waker(), io, io.fileno())

    # A subclass overrides the methods for "GPU memory" and its copies to use a real GPU.
    def _allocate(self) -> int:
        self._blocks = np.zeros_like(self._written)
        return self._blocks.ctypes.data

    def _numa_node(self) -> int | None:
        return None

    def _copy_engine(self, waker: Waker) -> Any:
        return HostCopyEngine(on_done=waker.wake)

    def fill(self) -> None:
        """Fill all blocks in "GPU memory" with the bytes to write."""
        self._blocks[self._ids.ravel()] = self._written

    def open_engine(self, stack: contextlib.ExitStack) -> IoEngine:
        """Open an engine with the product's limits; `stack` closes it before the pool."""
        name, limits = self.settings.io_engine, TUNING
        place = self.pool, self.memory.view, self.staging.base_address
        engine, _ = choose_io_engine(name, *place, limits)
        stack.callback(engine.close)
        return engine

    def open_worker(
        self, stack: contextlib.ExitStack, waker: Waker, io: IoEngine, io_fd: int, **more: Any
    ) -> tuple[Any, PipelineRunner]:
        """Open a pipeline and its copy engine. waker: wakes the pipeline's thread. io_fd: readable
        while there are completions to poll. more: other arguments for `TransferPipeline`."""
        copy = self._copy_engine(waker)
        stack.callback(copy.close)
        limits = TransferLimits(
            group_bytes=(self.settings.chunk_bytes,),
            reads_in_flight_max=self._reads_max,
            read_deadline_s=_STALL_S,
            write_deadline_s=_STALL_S,
        )
        pipeline = TransferPipeline(self.staging, copy, io, limits, **more)
        runner = PipelineRunner(pipeline, waker, io_fd)
        stack.callback(runner.stop)
        return copy, runner

    def _handed_over_max(self, engine: IoEngine) -> int:
        """Return twice the engine's depth, as `worker.build` does."""
        if "threads" in engine.name:
            return 2 * TUNING.io_threads
        at_work = TUNING.read_bytes_in_flight_max // self.settings.slot_bytes
        return 2 * min(TUNING.io_depth, max(1, at_work))

    def close(self) -> None:
        """Close the thread first, then the engines, the memory and the files."""
        self._stack.close()

    def batch(
        self, numbers: range, cache: npt.NDArray[np.int32], *, in_pool: bool = True
    ) -> ChunkBatch:
        """Return these chunks as columns. cache: int32[n], their cache slots; -1: none."""
        count, first = len(numbers), place_of(0, numbers.start)
        places = first + np.arange(count) if in_pool else np.full(count, NOWHERE)
        keys = b"".join(self.identities[number].key for number in numbers)
        generations = [self.identities[number].generation for number in numbers]
        groups = np.zeros(count, np.uint8)
        return ChunkBatch.of(keys, np.array(generations, np.uint64), cache, places, groups)

    def start(self, batch: ChunkBatch, numbers: range, *, copies: bool = True) -> int:
        """Submit a load of chunks `numbers`; return its op. copies: whether it copies bytes."""
        return self._transfer(False, batch, numbers, self._geometry if copies else self._nothing)

    def _transfer(
        self, is_store: bool, batch: ChunkBatch, numbers: range, geometry: CacheGeometry
    ) -> int:
        op, fence = self._begin(batch), self.copy.record_fence()
        ids = self._ids[numbers.start : numbers.stop].ravel()
        transfers = [(op, is_store, batch, ids, [len(ids)], [0])]
        self.runner.hand_over(lambda p: p.transfer(geometry, transfers, fence), op)
        return op

    def fetch(self, batch: ChunkBatch) -> None:
        self._apply(protocol.FetchCommand(self._begin(batch), batch, Urgency.DEMAND))

    def _apply(self, command: protocol.Command) -> None:
        self.runner.hand_over(lambda p: p.command(command))

    def _begin(self, batch: ChunkBatch) -> int:
        op = self._op()
        self._rows_left[op] = len(batch)
        return op

    def check(self) -> int:
        """Process finished transfers; return the number of unfinished ones. Raise BenchError if a
        chunk failed."""
        finished, reports, _ = self.runner.take()
        for job in finished:
            if job.failures:
                raise BenchError(f"a transfer failed: {job.failures[0][1]}")
        for report in protocol.unpacked(reports):
            if not isinstance(report, protocol.OpReport):
                continue
            if report.codes is not None and report.errnos is not None:
                row = int(report.codes.argmax())
                outcome = outcome_of(int(report.codes[row]), int(report.errnos[row]))
                raise BenchError(f"a transfer failed: {outcome}")
            left = self._rows_left.pop(report.op)
            if report.indexes is not None and len(report.indexes) < left:
                self._rows_left[report.op] = left - len(report.indexes)
        return len(self._rows_left)

    def write_all(self) -> None:
        """Store every chunk and write it to its pool slot, one full CPU tier at a time."""
        self.fill()
        tier = self.settings.cache_slots
        for first in range(0, len(self.identities), tier):
            numbers = range(first, min(first + tier, len(self.identities)))
            cache = np.arange(len(numbers), dtype=np.int32)
            stored = self.batch(numbers, cache, in_pool=False)
            self._transfer(True, stored, numbers, self._geometry)
            written = self.batch(numbers, cache)
            self._apply(protocol.WriteCommand(self._begin(written), written))
            end_s = time.monotonic() + _STALL_S
            while self.check():
                if time.monotonic() > end_s:
                    raise BenchError("writing the pool takes too long")
                time.sleep(_POLL_S)

    def read_bare(self, count: int) -> None:
        """Read and verify the first `count` chunks with only the I/O engine."""
        free = deque(range(self.staging.cache_slots + self.staging.stream_slots))
        ready = select.poll()
        ready.register(self._bare_io.fileno(), select.POLLIN)
        slots: dict[int, int] = {}  # token → slot of each chunk being read
        following = 0
        while following < count or slots:
            while following < count and free and len(slots) < self._reads_max:
                slot = free.popleft()
                address = self.staging.base_address + slot * self.staging.slot_bytes
                identity, kind = self.identities[following], OpKind.FETCH
                size = self.settings.chunk_bytes
                place = place_of(0, following), address, identity, size
                stamp = self._bare_io.stamp
                read = IoOp(following, kind, Urgency.DEMAND, *place, stamp=stamp)
                if not self._bare_io.room().reads:
                    free.appendleft(slot)
                    break
                self._bare_io.submit([read])
                slots[following] = slot
                following += 1
            if not ready.poll(_STALL_S * 1000):
                raise BenchError(f"{self._bare_io.name}: no read completed for {_STALL_S:.0f} s")
            for completion in self._bare_io.poll():
                if not completion.outcome.ok:
                    raise BenchError(f"{self._bare_io.name}: a read failed: {completion.outcome}")
                free.append(slots.pop(completion.token))

    def zero(self, count: int) -> None:
        """Zero the blocks of the first `count` chunks."""
        self._blocks[self._ids[:count].ravel()] = 0

    def same(self, count: int) -> bool:
        """Return whether the blocks of the first `count` chunks hold what was written."""
        per_chunk = self._ids.shape[1]
        return all(
            np.array_equal(self._blocks[ids], self._written[i * per_chunk : (i + 1) * per_chunk])
            for i, ids in enumerate(self._ids[:count])
        )


def measure_arm(rig: Rig, arm: str, count: int) -> tuple[float, float]:
    """Measure one load of the first `count` chunks; return (seconds, CPU seconds)."""
    run = _prepare(rig, arm, count)
    rig.zero(count)
    gc.collect()
    time.sleep(rig.settings.pause_s)
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    run()
    end_s, cpu_end_s = time.perf_counter(), time.process_time()
    rig.check()
    if arm in _CHECKED and not rig.same(count):
        raise BenchError(f"{arm}: the blocks differ from the written bytes")
    return end_s - begin_s, round(cpu_end_s - cpu_s, 6)


def _prepare(rig: Rig, arm: str, count: int) -> Callable[[], None]:
    """Prepare what a model's step would provide; return the call to time."""
    if arm == "read":
        return lambda: rig.read_bare(count)
    if arm == "two_phase":
        return lambda: _two_phase(rig, count)
    landing = int(CoreConfig().land_cache_share * rig.settings.cache_slots)
    slots = np.arange(count, dtype=np.int32)
    batch = rig.batch(range(count), np.where(slots < landing, slots, -1).astype(np.int32))
    return lambda: rig.runner.wait([rig.start(batch, range(count))])


def _two_phase(rig: Rig, count: int) -> None:
    """Fetch chunks into the CPU tier, then load them from it, one full tier at a time."""
    tier = rig.settings.cache_slots
    for first in range(0, count, tier):
        numbers = range(first, min(first + tier, count))
        slots = np.arange(len(numbers), dtype=np.int32)
        rig.fetch(rig.batch(numbers, slots))
        chunks = rig.batch(numbers, slots, in_pool=False)
        # A load without bytes waits for the fetches and completes with the last one.
        rig.runner.wait([rig.start(chunks, numbers, copies=False)])
        rig.runner.wait([rig.start(chunks, numbers)])
