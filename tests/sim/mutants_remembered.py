# SPDX-License-Identifier: Apache-2.0
"""Mutants of rule 2: a remembered look-up is made again when another answer is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_nvmeof_offload.manager.look_up import Answer, RequestLookUps

from .mutants import Patch, mutant, native

native(
    "remembered_answer_survives_an_eviction",
    "remembered_answer_survives_a_move",
    "remembered_answer_survives_a_load",
    "fetching_hits_in_the_second_look_up",
)


@mutant
def remembered_answer_survives_another_source_set() -> list[Patch]:
    real = RequestLookUps.recall

    def recall(self: Any, request_id: str, question: Any) -> Answer | None:
        known = self._requests.get(request_id)
        sources = next(iter(known.answers), question.sources) if known else question.sources
        return real(self, request_id, replace(question, sources=sources))

    return [(RequestLookUps, "recall", recall)]


@mutant
def first_miss_is_not_asked_again() -> list[Patch]:
    real = RequestLookUps.asked

    def asked(self: Any, name: str, said: Answer) -> Answer:
        return real(self, name, replace(said, misses=[]))

    return [(RequestLookUps, "asked", asked)]


@mutant
def delay_is_remembered() -> list[Patch]:
    """As nothing found: a request that is delayed is not asked for again."""
    asked, recall = RequestLookUps.asked, RequestLookUps.recall
    delayed: set[tuple[str, Any]] = set()

    def remembers(self: Any, name: str, said: Answer) -> Answer:
        if said.found is None:
            delayed.add((name, said.question))
        return asked(self, name, said)

    def recalls(self: Any, name: str, question: Any) -> Answer | None:
        if (name, question) in delayed:
            return Answer(question, 0, (), ())
        return recall(self, name, question)

    return [(RequestLookUps, "asked", remembers), (RequestLookUps, "recall", recalls)]
