# SPDX-License-Identifier: Apache-2.0
"""`bench stream`: loads larger than the CPU tier, prefetch and admission.

    load       one load of `sizes` × the CPU tier from a throttled pool, without vLLM
    prefetch   requests that wait in vLLM's queue, with their KV only in a throttled pool; arms on,
               off. The server runs one request at a time; each round sends the next prompts of a
               cycle at once. Case "turn": from the previous request's last token to the first
               token; case "total": the whole round
    admission  TTFT of returning prompts, one at a time, with the target throttled to
               `admission_mb_per_s`; arms auto, always (load), never (no offloading: recompute)

The servers run a small random model on vLLM's CPU engine, concurrently, and are used in turn.
`vllm-nvmeof demo` measures how long preempted requests take to resume.

In the part load, the rig is the real pipeline over a real pool, with a separate I/O engine and a
separate copy engine for the halves. "GPU memory" is an ordinary array, in which the chunks' blocks
are in random order. Chunk i is in pool slot i; all chunks were written once. The blocks are zeroed
before each load and compared with the written bytes after it, so that no result is from wrong data.
Every round measures every size and case with all arms, one after another in random order. Only
this process is throttled, and only its reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import (
    OnProgress,
    home_in,
    progress,
    quiet_interpreter,
    sync_file_system,
    unheard,
)
from vllm_nvmeof_bench.reports.stream import ARMS, PARTS, Sample, throttle_name
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.serve.fleet import serving
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS, OffloadSpec, ServerSpec, on_blocks
from vllm_nvmeof_bench.settings import check_names, check_positive, option, recorded
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload import protocol
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.copy.base import Descriptors, Direction, Pieces
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import Outcome, outcome_of
from vllm_nvmeof_offload.io.base import IoEngine, IoOp, Waker
from vllm_nvmeof_offload.io.native import choose_io_engine
from vllm_nvmeof_offload.manager.handshake import CoreConfig
from vllm_nvmeof_offload.pool.format import Keyspace
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
from vllm_nvmeof_offload.units import GIB, HEADER_BYTES, KIB, MIB, slot_stride_bytes
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

#: Throttles are in MB/s, as is usual for block devices; sizes are in MiB.
MB = 1_000_000
_STREAM_SLOTS_MAX = 64
_NO_PIECES: Descriptors = np.empty((0, 3), np.uint64)
_TABLE_ENTRY_BYTES = 64
_KEY_BYTES = 36
_STALL_S = 120.0
_POLL_S = 0.002
_CHECKED = ("ours", "two_phase")


@dataclass(frozen=True)
class Settings:
    """One run.

    tier_bytes: payload of the CPU tier's cache slots. sizes, paced_sizes: load sizes as multiples
    of tier_bytes, in the cases "memory" and "paced". land_cache_share: share of the cache slots
    that a load may fill, as in the product. pause_s: pause before each load, so that none starts
    within an earlier time slice of the throttle. admission_mb_per_s: read rates; 0: not throttled.
    warm_requests, requests: per rate and round; the warm ones teach the server and do not count.
    """

    parts: tuple[str, ...] = option(PARTS, "Parts to measure.")
    rounds: int = option(3, "Rounds per measurement; at most 3 with servers.", min=1)
    throttle_mb_per_s: int = option(
        100, "Read limit of the part load in MB/s; 0: none.", flag="--throttle", min=0
    )
    seed: int = option(1, "Seed for contents, prompts and orders.")
    directory: Path = option(
        Path("build/bench/tier-disk"), "Directory on the disk to throttle.", flag="--dir"
    )
    tier_bytes: int = 64 * MIB
    chunk_bytes: int = 512 * KIB
    block_bytes: int = 128 * KIB
    sizes: tuple[float, ...] = (0.25, 0.5, 1, 2, 4, 8)
    paced_sizes: tuple[float, ...] = (0.5, 2)
    land_cache_share: float = CoreConfig().land_cache_share
    pause_s: float = 0.25
    io_engine: str = "auto"
    models: Path = Path("build/models")
    server_rounds_max: int = 3
    prefetch_mb_per_s: int = 25
    admission_mb_per_s: tuple[int, ...] = (10, 50, 200, 0)
    warm_requests: int = 2
    requests: int = 4

    def __post_init__(self) -> None:
        check_names("part", self.parts, PARTS)
        check_positive(self, "rounds")
        if self.throttle_mb_per_s < 0:
            raise BenchError("the throttle must be a number of MB/s, or 0 for none")
        assert self.chunk_bytes % self.block_bytes == 0
        assert self.tier_bytes % self.chunk_bytes == 0

    @property
    def cache_slots(self) -> int:
        return self.tier_bytes // self.chunk_bytes

    @property
    def stream_slots(self) -> int:
        """The number of stream slots, at most a quarter of staging, as in the product."""
        return max(1, min(_STREAM_SLOTS_MAX, self.cache_slots // 3))

    @property
    def slot_bytes(self) -> int:
        return slot_stride_bytes(self.chunk_bytes)

    @property
    def cases(self) -> tuple[tuple[str, float], ...]:
        """The (case, multiple of the CPU tier) of all loads; "paced" needs a throttle."""
        paced = self.paced_sizes if self.throttle_mb_per_s else ()
        return (*(("memory", size) for size in self.sizes), *(("paced", size) for size in paced))

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
        """The most disk space used at any time."""
        load = self.chunks_max * (self.slot_bytes + 4 * KIB) if "load" in self.parts else 0
        return max(load, GIB if set(self.parts) - {"load"} else 0) + 16 * MIB


class PacedCopyEngine(HostCopyEngine):
    """The host's copy engine, slowed to a link's rate without using CPU time. Copies complete one
    after another, no faster than `bytes_per_s`, as with a DMA engine. None: the host's full speed.
    Set `bytes_per_s` only while the engine is idle.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        self.bytes_per_s: int | None = None
        self._on_passed = on_done
        self._under_way: deque[tuple[int, float]] = deque()  # bytes, time of submission
        self._free_s = 0.0  # when the link has transferred all bytes so far
        self._passed: deque[tuple[int, Outcome]] = deque()
        super().__init__(on_done=self._copied)

    def submit(
        self, direction: Direction, pieces: Descriptors, fence: object, payloads: Any = None
    ) -> int:
        self._under_way.append((int(pieces[:, 2].sum()), time.perf_counter()))
        return super().submit(direction, pieces, fence, payloads)

    def poll(self) -> list[tuple[int, Outcome]]:
        return [self._passed.popleft() for _ in range(len(self._passed))]

    def _copied(self) -> None:
        """Delay completions. Runs on the engine's thread, which does not copy while it waits."""
        for done in super().poll():
            count, submitted_s = self._under_way.popleft()
            if self.bytes_per_s is not None:
                self._free_s = max(self._free_s, submitted_s) + count / self.bytes_per_s
                time.sleep(max(0.0, self._free_s - time.perf_counter()))
            self._passed.append(done)
        self._on_passed()


class Rig:
    """The pool, pipeline and separate engines. Call `write_all` first and `close` last."""

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
        self._geometry = ChunkGeometry([tensor], per_chunk)
        self.identities = [
            SlotIdentity(number.to_bytes(_KEY_BYTES, "little"), 1) for number in range(count)
        ]
        spec = PoolSpec(
            targets=(directory,),
            pool_bytes=with_log(count * (settings.slot_bytes + _TABLE_ENTRY_BYTES)),
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
        self._bare_copied = threading.Event()
        self.bare_copy = PacedCopyEngine(on_done=self._bare_copied.set)
        self._stack.callback(self.bare_copy.close)
        io, self._bare_io = (self.open_engine(self._stack) for _ in range(2))
        self.engine = io.name
        self._reads_max = self._handed_over_max(io)
        self.copy, self.runner = self.open_worker(self._stack, Waker(), io, io.fileno())

    # -- "GPU memory" and its copies: a subclass uses a real GPU -----------------------------

    def _allocate(self) -> int:
        self._blocks = np.zeros_like(self._written)
        return self._blocks.ctypes.data

    def _numa_node(self) -> int | None:
        return None

    def _copy_engine(self, waker: Waker) -> Any:
        return PacedCopyEngine(on_done=waker.wake)

    def fill(self) -> None:
        """Fill every block in "GPU memory" with the bytes to write."""
        self._blocks[self._ids.ravel()] = self._written

    # -- the pool ---------------------------------------------------------------------

    def open_engine(self, stack: contextlib.ExitStack) -> IoEngine:
        """Open an engine with the product's limits. `stack` closes it before pool and staging."""
        name, limits = self.settings.io_engine, TUNING
        place = self.pool, self.memory.view, self.staging.base_address
        engine, _ = choose_io_engine(name, *place, limits)
        stack.callback(engine.close)
        return engine

    def open_worker(
        self, stack: contextlib.ExitStack, waker: Waker, io: IoEngine, io_fd: int, **more: Any
    ) -> tuple[Any, PipelineRunner]:
        """Open a pipeline and its copy engine. more: arguments of `TransferPipeline`.

        waker: wakes the pipeline's thread. io_fd: readable while there is something to poll.
        """
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
        """Return twice the engine's depth, like `worker.build`."""
        if "threads" in engine.name:
            return 2 * TUNING.io_threads
        at_work = TUNING.read_bytes_in_flight_max // self.settings.slot_bytes
        return 2 * min(TUNING.io_depth, max(1, at_work))

    def close(self) -> None:
        """Close the thread first, then the engines, the memory and the files."""
        self._stack.close()

    # -- transfers --------------------------------------------------------------------

    def pieces(self, chunk: int) -> Descriptors:
        return self._geometry.pieces(self._ids[chunk], 0)

    def batch(
        self, numbers: range, cache: npt.NDArray[np.int32], *, in_pool: bool = True
    ) -> ChunkBatch:
        """Return these chunks as columns. cache: their cache slots; -1: no slot."""
        count, first = len(numbers), place_of(0, numbers.start)
        places = first + np.arange(count) if in_pool else np.full(count, NOWHERE)
        keys = b"".join(self.identities[number].key for number in numbers)
        generations = [self.identities[number].generation for number in numbers]
        groups = np.zeros(count, np.uint8)
        return ChunkBatch.of(keys, np.array(generations, np.uint64), cache, places, groups)

    def start(self, batch: ChunkBatch, pieces: Sequence[Descriptors]) -> int:
        """Submit one load; return its op."""
        command = protocol.LoadCommand(self._begin(batch), batch)
        fence = self.copy.record_fence()
        self.runner.hand_over(lambda p: p.load(command, Pieces.of(pieces), fence), command.op)
        return command.op

    def fetch(self, batch: ChunkBatch) -> None:
        self._apply(protocol.FetchCommand(self._begin(batch), batch, Urgency.DEMAND))

    def _apply(self, command: protocol.Command) -> None:
        self.runner.hand_over(lambda p: p.command(command))

    def _begin(self, batch: ChunkBatch) -> int:
        op = self._op()
        self._rows_left[op] = len(batch)
        return op

    def check(self) -> int:
        """Process finished transfers; return the number of unfinished ones.

        Raises:
            BenchError: a chunk failed.
        """
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
            store = protocol.StoreCommand(self._begin(stored), stored)
            pieces = [self.pieces(number) for number in numbers]
            fence = self.copy.record_fence()
            self.runner.hand_over(
                lambda p, s=store, parts=pieces, f=fence: p.store(s, Pieces.of(parts), f),  # type: ignore[misc]
                store.op,
            )
            written = self.batch(numbers, cache)
            self._apply(protocol.WriteCommand(self._begin(written), written))
            end_s = time.monotonic() + _STALL_S
            while self.check():
                if time.monotonic() > end_s:
                    raise BenchError("writing the pool takes too long")
                time.sleep(_POLL_S)

    def read_bare(self, count: int) -> None:
        """Read and verify the first `count` chunks with only the I/O engine, into all staging."""
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

    def copy_bare(self, pieces: Descriptors) -> None:
        """Copy with only the copy engine; `pieces` contain staging addresses."""
        self._bare_copied.clear()
        self.bare_copy.submit(Direction.LOAD, pieces, None)
        self._bare_copied.wait()
        self.bare_copy.poll()

    def staged_pieces(self, count: int) -> Descriptors:
        """Return the pieces of the first `count` chunks, with addresses of cache slots in turn."""
        slots = (number % self.staging.cache_slots for number in range(count))
        addresses = [self.staging.cache_address(slot) + HEADER_BYTES for slot in slots]
        return Pieces.of([self.pieces(number) for number in range(count)]).at(addresses)

    # -- contents ---------------------------------------------------------------------

    def zero(self, count: int) -> None:
        """Zero the blocks of the first `count` chunks."""
        self._blocks[self._ids[:count].ravel()] = 0

    def same(self, count: int) -> bool:
        """Return whether the blocks of the first `count` chunks hold the written bytes."""
        per_chunk = self._ids.shape[1]
        return all(
            np.array_equal(self._blocks[ids], self._written[i * per_chunk : (i + 1) * per_chunk])
            for i, ids in enumerate(self._ids[:count])
        )


def measure_load(
    settings: Settings, home: Path, on_step: Callable[[str], None]
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure the part "load"; return the samples and the configuration.

    Raises:
        BenchError: a transfer failed, or loaded wrong bytes.
        ThrottleError: this machine cannot throttle.
    """
    with contextlib.ExitStack() as stack:
        throttle = stack.enter_context(Throttle(home)) if settings.throttle_mb_per_s else None
        rig = stack.enter_context(contextlib.closing(Rig(home / "load", settings)))
        on_step("load · writing the pool")
        rig.write_all()
        sync_file_system(home)
        if throttle is not None:
            throttle.add(os.getpid())
            throttle.limit(read_bytes_per_s=settings.throttle_mb_per_s * MB)
        samples = []
        gc.collect()
        with quiet_interpreter():
            for number in range(settings.rounds):
                samples += _round(rig, settings, number, on_step)
        return samples, {
            "engine": rig.engine,
            "throttle": "none" if throttle is None else throttle.kind,
            "cache_slots": settings.cache_slots,
            "stream_slots": settings.stream_slots,
        }


def _round(
    rig: Rig, settings: Settings, number: int, on_step: Callable[[str], None]
) -> Iterator[Sample]:
    dice = random.Random(f"{settings.seed} {number}")
    for case, size in settings.cases:
        rate = settings.throttle_mb_per_s * MB if case == "paced" else None
        rig.copy.bytes_per_s = rig.bare_copy.bytes_per_s = rate
        for arm in dice.sample(ARMS["load"], len(ARMS["load"])):
            on_step(f"load · round {number + 1} · {size:g}× the CPU tier, {case} · {arm}")
            seconds, cpu_s = measure_arm(rig, arm, settings.chunks(size))
            payload = settings.chunks(size) * settings.chunk_bytes
            yield Sample("load", case, arm, size, number, 0, round(seconds, 6), payload, cpu_s)


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
        raise BenchError(f"{arm}: the blocks do not hold what was written")
    return end_s - begin_s, round(cpu_end_s - cpu_s, 6)


def _prepare(rig: Rig, arm: str, count: int) -> Callable[[], None]:
    """Return the call to time, after preparing everything that a model's step would provide."""
    if arm == "read":
        return lambda: rig.read_bare(count)
    if arm == "copy":
        staged = rig.staged_pieces(count)
        return lambda: rig.copy_bare(staged)
    pieces = [rig.pieces(number) for number in range(count)]
    if arm == "two_phase":
        return lambda: _two_phase(rig, count, pieces)
    landing = int(rig.settings.land_cache_share * rig.settings.cache_slots)
    slots = np.arange(count, dtype=np.int32)
    batch = rig.batch(range(count), np.where(slots < landing, slots, -1).astype(np.int32))
    return lambda: rig.runner.wait([rig.start(batch, pieces)])


def _two_phase(rig: Rig, count: int, pieces: list[Descriptors]) -> None:
    """Fetch chunks into the CPU tier, then load them from it, one full tier at a time."""
    tier = rig.settings.cache_slots
    for first in range(0, count, tier):
        numbers = range(first, min(first + tier, count))
        slots = np.arange(len(numbers), dtype=np.int32)
        rig.fetch(rig.batch(numbers, slots))
        chunks = rig.batch(numbers, slots, in_pool=False)
        # A load without bytes waits for the fetches and completes with the last one.
        rig.runner.wait([rig.start(chunks, [_NO_PIECES] * len(chunks))])
        rig.runner.wait([rig.start(chunks, [pieces[i] for i in numbers])])


OnStep = Callable[[str], None]
Found = tuple[list[Sample], dict[str, Any]]

#: A small model: it takes about as long to compute 2,000 tokens as to read their KV, 8 MiB, at
#: about 20 MB/s, so both sides of this crossover can be measured quickly.
SHAPE = ModelShape(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2)
_CHUNK_BYTES = 512 * KIB
_READ_DEADLINE_MS = 60_000
#: Descriptions of measurements have at least this many parts; those of other steps fewer.
_MEASUREMENT_PARTS = 3
#: Tokens of each computed answer, with which later answers are compared.
_FIRST_TOKENS = 8


# -- shared by the parts with servers -----------------------------------------------------


@dataclass(frozen=True)
class ReturnPlan:
    """Prompts that are stored once and return in a cycle. They are too many for GPU and CPU memory,
    so that a returning prompt is only in the pool.

    arms: configuration keys of each arm's server; None: no offloading. count: number of prompts of
    `prompt_tokens`. tier_prompts: number of prompts that the CPU tier holds. sent_at_once: how many
    requests the client sends concurrently.
    """

    part: str
    arms: Mapping[str, Mapping[str, Any] | None]
    count: int
    tier_prompts: float
    prompt_tokens: int = 2000
    answer_tokens: int = 4
    sent_at_once: int = 1

    def prompts(self, seed: int) -> list[list[int]]:
        rng = np.random.default_rng([seed, 2000])
        return [random_tokens(rng, self.prompt_tokens, SHAPE) for _ in range(self.count)]

    def server(self, models: Path, home: Path, arm: str) -> ServerSpec:
        """Return an arm's server, whose GPU cache holds little more than one request."""
        needed = on_blocks(self.prompt_tokens + self.answer_tokens + 1)
        offload, keys = None, self.arms[arm]
        if keys is not None:
            prompt_bytes = self.prompt_tokens * SHAPE.kv_bytes_per_token
            offload = OffloadSpec.sized(
                math.ceil(self.tier_prompts * prompt_bytes / _CHUNK_BYTES),
                _CHUNK_BYTES,
                math.ceil(1.5 * self.count * prompt_bytes) + 16 * MIB,
                home / f"{self.part}-{arm}",
                read_deadline_ms=_READ_DEADLINE_MS,
                **keys,
            )
        return ServerSpec(
            model=make_model(models.resolve(), SHAPE),
            max_model_len=needed + BLOCK_TOKENS,
            gpu_blocks=needed * 5 // 4 // BLOCK_TOKENS,
            max_num_seqs=1,
            cores_reserved=0,
            offload=offload,
        )


@dataclass
class Agreement:
    """A count of answers to the same prompt that differ between arms. Batches of different shapes
    round differently, which can flip a near tie: then `different` is small, but not zero.
    """

    compared: int = 0
    different: int = 0
    _first: dict[str, Sequence[int]] = field(default_factory=dict)

    def add(self, name: str, answer: Answer) -> None:
        """Compare an answer with the first one of this name."""
        first = self._first.setdefault(name, answer.tokens)
        if first is not answer.tokens:
            self.compared += 1
            self.different += any(a != b for a, b in zip(first, answer.tokens, strict=False))

    def facts(self) -> dict[str, int]:
        return {"compared": self.compared, "different": self.different}


def _rows(times: Sequence[float], loaded_tokens: int, *common: Any) -> list[Sample]:
    """Return a sample per time. common: the values of the samples' first fields, part to round."""
    return [
        Sample(*common, number, round(seconds, 6), loaded_tokens=loaded_tokens)
        for number, seconds in enumerate(times)
    ]


# -- returning prompts --------------------------------------------------------------------

#: Only loads are compared here: no arm may choose to recompute instead.
PREFETCH = ReturnPlan(
    "prefetch",
    {
        "off": {"admission": "always", "ahead_cache_share": 0.0},
        "on": {"admission": "always"},
    },
    count=18,
    tier_prompts=8.2,
    answer_tokens=64,
    sent_at_once=6,
)
ADMISSION = ReturnPlan(
    "admission",
    {"never": None, "always": {"admission": "always"}, "auto": {"admission": "auto"}},
    count=12,
    tier_prompts=4.0,
)


class _Circle:
    """An arm's server, to which the plan's prompts are sent in a cycle."""

    def __init__(
        self, plan: ReturnPlan, arm: str, client: Client, seed: int, agreement: Agreement
    ) -> None:
        self.arm = arm
        self.client = client
        self.offloads = plan.arms[arm] is not None
        self._plan = plan
        self._agreement = agreement
        self._prompts = itertools.cycle(enumerate(plan.prompts(seed)))

    async def ask(self, count: int, tokens: int = 0) -> tuple[list[Answer], int]:
        """Send the next prompts; return the answers, and the mean of loaded tokens per prompt.

        tokens: tokens per answer; 0: as planned.
        """
        chosen = list(itertools.islice(self._prompts, count))
        turns = asyncio.Semaphore(self._plan.sent_at_once)

        async def send(prompt: list[int]) -> Answer:
            async with turns:
                return await self.client.complete(prompt, tokens or self._plan.answer_tokens)

        before = await self.client.hits()
        answers = await asyncio.gather(*(send(prompt) for _, prompt in chosen))
        hits = await self.client.hits() - before
        for (index, _), answer in zip(chosen, answers, strict=True):
            self._agreement.add(str(index), answer)
        return answers, round((hits.cpu + hits.pool) / count)


Batch = Callable[[_Circle, int, int], Coroutine[Any, Any, list[Sample]]]


def _measure_returns(
    plan: ReturnPlan, batch: Batch, rates: Sequence[int], settings: Settings, home: Path,
    on_step: OnStep,
) -> Found:  # fmt: skip
    """Measure returning prompts, with rates and arms in random order."""
    samples: list[Sample] = []
    agreement = Agreement()
    specs = {arm: plan.server(settings.models, home, arm) for arm in plan.arms}
    with Throttle(home) as throttle, serving(specs, home / "logs", on_step, {}) as fleet:
        circles = {
            arm: _Circle(plan, arm, client, settings.seed, agreement)
            for arm, client in fleet.clients.items()
        }
        for arm, circle in circles.items():
            on_step(f"{plan.part} · computing all prompts, {arm}")
            fleet.run(circle.ask(plan.count, min(_FIRST_TOKENS, plan.answer_tokens)))
            fleet.run(circle.client.settle())
            if circle.offloads:
                throttle.add_group(fleet.servers[arm].pid)
        for number in range(settings.server_rounds):
            dice = random.Random(f"{settings.seed} {number}")
            for place, rate in enumerate(dice.sample(rates, len(rates))):
                throttle.limit(read_bytes_per_s=rate * MB or None)
                for arm in fleet.shuffled(f"{settings.seed} {number} {rate}"):
                    if place and not circles[arm].offloads:
                        continue  # computing does not depend on the rate
                    name = throttle_name(rate)
                    on_step(f"{plan.part} · round {number + 1} · {name} · {arm}")
                    samples += fleet.run(batch(circles[arm], number, rate))
    return samples, {
        "throttle": throttle.kind,
        "prompts": plan.count,
        "prompt_tokens": plan.prompt_tokens,
        "answer_tokens": plan.answer_tokens,
        "tier_prompts": plan.tier_prompts,
        "kv_bytes_per_token": SHAPE.kv_bytes_per_token,
        "answers": agreement.facts(),
    }


def _measure_prefetch(settings: Settings, home: Path, on_step: OnStep) -> Found:
    prefetched: dict[str, int] = {}

    async def batch(circle: _Circle, number: int, rate: int) -> list[Sample]:
        answers, each = await circle.ask(PREFETCH.sent_at_once)
        metrics = await circle.client.metrics()
        prefetched[circle.arm] = int(metrics.value("vllm:nvmeof_prefetches_total"))
        ordered = sorted(answers, key=lambda answer: answer.times[0])
        turns = [b.times[0] - a.times[-1] for a, b in itertools.pairwise(ordered)]
        total = max(one.times[-1] for one in answers) - min(one.sent for one in answers)
        return [
            *_rows(turns, each, "prefetch", "turn", circle.arm, None, number),
            *_rows([total], each, "prefetch", "total", circle.arm, None, number),
        ]

    rates = (settings.prefetch_mb_per_s,)
    samples, facts = _measure_returns(PREFETCH, batch, rates, settings, home, on_step)
    return samples, {
        **facts,
        "read_mb_per_s": settings.prefetch_mb_per_s,
        "sent_at_once": PREFETCH.sent_at_once,
        "prefetched_chunks": prefetched,
    }


def _measure_admission(settings: Settings, home: Path, on_step: OnStep) -> Found:
    async def batch(circle: _Circle, number: int, rate: int) -> list[Sample]:
        await circle.ask(settings.warm_requests)  # lets the server learn the new rate
        answers, each = await circle.ask(settings.requests)
        at = rate if circle.offloads else None
        times = [one.ttft_s for one in answers]
        return _rows(times, each, "admission", "ttft", circle.arm, at, number)

    rates = settings.admission_mb_per_s
    return _measure_returns(ADMISSION, batch, rates, settings, home, on_step)


# -- the run ------------------------------------------------------------------------------

_PARTS = {
    "load": measure_load,
    "prefetch": _measure_prefetch,
    "admission": _measure_admission,
}


def steps(settings: Settings) -> int:
    """Return the number of measurements."""
    rounds = settings.server_rounds
    counts = {
        "load": settings.rounds * len(settings.cases) * len(ARMS["load"]),
        "prefetch": rounds * len(PREFETCH.arms),
        "admission": rounds * (1 + 2 * len(settings.admission_mb_per_s)),
    }
    return sum(counts[part] for part in settings.parts)


def run(
    settings: Settings,
    on_progress: OnProgress = unheard,
    on_part: Callable[[list[Sample], dict[str, Any]], None] = lambda samples, conditions: None,
) -> Found:
    """Measure in a new directory; return samples and conditions.

    on_part: called with both after each part, so that a failing part loses no earlier results.

    Raises:
        BenchError: there is too little space, or a transfer failed.
        OffloadError: this machine cannot throttle, or a server or a request failed.
    """
    with home_in(settings.directory, settings.disk_bytes_max) as home:
        conditions = {**at_start(home), "settings": recorded(settings), "parts": {}}
        samples: list[Sample] = []
        total, done = steps(settings), 0

        def on_step(what: str) -> None:
            nonlocal done
            on_progress(done, total, what)
            done += what.count(" · ") >= _MEASUREMENT_PARTS

        for part in settings.parts:
            found, facts = _PARTS[part](settings, home, on_step)
            samples += found
            conditions["parts"][part] = facts
            conditions["load_average_at_end"] = load_average()
            on_part(samples, conditions)
        on_progress(total, total, "done")
        return samples, conditions


def _measure(settings: Settings, json_path: Path) -> None:
    def is_logged(what: str) -> bool:
        """Return whether to log a step; single loads are left out."""
        return not what.startswith("load") or what.count(" · ") < _MEASUREMENT_PARTS

    with progress(is_logged) as on_progress:
        run(settings, on_progress, lambda *found: dump(json_path, "stream", *found))


COMMANDS = (
    Command(
        "stream",
        "Measure loads larger than the CPU tier, prefetch and admission.\n\n"
        "A control group throttles the disk, which usually requires root. The part load takes 3 "
        "minutes. The others start vllm serve on the CPU with a small random model, five times in "
        "all, and take 10 minutes. Disk space is freed at the end.",
        Settings,
        _measure,
    ),
)
