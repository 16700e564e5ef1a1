# SPDX-License-Identifier: Apache-2.0
"""Counts what a preempted request gets back when it is resumed.

vLLM leaves preempted requests out of its external prefix cache figures. Computed before the
preemption is what the steps scheduled, less the drafts that were rejected; on resume it is found
in GPU memory, found by us, or lost and recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Resume", "ResumeCounter"]


@dataclass(frozen=True, slots=True)
class Resume:
    """Tokens of one resumed request.

    reloaded: to be loaded. recomputed: computed before, and neither in GPU memory nor loaded.
    chunk_tokens: those computed before, in full chunks, and not in GPU memory; chunk_tokens_lost:
    of these, not loaded.
    """

    reloaded: int
    recomputed: int
    chunk_tokens: int
    chunk_tokens_lost: int


@dataclass(frozen=True, slots=True)
class _Computed:
    """Tokens that a request's steps have computed, at most. drafted: the last one had drafts."""

    tokens: int = 0
    drafted: bool = False


class ResumeCounter:
    """Follows vLLM's scheduler outputs; pure.

    num_tokens: the tokens that a request has now. Steps schedule more than these: drafts, of which
    some are rejected. A scheduler output never says how many, and a preempted request is missing
    in the next one, which would. The request's tokens do: its last one was sampled in the step
    that verified the drafts, and was never computed.
    """

    def __init__(self, num_tokens: Callable[[str], int], tokens_per_chunk: int = 1) -> None:
        self._num_tokens = num_tokens
        self._tokens_per_chunk = tokens_per_chunk
        self._computed: dict[str, _Computed] = {}  # running requests
        self._preempted: dict[str, _Computed] = {}  # as of the preemption
        self._offered: dict[str, tuple[int, int]] = {}  # resuming request → (local, found)

    def step(self, scheduler_output: Any) -> None:
        """Take in one `SchedulerOutput`."""
        for request_id in scheduler_output.preempted_req_ids or ():
            computed = self._computed.pop(request_id, _Computed())
            before = self._preempted.get(request_id, _Computed())
            # Preempted again before it got anywhere: what it once had is still what counts.
            self._preempted[request_id] = max(computed, before, key=lambda c: c.tokens)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduled.keys() & self._preempted.keys():
            # It runs again, and will have more tokens than those that bound what it once had.
            self._preempted[request_id] = _Computed(self.computed(request_id))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tokens = new.num_computed_tokens + scheduled[new.req_id]
            self._computed[new.req_id] = _Computed(tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            tokens = computed + scheduled[request_id]
            self._computed[request_id] = _Computed(tokens, request_id in drafts)
        for request_id in scheduler_output.finished_req_ids or ():
            self._computed.pop(request_id, None)
            self._preempted.pop(request_id, None)
            self._offered.pop(request_id, None)

    def computed(self, request_id: str) -> int:
        """Tokens that a preempted request had computed before; 0 for any other."""
        computed = self._preempted.get(request_id)
        if computed is None:
            return 0
        # Asked each time: with asynchronous scheduling the last step's tokens come afterwards.
        tokens = self._num_tokens(request_id)
        return min(computed.tokens, max(0, tokens - 1) if computed.drafted else tokens)

    def offered(self, request_id: str, local: int, found: int) -> None:
        """A look-up for a resume: `local` tokens in GPU memory, `found` more to load.

        vLLM may find no room for the request in this step, and then asks again in a later one.
        """
        if request_id in self._preempted:
            self._offered[request_id] = (local, found)

    def resumed(self, request_id: str) -> Resume | None:
        """What a preempted request gets back, if this is one that now has its blocks."""
        offer = self._offered.pop(request_id, None)
        if offer is None:
            return None
        local, found = offer
        computed = self.computed(request_id)
        del self._preempted[request_id]
        chunked = computed - computed % self._tokens_per_chunk
        return Resume(
            reloaded=found,
            recomputed=max(0, computed - local - found),
            chunk_tokens=max(0, chunked - local),
            chunk_tokens_lost=max(0, chunked - local - found),
        )
