# SPDX-License-Identifier: Apache-2.0
"""`bench serve stall`: gaps and goals on made-up samples, and a round with a made-up server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm_nvmeof_bench.benchmark import report_of
from vllm_nvmeof_bench.reports.stall import ALONE, BACK, IN_GPU, PHASES, Sample, goals
from vllm_nvmeof_bench.results import BenchError, Goal
from vllm_nvmeof_bench.serve.stall import Settings, Watched, Window
from vllm_nvmeof_bench.servers.client import Answer, Hits
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS

CONDITIONS = {
    "prompt_chunks": 3072,
    "prompt_tokens": 98_305,
    "settings": {"decoding": 8},
    "arms": {"full": {"says": "our CPU tier, holds all, and pool"}},
}


def everything() -> list[Sample]:
    """Three rounds of every arm and phase, made up so that all goals are reached."""
    longest = {"none": 4000.0, "full": 20.0, "pool": 28.0, "peer_full": 60.0}
    return [
        Sample(
            arm,
            phase,
            number,
            [5.0, gap * share if phase == BACK else 9.0],
            400,
            2.0,
            None if phase == ALONE else 0.5,
            cpu=98_304 if arm == "full" and phase == BACK else 0,
            same=None if phase == ALONE else True,
        )
        for arm, gap in longest.items()
        for phase in PHASES
        for number, share in enumerate((0.9, 1.0, 1.5))
    ]


def row(samples: Sequence[Sample], start: str) -> Goal:
    (found,) = (goal for goal in goals(samples, CONDITIONS) if goal.name.startswith(start))
    return found


def test_goals_are_of_the_longest_gaps_medians() -> None:
    found = row(everything(), "longest gap beside a load")
    assert (found.measured, found.n, found.reached) == (pytest.approx(20 / 60), 3, True)
    slow = [
        replace(one, gaps_ms=[99.0, 1.0]) if (one.arm, one.phase) == ("full", BACK) else one
        for one in everything()
    ]
    assert row(slow, "longest gap beside a load").reached is False
    assert row([], "longest gap beside a load").reached is None


def test_a_load_may_add_two_steps_to_the_longest_gap() -> None:
    samples = everything()
    assert row(samples, "steps that a load from the CPU tier").measured == pytest.approx(1.1)
    assert row(samples, "steps that a load from the pool").measured == pytest.approx(1.9)
    faster = [replace(one, tokens=800) if one.phase == ALONE else one for one in samples]
    found = row(faster, "steps that a load from the pool")
    assert (found.measured, found.n, found.reached) == (pytest.approx(3.8), 3, False)
    assert row([], "steps that a load from the pool").reached is None


def test_a_wrong_answer_or_a_short_prompt_misses_a_goal() -> None:
    assert [goal.reached for goal in goals(everything(), CONDITIONS)] == [True] * 5
    wrong = [replace(one, same=one.same and one.arm != "pool") for one in everything()]
    assert row(wrong, "answers that differ").measured == 6
    short = goals(everything(), CONDITIONS | {"prompt_chunks": 256})
    assert [goal.reached for goal in short] == [True, True, True, False, True]


def test_a_gap_across_the_sending_is_one_beside_the_prompt() -> None:
    times = [[0.0, 1.0, 1.5, 4.5, 4.6, 9.0], [0.0, 1.2, 1.9, 4.8, 9.0]]
    first = Answer(0.0)
    asked = [[Answer(0.0, times=one)] for one in times]
    alone = Window(asked, 1.4, 4.0).sample("full", ALONE, 0, first)
    assert alone.gaps_ms == [500.0, 700.0]
    assert (alone.tokens, alone.seconds, alone.same) == (2, pytest.approx(2.6), None)
    answer = Answer(4.0, times=[4.55])
    beside = Window(asked, 4.0, 4.55, answer).sample("full", BACK, 0, first)
    assert beside.gaps_ms == [3000.0, 2900.0]
    assert beside.gap_ms == 3000
    late = Window(asked, 4.55, 4.7, answer).sample("full", BACK, 0, first)
    assert late.gaps_ms == [4400.0, 2900.0], "a gap that begins beside it counts whole"


def test_servers_hold_all_that_runs_at_once() -> None:
    settings = Settings(rounds=2)
    sizes = settings.sizes()
    assert settings.prompt_tokens == 3072 * BLOCK_TOKENS + 1
    assert sizes.request_tokens_max >= settings.prompt_tokens
    assert sizes.shape.positions_max > sizes.request_tokens_max
    assert sizes.gpu_tokens > settings.prompt_tokens + 8 * 4096
    assert (
        sizes.slots(sizes.tokens_of("third"))
        < settings.chunks
        < sizes.slots(sizes.tokens_of("all"))
    )
    with pytest.raises(BenchError, match="chunks must be at least 1"):
        Settings(chunks=0)


class MadeUpClient:
    """Decodes a token per 2 ms; while the prompt is under way it stalls for 60 ms."""

    def __init__(self) -> None:
        self.forgot = 0
        self.cancelled = 0
        self.stalled = False
        self.found = Hits()

    async def forget_gpu(self) -> bool:
        self.forgot += 1
        return True

    async def hits(self) -> Hits:
        return self.found

    async def attempt(self, prompt: list[int], tokens: int, into: Answer | None = None) -> Answer:
        if into is None:
            answer = Answer(sent=time.perf_counter(), tokens=[7], tokens_out=1)
            self.stalled = True
            await asyncio.sleep(0.06)
            self.stalled = False
            answer.times.append(time.perf_counter())
            self.found = Hits(cpu=len(prompt))
            return answer
        try:
            while len(into.times) < tokens:
                await asyncio.sleep(0.002)
                if not self.stalled:
                    into.times.append(time.perf_counter())
            into.ended = time.perf_counter()
            into.tokens_out = tokens
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return into


@pytest.mark.parametrize("phase", [BACK, IN_GPU])
def test_a_round_sees_the_stall_and_ends_the_requests(phase: str) -> None:
    client: Any = MadeUpClient()
    watched = Watched(client, phase, [[1], [2]], [5] * 100)
    alone, found = asyncio.run(watched.run(0.1))
    first = Answer(0.0, tokens=[7])
    before, beside = (one.sample("a", phase, 0, first) for one in (alone, found))
    assert len(before.gaps_ms) == len(beside.gaps_ms) == 2
    assert min(beside.gaps_ms) >= 55
    assert before.tokens > beside.tokens
    assert (beside.cpu, beside.same, beside.ttft_s) == (100, True, pytest.approx(0.06, abs=0.05))
    assert before.ttft_s is None
    assert (client.forgot, client.cancelled) == (int(phase == BACK), 2)


def test_requests_that_end_before_the_prompt_begin_again_and_are_counted() -> None:
    client: Any = MadeUpClient()
    watched = Watched(client, BACK, [[1], [2], [3], [4]], [5] * 100, tokens_max=20)
    alone, found = asyncio.run(watched.run(0.5))
    before, beside = (one.sample("a", BACK, 0, Answer(0.0)) for one in (alone, found))
    assert before.restarts >= 4
    assert before.tokens > 20, "they go on decoding"
    assert beside.gap_ms >= 55, "not all of them begin again at the same time"
    tables = report_of("stall").tables
    assert any("finished decoding" in str(one) for one in tables([before, beside], CONDITIONS))
    assert not any("finished decoding" in str(one) for one in tables(everything(), CONDITIONS))


def test_the_time_between_two_requests_is_no_gap() -> None:
    ended, again = Answer(0.0, times=[1.0, 1.5]), Answer(1.5, times=[4.0, 4.2])
    found = Window([[ended, again]], 0.5, 5.0).sample("a", ALONE, 0, Answer(0.0))
    assert (found.gaps_ms, found.tokens, found.restarts) == ([500.0], 4, 1)
    inside = Window([[ended, again]], 2.0, 3.0).sample("a", ALONE, 0, Answer(0.0))
    assert (inside.gaps_ms, inside.restarts) == ([0.0], 1)
    before = Window([[ended, again]], 0.5, 1.2).sample("a", ALONE, 0, Answer(0.0))
    assert before.restarts == 0


def test_a_request_that_fails_ends_the_run() -> None:
    class Failing(MadeUpClient):
        async def attempt(
            self, prompt: list[int], tokens: int, into: Answer | None = None
        ) -> Answer:
            answer = await super().attempt(prompt, 10 if into else tokens, into)
            answer.failure = "HTTP 503" if into else None
            return answer

    watched = Watched(Failing(), BACK, [[1]], [5] * 100)  # type: ignore[arg-type]
    with pytest.raises(BenchError, match="decoding request failed: HTTP 503"):
        asyncio.run(watched.run(0.1))
