# SPDX-License-Identifier: Apache-2.0
"""vLLM's face of the manager: a thin adapter over `manager.core`."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_nvmeof_offload.job_specs import ChunkLoadSpec, ChunkStoreSpec
from vllm_nvmeof_offload.manager.core import ManagerCore, Source
from vllm_nvmeof_offload.manager.figures import CORE_COUNTERS, GAUGE_SOURCES
from vllm_nvmeof_offload.manager.resumes import Resume
from vllm_nvmeof_offload.manager.steps import StepMeter
from vllm_nvmeof_offload.manager.waiting import Attempt, Queue, WaitingRequests
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.protocol import Command, RankHello, Report

__all__ = ["NVMeoFOffloadingManager"]

logger = logging.getLogger(LOGGER_NAME)

_MEDIUM = {Source.CPU: Medium.CPU, Source.POOL: Medium.STORAGE}
_ALL_TIERS, _CPU, _HIT, _MISS = TierFilter.ALL, Source.CPU, LookupResult.HIT, LookupResult.MISS
_HIT_SOURCE = {Source.CPU: CacheHitSource.HOST, Source.POOL: CacheHitSource.DISK}

_TELL_TIME_S = 1.0


@dataclass
class _RequestKeys:
    """A request's chunks in prefix order, and where its last load takes each from."""

    keys: dict[bytes, None] = field(default_factory=dict)
    sources: dict[bytes, Source] = field(default_factory=dict)


class NVMeoFOffloadingManager(OffloadingManager):
    """Called on EngineCore's main thread; does no I/O and never blocks."""

    def __init__(
        self,
        core: ManagerCore,
        tokens_per_chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self._clock = clock
        self._worked_s = clock()
        self.tokens_per_chunk = tokens_per_chunk
        self._steps = StepMeter(clock)
        self._scheduler_s = 0.0
        self._told_s = 0.0  # when `get_stats` last had anything to say
        #: Nothing is stored: what GPU memory holds was computed with other weights.
        self.suspended = False
        #: Set by `follow`.
        self.waiting: WaitingRequests | None = None
        #: Metric name and label values → increase since the last `get_stats`.
        self._counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(int)
        self._missed = self._found_cpu = self._found_pool = 0  # look-ups since then
        self._core_seen: Counter[str] = Counter()
        self._activity_seen: tuple[int, ...] = ()

    # -- look-up and jobs -------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # Once a chunk of every waiting request: plain integers and module constants, for a
        # counter with labels and an enum's member each cost as much as the look-up.
        source = self.core.lookup(key)
        if source is not None and req_context.load_tier_filter is not _ALL_TIERS:
            locality = Locality.LOCAL if source is _CPU else None
            if not req_context.load_tier_filter.allows(_MEDIUM[source], locality):
                source = None
        if source is None:
            self._missed += 1
            return _MISS
        if source is _CPU:
            self._found_cpu += 1
        else:
            self._found_pool += 1
        return _HIT

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = req_context.get_state(_RequestKeys)
        source = state.sources.get(key) if state else None
        return _HIT_SOURCE[source] if source else CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        limit_s = self.waiting.limit_s(req_context.req_id) if self.waiting else None
        command = self.core.prepare_load(list(keys), limit_s)
        state = self._state(req_context)
        state.sources = {
            chunk.identity.key: Source.CPU if chunk.pool_slot is None else Source.POOL
            for chunk in command.chunks
        }
        state.keys.update(dict.fromkeys(keys))
        for source in state.sources.values():
            self._counts["loaded_tokens", (source.value,)] += self.tokens_per_chunk
        return ChunkLoadSpec(command)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if self.suspended:
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        plan = self.core.prepare_store(list(keys))
        self._state(req_context).keys.update(dict.fromkeys(keys))
        spec = ChunkStoreSpec(plan.command) if plan.command else LoadStoreSpec()
        return PrepareStoreOutput(
            [OffloadKey(key) for key in plan.stored],
            spec,
            [OffloadKey(key) for key in plan.evicted],
        )

    # `complete_store` and `complete_load` are vLLM's own no-ops: the core learns from the
    # workers' reports, which also come for jobs that vLLM forgot at a reset.

    # -- requests and steps -----------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = req_context.get_state(_RequestKeys)
        if state is not None:
            self.core.touch(state.keys)

    def follow(self, queue: Queue) -> WaitingRequests:
        """Look after the requests that wait in this queue."""
        self.waiting = WaitingRequests(self.core, queue, self._clock)
        return self.waiting

    def step_scheduled(self, scheduler_output: Any) -> None:
        """vLLM has scheduled a step; comes before its commands are taken."""
        assert self.waiting is not None
        tokens = scheduler_output.num_scheduled_tokens
        if tokens:
            self._worked_s = self._clock()
        self._steps.scheduled(tokens)
        if scheduler_output.preempted_req_ids:
            self._counts["preemptions", ()] += len(scheduler_output.preempted_req_ids)
        self.waiting.step(scheduler_output)

    def step_ended(self, scheduler_s: float) -> None:
        """A step's output has come, and was taken in. scheduler_s: spent in our scheduler side
        since the last call."""
        self._steps.ended()
        self.core.step_ended()
        self.core.admission.prefill_rate = self._steps.prefill_rate
        self._scheduler_s += scheduler_s

    def has_pending_work(self) -> bool:
        """Keep the engine stepping while reports are owed.

        For write-behind only for a bounded time after the last token: stepping costs an idle
        core, and blocks pause, sleep and shutdown. What is left goes on with the next request.
        """
        idle_s = self._clock() - self._worked_s
        bound_s = self.core.config.report_deadline_s
        return self.core.has_pending_work(count_writes=idle_s < bound_s)

    def reset_cache(self) -> None:
        self.core.reset()
        logger.info("every offloaded chunk was declared void")

    def weights_may_have_changed(self, call: str, *, known: bool) -> bool:
        """vLLM did `call`. Returns whether everything is void, and a reset must follow."""
        if not known and self.core.config.weights_never_change:
            return False
        if not self.suspended:
            logger.warning(
                "%s %s the weights: what was offloaded before is void, and what follows will not "
                "be found by another start%s",
                call,
                "changes" if known else "may have changed",
                "" if known else "; weights_never_change says that such a call does not",
            )
        self.suspended = True
        self.core.weights_changed = True
        return True

    # -- the connector's interface ----------------------------------------------------

    def attach(self, hellos: Iterable[RankHello]) -> None:
        """Learn from the workers what there is."""
        ordered = sorted(hellos, key=lambda hello: hello.rank)
        for note in self.core.attach(ordered):
            logger.warning("%s", note)

    def take_commands(self) -> list[Command]:
        self.core.turn()
        return self.core.take_commands()

    def report(self, reports: Iterable[Report], worker_counters: Counter[str]) -> None:
        """Apply the workers' reports; must come before vLLM's next look-up."""
        self.core.report(reports)
        if worker_counters["read_bytes"]:
            self._counts["read_bytes", ()] += worker_counters["read_bytes"]
        for name, count in worker_counters.items():
            direction, _, target = name.partition(":")
            if direction == "written_bytes":
                self._counts["written_bytes", ()] += count
                self._counts["target_written_bytes", (target,)] += count

    def count_resume(self, resume: Resume) -> None:
        """A preempted request was resumed."""
        self._counts["reloaded_tokens", ()] += resume.reloaded
        self._counts["recomputed_tokens", ()] += resume.recomputed
        self._counts["resumed_chunk_tokens", ()] += resume.chunk_tokens
        self._counts["resumed_chunk_tokens_lost", ()] += resume.chunk_tokens_lost

    def count_attempt(self, attempt: Attempt) -> None:
        """vLLM went on with what was decided on a hit."""
        self._counts["admissions", (attempt.decision,)] += 1
        self._counts["declined_tokens", ()] += attempt.declined

    # -- figures ----------------------------------------------------------------------

    def get_stats(self) -> OffloadingConnectorStats | None:
        # Once a step, and most steps change nothing: time alone is told now and then.
        lookups = self._found_cpu + self._found_pool + self._missed
        activity, now_s = self.core.activity(), self._clock()
        quiet = not lookups and not self._counts and activity == self._activity_seen
        if quiet and now_s - self._told_s < _TELL_TIME_S:
            return None
        self._told_s, self._activity_seen = now_s, activity
        self._count_lookups()
        self._count_core()
        self._count_time()
        counts = {item: count for item, count in self._counts.items() if count}
        self._counts.clear()
        figures = {**self.core.gauges(), **self.core.learned()}
        stats = OffloadingConnectorStats()
        for (name, labels), amount in counts.items():
            stats.increase_counter(COUNTERS[name].name, amount, labels)
        for (name, labels), source in GAUGE_SOURCES.items():
            stats.set_gauge(GAUGES[name].name, figures[source], labels)
        for target, verdict in enumerate(self.core.verdicts()):
            stats.set_gauge(GAUGES["target_verdict"].name, verdict, (str(target),))
        return stats

    def _count_lookups(self) -> None:
        self._counts["lookups", ("cpu",)] += self._found_cpu
        self._counts["lookups", ("pool",)] += self._found_pool
        self._counts["lookups", ("miss",)] += self._missed
        self._missed = self._found_cpu = self._found_pool = 0

    def _count_core(self) -> None:
        for name, count in self.core.counters.items():
            increase = count - self._core_seen[name]
            if increase and name in CORE_COUNTERS:
                self._counts[CORE_COUNTERS[name]] += increase
            elif increase and ":" in name:
                metric, _, label = name.partition(":")
                self._counts[metric, (label,)] += increase
        self._core_seen = Counter(self.core.counters)

    def _count_time(self) -> None:
        steps = self._steps
        self._counts["scheduler_seconds", ()] += self._scheduler_s
        self._counts["scheduler_steps", ()] += steps.steps
        self._counts["step_seconds", ()] += steps.seconds
        self._counts["step_tokens", ()] += steps.tokens
        self._scheduler_s = 0.0
        steps.clear()

    def _state(self, req_context: ReqContext) -> _RequestKeys:
        state: _RequestKeys | None = req_context.get_state(_RequestKeys)
        if state is None:
            state = _RequestKeys()
            req_context.set_state(state)
        return state
