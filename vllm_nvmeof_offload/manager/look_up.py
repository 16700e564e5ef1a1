# SPDX-License-Identifier: Apache-2.0
"""A waiting request's look-up: the question, vLLM's answer, and the load that follows. Pure.

In every step, vLLM looks up the request at the head of its queue, key by key, until the request
gets its GPU blocks. An answer is cached and reused while three conditions hold: the chunks found
have not moved; no load of one has begun (vLLM delays a request that asks for such a chunk); the
keys at which the groups' look-ups stopped still miss.

If admission declines the pool, the request is looked up again in the CPU tier only, and this second
answer is cached too. vLLM's own state for the request is the one left by the last real look-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.groups import Group, GroupKind, leading
from vllm_nvmeof_offload.manager import boundary
from vllm_nvmeof_offload.manager.load_or_recompute import Attempt, Decision, Find

if TYPE_CHECKING:
    from vllm_nvmeof_offload.manager.core import ManagerCore
    from vllm_nvmeof_offload.native import Whereabouts

_DECIDE_AGAIN_S = 0.05  # a decision is cached this long, because rates and queues change
_LOG_PERIOD_S = 60.0  # the minimum interval between two log lines about admission


@dataclass(frozen=True, slots=True)
class Queue:
    """Access to vLLM's queue.

    `keys_of` returns a request's keys so far, by group position and in prefix order, or None if the
    request is unknown. `ends_of` returns, for keys that a request's look-up asked for, the tokens
    up to each chunk's end. `is_cached` returns whether the request's chunk with this key is in GPU
    memory, and False for windows and states. With `by_priority`, vLLM orders the queue by priority.
    """

    keys_of: Callable[[str], Sequence[Sequence[bytes]] | None]
    ends_of: Callable[[str, Sequence[bytes]], Sequence[int]]
    is_cached: Callable[[Any, bytes], bool]
    groups: tuple[Group, ...]
    by_priority: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A look-up's question. `tokens` is the request's length. `last_hash` is the hash of its last
    whole block, which depends on all earlier blocks. `local` tokens are in GPU memory. At most
    `cap` tokens are loaded. Only `sources` may hit."""

    tokens: int
    last_hash: object
    local: int
    cap: int | None
    sources: int


@dataclass(slots=True)
class Answer:
    """A look-up's answer. `found` is the number of tokens, or None if vLLM delays the request.
    `hits` and `misses` are keys. `later`: the load may continue during later steps. `keep`: the
    answer may be cached. `whereabouts` is where the hits are, or None if one of them now misses.
    The other fields record admission's decision."""

    question: Question
    found: int | None
    hits: Sequence[bytes]
    misses: Sequence[bytes]
    later: bool = True
    keep: bool = True
    whereabouts: Whereabouts | None = None
    find: Find | None = None
    decision: Decision | None = None
    declined: Sequence[bytes] = ()
    decided_s: float = 0.0
    reading: bool = True  # admission's state after the decision


Ask: TypeAlias = Callable[[Question], Answer]  # vLLM's own look-up of a request


@dataclass(slots=True)
class _LookedUp:
    """A request between its first look-up and its GPU blocks. `answers` is keyed by the set of
    sources, `last` is the question of the last real look-up, and `boundary` is the number of tokens
    up to the end of the last hit."""

    answers: dict[int, Answer] = field(default_factory=dict)
    last: Question | None = None
    attempt: Attempt | None = None
    boundary: int | None = None


class RequestLookUps:
    """The look-ups of all requests. Used only on the scheduler's thread. `offered` is called with
    each look-up's outcome: (request, local tokens, tokens to load). `helpers_of` is as in
    `LoadCommand`."""

    def __init__(
        self,
        core: ManagerCore,
        queue: Queue,
        offered: Callable[[str, int, int], None],
        helpers_of: Callable[[str], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._queue = queue
        self._offered, self._helpers_of, self._clock = offered, helpers_of, clock
        #: For the leading group: the tokens per chunk, and whether it has full attention.
        self.tokens_per_chunk = queue.groups[leading(queue.groups)].tokens_per_chunk
        self.full = queue.groups[leading(queue.groups)].kind is GroupKind.FULL
        self._requests: dict[str, _LookedUp] = {}
        self._declined: Sequence[bytes] = ()  # the keys declined by this step's last attempt
        self._logged: tuple[bool, float] = (True, -_LOG_PERIOD_S)

    def answer(self, request_id: str, question: Question, ask: Ask, second: int) -> Answer:
        """Return what the request should load. If admission declines the hit, the second look-up is
        limited to the sources in `second`."""
        answer = self._look_up(request_id, question, ask)
        if answer.found is None:
            return answer
        if self.decide(request_id, answer).declined:
            question = replace(question, sources=question.sources & second)
            answer = self._look_up(request_id, question, ask)
            if answer.found is None:
                return answer
            self.declined(request_id, answer.found)
        if answer.found and self._requests[request_id].last != question:
            # vLLM's state for the request still comes from the look-up in the other sources.
            answer = self.asked(request_id, ask(question))
        return answer

    def _look_up(self, request_id: str, question: Question, ask: Ask) -> Answer:
        return self.recall(request_id, question) or self.asked(request_id, ask(question))

    def recall(self, request_id: str, question: Question) -> Answer | None:
        """Return the cached answer if it is still valid, or None if a look-up is needed."""
        known = self._requests.get(request_id)
        answer = known.answers.get(question.sources) if known else None
        if known is None or answer is None:
            return None
        if (
            answer.question == question
            and answer.whereabouts is not None
            and self._core.unmoved(answer.whereabouts, answer.hits, question.sources)
            and 1 not in self._core.present(answer.misses, question.sources)
        ):
            return answer
        del known.answers[question.sources]
        return None

    def asked(self, request_id: str, answer: Answer) -> Answer:
        """Record a real look-up's answer, cache it if possible, and return it."""
        known = self._requests.setdefault(request_id, _LookedUp())
        known.last, sources, found = answer.question, answer.question.sources, answer.found
        known.answers.pop(sources, None)
        answer.whereabouts = self._core.whereabouts(answer.hits, sources)
        asked_one_key = not found and self._core.config.full_attention_only
        if found is None or asked_one_key or not answer.keep:  # None means a delay
            return answer
        # Cache an answer only if the tiers have exactly what vLLM found.
        rests_on = answer.hits or (not found and answer.misses)
        if rests_on and answer.whereabouts is not None:
            known.answers[sources] = answer
        return answer

    def decide(self, request_id: str, answer: Answer) -> Attempt:
        """Decide whether to load the hit from a look-up in all sources. If not, the caller must
        look up the request in the CPU tier only, and then call `declined`."""
        local, found = answer.question.local, answer.found or 0
        known = self._requests.setdefault(request_id, _LookedUp())
        self._core.reload.looked_up(request_id, local // self.tokens_per_chunk if self.full else 0)
        decision = Decision(load=True)
        if found and self._core.admission.automatic:
            decision = self._decide(request_id, answer, found)
            self._log_change()
        tokens = found if decision.load else 0
        helpers = self._helpers_of(request_id)
        attempt = Attempt(local, tokens, found - tokens, decision, helpers)
        known.attempt = attempt if found else None  # None clears the decision on an earlier hit
        known.boundary = local + found
        self._offered(request_id, local, tokens)
        return attempt

    def declined(self, request_id: str, tokens: int) -> None:
        """Record that the pool was declined, and that the CPU tier supplies `tokens` instead."""
        known = self._requests[request_id]
        assert known.attempt is not None
        left = max(0, known.attempt.declined - tokens)
        known.attempt = replace(known.attempt, tokens=tokens, declined=left)
        self._offered(request_id, known.attempt.local, tokens)

    def _decide(self, request_id: str, answer: Answer, found: int) -> Decision:
        admission, now_s = self._core.admission, self._clock()
        if answer.decision is not None:
            recent = now_s - answer.decided_s < _DECIDE_AGAIN_S
            if recent and answer.reading is admission.reading:
                self._declined = answer.declined
                return answer.decision
        if answer.find is not None:
            find = replace(answer.find, queued_bytes=self._core.queued_bytes())
        else:
            find = self._core.find(self._taken(request_id, answer), found)
        before = answer.question.local + found - find.tokens
        decision = admission.decide(find.read_bytes, find.queued_bytes, find.tokens, before)
        declined: Sequence[bytes] = ()
        if not decision.load:
            declined = self._taken(request_id, answer)[find.leading_cpu :]
            self._declined = declined
        answer.find, answer.decision, answer.declined = find, decision, declined
        answer.decided_s, answer.reading = now_s, admission.reading
        return decision

    def _taken(self, request_id: str, answer: Answer) -> Sequence[bytes]:
        """Return the keys that a load of this answer would read, all of them hits."""
        keys_by_group = self._queue.keys_of(request_id)
        if self._core.config.full_attention_only or keys_by_group is None:
            return answer.hits
        local, ends_of = answer.question.local, partial(self._queue.ends_of, request_id)
        end = local + (answer.found or 0)
        groups = self._queue.groups
        return boundary.taken(groups, keys_by_group, answer.hits, local, end, ends_of)

    def attempt(self, request_id: str) -> Attempt | None:
        """Return the decision on the load that is being planned for this request."""
        known = self._requests.get(request_id)
        return known.attempt if known else None

    def end(self, request_id: str) -> tuple[Attempt | None, int | None]:
        """Forget a request that has received or returned its GPU blocks, or has ended. Return its
        decision, and the number of tokens up to the end of its hit."""
        known = self._requests.pop(request_id, None)
        return (known.attempt, known.boundary) if known else (None, None)

    def forget_answers(self, request_id: str) -> None:
        """Forget cached answers, because vLLM's state for the request no longer matches them."""
        if known := self._requests.get(request_id):
            known.answers.clear()

    def take_declined(self) -> Sequence[bytes]:
        """Take the chunks that the last attempt declined, for probing the pool. This is not part of
        `decide`, because a probe takes cache slots while found chunks are not pinned yet."""
        declined, self._declined = self._declined, ()
        return declined

    def _log_change(self) -> None:
        admission = self._core.admission
        reading, logged_s = self._logged
        now_s = self._clock()
        if admission.reading == reading or now_s - logged_s < _LOG_PERIOD_S:
            return
        self._logged = (admission.reading, now_s)
        logger.info(
            "pool hits are %s: the pool reads %.0f MB/s, loads take %.1f times the predicted time, "
            "and the model computes %.0f tokens/s",
            "loaded again" if admission.reading else "recomputed, which is faster",
            admission.bytes_per_s / 1e6,
            admission.slowness,
            admission.prefill_rate,
        )
