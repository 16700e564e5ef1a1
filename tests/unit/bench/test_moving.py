# SPDX-License-Identifier: Apache-2.0
"""`bench serve moving`: its arithmetic on made-up samples, and a run against made-up servers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.reports.moving import (
    OURS,
    PEER,
    STICKY,
    Sample,
    different,
    goals,
    ratio_of_found,
    ratio_of_tokens,
    ratio_of_ttft,
    tokens_per_s,
)
from vllm_nvmeof_bench.results import rows_in
from vllm_nvmeof_bench.serve.fleet import server_spec
from vllm_nvmeof_bench.serve.moving import Settings, server_of

from tests.unit.bench.made_up_server import MadeUpServer
from vllm_nvmeof_offload.cli import app

ROUNDS, CONVERSATIONS, TURNS = 5, 2, 3
CONDITIONS = {"settings": {"conversations": 2, "turns": 3}, "arms": {"ours-0": {"says": "ours"}}}


def arm(name: str, slowness: float = 1.0, found: int = 100) -> list[Sample]:
    """Prompts of 100 tokens, the first of which nobody has; turns differ in their times."""
    return [
        Sample(
            arm=name, round=number, conversation=which, turn=turn, server=f"{name}-0",
            ttft_s=slowness * (turn + 1), end_s=slowness * (turn + 1.5), prompt_tokens=100,
            answer_tokens=10, gpu=0, cpu=found // 2 if turn else 0, pool=0,
            shared=found - found // 2 if turn else 0, other=0, digest=f"{number} {which} {turn}",
            failure=None,
        )
        for number in range(1, ROUNDS + 1)
        for which in range(CONVERSATIONS)
        for turn in range(TURNS)
    ]  # fmt: skip


def everything(peer: float = 1.0, sticky: float = 0.95, found: int = 80) -> list[Sample]:
    return [*arm(OURS), *arm(STICKY, sticky), *arm(PEER, peer, found)]


def test_ratios_are_paired_by_turn_and_by_round() -> None:
    samples = everything(peer=2.0)
    ttft, tokens, found = (
        of(samples, OURS, PEER) for of in (ratio_of_ttft, ratio_of_tokens, ratio_of_found)
    )
    assert ttft and tokens and found
    assert (median(ttft), len(ttft)) == (pytest.approx(0.5), ROUNDS * CONVERSATIONS * (TURNS - 1))
    assert (median(tokens), len(tokens)) == (pytest.approx(2.0), ROUNDS)
    assert (median(found), len(found)) == (pytest.approx(1.25), ROUNDS)
    assert ratio_of_ttft(arm(OURS), OURS, PEER) == []
    only_first_turns = [one for one in samples if one.turn == 0]
    assert ratio_of_ttft(only_first_turns, OURS, PEER) == [], "nobody has those"
    assert ratio_of_found(only_first_turns, OURS, PEER) == []


def test_a_failed_answer_takes_time_and_counts_no_tokens() -> None:
    whole = arm(OURS)[:2]
    failed = [whole[0], replace(whole[1], failure="x", ttft_s=None)]
    assert tokens_per_s(whole) == pytest.approx(220 / 4.0)
    assert tokens_per_s(failed) == pytest.approx(110 / 4.0)
    assert tokens_per_s([]) is None


def test_different_answers_are_counted() -> None:
    samples = everything()
    turns = ROUNDS * CONVERSATIONS * TURNS
    assert different(samples) == (0, 2 * turns)
    assert different([*samples[:-1], replace(samples[-1], digest="other")]) == (1, 2 * turns)


def test_every_goal_can_be_missed() -> None:
    assert [goal.reached for goal in goals(everything(), CONDITIONS)] == [True] * 8
    slower = goals(everything(peer=0.9), CONDITIONS)
    assert [goal.reached for goal in slower] == [False, False, *[True] * 6]
    assert goals(everything(found=101), CONDITIONS)[2].reached is False
    behind_sticky = goals(everything(sticky=0.8), CONDITIONS)
    assert [goal.reached for goal in behind_sticky[3:5]] == [False, False]
    wrong = everything()
    wrong[-1] = replace(wrong[-1], digest="other", failure=None)
    assert goals(wrong, CONDITIONS)[6].reached is False
    wrong[-1] = replace(wrong[-1], failure="x", ttft_s=None)
    assert goals(wrong, CONDITIONS)[7].reached is False
    assert {goal.reached for goal in goals([], {})} == {None}


def test_turns_alternate_and_sticky_ones_stay() -> None:
    assert [server_of(OURS, 0, turn) for turn in range(3)] == ["ours-0", "ours-1", "ours-0"]
    assert [server_of(PEER, 1, turn) for turn in range(2)] == ["peer-1", "peer-0"]
    assert {server_of(STICKY, 3, turn) for turn in range(6)} == {"ours-1"}


def test_two_servers_share_a_directory_and_each_tier_holds_a_quarter() -> None:
    settings = Settings()
    sizes, servers = settings.sizes(), settings.servers()
    assert [one.name for one in servers] == ["ours-0", "ours-1", "peer-0", "peer-1"]
    specs = [server_spec(one, sizes, Path("m"), Path(one.directory)) for one in servers]
    ours, theirs = specs[0].offload, specs[2].offload
    assert ours is not None and theirs is not None
    assert ours == specs[1].offload
    assert ours.extra["targets"] == ["ours"]
    assert theirs.extra["secondary_tiers"] == [{"type": "fs", "root_dir": "peer"}]
    every = settings.conversations * sizes.request_tokens_max
    assert sizes.tokens_of("third") == every // 4
    assert specs[0].gpu_tokens < 2 * sizes.request_tokens_max
    assert theirs.transfer["engine_id"] != specs[3].offload.transfer["engine_id"]  # type: ignore[union-attr]


SHORT = ("--first-tokens", "80", "--grow-tokens", "70", "--rounds", "1", "--think-s", "0")


def test_a_whole_run_on_servers_that_are_given(tmp_path: Path) -> None:
    path = tmp_path / "out" / "moving.json"
    with ExitStack() as stack:
        names = ("ours-0", "ours-1", "peer-0", "peer-1")
        servers = {name: stack.enter_context(MadeUpServer()) for name in names}
        urls = [w for name, one in servers.items() for w in ("--base-url", f"{name}={one.url}")]
        files = ["--dir", str(tmp_path / "disk"), "--json", str(path)]
        sizes = ["--conversations", "2", "--turns", "3", *SHORT]
        done = CliRunner().invoke(app, ["bench", "serve", "moving", *urls, *files, *sizes])
    assert done.exit_code == 0, done.output
    rows = rows_in(json.loads(path.read_text()))
    assert len(rows) == 3 * 2 * 3
    assert {row["server"] for row in rows if row["arm"] == PEER} == {"peer-0", "peer-1"}
    for row in rows:  # a made-up server has what it was asked before, and no other one's
        came_back = row["turn"] == 2 or (row["turn"] == 1 and row["arm"] == STICKY)
        assert row["gpu"] == 0, "GPU memory was emptied"
        if came_back:
            assert row["cpu"] == row["prompt_tokens"]
    assert "answers that differ between arms: 0 of 12" in done.output


def test_a_missing_server_is_named(tmp_path: Path) -> None:
    with MadeUpServer() as one:
        files = ["--dir", str(tmp_path / "disk"), "--json", str(tmp_path / "m.json")]
        urls = ["--base-url", f"ours-0={one.url}"]
        done = CliRunner().invoke(app, ["bench", "serve", "moving", *urls, *files, *SHORT])
    assert done.exit_code == 2
    assert "no server ours-1, peer-0, peer-1" in done.output
