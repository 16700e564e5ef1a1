# SPDX-License-Identifier: Apache-2.0
"""vLLM's waiting requests as the core knows them: keys, places in the queue, decisions.

What vLLM's scheduler says and asks comes in here request by request; the core's `reload` and
`admission` decide. Imports nothing of vLLM: its objects are taken as they come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.manager.reload import Order
from vllm_nvmeof_offload.manager.resumes import ResumeCounter
from vllm_nvmeof_offload.names import LOGGER_NAME

__all__ = ["Attempt", "Queue", "WaitingRequests"]

logger = logging.getLogger(LOGGER_NAME)

#: Between two log lines on what admission does.
_LOG_PERIOD_S = 60.0


@dataclass(frozen=True, slots=True)
class Queue:
    """How vLLM's queue looks from outside.

    keys_of: a request's chunks in prefix order, so far; None: not a request of ours.
    is_cached: whether the request's n-th chunk is in GPU memory. by_priority: vLLM's policy.
    """

    keys_of: Callable[[str], Sequence[bytes] | None]
    is_cached: Callable[[Any, int], bool]
    tokens_per_chunk: int
    by_priority: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """What was decided on a hit. tokens: to load; declined: found, and not to be loaded."""

    tokens: int
    declined: int
    limit_s: float | None

    @property
    def decision(self) -> str:
        if not self.declined:
            return "load"
        return "partial" if self.tokens else "recompute"


class WaitingRequests:
    """Scheduler side, one thread."""

    def __init__(
        self, core: ManagerCore, queue: Queue, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.resumes = ResumeCounter(self._num_tokens, queue.tokens_per_chunk)
        self._core = core
        self._queue = queue
        self._clock = clock
        self._requests: dict[str, Any] = {}
        self._attempts: dict[str, Attempt] = {}
        self._going: set[str] = set()  # got their blocks in this step
        self._declined: Sequence[bytes] = ()  # by the last attempt of this step
        self._said: tuple[bool, float] = (True, -_LOG_PERIOD_S)

    def added(self, request: Any, *, prefetch: bool = True) -> None:
        """A request has come. prefetch: whether its chunks may be fetched ahead."""
        self._requests[request.request_id] = request
        keys = self._queue.keys_of(request.request_id) if prefetch else None
        if keys:
            # vLLM computes at least the last token, so a load never brings all.
            count = (request.num_tokens - 1) // self._queue.tokens_per_chunk
            self._core.reload.queued(
                request.request_id, keys[:count], self._order(request), self._in_gpu(request)
            )

    def decide(self, request_id: str, local: int, found: int) -> Attempt:
        """Of `found` tokens behind `local` ones in GPU memory, which to load."""
        per_chunk = self._queue.tokens_per_chunk
        keys = self._queue.keys_of(request_id)
        assert keys is not None
        first, last = local // per_chunk, -(-(local + found) // per_chunk)
        self._core.reload.looked_up(request_id, first)
        attempt = Attempt(found, 0, None)
        if found and self._core.admission.automatic:
            decision = self._core.admission.decide(self._core.find(keys[first:last]))
            if first + decision.chunks < last:
                tokens = max(0, (first + decision.chunks) * per_chunk - local)
                attempt = Attempt(tokens, found - tokens, None)
                self._declined = keys[first + decision.chunks : last]
            else:
                attempt = Attempt(found, 0, decision.limit_s)
            self._say()
        if found:
            self._attempts[request_id] = attempt
        else:  # what was decided on an earlier hit is void
            self._attempts.pop(request_id, None)
        self.resumes.offered(request_id, local, attempt.tokens)
        return attempt

    def allocated(self, request_id: str) -> Attempt | None:
        """The request got its blocks; returns what had been decided on its hit, if it had one."""
        self._core.reload.left(request_id)
        self._going.add(request_id)
        return self._attempts.pop(request_id, None)

    def limit_s(self, request_id: str) -> float | None:
        """How long the load that is being planned for this request may take."""
        attempt = self._attempts.get(request_id)
        return attempt.limit_s if attempt else None

    def step(self, scheduler_output: Any) -> None:
        """Take in one `SchedulerOutput`."""
        self.resumes.step(scheduler_output)
        # Before what runs: a reset may preempt between two steps what this one runs again,
        # … or loads again.
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id not in self._going:
                self._preempted(request_id)
        self._going.clear()
        for request_id in scheduler_output.num_scheduled_tokens:
            self._core.reload.left(request_id)
        for request_id in scheduler_output.finished_req_ids or ():
            self._core.reload.left(request_id)
            self._requests.pop(request_id, None)
            self._attempts.pop(request_id, None)
        # Not in `decide`: a probe takes cache slots, and what was found there is not pinned yet.
        self._core.reload.probe(self._declined)
        self._declined = ()

    def _preempted(self, request_id: str) -> None:
        request, keys = self._requests.get(request_id), self._queue.keys_of(request_id)
        if request is None or keys is None:
            return
        count = self.resumes.computed(request_id) // self._queue.tokens_per_chunk
        self._core.reload.preempted(request_id, keys[:count], self._in_gpu(request))

    def _num_tokens(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        return request.num_tokens if request is not None else 0

    def _order(self, request: Any) -> Order:
        if self._queue.by_priority:
            return (request.priority, request.arrival_time)
        return ()

    def _in_gpu(self, request: Any) -> Callable[[int], bool]:
        is_cached = self._queue.is_cached
        return lambda chunk: is_cached(request, chunk)

    def _say(self) -> None:
        """One line when admission changes its mind about the pool, and not often."""
        admission = self._core.admission
        reading, said_s = self._said
        now_s = self._clock()
        if admission.reading == reading or now_s - said_s < _LOG_PERIOD_S:
            return
        self._said = (admission.reading, now_s)
        logger.info(
            "what is found in the pool is %s: it reads %.0f MB/s with %.0f ms beside, the model "
            "computes %.0f tokens/s",
            "loaded again" if admission.reading else "computed again, which is sooner",
            admission.bytes_per_s / 1e6,
            admission.overhead_s * 1e3,
            admission.tokens_per_s,
        )
