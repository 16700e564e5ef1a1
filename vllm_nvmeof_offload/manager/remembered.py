# SPDX-License-Identifier: Apache-2.0
"""Answers of vLLM's look-ups, each remembered until another one is possible. Pure.

vLLM looks up the request at the head of its queue in every step, key by key, until the request gets
its GPU blocks. The answer is given again while the chunks that were found are where they were, none
of them has begun to be loaded (vLLM delays whoever asks for one that is), and the keys at which the
groups' look-ups stopped still miss. One call of native code asks that of all keys at once, at some
40 ns a key.

If admission declines the pool, the request is looked up again in the CPU tier only, and this second
answer is remembered beside the first. vLLM's state of the request is that of the last real look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.manager.load_or_recompute import Decision, Find

if TYPE_CHECKING:
    from vllm_nvmeof_offload.manager.core import ManagerCore


@dataclass(frozen=True, slots=True)
class Question:
    """What a look-up asks. tokens: of the request; last_hash: of its last whole block, which stands
    for all before; local: tokens in GPU memory; cap: tokens to load at most; sources: that may
    hit."""

    tokens: int
    last_hash: object
    local: int
    cap: int | None
    sources: int


@dataclass(slots=True)
class Answer:
    """A look-up's answer. found: tokens; None: vLLM delays the request. hits, misses: the keys for
    which it hit and missed. whereabouts: that of the hits when it was given. The others are
    admission's."""

    question: Question
    found: int | None
    hits: Sequence[bytes]
    misses: Sequence[bytes]
    whereabouts: int
    find: Find | None = None
    decision: Decision | None = None
    declined: Sequence[bytes] = ()
    decided_s: float = 0.0
    reading: bool = True  # admission's state after the decision


class RememberedAnswers:
    """By request, its last answers: one per set of sources."""

    def __init__(self, core: ManagerCore) -> None:
        self._core = core
        self._answers: dict[str, dict[int, Answer]] = {}
        self._last: dict[str, Question] = {}  # of the last real look-up

    def recall(self, request_id: str, question: Question) -> Answer | None:
        """The answer that a look-up would give again; None: only a look-up can tell."""
        answers = self._answers.get(request_id)
        answer = answers.get(question.sources) if answers is not None else None
        if answer is None:
            return None
        if (
            answer.question == question
            and answer.whereabouts == self._core.whereabouts(answer.hits, question.sources)
            and 1 not in self._core.present(answer.misses, question.sources)
        ):
            return answer
        self._drop(request_id, question.sources)
        return None

    def remember(
        self,
        request_id: str,
        question: Question,
        found: int | None,
        hits: Sequence[bytes],
        misses: Sequence[bytes],
        keep: bool = True,
    ) -> Answer:
        """A real look-up has given this answer, which is returned. It is remembered if it can be.

        keep: False: it is not, because every look-up has to be real.
        """
        self._drop(request_id, question.sources)
        whereabouts = self._core.whereabouts(hits, question.sources)
        answer = Answer(question, found, hits, misses, whereabouts)
        asked_one_key = not found and self._core.config.full_attention_only
        if found is None or asked_one_key or not keep:  # None: a delay
            return answer
        # What vLLM found must be what the tiers have: all else is not remembered.
        rests_on = hits if found else [*hits, *misses]
        if rests_on and whereabouts:
            self._answers.setdefault(request_id, {})[question.sources] = answer
        return answer

    def asked(self, request_id: str, question: Question) -> None:
        """A real look-up asked this."""
        self._last[request_id] = question

    def was_last(self, request_id: str, question: Question) -> bool:
        """Whether the last real look-up of the request asked this: vLLM's state of the request is
        the one that it left."""
        return self._last.get(request_id) == question

    def forget(self, request_id: str) -> None:
        """The request has got or given back GPU blocks, or has ended."""
        self._last.pop(request_id, None)
        self._answers.pop(request_id, None)

    def _drop(self, request_id: str, sources: int) -> None:
        answers = self._answers.get(request_id)
        if answers is not None and answers.pop(sources, None) is not None and not answers:
            del self._answers[request_id]
