# SPDX-License-Identifier: Apache-2.0
"""Answers of vLLM's look-ups, each remembered until another one is possible. Pure.

vLLM looks up the request at the head of its queue in every step, key by key, until the request gets
its GPU blocks. The answer rests on the chunks that were found: the tiers watch these, and void all
answers when one of them leaves, moves to another tier or begins to be loaded, and at verdicts and
resets. It also rests on the key at which the look-up stopped, which is asked again each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.manager.load_or_recompute import Attempt, Find

if TYPE_CHECKING:
    from vllm_nvmeof_offload.manager.core import ManagerCore


@dataclass(frozen=True, slots=True)
class Question:
    """What a look-up asks. tokens: of the request; last_hash: of its last whole block, which stands
    for all before; local: tokens in GPU memory; cap: tokens to load at most."""

    tokens: int
    last_hash: object
    local: int
    cap: int | None
    sources: int


@dataclass(slots=True)
class Answer:
    """found: tokens. stopped_at: the key that missed; None: the look-up ended at the last key, or
    at the cap. voided: the tiers' count when it was given. The others are admission's."""

    question: Question
    found: int
    stopped_at: bytes | None
    voided: int
    find: Find | None = None
    attempt: Attempt | None = None
    declined: Sequence[bytes] = ()
    decided_s: float = 0.0
    reading: bool = True  # admission's state after the decision


class RememberedAnswers:
    """By request, its last answer."""

    def __init__(self, core: ManagerCore) -> None:
        self._core = core
        self._answers: dict[str, Answer] = {}

    def recall(self, request_id: str, question: Question) -> int | None:
        """The tokens that a look-up would find; None: only a look-up can tell."""
        answer = self._answers.get(request_id)
        if answer is None:
            return None
        stopped_at = answer.stopped_at
        if (
            answer.question == question
            and answer.voided == self._core.voided
            and (stopped_at is None or self._core.lookup(stopped_at, question.sources) is None)
        ):
            return answer.found
        self.forget(request_id)
        return None

    def remember(
        self,
        request_id: str,
        question: Question,
        found: int | None,
        keys: Sequence[bytes],
        stopped_at: bytes | None,
    ) -> None:
        """A look-up found so many tokens, in the chunks `keys`; None: vLLM delays the request."""
        self.forget(request_id)
        # What vLLM found must be what the tiers have: all else is not remembered.
        if not found or not keys or not self._core.watch(keys, question.sources):
            return
        if stopped_at is not None and self._core.lookup(stopped_at, question.sources) is not None:
            stopped_at = None  # it ended at the cap
        self._answers[request_id] = Answer(question, found, stopped_at, self._core.voided)

    def given(self, request_id: str, local: int, found: int) -> Answer | None:
        """The answer that the request was just given, if it is remembered."""
        answer = self._answers.get(request_id)
        if answer is None or answer.voided != self._core.voided:
            return None
        return answer if (answer.question.local, answer.found) == (local, found) else None

    def forget(self, request_id: str) -> None:
        """The request has got or given back GPU blocks, or has ended."""
        if self._answers.pop(request_id, None) is not None and not self._answers:
            self._core.unwatch()
