# SPDX-License-Identifier: Apache-2.0
"""vLLM's face of the manager: a thin adapter over `manager.core`."""

from __future__ import annotations

import logging
import time
from collections import Counter
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
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_nvmeof_offload.manager.core import ManagerCore, Source
from vllm_nvmeof_offload.manager.requests import Queue, StepMeter, WaitingRequests
from vllm_nvmeof_offload.manager.telemetry import Complaints, Figures, config_of, start_line
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, COUNTERS, GAUGES
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.protocol import Command, RankHello, Report
from vllm_nvmeof_offload.vllm_adapter.messages import ChunkLoadSpec, ChunkStoreSpec

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
        *,
        prompts_only: bool = False,
    ) -> None:
        self.core = core
        self._clock, self._worked_s = clock, clock()
        self.tokens_per_chunk = tokens_per_chunk
        self._steps = StepMeter(clock)
        core.follow_prompts(self._steps.prompts_s)
        self._scheduler_s = 0.0
        self._told_s = self._told_all_s = 0.0  # when `get_stats` told anything, every gauge
        #: Set by `follow`.
        self.waiting: WaitingRequests | None = None
        self.figures = Figures(core, tokens_per_chunk)
        self._config = dict.fromkeys(CONFIG_LABELS, "")
        self._config["prompts_only"] = "yes" if prompts_only else "no"
        self._complaints = Complaints(core, clock)
        self._untold = False  # since `attach`
        self._missed = self._found_cpu = self._found_pool = 0  # look-ups since then
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
            self.figures.add("loaded_tokens", self.tokens_per_chunk, source.value)
        return ChunkLoadSpec(command)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if req_context.req_id in self.core.suspension:
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
        # Comes when nothing more of the request will be stored.
        self.core.suspension.ended(req_context.req_id)
        state = req_context.get_state(_RequestKeys)
        if state is not None:
            self.core.ended(state.keys)

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
            self.figures.add("preemptions", len(scheduler_output.preempted_req_ids))
        self.waiting.step(scheduler_output)
        self.core.suspension.log_while_it_lasts()

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
        if self._untold or self.core.residency:  # one step tells the figures, some the events
            return True
        idle_s = self._clock() - self._worked_s
        bound_s = self.core.config.report_deadline_s
        return self.core.has_pending_work(count_writes=idle_s < bound_s)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What came to a tier and left it, oldest first, as much as one step should carry."""
        for change in self.core.residency.take() if self.core.residency is not None else ():
            yield OffloadingEvent(
                keys=[OffloadKey(key) for key in change.keys],
                medium=_MEDIUM[change.tier],
                removed=change.removed,
                removal_expected=not change.removed,
            )

    def reset_cache(self) -> None:
        entries = self.core.gauges()["entries"]
        if self.core.reset():
            logger.info("a reset declared void what was offloaded: %d chunks", entries)

    def weights_may_have_changed(self, *, known: bool) -> bool:
        """Returns whether everything is void: a reset must follow, and a suspension."""
        if not known and self.core.config.weights_never_change:
            return False
        self.core.weights_changed = True
        return True

    # -- the connector's interface ----------------------------------------------------

    def attach(self, hellos: Iterable[RankHello]) -> None:
        """Learn from the workers what there is."""
        ordered = sorted(hellos, key=lambda hello: hello.rank)
        for note in self.core.attach(ordered):
            logger.warning("%s", note)
        logger.info("%s", start_line(ordered, self.core, self.tokens_per_chunk))
        self._complaints.attach(ordered[0].targets)
        self._config |= config_of(ordered, self.core.config)
        self.figures.attach(ordered, self._config)
        self._untold = True

    def take_commands(self) -> list[Command]:
        self.core.turn()
        return self.core.take_commands()

    def report(self, reports: Iterable[Report], worker_counters: Counter[str]) -> None:
        """Apply the workers' reports; must come before vLLM's next look-up."""
        self.core.report(reports)
        self.figures.add_from_workers(worker_counters)
        self._complaints.look()

    def get_stats(self) -> OffloadingConnectorStats | None:
        # Once a step, and most steps change nothing: time alone is told now and then.
        lookups = self._found_cpu + self._found_pool + self._missed
        activity, now_s = self.core.activity(), self._clock()
        quiet = not lookups and not self.figures.waiting and activity == self._activity_seen
        if quiet and now_s - self._told_s < _TELL_TIME_S:
            return None
        self._told_s, self._activity_seen, self._untold = now_s, activity, False
        self._count()
        if all_gauges := now_s - self._told_all_s >= _TELL_TIME_S:
            self._told_all_s = now_s
        told = self.figures.take(all_gauges=all_gauges)
        stats = OffloadingConnectorStats()
        for (name, labels), amount in told.counters.items():
            stats.increase_counter(COUNTERS[name].name, amount, labels)
        for (name, labels), value in told.gauges.items():
            stats.set_gauge(GAUGES[name].name, value, labels)
        return stats

    def config_info(self) -> list[dict[str, str | int | float | bool]]:
        """What vLLM 0.33 publishes as its own `kv_offload_config_info`."""
        return [dict(self._config)]

    def _count(self) -> None:
        """Hand over what was counted here since the last call."""
        add, steps = self.figures.add, self._steps
        add("lookups", self._found_cpu, "cpu")
        add("lookups", self._found_pool, "pool")
        add("lookups", self._missed, "miss")
        add("scheduler_seconds", self._scheduler_s)
        add("scheduler_steps", steps.steps)
        add("step_seconds", steps.seconds)
        add("step_tokens", steps.tokens)
        self._missed = self._found_cpu = self._found_pool = 0
        self._scheduler_s = 0.0
        steps.clear()

    def _state(self, req_context: ReqContext) -> _RequestKeys:
        state: _RequestKeys | None = req_context.get_state(_RequestKeys)
        if state is None:
            state = _RequestKeys()
            req_context.set_state(state)
        return state
