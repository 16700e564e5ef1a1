# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingManager, implemented as a thin adapter over `manager.core`.

vLLM creates the manager with the connector, and delivers the ranks' handshake before the first
request. `attach` then creates the core with the sizes in the handshake.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
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

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.child import Companion
from vllm_nvmeof_offload.exporter import Exporter, ExporterSettings, start_exporter
from vllm_nvmeof_offload.groups import Group
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL, CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.eviction import MakePolicy
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.manager.look_up import Queue
from vllm_nvmeof_offload.manager.prefill_rate import StepMeter
from vllm_nvmeof_offload.manager.requests import Suspension, WaitingRequests
from vllm_nvmeof_offload.manager.stores import BoundaryStores
from vllm_nvmeof_offload.manager.telemetry import (
    FailureLog,
    MetricsCollector,
    config_labels,
    start_line,
)
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, Counts, exported
from vllm_nvmeof_offload.native import LookUps
from vllm_nvmeof_offload.pool.format import client_of, share_tag
from vllm_nvmeof_offload.protocol import (
    ChunkBatch,
    Command,
    LoadCommand,
    RankHello,
    Report,
    StoreCommand,
)
from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter.kv_hints import (
    Advice,
    advice_of,
    helpers_of,
    retention_of,
    wants_record,
)
from vllm_nvmeof_offload.vllm_adapter.sharing import NAMELESS, ShareSettings, start_sharing, why_not

_MEDIUM = {Source.CPU: Medium.CPU, Source.POOL: Medium.STORAGE}
_EVERYWHERE = FROM_CPU | FROM_POOL

#: The value that represents a store in a pickled command, in place of a load's helpers.
_IS_STORE = -1

#: Unchanged gauges are exported once per period, and so are counters of seconds if nothing else
#: has changed.
_EXPORT_PERIOD_S = 1.0


@dataclass  # a frozen dataclass takes several times as long to create
class CommandSpec(LoadStoreSpec):
    command: StoreCommand | LoadCommand

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one call with plain fields: the default pickles three objects per job."""
        op, batch, *helpers = self.command
        return _unpickled, (helpers[0] if helpers else _IS_STORE, op, *batch)


def _unpickled(helpers: int | None, op: int, *columns: bytes) -> CommandSpec:
    batch = ChunkBatch(columns)
    is_store = helpers == _IS_STORE
    return CommandSpec(StoreCommand(op, batch) if is_store else LoadCommand(op, batch, helpers))


@dataclass
class _RequestState:
    """The state of a request. `used` lists the chunks of its jobs. `loaded` has the chunks of its
    last load and, with several groups, `ends` has the tokens up to the end of each. `refused` has
    the chunks that found no room; while there are any, `offered` has all chunks offered since the
    first of them."""

    used: list[Collection[bytes]]
    refused: set[bytes] = field(default_factory=set, init=False)
    offered: set[bytes] = field(default_factory=set, init=False)
    advice: Advice | None = field(default=None, init=False)
    client: int = field(default=0, init=False)
    loaded: ChunkBatch | None = field(default=None, init=False)
    ends: npt.NDArray[np.int64] | None = field(default=None, init=False)


class NVMeoFOffloadingManager(OffloadingManager):
    """The manager, called on EngineCore's main thread. It does no I/O and never blocks.

    Before `attach` there are no requests, events or metrics. Until then, only `reset_cache`,
    `weights_may_have_changed` and vLLM's calls without chunks are possible.
    """

    #: Set by `attach`. `sources_of` returns the sources that a filter allows.
    sources_of: Callable[[TierFilter], int]
    look_ups: LookUps
    _metrics: MetricsCollector
    _failure_log: FailureLog

    def __init__(
        self,
        config: CoreConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        policy: MakePolicy | None = None,
        prompts_only: bool = False,
    ) -> None:
        self.config = config
        self.suspension = Suspension(clock)
        self.waiting: WaitingRequests | None = None
        self._boundaries: BoundaryStores | None = None
        self._core: ManagerCore | None = None
        self._clock, self._worked_s = clock, clock()
        self._policy = policy
        self._void = False  # whether a reset preceded the core's creation
        self._weights_changed = False  # whether new weights preceded the core's creation
        self._keyspace = ""  # empty if weight names have no effect
        self._version = ""  # the last name given by the operator
        self._steps = StepMeter(clock)
        self._scheduler_s = 0.0
        self._exported_s = self._all_exported_s = 0.0  # the last export, and the last of all gauges
        self._export_due = False  # true after `attach`
        #: The locality of each tier relative to this engine; None if unknown.
        self._localities: dict[Source, Locality | None] = {Source.CPU: Locality.LOCAL}
        self._labels = dict.fromkeys(CONFIG_LABELS, "")
        self._follower: Companion | None = None  # None if nothing is shared
        self._exporter: Exporter | None = None
        self._refused: dict[str, list[bytes]] = {}  # this step's refused chunks, by request
        self._labels["vllm"] = vllm_release.release()
        self._labels["prompts_only"] = "yes" if prompts_only else "no"
        self._activity_seen: tuple[float, ...] = ()

    @property
    def core(self) -> ManagerCore:
        assert self._core is not None, "vLLM delivers the handshake before any request"
        return self._core

    @property
    def is_attached(self) -> bool:
        return self._core is not None

    # -- look-up and jobs -------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # vLLM calls this for each chunk of every waiting request. `attach` replaces it with the
        # native function, because a Python frame costs more than the look-up.
        raise AssertionError("vLLM delivers the handshake before any request")

    def load_sources(self, req_context: ReqContext, first: int, tokens: int) -> dict[Any, int]:
        state = req_context.get_state(_RequestState)
        if not tokens or state is None or state.loaded is None:
            return {}
        # Imported here, because a vLLM that does not call this method may lack it.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        of = range(first, first + tokens)
        cpu, pool, shared = self.core.tokens_by_source(state.loaded, of, state.ends)
        counts = {
            CacheHitSource.HOST: cpu,
            CacheHitSource.DISK: pool + shared,
            # Tokens outside every window.
            CacheHitSource.EXTERNAL_UNSPECIFIED: tokens - cpu - pool - shared,
        }
        return {source: count for source, count in counts.items() if count}

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        attempt = self.waiting.look_ups.attempt(req_context.req_id) if self.waiting else None
        wanted = list(keys)
        ends, state = self._ends(wanted, req_context), self._state(req_context)
        if attempt is None:
            command = self.core.prepare_load(wanted, ends=ends, client=state.client)
        else:
            tokens = range(attempt.local, attempt.local + attempt.tokens)
            command = self.core.prepare_load(
                wanted,
                attempt.decision.limit_s,
                tokens=tokens,
                ends=ends,
                helpers=attempt.helpers,
                predicted_s=attempt.decision.predicted_s,
                client=state.client,
            )
        state.loaded, state.ends = command.batch, ends
        state.used.append(keys)
        return CommandSpec(command)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if req_context.req_id in self.suspension.requests:
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        wanted = list(keys)
        ends, state = self._ends(wanted, req_context), self._state(req_context)
        if self._boundaries is None or ends is None:
            plan = self.core.prepare_store(wanted, ends, again=state.offered, client=state.client)
        else:
            assert self.waiting is not None
            request = self.waiting.request(req_context.req_id)
            offer = self._boundaries.offered(request, wanted, ends)
            wanted = _offload_keys(offer.keys)
            what = wanted, offer.ends, offer.provisional
            plan = self.core.prepare_store(*what, again=state.offered, client=state.client)
            if not plan.refused:
                self._boundaries.stored(req_context.req_id, offer)
        self._note_refused(plan.refused, wanted, req_context)
        if plan.command is None:
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        batch = plan.command.batch
        stored = wanted if len(batch) == len(wanted) else _offload_keys(batch.key_list())
        return PrepareStoreOutput(stored, CommandSpec(plan.command), [])

    def _note_refused(
        self, refused: list[bytes], offered: list[OffloadKey], req_context: ReqContext
    ) -> None:
        """Record refused chunks for the connector, because vLLM counts them as stored."""
        state = self._state(req_context)
        if refused or state.refused:
            state.refused = state.refused.difference(offered).union(refused)
            state.offered = state.offered.union(offered) if state.refused else set()
        if refused:
            self._refused[req_context.req_id] = refused
            offered = [key for key in offered if key not in state.refused]
        state.used.append(offered)

    def take_refused(self) -> dict[str, list[bytes]]:
        refused, self._refused = self._refused, {}
        return refused

    # `complete_store` and `complete_load` remain vLLM's no-ops: the core gets outcomes from the
    # workers' reports, which also cover jobs that vLLM forgot in a reset.

    # -- requests and steps -----------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        # vLLM will not store any more chunks of the request.
        self.suspension.ended(req_context.req_id)
        if self._boundaries is not None:
            self._boundaries.ended(req_context.req_id)
        state = req_context.get_state(_RequestState)
        if state is not None:
            if state.refused:  # other requests may have stored some of these chunks
                still = self.core.present(list(state.refused)).count(0)
                self.core.counters["unstored_chunks", "no_room"] += still
            used = list(itertools.chain.from_iterable(state.used))
            self.core.ended(used, self._ends(used, req_context))
            if state.advice is not None:
                self._follow(state.advice, req_context)
        if wants_record(req_context.kv_transfer_params):
            for record in self.core.request_log.find(req_context.req_id):
                logger.info("request %s", json.dumps(record))

    def advise(self, req_context: ReqContext, request: Any, *, may_prefetch: bool = True) -> Advice:
        """Return an orchestrator's advice about a new request's KV. With `may_prefetch`, the
        request's chunks may be prefetched while it waits."""
        counters = self.core.counters

        def count(kind: str) -> None:
            counters["kv_hints", kind] += 1

        def count_helper(how: str) -> None:
            counters["peer_hints", how] += 1

        salt = getattr(request, "cache_salt", None) or ""
        self._state(req_context).client = client_of(salt)
        params = getattr(request, "kv_transfer_params", None)
        helpers = helpers_of(params, self.config.peers, count_helper) if params else None
        advice = replace(retention_of(params, request, count), helpers=helpers)
        hints = getattr(req_context, "kv_hints", None)
        over_http = params.get("kv_hint") if isinstance(params, dict) else None
        if hints is None and over_http is None and not advice.retention_answer:
            return advice
        if advice.retention and not self.config.retain_share:
            advice = replace(advice, retention=None, retention_answer="nothing")
        elif advice.retention and not advice.retention.seconds:
            self.core.drop_session(advice.retention.session)
        may = {"may_prefetch": may_prefetch, "may_retain": self.config.retain_share > 0}
        if hints is not None:
            advice = advice.together(replace(advice_of(hints, request, count, **may), answers=()))
        if over_http is not None:
            advice = advice.together(advice_of(over_http, request, count, **may))
        self._state(req_context).advice = advice
        return advice

    def answers(self, req_context: ReqContext) -> dict[str, Any]:
        state = req_context.get_state(_RequestState)
        advice = state.advice if state is not None else None
        found: dict[str, Any] = {}
        if advice and advice.answers:
            found["kv_hint"] = list(advice.answers)
        if advice and advice.retention_answer:
            found["retention"] = advice.retention_answer
        return found

    def _follow(self, advice: Advice, req_context: ReqContext) -> None:
        keys = self.waiting.keys(req_context.req_id) if self.waiting else []
        if advice.demote:
            self.core.cool(keys)
        ends = [req_context.get_offload_key_position(OffloadKey(key)) or 0 for key in keys]
        kept = [keys[at] for at in advice.kept(ends)]
        if kept:
            self.core.ended(kept, self._ends(kept, req_context))
        for asked, tokens in advice.retentions():
            of = [key for key, end in zip(keys, ends, strict=True) if tokens.contains(end)]
            every = self._ends(of, req_context)
            self.core.retain(of, every, asked.session, asked.seconds, asked.priority)

    def step_scheduled(self, scheduler_output: Any) -> None:
        """Record that vLLM has scheduled a step. Call this before the step's commands are taken."""
        assert self.waiting is not None
        tokens = scheduler_output.num_scheduled_tokens
        if tokens:
            self._worked_s = self._clock()
        self._steps.scheduled(tokens, lambda: _computed_before(scheduler_output))
        self.waiting.step(scheduler_output)
        if self._boundaries is not None:
            for request_id in scheduler_output.preempted_req_ids or ():
                self._boundaries.preempted(request_id)
        self.suspension.log_while_it_lasts()

    def step_ended(self, scheduler_s: float) -> None:
        """Record that a step's output was applied. `scheduler_s` is the time spent in the
        connector's scheduler side since the last call."""
        self._steps.ended()
        admission, steps = self.core.admission, self._steps
        admission.prefill_rate, admission.prefill_depth = steps.prefill_rate, steps.depth
        admission.depth_s, admission.step_s = steps.depth_s, steps.decode_s
        self._scheduler_s += scheduler_s

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping to receive reports.

        Pending writes count only for a bounded time after the last token, because stepping occupies
        a core and blocks pause, sleep and shutdown. The writes continue with the next request.
        """
        if self._core is None:
            return False
        if self._export_due or self.has_events:  # a step exports the metrics
            return True
        count_writes = self._clock() - self._worked_s < self.config.report_deadline_s
        return self._core.has_pending_work(count_writes=count_writes)

    @property
    def has_events(self) -> bool:
        return self._core is not None and bool(self._core.changed_keys)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield a limited number of events for chunks that entered or left a tier, oldest first."""
        for change in self._core.take_changes() if self._core is not None else ():
            yield OffloadingEvent(
                keys=[OffloadKey(key) for key in change.keys],
                medium=_MEDIUM[change.tier],
                removed=change.removed,
                locality=self._localities[change.tier],
                removal_expected=not change.removed,
            )

    def reset_cache(self) -> None:
        if self._core is None:
            self._void = True  # including the chunks that `attach` will adopt
            return
        if self._boundaries is not None:
            self._boundaries.reset()
        entries = self._core.gauges()["entries"]
        if self._core.reset():
            logger.info("a reset invalidated all offloaded KV: %d chunks", entries)

    def weights_may_have_changed(self, *, known: bool) -> bool:
        """Record that weights have changed or, unless `known`, may have. Return whether this
        invalidates all chunks, so that a reset and a suspension must follow."""
        if not known and self.config.weights_never_change:
            return False
        self._weights_changed = True
        if self._core is not None:
            self._core.weights_changed()
        return True

    def name_weights(self, version: str) -> bool:
        """Record that all ranks now have the weights with this name.

        Return whether this invalidates all chunks, so that a reset must follow: always, unless the
        name is unchanged or names have no effect.
        """
        if not self._keyspace:
            return False
        is_new = self.core.name_weights(share_tag(self._keyspace, version.encode()))
        self._version = version
        return is_new

    def who_shares(self) -> str:
        if not self._keyspace:
            text = f"the name of the weights has no effect: {NAMELESS}"
            logger.warning("%s", text)
            return text
        text = f"the weights are named {self._version!r}; servers with weights of this name load "
        text += "chunks that this server stores from now on"
        text += ", and this server loads theirs" if self._follower else "; it loads none of theirs"
        logger.info("%s", text)
        return text

    # -- the connector's interface ----------------------------------------------------

    def attach(
        self,
        hellos: Iterable[RankHello],
        key_bytes: int,
        groups: tuple[Group, ...],
        queue: Queue | None = None,
        *,
        boundary_tokens: int = 0,
        tail_tokens: int = 0,
        share: ShareSettings | None = None,
        export: ExporterSettings | None = None,
    ) -> None:
        """Create the core from the workers' handshake.

        `key_bytes` is the length of every offload key. `groups` are the offloaded groups, by
        position. `boundary_tokens` is the result of `keep_boundaries`. `tail_tokens` is as in
        `BoundaryStores`. `share` is None if no chunks are shared with other servers; `export` is
        None if only vLLM exports the metrics.
        """
        assert self._core is None, "a second handshake"
        ordered = sorted(hellos, key=lambda hello: hello.rank)
        agreement = agree(ordered)
        for note in agreement.notes:
            logger.warning("%s", note)
        alone, foreign = why_not(ordered, agreement, share) if share else None, None
        if share and not alone:
            foreign, self._follower = start_sharing(ordered, agreement)
        core = ManagerCore(
            replace(self.config, key_bytes=key_bytes, groups=groups),
            agreement,
            self._clock,
            self._policy,
            prompts_s=self._steps.prompts_s,
            foreign=foreign,
        )
        self._core = core
        self._localities[Source.POOL] = _locality(ordered)
        # A partial, not a bound method: Python cannot collect a cycle through a native object.
        self.sources_of = partial(_sources_of, self._localities)
        self.look_ups = core.look_ups(self.sources_of, LookupResult.HIT, LookupResult.MISS)
        self.lookup = self.look_ups.lookup  # type: ignore[assignment,method-assign]
        self._labels |= config_labels(ordered, self.config)
        self._metrics = MetricsCollector(core, self.suspension, ordered, self._labels)
        if export is not None:
            self._exporter = start_exporter(export, self._metrics.snapshot, core.request_log)
        group, at = share.group if share else "", self._exporter and self._exporter.where
        exports = f"; metrics at {at}" if at else ""
        logger.info("%s%s", start_line(ordered, core, alone, group), exports)
        self._keyspace = ordered[0].keyspace if agreement.tag else ""
        if self._weights_changed:
            core.weights_changed()
        if self._void:
            self.reset_cache()
        self._failure_log = FailureLog(core, ordered[0].targets, self._clock)
        if queue is not None:
            self.waiting = WaitingRequests(core, queue, self._clock)
        if boundary_tokens:
            self._boundaries = BoundaryStores(
                core.supersede, core.keep, groups, boundary_tokens, tail_tokens
            )
        self._export_due = True

    def take_commands(self) -> list[Command]:
        self.core.turn()
        return self.core.take_commands()

    def report(self, reports: Iterable[Report], worker_counters: Counts) -> None:
        """Apply the workers' reports. Call this before vLLM's next look-up."""
        self.core.report(reports)
        self.core.counters.add(worker_counters)
        self._failure_log.log_new()

    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._core is None:
            return None
        # Most steps change only timings, which are exported periodically.
        self._count_look_ups()
        activity, now_s = self._core.activity(), self._clock()
        quiet = not self._export_due and activity == self._activity_seen
        if quiet and now_s - self._exported_s < _EXPORT_PERIOD_S:
            return None
        self._exported_s, self._export_due = now_s, False
        self._count()
        self._activity_seen = self._core.activity()
        if all_gauges := now_s - self._all_exported_s >= _EXPORT_PERIOD_S:
            self._all_exported_s = now_s
        stats = OffloadingConnectorStats()
        for series, amount in self._metrics.take_increases().items():
            name, labels = exported(series)
            stats.increase_counter(name, amount, labels)
        for series, value in self._metrics.take_gauges(unchanged_too=all_gauges).items():
            name, labels = exported(series)
            stats.set_gauge(name, value, labels)
        return stats

    def shutdown(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        if self._exporter is not None:
            self._exporter.stop()

    def config_info(self) -> list[dict[str, str | int | float | bool]]:
        """Return the labels that vLLM 0.33 publishes as its own `kv_offload_config_info`."""
        return [dict(self._labels)]

    def _count(self) -> None:
        counters, steps = self.core.counters, self._steps
        counters["scheduler_seconds"] += self._scheduler_s
        counters["scheduler_steps"] += steps.steps
        counters["step_seconds"] += steps.seconds
        counters["step_tokens"] += steps.tokens
        self._scheduler_s = 0.0
        steps.clear()

    def _count_look_ups(self) -> None:
        counters = self.core.counters
        counts = self.look_ups.take_counts()
        for result, amount in zip(("miss", "cpu", "pool", "shared"), counts, strict=True):
            counters["lookups", result] += amount

    def _ends(self, keys: Sequence[bytes], req_context: ReqContext) -> npt.NDArray[np.int64] | None:
        """Return, for each key, the request's tokens up to the end of its chunk. None with only
        full attention, because vLLM then passes the keys in prefix order."""
        if self.core.config.full_attention_only:
            return None
        return np.array([*map(req_context.get_offload_key_position, keys)], np.int64)

    def _state(self, req_context: ReqContext) -> _RequestState:
        state: _RequestState | None = req_context.get_state(_RequestState)
        if state is None:
            state = _RequestState([])
            req_context.set_state(state)
        return state


def _sources_of(localities: Mapping[Source, Locality | None], tiers: TierFilter) -> int:
    """Return the sources that the filter `tiers` allows. Any filter allows an unknown locality."""
    if tiers is TierFilter.ALL:
        return _EVERYWHERE
    cpu = FROM_CPU if tiers.allows(Medium.CPU, localities[Source.CPU]) else 0
    pool = FROM_POOL if tiers.allows(Medium.STORAGE, localities[Source.POOL]) else 0
    return cpu | pool


def _locality(hellos: Sequence[RankHello]) -> Locality | None:
    remote = {one for hello in hellos for one in hello.remote}
    if True in remote:
        return Locality.REMOTE
    return Locality.LOCAL if remote == {False} else None


def _offload_keys(keys: list[bytes]) -> list[OffloadKey]:
    return cast(list[OffloadKey], keys)  # vLLM's name for bytes


def _computed_before(scheduler_output: Any) -> dict[str, int]:
    found = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    return found | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
