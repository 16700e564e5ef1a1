# SPDX-License-Identifier: Apache-2.0
"""A look-up's answer is remembered until another one is possible, and no longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL
from vllm_nvmeof_offload.manager.look_up import Answer, Question
from vllm_nvmeof_offload.protocol import VERDICTS, RateReport, VerdictReport

from .bench import key, keys_of
from .test_waiting_requests import Lobby, T

ALL = FROM_CPU | FROM_POOL
QUESTION = Question(tokens=3 * T + 1, last_hash=b"c", local=0, cap=None, sources=ALL)


class Asked(Lobby):
    """A request with three chunks, of which a look-up has found the first two."""

    def __init__(self, cache: int = 8, *, pooled: bool = False, **config: object) -> None:
        super().__init__(cache, prefetch_cache_share=0.0, **config)
        (self.bench.in_the_pool if pooled else self.bench.in_both_tiers)(0, 1)
        self.add("a", 0, 1, 2, prefetch=False)
        self.ask()

    def ask(self, question: Question = QUESTION) -> int:
        return self.look_up("a", question)

    def recall(self, question: Question = QUESTION, name: str = "a") -> int | None:
        answer = self.look_ups.recall(name, question)
        return None if answer is None else answer.found


def test_an_answer_is_given_again_while_others_store_load_and_evict() -> None:
    asked = Asked(cache=4)
    bench, core = asked.bench, asked.core
    hold = [core._tiers.hold(one) for one in keys_of(0, 1)]
    assert all(hold), "or they would be evicted"
    for number in range(200, 240):  # each of them evicts
        bench.store(number)
        bench.write_all()
        bench.done(bench.load(number).op)
        assert asked.recall() == 2 * T
    assert core.counters["evictions", "cpu"] > 30
    assert core.counters["evictions", "pool"] > 0


def test_its_own_chunks_may_be_copied_and_written() -> None:
    asked = Lobby()
    plan = asked.core.prepare_store(keys_of(0, 1))
    assert plan.command is not None
    asked.add("a", 0, 1, 2)
    asked.look_up("a", QUESTION)
    asked.bench.done(plan.command.op)
    answer = asked.answers["a"]
    assert asked.look_ups.recall("a", QUESTION) is answer
    assert asked.bench.write_all() == [0, 1]
    assert asked.look_ups.recall("a", QUESTION) is answer


def test_an_eviction_of_its_chunks_voids_it() -> None:
    asked = Asked(cache=4)
    asked.bench.store(200, 201, 202, 203)
    assert asked.recall() is None, "they are in the pool only"


def test_a_fetch_of_its_chunks_voids_it_when_it_begins_and_when_it_ends() -> None:
    asked = Asked(pooled=True)
    tiers = asked.core._tiers
    assert asked.recall() == 2 * T
    assert tiers.begin_fetch(key(1), 0)
    assert asked.recall() is None
    asked.ask()
    (fetch,) = [c for c in asked.core.take_commands() if hasattr(c, "urgency")]
    assert asked.recall() == 2 * T
    asked.bench.done(fetch.op)
    assert asked.recall() is None


def test_a_verdict_a_reset_and_a_failure_void_it() -> None:
    asked = Asked(pooled=True)
    asked.core.report([VerdictReport(0, 0, VERDICTS[-1])])
    assert asked.recall() is None
    asked.core.report([VerdictReport(0, 0, VERDICTS[0])])
    assert asked.recall() is None, "there was nothing to remember"
    asked.ask()
    assert asked.recall() == 2 * T
    load = asked.bench.load(0, 1)
    asked.ask()
    asked.bench.report(load.op, (1, CHECKSUM_MISMATCH), rows=(0, 1))
    assert asked.recall() is None
    asked.ask()
    assert asked.recall() == T
    asked.core.reset()
    assert asked.recall() is None


def test_the_key_that_missed_is_asked_again() -> None:
    asked = Asked()
    asked.bench.store(3)
    assert asked.recall() == 2 * T
    asked.bench.store(2)
    assert asked.recall() is None
    asked.ask()
    assert asked.recall() == 3 * T


def test_the_key_behind_a_cap_is_not_asked() -> None:
    asked = Asked()
    asked.bench.store(2)
    capped = replace(QUESTION, cap=2 * T)
    asked.ask(capped)
    assert asked.recall(capped) == 2 * T


def test_a_load_of_its_chunks_voids_it() -> None:
    """vLLM delays a request whose chunks are being loaded for another one."""
    asked = Asked()
    asked.bench.load(1)
    assert asked.recall() is None


@pytest.mark.parametrize(
    "change",
    [{"tokens": 5}, {"last_hash": b"d"}, {"local": T}, {"cap": 5}, {"sources": FROM_CPU}],
)
def test_another_question_is_not_answered(change: dict[str, Any]) -> None:
    asked = Asked()
    assert asked.recall(replace(QUESTION, **change)) is None


@pytest.mark.parametrize("found", [None, 0])
def test_neither_delay_nor_a_miss_is_remembered(found: int | None) -> None:
    asked = Asked()
    asked.look_ups.asked("a", Answer(QUESTION, found, keys_of(0, 1), []))
    assert asked.recall() is None


def test_a_request_that_got_blocks_ran_or_ended_is_looked_up_again() -> None:
    asked = Asked()
    asked.allocated("a")
    assert asked.recall() is None
    for step in ({"new": {"a": 1}}, {"preempted": ("a",)}, {"finished": ("a",)}):
        asked.ask()
        asked.run(**step)  # type: ignore[arg-type]
        assert asked.recall() is None
        asked.add("a", 0, 1, 2, prefetch=False)
    asked.ask()
    asked.add("a", 0, 1, 2, prefetch=False)
    assert asked.recall() is None, "another request of the same name"


def test_admission_decides_again_after_50_ms_or_when_it_has_changed() -> None:
    asked = Asked(pooled=True, admission=True)
    admission, bench = asked.core.admission, asked.bench
    asked.core.report([RateReport(rank, 0, 1e6, 1e6) for rank in range(bench.ranks)])
    admission.prefill_rate = 1.0
    first = asked.decide("a", 0, 2 * T)
    assert first.decision == "load"
    bench.now_s += 0.03
    assert asked.decide("a", 0, 2 * T) == first
    admission.prefill_rate = 1e9  # computing is faster now
    assert asked.decide("a", 0, 2 * T) == first
    bench.now_s += 0.03
    assert asked.decide("a", 0, 2 * T).decision == "recompute"
    declined = asked.look_ups.take_declined()
    assert declined
    assert asked.decide("a", 0, 2 * T).decision == "recompute"
    assert asked.look_ups.take_declined() == declined, "they are probed in each step"
    admission.reading = True  # another request's decision
    admission.prefill_rate = 1.0
    assert asked.decide("a", 0, 2 * T).decision == "load"


def test_a_hit_that_the_tiers_do_not_have_is_not_remembered() -> None:
    asked = Asked()
    asked.look_ups.asked("a", Answer(QUESTION, 3 * T, keys_of(0, 1, 2), []))
    assert asked.recall() is None
