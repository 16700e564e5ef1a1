# SPDX-License-Identifier: Apache-2.0
"""Mutants of rule 2: a remembered look-up is made again when another answer is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_nvmeof_offload.manager.remembered import Answer, RememberedAnswers

from .mutants import Patch, mutant, native

native(
    "remembered_answer_survives_an_eviction",
    "remembered_answer_survives_a_move",
    "remembered_answer_survives_a_load",
    "fetching_hits_in_the_second_look_up",
)


@mutant
def remembered_answer_survives_another_source_set() -> list[Patch]:
    real = RememberedAnswers.recall

    def recall(self: Any, request_id: str, question: Any) -> Answer | None:
        others = self._answers.get(request_id, {question.sources: None})
        sources = next(iter(others))
        return real(self, request_id, replace(question, sources=sources))

    return [(RememberedAnswers, "recall", recall)]


@mutant
def first_miss_is_not_asked_again() -> list[Patch]:
    real = RememberedAnswers.remember

    def remember(self: Any, name: str, question: Any, found: Any, keys: Any, _: Any) -> Answer:
        return real(self, name, question, found, keys, [])

    return [(RememberedAnswers, "remember", remember)]


@mutant
def delay_is_remembered() -> list[Patch]:
    """As nothing found: a request that is delayed is not asked for again."""
    remember, recall = RememberedAnswers.remember, RememberedAnswers.recall
    delayed: set[tuple[str, Any]] = set()

    def remembers(self: Any, name: str, question: Any, found: Any, *more: Any) -> Answer:
        if found is None:
            delayed.add((name, question))
        return remember(self, name, question, found, *more)

    def recalls(self: Any, name: str, question: Any) -> Answer | None:
        if (name, question) in delayed:
            return Answer(question, 0, (), (), 0)
        return recall(self, name, question)

    return [(RememberedAnswers, "remember", remembers), (RememberedAnswers, "recall", recalls)]
