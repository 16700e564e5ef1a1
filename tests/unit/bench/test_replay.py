# SPDX-License-Identifier: Apache-2.0
"""The replay: prompts that share what the trace shares, users, tables; on a server made up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_nvmeof_bench.replay import Replay, Settings, Vocabulary, trace_of
from vllm_nvmeof_bench.reports.replay import Sample, ratio, summary_of
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers.client import Answer
from vllm_nvmeof_bench.traces import Pace, Request, read_trace

from tests.unit.bench.made_up import agentic, mooncake

_IDS = st.lists(st.integers(0, 1 << 24), max_size=6, unique=True)


def request(ids: list[int], tokens: int) -> Request:
    return Request(tokens, 1, np.array(ids, np.int64))


@given(shared=_IDS, one=_IDS, other=_IDS, block_tokens=st.integers(2, 9), more=st.integers(0, 20))
def test_prompts_share_exactly_the_blocks_that_the_trace_shares(
    shared: list[int], one: list[int], other: list[int], block_tokens: int, more: int
) -> None:
    vocabulary = Vocabulary(300, 5000, seed=3)
    first, second = shared + one, shared + other
    prompts = [
        vocabulary.prompt(request(ids, len(ids) * block_tokens + more), block_tokens)
        for ids in (first, second)
    ]
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    cut = common * block_tokens
    assert prompts[0][:cut] == prompts[1][:cut]
    assert all(300 <= token < 5000 for prompt in prompts for token in prompt)
    assert [len(prompt) for prompt in prompts] == [
        len(ids) * block_tokens + more for ids in (first, second)
    ]
    if common < min(len(first), len(second)):
        whole = slice(cut, cut + block_tokens)
        assert prompts[0][whole] != prompts[1][whole]
    if first == second:
        assert prompts[0] == prompts[1]


def test_the_seed_changes_the_text_and_a_part_of_a_block_is_its_beginning() -> None:
    whole = Vocabulary(seed=1).prompt(request([7, 8], 128), 64)
    assert Vocabulary(seed=1).prompt(request([7, 8], 100), 64) == whole[:100]
    assert Vocabulary(seed=2).prompt(request([7, 8], 128), 64) != whole
    with pytest.raises(BenchError, match="at least two"):
        Vocabulary(5, 6)


class MadeUpServer:
    """Answers at once, or never; records which requests were open at the same time."""

    def __init__(self, hangs_from: int = 1 << 30, fails: int = -1) -> None:
        self.asked: list[int] = []
        self.at_once = self.at_once_max = 0
        self._hangs_from = hangs_from
        self._fails = fails

    async def attempt(self, prompt: list[int], answer_tokens: int) -> Answer:
        number = len(self.asked)
        self.asked.append(len(prompt))
        self.at_once += 1
        self.at_once_max = max(self.at_once, self.at_once_max)
        await asyncio.sleep(0)
        if number >= self._hangs_from:
            await asyncio.Event().wait()
        self.at_once -= 1
        failure = "HTTP 500" if number == self._fails else None
        now_s = time.perf_counter()
        return Answer(
            now_s,
            times=[now_s + 0.5],
            ended=now_s + 1.0,
            tokens_in=len(prompt),
            tokens_out=answer_tokens,
            failure=failure,
        )


def played(folder: Path, server: MadeUpServer, pace: Pace, duration_s: float = 60.0) -> Replay:
    trace = read_trace(agentic(folder / "traces"))
    replay = Replay("one", server, trace, pace, Vocabulary())
    asyncio.run(replay.run(duration_s))
    return replay


def test_every_request_is_sent_and_sub_agents_run_in_parallel(tmp_path: Path) -> None:
    server = MadeUpServer()
    replay = played(tmp_path, server, Pace(users=1, time_scale=0.0))
    assert sorted(server.asked) == sorted([138, 138, 138, 202, 266, 202, 330])
    assert server.at_once_max == 2
    assert {one.ended for one in replay.samples} == {"whole"}
    assert len(replay.asked) == 4 + 3 + 5


def test_users_are_bounded_by_sessions_and_by_the_setting(tmp_path: Path) -> None:
    server = MadeUpServer(hangs_from=0)
    replay = played(tmp_path, server, Pace(users=9, ramp_s=0.0, time_scale=0.0), 0.2)
    assert len(server.asked) == 2
    assert [one.ended for one in replay.samples] == ["cut", "cut"]


def test_a_failed_request_is_counted_and_the_session_continues(tmp_path: Path) -> None:
    replay = played(tmp_path, MadeUpServer(fails=0), Pace(users=1, time_scale=0.0))
    found = summary_of(replay.samples, "one")
    assert (found["completed"], found["failed"], found["cut"]) == (6, 1, 0)


def test_requests_with_arrival_times_are_sent_without_users(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "t.jsonl"))
    server = MadeUpServer()
    replay = Replay("one", server, trace, Pace(users=1, time_scale=0.0), Vocabulary())
    asyncio.run(replay.run(60.0))
    assert server.asked == [1000, 1500, 512]


def test_a_trace_is_shrunk_capped_and_thinned(tmp_path: Path) -> None:
    folder = agentic(tmp_path / "traces")
    settings = Settings(block_tokens=2, context_tokens_max=7)
    found = trace_of(settings, folder)
    assert found.block_tokens == 2
    assert max(one.input_tokens for one in found.requests()) == 6
    assert len(trace_of(Settings(sessions=1), folder).sessions) == 1
    with pytest.raises(BenchError, match="no session's first request fits into 3 tokens"):
        trace_of(Settings(context_tokens_max=3), folder)


def rows(arm: str, slow: float) -> list[Sample]:
    times = [0.1 * slow * (n + 1) for n in range(20)]
    return [Sample(arm, "s", float(n), t, t + 1, 100, 10, "whole") for n, t in enumerate(times)]


def made_up() -> tuple[list[Sample], dict[str, object]]:
    cut = Sample("none", "s", 19.0, None, 3.0, 100, 0, "cut")
    failed = Sample("pool", "s", 19.0, None, 0.1, 0, 0, "failed", "HTTP 500: [no]")
    hits = {"prompt": 2000, "gpu": 200, "cpu": 400, "pool": 600, "other": 0}
    pace = {"users": 4, "ramp_s": 1.0, "time_scale": 0.5, "think_s_max": 9.0, "seed": 1}
    settings = {"trace": "t", "context_tokens_max": 4000, "duration_s": 20.0, "pace": pace}
    settings["third_tokens"] = 777
    arms = ("none", "pool", "silent")
    conditions: dict[str, object] = {
        "settings": settings,
        "sessions": 3,
        "requests": 40,
        "block_tokens": 2,
        "machine": {"cpus": 2},
        "versions": {"vllm": "0.32.0"},
        "arms": {arm: {"says": f"it is {arm}"} for arm in arms},
        "hits": {arm: dict(hits) for arm in arms},
        "working_set_tokens": dict.fromkeys(arms, 1234),
        "peer_note": "peer: [sic]",
    }
    silent = Sample("silent", "s", 0.0, None, 3.0, 100, 0, "cut")
    return [*rows("none", 4.0), cut, *rows("pool", 1.0), failed, silent], conditions


def test_figures_are_of_whole_requests_and_first_tokens() -> None:
    samples, _ = made_up()
    assert summary_of(samples, "none")["tokens_in_per_s"] == pytest.approx(2000 / 28)
    assert summary_of(samples, "none")["ttft_mean_s"] == pytest.approx(4.2)
    assert summary_of(samples, "silent") == {}
    assert summary_of(samples, "none")["tpot_ms"] == pytest.approx(1000 / 9)


def test_rounds_are_added_up_and_compared_one_by_one() -> None:
    samples, _ = made_up()
    slower = [replace(one, round=1, ttft_s=one.ttft_s and 2 * one.ttft_s) for one in samples]
    both = [*samples, *slower]
    assert summary_of(both, "none")["completed"] == 40
    assert summary_of(both, "none")["tokens_in_per_s"] == pytest.approx(2000 / 28)
    found = ratio(both, "ttft_p95_s", "none", "pool")
    assert found == pytest.approx([4.0, 4.0])
    assert ratio(both, "ttft_p95_s", "none", "silent") == []
