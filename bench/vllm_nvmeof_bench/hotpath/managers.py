# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: our manager and vLLM's own, both called through vLLM's interface.

Both get the same calls with the same keys. There are no workers: all ops of ours succeed at once.
Keys are random bytes, and each load uses new key objects, as a new request does.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

from vllm_nvmeof_bench.reports.hotpath import CASES, Sample
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL, CoreConfig
from vllm_nvmeof_offload.manager.hold_and_prefetch import LOOKS_MAX
from vllm_nvmeof_offload.manager.look_up import Answer, Question, Queue
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import (
    AdoptedEntries,
    CancelCommand,
    OpReport,
    OpReports,
    RankHello,
    Report,
)
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager

KEY_BYTES = 36  # vLLM's: a SHA-256 and the number of a group
TARGETS = 2
_FILLED_AT_ONCE = 8192
#: Requests that decode and store chunks while the others wait.
_DECODING, _OTHERS_SEED = 8, 4
_TOKENS_PER_CHUNK = 16
_GROUPS = (Group(0, GroupKind.FULL, _TOKENS_PER_CHUNK),)
_TAG = b"weights" + bytes(9)
_Keys = list[OffloadKey]
Batches = Sequence[_Keys]  # one per op
_Result = TypeVar("_Result")


def random_keys(seed: Sequence[int], count: int) -> npt.NDArray[np.void]:
    """Return random keys of group 0, different ones for every seed."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 256, (count, KEY_BYTES), np.uint8)
    keys[:, -GROUP_ID_BYTES:] = 0
    return keys.view(f"V{KEY_BYTES}").ravel()


def batches_of(keys: npt.NDArray[np.void], chunks: int) -> Batches:
    """Return the keys as new objects, in lists of `chunks` keys: one list per op."""
    return [keys[at : at + chunks].tolist() for at in range(0, len(keys), chunks)]


def _reports(ops: Sequence[int]) -> list[Report]:
    """Return the reports with which a rank says, in one step, that all these ops have succeeded."""
    if len(ops) == 1:
        return [OpReport(ops[0])]
    seconds = np.zeros(len(ops), np.float32)
    return [OpReports(np.array(ops, np.uint64).tobytes(), seconds.tobytes())]


@dataclass
class Recorder:
    """The samples of one side, size and round. Times are CPU times of the calling thread."""

    side: str
    chunks: int
    round: int
    samples: list[Sample] = field(default_factory=list)

    def time(self, case: str, stage: str, count: int, call: Callable[[], _Result]) -> _Result:
        """Measure one call. count: number of chunks in all ops together."""
        began_s = time.thread_time()
        result = call()
        self.add(case, stage, time.thread_time() - began_s, count)
        return result

    def add(
        self, case: str, stage: str, seconds: float, count: int, locked_s: float | None = None
    ) -> None:
        """Add a sample. locked_s: the part during which the thread held the interpreter lock."""
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


def _look_up(
    manager: OffloadingManager, batches: Batches, contexts: Sequence[ReqContext]
) -> list[LookupResult]:
    """Look up the chunks of waiting requests key by key, as vLLM's scheduler does."""
    lookup = manager.lookup
    return [
        lookup(key, context)
        for batch, context in zip(batches, contexts, strict=True)
        for key in batch
    ]


#: With chunks of 64 KiB, `hold_and_prefetch` fetches up to twice 256 MiB for preempted requests.
FETCHES_MAX = 8192


def _never(question: Question) -> Answer:
    raise AssertionError(f"a real look-up: {question}")


class _Manager:
    """The calls that vLLM makes to either manager for requests that load or store."""

    def __init__(self, manager: OffloadingManager) -> None:
        self.manager = manager
        self._requests = 0

    def contexts(self, batches: Batches) -> list[ReqContext]:
        """Start a new request per op; return their contexts."""
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

    def prepare_load(self, batches: Batches, contexts: Sequence[ReqContext]) -> list[Any]:
        prepare = self.manager.prepare_load
        return [prepare(*one) for one in zip(batches, contexts, strict=True)]

    def prepare_store(self, batches: Batches, contexts: Sequence[ReqContext]) -> list[Any]:
        prepare = self.manager.prepare_store
        return [prepare(*one) for one in zip(batches, contexts, strict=True)]

    def complete(
        self,
        complete: Callable[[_Keys, ReqContext], None],
        batches: Batches,
        contexts: Sequence[ReqContext],
    ) -> None:
        for one in zip(batches, contexts, strict=True):
            complete(*one)

    def end(self, contexts: Iterable[ReqContext]) -> None:
        for context in contexts:
            self.manager.on_request_finished(context)


class OurManager(_Manager):
    """Our manager, with the chunks `adopted` in its pool."""

    manager: NVMeoFOffloadingManager
    _others = 0  # steps of other requests

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
        """Look up after announcing the keys of each request, as the connector does."""
        found = []
        for batch, context in zip(batches, contexts, strict=True):
            self.manager.look_ups.begin(FROM_CPU | FROM_POOL, [batch])
            found += _look_up(self.manager, [batch], [context])
            self.manager.look_ups.end()
        return found

    def ask_again(
        self, recorder: Recorder, case: str, batches: Batches, contexts: Sequence[ReqContext]
    ) -> None:
        """Look up again as the connector does, after a step of other requests' stores."""
        waiting, asked = self.manager.waiting, []
        assert waiting is not None
        for batch, context in zip(batches, contexts, strict=True):
            self._keys[context.req_id] = batch
            tokens = len(batch) * _TOKENS_PER_CHUNK
            question = Question(tokens + 1, batch[-1], 0, None, FROM_CPU | FROM_POOL)
            answer = waiting.look_ups.asked(context.req_id, Answer(question, tokens, batch, []))
            assert waiting.look_ups.decide(context.req_id, answer).tokens == tokens
            asked.append((context.req_id, question, answer))
        self._others += 1
        self.fill(random_keys([_OTHERS_SEED, self._others], _DECODING))

        def ask_again() -> bool:
            return all(
                waiting.look_ups.answer(name, question, _never, FROM_CPU) is answer
                for name, question, answer in asked
            )

        count = sum(map(len, batches))
        assert recorder.time(case, "look_up_again", count, ask_again), "nothing has changed"
        for context, (_, _, answer) in zip(contexts, asked, strict=True):
            waiting.allocated(context.req_id, answer.found or 0)
            del self._keys[context.req_id]

    def _keys_of(self, request_id: str) -> list[_Keys] | None:
        return [self._keys[request_id]] if request_id in self._keys else None

    def fill(self, keys: npt.NDArray[np.void]) -> None:
        """Store chunks with these keys, and write them to the pool."""
        for batch in batches_of(keys, _FILLED_AT_ONCE):
            plan = self.manager.core.prepare_store(batch)
            assert plan.command is not None
            self.manager.report([OpReport(plan.command.op)], Counts())
            self.write_all()

    def measure_store(self, recorder: Recorder, batches: Batches) -> None:
        """Measure storing and writing these chunks, all of them new."""
        manager, count = self.manager, sum(map(len, batches))
        contexts = self.contexts(batches)
        outputs = recorder.time(
            "store", "prepare", count, lambda: self.prepare_store(batches, contexts)
        )
        assert sum(len(one.keys_to_store) for one in outputs) == count, "the CPU tier has room"
        specs = [one.store_spec for one in outputs]
        recorder.pickle("store", count, specs)
        reports = _reports([spec.command.op for spec in specs])

        def report() -> None:
            manager.report(reports, Counts())
            self.complete(manager.complete_store, batches, contexts)

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
        find = manager.core.find
        recorder.time(case, "find", count, lambda: [find(batch) for batch in batches])
        specs = recorder.time(case, "prepare", count, lambda: self.prepare_load(batches, contexts))
        from_pool = sum(int((spec.command.batch.places >= 0).sum()) for spec in specs)
        assert from_pool == (count if case == "pool" else 0), f"not all chunks are in the {case}"
        recorder.pickle(case, count, specs)
        reports = _reports([spec.command.op for spec in specs])

        def report() -> None:
            manager.report(reports, Counts())
            self.complete(manager.complete_load, batches, contexts)

        recorder.time(case, "report", count, report)
        recorder.time(case, "end", count, lambda: self.end(contexts))
        self.write_all()

    def measure_holds(self, recorder: Recorder, cached: Batches, in_pool: Batches) -> None:
        """Measure holding preempted requests' chunks in the CPU tier, and fetching those that are
        only in the pool, up to the limit in flight. Then release them, as if the requests ran."""
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
        assert len(core.held()) == count, "the CPU tier has room for them"
        recorder.time("hold", "release", count, leave)
        if count <= FETCHES_MAX:
            recorder.time("hold", "fetch", count, turns(in_pool))
            assert len(core.held()) == count, "as many may be in flight"
            self.write_all()
            leave()

    def write_all(self) -> None:
        """Complete all pending writes and fetches."""
        while commands := self.manager.take_commands():
            assert not any(isinstance(command, CancelCommand) for command in commands)
            ops = [command.op for command in commands]  # type: ignore[union-attr]
            self.manager.report([OpReport(op) for op in ops], Counts())


class VllmManager(_Manager):
    """vLLM's own manager, whose only tier is full: it holds the chunks in `keys`."""

    def __init__(self, keys: npt.NDArray[np.void]) -> None:
        super().__init__(CPUOffloadingManager(len(keys)))
        for at in range(0, len(keys), _FILLED_AT_ONCE):
            batch, context = keys[at : at + _FILLED_AT_ONCE].tolist(), ReqContext("fill")
            self.manager.prepare_store(batch, context)
            self.manager.complete_store(batch, context)

    def measure_store(self, recorder: Recorder, batches: Batches) -> None:
        count, contexts = sum(map(len, batches)), self.contexts(batches)
        outputs = recorder.time(
            "store", "prepare", count, lambda: self.prepare_store(batches, contexts)
        )
        recorder.pickle("store", count, [one.store_spec for one in outputs])
        complete = self.manager.complete_store
        recorder.time("store", "report", count, lambda: self.complete(complete, batches, contexts))
        self.end(contexts)

    def measure_load(self, recorder: Recorder, case: str, batches: Batches) -> None:
        contexts = self.contexts(batches)
        count = self.ask(recorder, case, batches, contexts)
        specs = recorder.time(case, "prepare", count, lambda: self.prepare_load(batches, contexts))
        recorder.pickle(case, count, specs)
        complete = self.manager.complete_load
        recorder.time(case, "report", count, lambda: self.complete(complete, batches, contexts))
        recorder.time(case, "end", count, lambda: self.end(contexts))


class Blocks:
    """vLLM's manager of GPU blocks, each of which is one chunk, with room for a prompt of `chunks`.

    It measures vLLM's own work for a load in the step that plans it, to compare our part of that
    step with. No GPU memory is allocated. The prefix cache is on, as it is by default.
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
        """Measure the allocation of a load of `chunks` chunks, and what follows the load."""
        self._made += 1
        tokens = [self._made] * (chunks * _TOKENS_PER_CHUNK + 1)  # one token is left to compute
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
        self._manager.free(request)


def _hash(value: Any) -> bytes:
    """Return a block's hash. vLLM hashes when a request arrives; this is no part of the figures."""
    return hash(value).to_bytes(8, "little", signed=True) * 4
