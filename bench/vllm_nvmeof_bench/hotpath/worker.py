# SPDX-License-Identifier: Apache-2.0
"""The worker's side: the model's and the pipeline's threads, with engines that complete at once.

The adapter, the runner and the pipeline are the product's. No data is moved: copies and I/O
operations complete as soon as they are submitted. A thread's cost is its CPU time.

The pipeline's thread holds the interpreter lock except in native sections, which count their own
CPU time. The rest of its CPU time is reported as time with the lock. This figure is never too low.
It is too high by the system calls for which Python itself releases the lock, at most two per turn,
and by one reading of the clock per section.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from vllm_nvmeof_bench.hotpath.managers import TARGETS, Recorder
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.copy.base import Descriptors, Direction, Payloads
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.errors import OK, Outcome
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import Completion, IoOp, Lanes, Room, Waker
from vllm_nvmeof_offload.native import InstantLanes, meter_unlocked, unlocked_s
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.protocol import (
    NOWHERE,
    TAG_BYTES,
    ChunkBatch,
    LoadCommand,
    OpReport,
    StoreCommand,
    WriteCommand,
    place_of,
    unpacked,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import KIB, slot_stride_bytes
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankWorker
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

_BLOCK_BYTES = 64 * KIB
_KV_ADDRESS, _STAGING_ADDRESS = 1 << 40, 1 << 44
_DONE_S_MAX = 120.0
_POLL_S = 0.0005


class InstantCopy:
    """A copy engine whose copies complete as soon as they are submitted."""

    makes_checksums = False

    def __init__(self, wake: Callable[[], None]) -> None:
        self.asleep = False
        self._wake = wake
        self._tickets = 0
        self._done: list[tuple[int, Outcome]] = []

    def record_fence(self) -> object:
        return None

    def has_passed(self, fence: object) -> bool:
        return True

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        self._tickets += 1
        self._done.append((self._tickets, OK))
        if len(self._done) == 1:  # real engines wake the thread from their own threads
            self._wake()
        return self._tickets

    def poll(self) -> list[tuple[int, Outcome]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        return


class InstantIo:
    """An I/O engine of native lanes whose operations complete as soon as they are submitted."""

    name = "instant"
    stamp = Stamp(1, bytes(TAG_BYTES))

    def __init__(self) -> None:
        self._waker = Waker()
        self._lanes = InstantLanes(self._waker.fd)

    def attach(self) -> Lanes:
        return self._lanes

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        raise AssertionError("there are no resets")

    def room(self) -> Room:
        return Room(0, 0)

    def submit(self, ops: Sequence[IoOp]) -> None:
        raise AssertionError("reads and writes go to the lanes, and there are no resets")

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        return []

    def replace_target(self, target: int) -> None:
        return

    def poll(self) -> list[Completion]:
        return []

    def fileno(self) -> int:
        return self._waker.fd

    def close(self, timeout_s: float = 5.0) -> bool:
        return True


class Worker:
    """One rank's worker with `chunks_max` cache slots; `close` ends its thread."""

    def __init__(self, chunks_max: int) -> None:
        self._slots = chunks_max
        slot_bytes = slot_stride_bytes(_BLOCK_BYTES)
        staging = StagingMap(_STAGING_ADDRESS, slot_bytes, chunks_max, TUNING.stream_slots)
        tensor = CacheTensor(_KV_ADDRESS, _BLOCK_BYTES, _BLOCK_BYTES, chunks_max)
        waker, io = Waker(), InstantIo()
        copy = InstantCopy(waker.wake)
        limits = TransferLimits(
            group_bytes=(_BLOCK_BYTES,),
            target_count=TARGETS,
            reads_in_flight_max=2 * TUNING.io_depth * TARGETS,
            writes_in_flight_max=2 * TUNING.io_depth * TARGETS,
        )
        meter_unlocked(True)
        known = set(threading.enumerate())
        runner = PipelineRunner(TransferPipeline(staging, copy, io, limits), waker, io.fileno())
        (thread,) = set(threading.enumerate()) - known
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self.runner = runner
        nothing: Any = None  # without data there is neither staging nor a pool
        geometry = CacheGeometry([(Group(0, GroupKind.FULL, 16), [tensor])])
        parts = RankWorker(runner, geometry, copy, io, nothing, None)
        self._worker = NVMeoFOffloadingWorker(parts)
        self._blocks = np.random.default_rng(1).permutation(chunks_max).astype(np.int32)
        self._op = 0

    def close(self) -> None:
        self.runner.stop()
        meter_unlocked(False)

    def measure(self, recorder: Recorder, keys: Sequence[Sequence[bytes]]) -> None:
        """Store, write, and load chunks from cache slots and from the pool. keys: a list per op."""
        ends = np.cumsum([len(op) for op in keys]).tolist()
        slots = [
            np.arange(end - len(op), end, dtype=np.int32)
            for end, op in zip(ends, keys, strict=True)
        ]
        blocks = [GPULoadStoreSpec(self._blocks[one].tolist(), [len(one)], [0]) for one in slots]
        worker = self._worker
        for case in ("store", "write", "cpu", "pool"):
            # The manager writes all chunks that a step has stored in one op.
            rows = [np.concatenate(slots)] if case == "write" else slots
            named = [list(chain.from_iterable(keys))] if case == "write" else keys
            given = {self._next(): self._batch(case, *one) for one in zip(named, rows, strict=True)}
            calls: list[Callable[[], object]]
            if case == "write":
                writes = [WriteCommand(*one) for one in given.items()]
                calls = [partial(worker.apply, writes)]
            elif case == "store":
                stores = [CommandSpec(StoreCommand(*one)) for one in given.items()]
                calls = list(map(partial, repeat(worker.submit_store), given, blocks, stores))
            else:
                loads = [CommandSpec(LoadCommand(*one)) for one in given.items()]
                calls = list(map(partial, repeat(worker.submit_load), given, loads, blocks))
            self._run(recorder, case, calls, {op: len(batch) for op, batch in given.items()})

    def _run(
        self,
        recorder: Recorder,
        case: str,
        calls: Sequence[Callable[[], object]],
        chunks: Mapping[int, int],
    ) -> None:
        """Submit the calls and wait for the reports of all chunks. chunks: op → their number."""
        count = left = sum(chunks.values())
        began_s, end_s = time.clock_gettime(self._clock), time.monotonic() + _DONE_S_MAX
        unlocked_before_s = unlocked_s()

        def submit() -> None:  # as the connector submits the jobs of a step
            with self._worker.together():
                for call in calls:
                    call()

        recorder.time(case, "submit", count, submit)
        finished_s = 0.0
        while left:
            time.sleep(_POLL_S)
            take_s = time.thread_time()
            self._worker.get_finished()
            took_s = time.thread_time() - take_s
            reports = self._worker.take_reports()[0]
            if reports:
                finished_s, took_s = finished_s + took_s, 0.0  # only calls that returned reports
            for report in unpacked(reports):
                if isinstance(report, OpReport):
                    left -= chunks[report.op] if report.indexes is None else len(report.indexes)
                    if report.codes is not None:
                        raise BenchError(f"{case}: a transfer failed")
            if time.monotonic() > end_s:
                raise BenchError(f"{case}: {left} of {count} chunks are not done")
        took_s = time.clock_gettime(self._clock) - began_s
        locked_s = took_s - (unlocked_s() - unlocked_before_s)
        recorder.add(case, "pipeline", took_s, count, locked_s)
        if case != "write":
            recorder.add(case, "finished", finished_s, count)

    def _next(self) -> int:
        self._op += 1
        return self._op

    def _batch(self, case: str, keys: Sequence[bytes], slots: npt.NDArray[np.int32]) -> ChunkBatch:
        count = len(keys)
        targets = slots.astype(np.int64) % TARGETS
        return ChunkBatch.of(
            b"".join(keys),
            np.ones(count, np.uint64),
            np.full(count, NOWHERE, np.int32) if case == "pool" else slots,
            place_of(0, 0) | targets << 32 | slots // TARGETS
            if case in ("write", "pool")
            else np.full(count, NOWHERE, np.int64),
            np.zeros(count, np.uint8),
        )
