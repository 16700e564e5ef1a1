# SPDX-License-Identifier: Apache-2.0
"""`bench serve borrow`: its arithmetic on made-up samples, and whole runs with made-up servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.reports.borrow import BORROWED, KINDS, OWN, Sample, goals, ratio
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve import borrow as measure
from vllm_nvmeof_bench.serve.borrow import Settings
from vllm_nvmeof_bench.serve.fleet import Fleet, Run
from vllm_nvmeof_bench.servers.client import Answer, Client, Hits, Metrics, Tokens

from vllm_nvmeof_offload.cli import app

TOKENS = 100


def everything(slowness: float = 1.2, pairs: int = 20) -> list[Sample]:
    """Times differ from pair to pair."""
    return [
        Sample(
            kind, number, (1.0 if kind == OWN else slowness) * number, TOKENS, gpu=0, cpu=0,
            pool=96 if kind == OWN else 0, shared=96 if kind == BORROWED else 0, other=0,
            same=True, failure=None,
        )
        for number in range(1, pairs + 1)
        for kind in KINDS
    ]  # fmt: skip


def test_the_ratio_is_of_pairs_whose_prompts_came_from_where_they_were_stored() -> None:
    found = ratio(everything())
    assert found and (found.middle, found.n) == (pytest.approx(1.2), 20)
    assert found.interval == (pytest.approx(1.2), pytest.approx(1.2))
    computed = [replace(one, shared=0, ttft_s=9.0) for one in everything()[1:2]]
    found = ratio([*computed, *everything()[2:]])
    assert found and (found.middle, found.n) == (pytest.approx(1.2), 19)
    assert ratio([]) is None


def test_every_goal_can_be_missed() -> None:
    assert [goal.reached for goal in goals(everything(), {})] == [True] * 4
    assert [goal.reached for goal in goals(everything(1.4), {})] == [False, True, True, True]
    samples = everything()
    elsewhere = [replace(samples[0], pool=0, cpu=96), *samples[1:]]
    assert [goal.reached for goal in goals(elsewhere, {})] == [True, True, False, True]
    fewer = [replace(one, shared=min(one.shared, 91)) for one in samples]
    assert [goal.reached for goal in goals(fewer, {})] == [True, False, True, True]
    wrong = [replace(samples[0], same=False), *samples[1:]]
    assert [goal.reached for goal in goals(wrong, {})] == [True, True, True, False]
    assert {goal.reached for goal in goals([], {})} == {None}


class MadeUp:
    """A server that computes nothing. others: those whose pools it reads."""

    def __init__(self) -> None:
        self.others: list[MadeUp] = []
        self.stored: list[list[int]] = []
        self.counts = Hits()
        self.asked: list[str] = []

    async def forget_gpu(self) -> bool:
        return True

    async def settle(self) -> None:
        pass

    async def hits(self) -> Hits:
        return self.counts

    async def counted(self) -> Metrics:
        chunks = sum(len(prompt) // 32 for one in self.others for prompt in one.stored)
        return Metrics(f"vllm:nvmeof_shared_entries {chunks}\n")

    async def attempt(self, prompt: list[int], tokens: int) -> Answer:
        length, now = len(prompt), self.counts
        if prompt in self.stored:
            self.asked.append(OWN)
            self.counts = replace(now, pool=now.pool + length)
        elif any(prompt in one.stored for one in self.others):
            self.asked.append(BORROWED)
            self.counts = replace(now, other=now.other + length, shared=now.shared + length)
        else:
            self.stored.append(prompt)
        return Answer(0.0, tokens=prompt[:tokens], times=[0.5])


def measured(settings: Settings, servers: dict[str, MadeUp]) -> list[Sample]:
    with asyncio.Runner() as runner:
        fleet = Fleet(runner, cast(dict[str, Client], servers))
        run = Run(fleet, Tokens(), [], {}, lambda *_: None)
        settings.measure(run)
        return run.samples


def test_pairs_are_asked_in_a_drawn_order_of_the_server_that_borrows() -> None:
    servers = {"owner": MadeUp(), "borrower": MadeUp()}
    servers["borrower"].others = [servers["owner"]]
    samples = measured(Settings(tokens=320, pairs=6), servers)
    assert [one.round for one in samples] == [n for n in range(1, 7) for _ in KINDS]
    assert all(one.found_there == 1.0 and one.same for one in samples)
    asked = servers["borrower"].asked
    assert asked[2:] == [one.kind for one in samples], "the first pair warms up"
    assert {tuple(asked[at : at + 2]) for at in range(0, 14, 2)} == {
        (OWN, BORROWED),
        (BORROWED, OWN),
    }


def test_servers_that_borrow_are_idle_together_and_asked_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_REST_S", 0.0)
    names = ["owner", "borrower", "borrower-2", "borrower-3"]
    servers = {name: MadeUp() for name in names}
    for one in servers.values():
        one.others = [other for other in servers.values() if other is not one]
    settings = Settings(tokens=320, pairs=7, borrowers=3)
    assert [arm.name for arm in settings.servers()] == names
    samples = measured(settings, servers)
    assert sorted(one.round for one in samples) == [n for n in range(1, 8) for _ in KINDS]
    assert all(one.found_there == 1.0 and one.same for one in samples)
    asked = [len(servers[name].asked) for name in names]
    assert asked == [0, 2 * 4, 2 * 3, 2 * 3], "one pair of each warms up"
    rounds = [one.round for one in samples]
    assert rounds[:6] == [1, 2, 3, 1, 2, 3]


def test_a_server_that_does_not_see_the_other_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_KNOWS_S_MAX", 0.0)
    servers: dict[str, Any] = {"owner": MadeUp(), "borrower": MadeUp()}
    with pytest.raises(BenchError, match="knows only 0 of the others' 20 chunks"):
        measured(Settings(tokens=320, pairs=1), servers)


def test_wrong_settings_are_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "serve", "borrow", "--pairs", "0"])
    assert done.exit_code == 2
