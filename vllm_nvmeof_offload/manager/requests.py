# SPDX-License-Identifier: Apache-2.0
"""The core's view of vLLM's requests, without an import of vLLM.

`WaitingRequests` passes each request's keys and queue position to `hold_and_prefetch`; look_up.py
handles the look-ups. `ResumeCounter` counts the tokens that a preempted request gets back when it
resumes, because vLLM's external prefix cache metrics leave them out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.manager import boundary
from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.manager.hold_and_prefetch import Order
from vllm_nvmeof_offload.manager.load_or_recompute import Attempt
from vllm_nvmeof_offload.manager.look_up import Queue, RequestLookUps
from vllm_nvmeof_offload.manager.request_log import Start
from vllm_nvmeof_offload.metrics import Counts


@dataclass(frozen=True, slots=True)
class _Computed:
    """An upper bound on a request's computed tokens. `drafted`: its last step had draft tokens."""

    tokens: int = 0
    drafted: bool = False


class ResumeCounter:
    """A counter of the tokens that resumed requests get back, based on vLLM's scheduler outputs.

    `num_tokens` returns a request's current number of tokens. A step can schedule draft tokens,
    some of which are rejected. The scheduler output does not report how many, but the request's
    tokens show it: the last one was sampled in the step that verified the drafts, and was never
    computed. A load ends at a multiple of `unit_tokens`, which is whole chunks in every group.
    """

    def __init__(
        self, num_tokens: Callable[[str], int], unit_tokens: int, counters: Counts
    ) -> None:
        self._num_tokens = num_tokens
        self._unit_tokens = unit_tokens
        self._counters = counters
        self._computed: dict[str, _Computed] = {}  # running requests
        self._preempted: dict[str, _Computed] = {}  # as of the preemption
        self._offered: dict[str, tuple[int, int]] = {}  # resuming request → (local, found)

    def step(self, scheduler_output: Any) -> None:
        for request_id in scheduler_output.preempted_req_ids or ():
            computed = self._computed.pop(request_id, _Computed())
            before = self._preempted.get(request_id, _Computed())
            # If it was preempted again before it advanced, keep the tokens of the first preemption.
            self._preempted[request_id] = max(computed, before, key=lambda c: c.tokens)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduled.keys() & self._preempted.keys():
            # The request is running again and gains tokens that it had not computed before.
            self._preempted[request_id] = _Computed(self.computed(request_id))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._computed[new.req_id] = _Computed(new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            tokens = computed + scheduled[request_id]
            self._computed[request_id] = _Computed(tokens, request_id in drafts)
        for request_id in scheduler_output.finished_req_ids or ():
            for known in (self._computed, self._preempted, self._offered):
                known.pop(request_id, None)

    def computed(self, request_id: str) -> int:
        """Return the tokens that a preempted request had computed; 0 for any other request."""
        computed = self._preempted.get(request_id)
        if computed is None:
            return 0
        # Not cached, because with asynchronous scheduling the last step's tokens arrive later.
        tokens = self._num_tokens(request_id)
        return min(computed.tokens, max(0, tokens - 1) if computed.drafted else tokens)

    def offered(self, request_id: str, local: int, found: int) -> None:
        """Record that a look-up found `local` tokens in GPU memory and `found` further tokens to
        load."""
        if request_id in self._preempted:
            self._offered[request_id] = (local, found)

    def resumed(self, request_id: str, loaded: int) -> bool:
        """Count the tokens that a preempted request recovers when it resumes, of which `loaded` are
        loaded. Return False for any other request."""
        offer = self._offered.pop(request_id, None)
        if offer is None:
            return False
        local, found = offer
        computed = self.computed(request_id)
        del self._preempted[request_id]
        chunked = computed - computed % self._unit_tokens
        lost = max(0, chunked - local - found)
        self._counters["resumed_tokens", "loaded"] += loaded
        self._counters["resumed_tokens", "recomputed"] += max(0, computed - local - found)
        self._counters["resumed_chunk_tokens", "found"] += max(0, chunked - local) - lost
        self._counters["resumed_chunk_tokens", "recomputed"] += lost
        return True


_LOG_PERIOD_S = 60.0  # the minimum interval between two log lines about suspended requests


class WaitingRequests:
    """The waiting requests. Used only on the scheduler's thread."""

    def __init__(
        self, core: ManagerCore, queue: Queue, clock: Callable[[], float] = time.monotonic
    ) -> None:
        unit = boundary.unit_tokens(queue.groups)
        self.resumes = ResumeCounter(self._num_tokens, unit, core.counters)
        self._helpers: dict[str, int] = {}  # by request, if it names helpers
        offered, helpers_of = self.resumes.offered, self._helpers.get
        self.look_ups = RequestLookUps(core, queue, offered, helpers_of, clock)
        self._core = core
        self._queue = queue
        self._requests: dict[str, Any] = {}
        self._followed: set[str] = set()  # requests whose chunks may be held and fetched
        self._ended: set[str] = set()  # requests that ended in the last step
        kinds = {group.kind for group in queue.groups}
        self._limited = GroupKind.FULL in kinds and not kinds.isdisjoint(boundary.SPARSE)
        self._going: set[str] = set()  # requests that got their blocks in this step

    def added(
        self,
        request: Any,
        *,
        prefetch: bool = True,
        first: bool = False,
        helpers: int | None = None,
    ) -> None:
        """Add a request that has arrived. `prefetch`: hold and fetch its chunks while it waits.
        `first`: do so before serving other requests. `helpers` is as in `LoadCommand`."""
        self._requests[request.request_id] = request
        (self._followed.add if prefetch else self._followed.discard)(request.request_id)
        self._helpers.pop(request.request_id, None)
        if helpers is not None:
            self._helpers[request.request_id] = helpers
        self._ended.discard(request.request_id)
        self.look_ups.end(request.request_id)
        if prefetch:
            order: Order = (not first,)
            if self._queue.by_priority:
                order += (request.priority, request.arrival_time)
            # vLLM computes at least the last token, so a load never covers all tokens.
            self._follow(request, request.num_tokens - 1, order)

    def allocated(self, request_id: str, loaded: int) -> Attempt | None:
        """Record that the request got its GPU blocks, and count the tokens that it recovers. Count
        the decision on its hit, and return that decision. `loaded` is the number of tokens that
        vLLM lets us load: 0 if another connector loads them, or if they are already in GPU
        memory."""
        attempt, found = self.look_ups.end(request_id)
        self._core.reload.left(request_id)
        self._going.add(request_id)
        self.resumes.resumed(request_id, loaded)
        elsewhere = attempt is not None and attempt.tokens > 0 and not loaded
        counters = self._core.counters
        if attempt is not None and not elsewhere:
            counters["admissions", attempt.result] += 1
            counters["recomputed_tokens", "declined"] += attempt.declined
        beyond = 0
        if self._limited and found is not None and not elsewhere:
            beyond = self._beyond(request_id, found)
            counters["recomputed_tokens", "no_boundary"] += beyond
        if found is not None:  # vLLM calls again when a load has ended, without a look-up
            self._log(request_id, attempt, found, loaded, beyond)
        return attempt

    def _log(
        self, request_id: str, attempt: Attempt | None, end: int, loaded: int, beyond: int
    ) -> None:
        """Record the request's start. `end` is the number of tokens up to the end of the hit, and
        `beyond` is as in `_beyond`."""
        local = end if attempt is None else attempt.local
        start = Start(
            tokens=self._num_tokens(request_id),
            gpu_tokens=local,
            found_tokens=end - local,
            loaded_tokens=loaded,
            declined_tokens=attempt.declined if attempt else 0,
            no_boundary_tokens=beyond,
            expected_load_seconds=attempt.decision.expected_s if attempt else 0.0,
            expected_compute_seconds=attempt.decision.compute_s if attempt else 0.0,
            chunk_tokens=self.look_ups.tokens_per_chunk,
            limits=_limits_of(self._requests.get(request_id)),
            load=self._core.planned if loaded else None,
        )
        self._core.request_log.started(request_id, start)

    def _beyond(self, request_id: str, found: int) -> int:
        """Return the number of tokens found beyond `found`, the last boundary with windows and
        states."""
        limit, keys_by_group = self._num_tokens(request_id), self._queue.keys_of(request_id)
        if keys_by_group is None:
            return 0
        groups, present = self._queue.groups, self._core.present
        return boundary.full_prefix(groups, keys_by_group, found, limit, present) - found

    def keys(self, request_id: str) -> list[bytes]:
        by_group = self._queue.keys_of(request_id) or ()
        return list(itertools.chain.from_iterable(by_group))

    def request(self, request_id: str) -> Any:
        """Return vLLM's request. It is kept until the step that reports its end."""
        return self._requests[request_id]

    def step(self, scheduler_output: Any) -> None:
        self.resumes.step(scheduler_output)
        for request_id in self._ended:
            self._requests.pop(request_id, None)
            self._followed.discard(request_id)
            self._helpers.pop(request_id, None)
        # The last chunks of ended requests are stored in this step.
        self._ended = set(scheduler_output.finished_req_ids or ())
        # Handle preempted requests first, because a reset between two steps can preempt a request
        # that this step runs or loads again.
        for request_id in scheduler_output.preempted_req_ids or ():
            self.look_ups.end(request_id)
            if request_id not in self._going:
                self._preempted(request_id)
        self._going.clear()
        ended = scheduler_output.finished_req_ids or ()
        for request_id in itertools.chain(scheduler_output.num_scheduled_tokens, ended):
            self._core.reload.left(request_id)
            self.look_ups.end(request_id)
        self._core.reload.probe(self.look_ups.take_declined())

    def _preempted(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request_id in self._followed:
            self._follow(request, self.resumes.computed(request_id), None)

    def _follow(self, request: Any, tokens: int, order: Order | None) -> None:
        """Hold and fetch the chunks of a waiting request that could load up to `tokens` tokens."""
        keys_by_group = self._queue.keys_of(request.request_id)
        if keys_by_group is None:
            return
        groups, is_cached = self._queue.groups, self._queue.is_cached
        if len(groups) == 1 and self.look_ups.full:
            keys = keys_by_group[0][: tokens // self.look_ups.tokens_per_chunk]
        else:
            # The windows and states that a load needs depend on what is missing.
            limit = min(tokens + 1, request.num_tokens)
            _, keys = boundary.plan(groups, keys_by_group, 0, limit, self._core.present)
        self._core.reload.follow(
            request.request_id, keys, lambda chunk: is_cached(request, keys[chunk]), order
        )

    def _num_tokens(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        return request.num_tokens if request is not None else 0


def _limits_of(request: Any) -> str:
    """Describe the limits that a request sets on its loads; empty if it sets none."""
    params = getattr(request, "kv_transfer_params", None)
    params = params if isinstance(params, dict) else {}
    keys = ("max_load_tokens", "kv_load_tiers")
    limits = [f"{key}={params[key]!r}" for key in keys if key in params]
    if getattr(request, "skip_reading_prefix_cache", False):
        limits.append("it computes its whole prompt, as prompt_logprobs requires")
    return ", ".join(limits)


class Suspension:
    """The requests whose chunks are not stored, because weights may have changed since their KV was
    computed; `vllm_adapter/new_weights.py` finds them. Used only on the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests: set[str] = set()
        self._clock = clock
        self._began_s = 0.0
        self._logged_s = -_LOG_PERIOD_S
        self._announced = False  # whether the start was logged, so that the end will be too

    def begin(self, call: str, requests: Iterable[str], *, known: bool) -> None:
        """Suspend `requests`, which had KV when vLLM called the method `call`. The method changes
        weights (`known`) or may do so."""
        self.requests = set(requests)
        self._began_s = self._clock()
        if self._began_s - self._logged_s < _LOG_PERIOD_S:
            return
        self._logged_s = self._began_s
        self._announced = bool(self.requests)
        logger.warning(
            "%s %s the weights: everything offloaded before is invalid, and a later start will not "
            "adopt chunks stored after this call; %s%s",
            call,
            "changed" if known else "may have changed",
            f"{len(self.requests)} requests with older KV are not stored"
            if self.requests
            else "every request is stored",
            "" if known else " (set weights_never_change if this call does not change weights)",
        )

    def ended(self, request_id: str) -> None:
        """Record that a request has ended, or that it recomputes everything."""
        self.requests.discard(request_id)
        if self._announced and not self.requests:
            self._announced = False
            logger.info(
                "every request is stored again, %.0f s after a call that may have changed weights",
                self._clock() - self._began_s,
            )

    def log_while_it_lasts(self) -> None:
        """Log the number of suspended requests once per minute. Call in every step."""
        if not self.requests:
            return
        now_s = self._clock()
        if now_s - self._logged_s < _LOG_PERIOD_S:
            return
        self._logged_s, self._announced = now_s, True
        logger.warning(
            "%d requests are still not stored, %.0f s after a call that may have changed the "
            "weights: they started before the call",
            len(self.requests),
            now_s - self._began_s,
        )
