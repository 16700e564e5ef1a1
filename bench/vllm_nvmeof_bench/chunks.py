# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath`: the cost per chunk on every thread that requests wait for.

Our manager and vLLM's own `CPUOffloadingManager` run in one process with the same number of
entries. Their measurements are interleaved in random order. Times are CPU times of one thread,
which exclude most effects of other load. Garbage collection is as in production: objects older than
the managers are frozen, and the collector stays enabled. The first round is a discarded warm-up.

Each round creates our manager from a pool's table, which also measures adoption. It then fills the
CPU tier, so that every store evicts, and measures each size with one op of that many chunks. Ops
with one chunk measure the cost per op. vLLM's manager stays full.

Both managers receive the same calls with the same keys through vLLM's interface. All ops succeed
immediately, without workers. Keys are random bytes, and each load uses new key objects, as a new
request does.

The worker's adapter, runner and pipeline are the product's, but no data moves: copies and I/O
operations complete as soon as they are submitted. The pipeline's thread holds the interpreter lock
except in native sections, which count their own CPU time; the rest is reported as time with the
lock. This figure is never too low. It is too high by at most two system calls per turn, during
which Python releases the lock, and one clock reading per section.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import OnProgress, home_in, progress, unheard
from vllm_nvmeof_bench.pool import KEY_BYTES, InstantCopy
from vllm_nvmeof_bench.reports.hotpath import CASES, ONE, OURS, SIDES, VLLM, Sample
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.settings import check_positive, option, recorded
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind
from vllm_nvmeof_offload.io.base import Completion, Lanes, NoIoEngine, Waker
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL, CoreConfig
from vllm_nvmeof_offload.manager.hold_and_prefetch import LOOKS_MAX
from vllm_nvmeof_offload.manager.look_up import Answer, Question, Queue
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import InstantLanes, meter_unlocked, unlocked_s
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Stamp, StoredGroup, encode_entry
from vllm_nvmeof_offload.pool.recovery import adopt_entries
from vllm_nvmeof_offload.protocol import (
    NOWHERE,
    TAG_BYTES,
    AdoptedEntries,
    CancelCommand,
    ChunkBatch,
    LoadCommand,
    OpReport,
    OpReports,
    RankHello,
    Report,
    SlotIdentity,
    StoreCommand,
    WriteCommand,
    place_of,
    slots_by_target,
    unpacked,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import KIB, MIB, slot_stride_bytes
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec, NVMeoFOffloadingManager
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankWorker
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

TARGETS = 2
_FILLED_AT_ONCE = 8192
#: Chunks that other requests store in each step while the measured ones wait, and the keys' seed.
_DECODING, _OTHERS_SEED = 8, 4
_TOKENS_PER_CHUNK = 16
_GROUPS = (Group(0, GroupKind.FULL, _TOKENS_PER_CHUNK),)
_TAG = b"weights" + bytes(9)
_Keys = list[OffloadKey]
Batches = Sequence[_Keys]  # one per op
_Result = TypeVar("_Result")


def random_keys(seed: Sequence[int], count: int) -> npt.NDArray[np.void]:
    """Return random keys in group 0, determined by the seed."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 256, (count, KEY_BYTES), np.uint8)
    keys[:, -GROUP_ID_BYTES:] = 0
    return keys.view(f"V{KEY_BYTES}").ravel()


def batches_of(keys: npt.NDArray[np.void], chunks: int) -> Batches:
    """Return the keys as new objects, in lists of `chunks` keys: one list per op."""
    return [keys[at : at + chunks].tolist() for at in range(0, len(keys), chunks)]


def _reports(ops: Sequence[int]) -> list[Report]:
    """Return the reports that a rank sends in one step if all these ops succeeded."""
    if len(ops) == 1:
        return [OpReport(ops[0])]
    seconds = np.zeros(len(ops), np.float32)
    return [OpReports(np.array(ops, np.uint64).tobytes(), seconds.tobytes())]


@dataclass
class Recorder:
    """A recorder for one side, size, and round. Times are the calling thread's CPU times."""

    side: str
    chunks: int
    round: int
    samples: list[Sample] = field(default_factory=list)

    def time(self, case: str, stage: str, count: int, call: Callable[[], _Result]) -> _Result:
        """Measure one call. count: the number of chunks in all its ops."""
        began_s = time.thread_time()
        result = call()
        self.add(case, stage, time.thread_time() - began_s, count)
        return result

    def add(
        self, case: str, stage: str, seconds: float, count: int, locked_s: float | None = None
    ) -> None:
        """Add a sample. locked_s: how long the thread held the interpreter lock."""
        locked_us = None if locked_s is None else 1e6 * locked_s / count
        self._add(case, stage, 1e6 * seconds / count, locked_us=locked_us)

    def pickle(self, case: str, count: int, commands: Sequence[Any]) -> None:
        """Measure pickling and unpickling of all commands at once, as vLLM sends a step's jobs."""
        began_s = time.thread_time()
        dumped = pickle.dumps(commands, pickle.HIGHEST_PROTOCOL)
        took_s = time.thread_time() - began_s
        self._add(case, "pickle", 1e6 * took_s / count, len(dumped) / count)
        self.time(case, "unpickle", count, lambda: pickle.loads(dumped))

    def _add(
        self,
        case: str,
        stage: str,
        us: float,
        size: float | None = None,
        locked_us: float | None = None,
    ) -> None:
        thread = CASES[case][stage].thread
        self.samples.append(
            Sample(stage, case, self.side, thread, self.chunks, self.round, us, size, locked_us)
        )


def _each(call: Callable[[_Keys, ReqContext], Any], *ops: Iterable[Any]) -> list[Any]:
    """Call a manager's method for each op. ops: the ops' keys, and their contexts."""
    return [call(*op) for op in zip(*ops, strict=True)]


def _look_up(
    manager: OffloadingManager, batches: Batches, contexts: Sequence[ReqContext]
) -> list[LookupResult]:
    lookup = manager.lookup
    return [
        lookup(key, context)
        for batch, context in zip(batches, contexts, strict=True)
        for key in batch
    ]


#: With 64 KiB chunks, `hold_and_prefetch` fetches up to 2 × 256 MiB for preempted requests.
FETCHES_MAX = 8192


def _never(question: Question) -> Answer:
    raise AssertionError(f"an unexpected look-up: {question}")


class _Manager:
    """A manager with the calls that vLLM makes for requests that load or store."""

    def __init__(self, manager: OffloadingManager) -> None:
        self.manager = manager
        self._requests = 0

    def contexts(self, batches: Batches) -> list[ReqContext]:
        """Start one request per op; return the requests' contexts."""
        made = [ReqContext(f"{self._requests + at}") for at in range(len(batches))]
        self._requests += len(batches)
        for context in made:
            self.manager.on_new_request(context)
        return made

    def look_up(self, batches: Batches, contexts: Sequence[ReqContext]) -> list[LookupResult]:
        return _look_up(self.manager, batches, contexts)

    def ask(
        self, recorder: Recorder, case: str, batches: Batches, contexts: Sequence[ReqContext]
    ) -> int:
        """Look up every chunk twice; return the number of chunks."""
        count = sum(map(len, batches))
        found = recorder.time(case, "look_up", count, lambda: self.look_up(batches, contexts))
        assert found.count(LookupResult.HIT) == count, "the chunks were stored"
        self.ask_again(recorder, case, batches, contexts)
        return count

    def ask_again(
        self, recorder: Recorder, case: str, batches: Batches, contexts: Sequence[ReqContext]
    ) -> None:
        """Look up every chunk again, as in the next step, while the requests are still waiting."""
        recorder.time(
            case,
            "look_up_again",
            sum(map(len, batches)),
            lambda: self.look_up(batches, contexts),
        )

    def end(self, contexts: Iterable[ReqContext]) -> None:
        for context in contexts:
            self.manager.on_request_finished(context)


class OurManager(_Manager):
    """Our manager, whose pool contains the `adopted` chunks."""

    manager: NVMeoFOffloadingManager
    _others = 0  # steps taken by other requests

    def __init__(self, adopted: AdoptedEntries, cache_slots: int) -> None:
        super().__init__(NVMeoFOffloadingManager(CoreConfig(reload_cache_share=0.5)))
        hello = RankHello(
            rank=0,
            engine_index=0,
            keyspace="benchmark",
            cache_slots=cache_slots,
            pool_slots=len(adopted),
            target_count=TARGETS,
            slot_bytes=1 << 16,
            adopted=adopted,
            tag=_TAG,
        )
        self._keys: dict[str, _Keys] = {}  # ID of a waiting request → its keys
        queue = Queue(self._keys_of, lambda *_: (), lambda request, key: False, _GROUPS)
        began_s = time.thread_time()
        self.manager.attach([hello], KEY_BYTES, _GROUPS, queue)
        self.attach_s = time.thread_time() - began_s

    def look_up(self, batches: Batches, contexts: Sequence[ReqContext]) -> list[LookupResult]:
        """Announce each request's keys, then look them up, as the connector does."""
        found = []
        for batch, context in zip(batches, contexts, strict=True):
            self.manager.look_ups.begin(FROM_CPU | FROM_POOL, [batch])
            found += _look_up(self.manager, [batch], [context])
            self.manager.look_ups.end()
        return found

    def ask_again(
        self, recorder: Recorder, case: str, batches: Batches, contexts: Sequence[ReqContext]
    ) -> None:
        """Look up again as the connector does, after other requests have stored chunks."""
        waiting, asked = self.manager.waiting, []
        assert waiting is not None
        for batch, context in zip(batches, contexts, strict=True):
            self._keys[context.req_id] = batch
            tokens = len(batch) * _TOKENS_PER_CHUNK
            question = Question(tokens + 1, batch[-1], 0, None, FROM_CPU | FROM_POOL)
            answer = waiting.look_ups.asked(context.req_id, Answer(question, tokens, batch, []))
            assert waiting.look_ups.decide(context.req_id, answer).tokens == tokens
            asked.append((context.req_id, question, answer))
        self._serve_others()

        def ask_again() -> bool:
            return all(
                waiting.look_ups.answer(name, question, _never, FROM_CPU) is answer
                for name, question, answer in asked
            )

        count = sum(map(len, batches))
        assert recorder.time(case, "look_up_again", count, ask_again), "an answer changed"
        for context, (_, _, answer) in zip(contexts, asked, strict=True):
            waiting.allocated(context.req_id, answer.found or 0)
            del self._keys[context.req_id]

    def _serve_others(self) -> None:
        """Store other requests' chunks, so that no later call profits from the last keys."""
        self._others += 1
        self.fill(random_keys([_OTHERS_SEED, self._others], _DECODING))

    def _keys_of(self, request_id: str) -> list[_Keys] | None:
        return [self._keys[request_id]] if request_id in self._keys else None

    def fill(self, keys: npt.NDArray[np.void]) -> None:
        for batch in batches_of(keys, _FILLED_AT_ONCE):
            plan = self.manager.core.prepare_store(batch)
            assert plan.command is not None
            self.manager.report([OpReport(plan.command.op)], Counts())
            self.write_all()

    def measure_store(self, recorder: Recorder, batches: Batches) -> None:
        """Measure storing and writing these chunks, all of which are new."""
        manager, count = self.manager, sum(map(len, batches))
        contexts = self.contexts(batches)
        prepare = partial(_each, self.manager.prepare_store, batches, contexts)
        outputs = recorder.time("store", "prepare", count, prepare)
        assert sum(len(one.keys_to_store) for one in outputs) == count, "the CPU tier has room"
        specs = [one.store_spec for one in outputs]
        recorder.pickle("store", count, specs)
        reports = _reports([spec.command.op for spec in specs])

        def report() -> None:
            manager.report(reports, Counts())
            _each(manager.complete_store, batches, contexts)

        recorder.time("store", "report", count, report)
        commands = recorder.time("write", "take", count, manager.take_commands)
        written = sum(len(command.batch) for command in commands)  # type: ignore[union-attr]
        assert written == count, "all stored chunks are written"
        recorder.pickle("write", count, commands)
        done = [OpReport(command.op) for command in commands]  # type: ignore[union-attr]
        recorder.time("write", "report", count, lambda: manager.report(done, Counts()))
        self.end(contexts)

    def measure_load(self, recorder: Recorder, case: str, batches: Batches) -> None:
        """Measure loading these chunks from the tier named by `case`."""
        manager, contexts = self.manager, self.contexts(batches)
        count = self.ask(recorder, case, batches, contexts)
        self.look_up(batches, contexts)  # in the step that plans the load

        def find() -> None:
            for batch in batches:
                manager.core.whereabouts(batch, FROM_CPU | FROM_POOL)
                manager.core.find(batch)

        recorder.time(case, "find", count, find)
        prepare = partial(_each, self.manager.prepare_load, batches, contexts)
        specs = recorder.time(case, "prepare", count, prepare)
        from_pool = sum(int((spec.command.batch.places >= 0).sum()) for spec in specs)
        assert from_pool == (count if case == "pool" else 0), f"not all chunks are in the {case}"
        recorder.pickle(case, count, specs)
        reports = _reports([spec.command.op for spec in specs])

        def report() -> None:
            manager.report(reports, Counts())
            _each(manager.complete_load, batches, contexts)

        recorder.time(case, "report", count, report)
        self._serve_others()
        recorder.time(case, "end", count, lambda: self.end(contexts))
        self.write_all()

    def measure_holds(self, recorder: Recorder, cached: Batches, in_pool: Batches) -> None:
        """Measure holding and releasing preempted requests' cached chunks and, for at most
        `FETCHES_MAX` chunks, fetching `in_pool`."""
        core = self.manager.core

        def turns(batches: Batches) -> Callable[[], None]:
            for number, batch in enumerate(batches):
                core.reload.follow(str(number), batch, lambda chunk: False)
            count = -(-sum(map(len, batches)) // LOOKS_MAX)

            def turn() -> None:
                for _ in range(count):
                    core.turn()

            return turn

        def leave() -> None:
            for number in range(max(len(cached), len(in_pool))):
                core.reload.left(str(number))

        count = sum(map(len, cached))
        recorder.time("hold", "hold", count, turns(cached))
        assert len(core.held()) == count, "the CPU tier has room for all"
        recorder.time("hold", "release", count, leave)
        if count <= FETCHES_MAX:
            recorder.time("hold", "fetch", count, turns(in_pool))
            assert len(core.held()) == count, "the limit allows all fetches in flight"
            self.write_all()
            leave()

    def write_all(self) -> None:
        """Complete all pending writes and fetches."""
        while commands := self.manager.take_commands():
            assert not any(isinstance(command, CancelCommand) for command in commands)
            ops = [command.op for command in commands]  # type: ignore[union-attr]
            self.manager.report([OpReport(op) for op in ops], Counts())


class VllmManager(_Manager):
    """vLLM's own manager, whose only tier is filled with the chunks in `keys`."""

    def __init__(self, keys: npt.NDArray[np.void]) -> None:
        super().__init__(CPUOffloadingManager(len(keys)))
        for at in range(0, len(keys), _FILLED_AT_ONCE):
            batch, context = keys[at : at + _FILLED_AT_ONCE].tolist(), ReqContext("fill")
            self.manager.prepare_store(batch, context)
            self.manager.complete_store(batch, context)

    def measure_store(self, recorder: Recorder, batches: Batches) -> None:
        count, contexts = sum(map(len, batches)), self.contexts(batches)
        prepare = partial(_each, self.manager.prepare_store, batches, contexts)
        outputs = recorder.time("store", "prepare", count, prepare)
        recorder.pickle("store", count, [one.store_spec for one in outputs])
        complete = self.manager.complete_store
        recorder.time("store", "report", count, lambda: _each(complete, batches, contexts))
        self.end(contexts)

    def measure_load(self, recorder: Recorder, case: str, batches: Batches) -> None:
        contexts = self.contexts(batches)
        count = self.ask(recorder, case, batches, contexts)
        prepare = partial(_each, self.manager.prepare_load, batches, contexts)
        specs = recorder.time(case, "prepare", count, prepare)
        recorder.pickle(case, count, specs)
        complete = self.manager.complete_load
        recorder.time(case, "report", count, lambda: _each(complete, batches, contexts))
        recorder.time(case, "end", count, lambda: self.end(contexts))


class Blocks:
    """vLLM's GPU block manager, with room for a prompt of `chunks` blocks, one per chunk.

    It measures vLLM's own work in the steps that plan and end a load, and in the one that ends the
    request, for comparison with ours. No GPU memory is allocated. The prefix cache is enabled, as
    by default.
    """

    def __init__(self, chunks: int) -> None:
        spec = FullAttentionSpec(
            block_size=_TOKENS_PER_CHUNK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(chunks + 2, [], [KVCacheGroupSpec(["layer"], spec)])
        tokens = (chunks + 1) * _TOKENS_PER_CHUNK
        sizes = dict.fromkeys(("scheduler_block_size", "hash_block_size"), _TOKENS_PER_CHUNK)
        self._manager = KVCacheManager(config, max_model_len=tokens, enable_caching=True, **sizes)
        init_none_hash(_hash)
        self._hasher = get_request_block_hasher(_TOKENS_PER_CHUNK, _hash)
        self._made = 0

    def measure(self, recorder: Recorder, chunks: int) -> None:
        """Measure allocating a load's blocks, adding them to the prefix cache, and freeing them."""
        self._made += 1
        tokens = [self._made] * (chunks * _TOKENS_PER_CHUNK + 1)  # vLLM computes at least one token
        request = Request(
            str(self._made), tokens, SamplingParams(), None, block_hasher=self._hasher
        )
        loaded = chunks * _TOKENS_PER_CHUNK

        def allocate() -> Any:
            return self._manager.allocate_slots(
                request, 0, num_external_computed_tokens=loaded, delay_cache_blocks=True
            )

        got = recorder.time("blocks", "allocate", chunks, allocate)
        assert got is not None, "there are enough blocks"
        recorder.time("blocks", "name", chunks, lambda: self._manager.cache_blocks(request, loaded))
        recorder.time("blocks", "free", chunks, lambda: self._manager.free(request))


def _hash(value: Any) -> bytes:
    """Return a block's hash. The figures exclude it: vLLM hashes when a request arrives."""
    return hash(value).to_bytes(8, "little", signed=True) * 4


_BLOCK_BYTES = 64 * KIB
_KV_ADDRESS, _STAGING_ADDRESS = 1 << 40, 1 << 44
_DONE_S_MAX = 120.0
_POLL_S = 0.0005


class InstantIo(NoIoEngine):
    """An I/O engine with native lanes that complete operations on submission."""

    stamp = Stamp(1, bytes(TAG_BYTES))

    def attach(self) -> Lanes:
        return InstantLanes(self._waker.fd)

    def poll(self) -> list[Completion]:
        return []  # there are no resets


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
        nothing: Any = None  # no staging or pool, because no data moves
        geometry = CacheGeometry([(Group(0, GroupKind.FULL, 16), [tensor])])
        parts = RankWorker(runner, geometry, copy, io, nothing, None)
        self._worker = NVMeoFOffloadingWorker(parts)
        self._blocks = np.random.default_rng(1).permutation(chunks_max).astype(np.int32)
        self._op = 0

    def close(self) -> None:
        self.runner.stop()
        meter_unlocked(False)

    def measure(self, recorder: Recorder, keys: Sequence[Sequence[bytes]]) -> None:
        """Measure a store, a write, and loads from cache slots and pool. keys: one list per op."""
        ends = np.cumsum([len(op) for op in keys]).tolist()
        slots = [
            np.arange(end - len(op), end, dtype=np.int32)
            for end, op in zip(ends, keys, strict=True)
        ]
        blocks = [GPULoadStoreSpec(self._blocks[one].tolist(), [len(one)], [0]) for one in slots]
        worker = self._worker
        for case in ("store", "write", "cpu", "pool"):
            # The manager writes all chunks stored in a step with one op.
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
        """Submit the calls and wait until all chunks are reported. chunks: op → chunk count."""
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
                finished_s, took_s = finished_s + took_s, 0.0  # count only calls that found reports
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


_EPOCH = 1
_MEMORY_CACHE_SLOTS = 4096


@dataclass(frozen=True)
class Settings:
    """Settings for the run. ops: one-chunk ops per sample, each for a separate request."""

    chunks: tuple[int, ...] = option((512, 8192, 65_536), "Chunks per op.")
    entries: int = option(1_000_000, "Chunks in each manager's index.", min=1)
    repeats: int = option(7, "Measured rounds, after a warm-up round.", min=1)
    seed: int = option(1, "Seed for keys and order.")
    directory: Path = option(
        Path("build/bench/disk"), "Directory for pool tables of 64 bytes per entry.", flag="--dir"
    )
    ops: int = 200

    def __post_init__(self) -> None:
        check_positive(self, "chunks", "entries", "repeats")
        if self.entries < 2 * (self.cache_slots + 2 * sum(self.sizes.values())):
            raise BenchError(
                f"{self.entries} entries are too few for ops of {max(self.chunks)} chunks: the "
                "pool would evict chunks before they are loaded"
            )

    @property
    def sizes(self) -> dict[int, int]:
        """Chunks per op → chunks per sample."""
        return {ONE: self.ops} | {one: one for one in self.chunks}

    @property
    def cache_slots(self) -> int:
        """The cache slots for two of the largest stores; half of them may hold unwritten chunks."""
        return 2 * max(self.sizes.values())


class Table:
    """The tables of a full pool on disk, which a starting rank adopts."""

    def __init__(self, directory: Path, keys: npt.NDArray[np.void], targets: int) -> None:
        self._counts = slots_by_target(len(keys), targets)
        self._paths = [directory / f"table-{target}" for target in range(targets)]
        for target, path in enumerate(self._paths):
            rows = range(target, len(keys), targets)
            identities = (SlotIdentity(keys[row].tobytes(), row + 1) for row in rows)
            entries = map(encode_entry, count(), identities, repeat(_EPOCH))
            path.write_bytes(b"".join(entries))

    def adopt(self) -> tuple[AdoptedEntries, float]:
        """Return the adopted entries and the CPU seconds of adoption."""
        fds = [os.open(path, os.O_RDONLY) for path in self._paths]
        try:
            slabs: Any = [
                SimpleNamespace(table_fd=fd, table_slots_found=count)
                for fd, count in zip(fds, self._counts, strict=True)
            ]
            group = StoredGroup(0, GroupKind.FULL, 1, 1, 1)
            superblocks: Any = [
                SimpleNamespace(epoch=_EPOCH, groups=(group,), target_index=target)
                for target in range(len(slabs))
            ]
            began_s = time.thread_time()
            found = adopt_entries(slabs, self._counts, superblocks)
            return found, time.thread_time() - began_s
        finally:
            for fd in fds:
                os.close(fd)


@contextmanager
def frozen() -> Iterator[None]:
    """Exempt existing objects from garbage collection, as vLLM's engine does when it starts."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Round:
    """A round, with a new instance of our manager whose CPU tier is full."""

    def __init__(
        self, settings: Settings, number: int, table: Table, keys: npt.NDArray[np.void]
    ) -> None:
        self.samples: list[Sample] = []
        self._number, self._settings = number, settings
        adopted, rank_s = table.adopt()
        self._ours = OurManager(adopted, settings.cache_slots)
        self._blocks = Blocks(max(settings.chunks))
        for stage, seconds in (("adopt_rank", rank_s), ("adopt_manager", self._ours.attach_s)):
            us = 1e6 * seconds / settings.entries
            self.samples.append(_start_sample(settings, stage, OURS, number, us))
        self._dice = random.Random(f"{settings.seed} {number}")
        self._made = 0
        self._ours.fill(self._new_keys(settings.cache_slots))
        # Use only the upper half, because the lower half is evicted first.
        rows = np.random.default_rng([settings.seed, 2 + number]).permutation(len(keys) // 2)
        self._in_pool = keys[len(keys) - len(rows) :][rows]

    def measure(self, chunks: int, theirs: VllmManager, rank: Worker) -> None:
        count = self._settings.sizes[chunks]
        new, self._in_pool, in_pool = (
            self._new_keys(count), self._in_pool[count:], self._in_pool[:count],
        )  # fmt: skip
        recorders = {side: Recorder(side, chunks, self._number) for side in SIDES}
        sides = {OURS: self._ours, VLLM: theirs}
        for side in self._dice.sample(SIDES, len(SIDES)):
            sides[side].measure_store(recorders[side], batches_of(new, chunks))
        for side in self._dice.sample(SIDES, len(SIDES)):
            sides[side].measure_load(recorders[side], "cpu", batches_of(new, chunks))
        self._ours.measure_load(recorders[OURS], "pool", batches_of(in_pool, chunks))
        held, self._in_pool = self._in_pool[:count], self._in_pool[count:]
        self._ours.measure_holds(recorders[OURS], batches_of(new, chunks), batches_of(held, chunks))
        rank.measure(recorders[OURS], batches_of(new, chunks))
        if chunks != ONE:
            self._blocks.measure(recorders[VLLM], chunks)
        for recorder in recorders.values():
            self.samples += recorder.samples

    def _new_keys(self, count: int) -> npt.NDArray[np.void]:
        self._made += 1
        return random_keys([self._settings.seed, 3, 1 + self._number, self._made], count)


def _start_sample(
    settings: Settings, stage: str, side: str, number: int, us: float | None = None,
    size: float | None = None,
) -> Sample:  # fmt: skip
    thread = CASES["start"][stage].thread
    return Sample(stage, "start", side, thread, settings.entries, max(0, number), us, size)


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the reuse of free memory hides growth
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _fill_managers(settings: Settings, table: Table) -> tuple[VllmManager, Iterator[Sample]]:
    """Return vLLM's manager, which is full, and samples of both managers' index memory."""
    adopted, _ = table.adopt()
    before = _resident_bytes()
    ours = OurManager(adopted, _MEMORY_CACHE_SLOTS)
    grown = {OURS: _resident_bytes() - before}
    del ours, adopted
    keys = random_keys([settings.seed, 1], settings.entries)
    before = _resident_bytes()
    theirs = VllmManager(keys)
    grown[VLLM] = _resident_bytes() - before
    per_chunk = {side: one / settings.entries for side, one in grown.items()}
    return theirs, (
        _start_sample(settings, "memory", side, 0, size=one) for side, one in per_chunk.items()
    )


def run(
    settings: Settings, home: Path, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Return samples and conditions. home: an empty directory for the pool's tables."""
    found = {
        **at_start(home), "settings": recorded(settings), "cache_slots": settings.cache_slots,
    }  # fmt: skip
    total = (settings.repeats + 1) * len(settings.sizes)
    with frozen(), closing(Worker(max(settings.sizes.values()))) as rank:
        on_progress(0, total, "making the pool's tables")
        keys = random_keys([settings.seed], settings.entries)
        table = Table(home, keys, TARGETS)
        on_progress(0, total, "filling the managers")
        theirs, memory = _fill_managers(settings, table)
        samples = list(memory)
        for number in range(-1, settings.repeats):
            one = _Round(settings, number, table, keys)
            for at, chunks in enumerate(settings.sizes):
                done, name = (number + 1) * len(settings.sizes) + at, f"{max(0, number) + 1}"
                on_progress(done, total, f"round {name} · {chunks:,} chunks")
                one.measure(chunks, theirs, rank)
            samples += one.samples if number >= 0 else []
    found["load_average_at_end"] = load_average()
    return samples, found


def _measure(settings: Settings, json_path: Path) -> None:
    size = settings.entries * ENTRY_BYTES + MIB
    with progress() as on_progress, home_in(settings.directory, size) as home:
        dump(json_path, "hotpath", *run(settings, home, on_progress))


COMMANDS = (
    Command(
        "hotpath",
        """Measure the CPU time per chunk on the scheduler's, model's and pipeline's threads.

        Measures our manager and vLLM's CPU offloading manager alternately in this process, each
        with a million chunks. No data is moved. Takes 2 minutes and 2 GiB of memory.
        """,
        Settings,
        _measure,
    ),
)
