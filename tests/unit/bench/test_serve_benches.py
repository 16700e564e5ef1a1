# SPDX-License-Identifier: Apache-2.0
"""`bench serve ttft`, `hits`, `turns` against made-up servers; and the arithmetic behind them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.home import drop_logs
from vllm_nvmeof_bench.reports import serve as report
from vllm_nvmeof_bench.reports.serve import HitSample, TtftSample, TurnSample, ratio_of_cpu
from vllm_nvmeof_bench.results import load
from vllm_nvmeof_bench.serve.fleet import Fleet
from vllm_nvmeof_bench.serve.measure import HitSettings, prompts_of
from vllm_nvmeof_bench.servers.client import Tokens
from vllm_nvmeof_bench.servers.server import group_cpu_s

from tests.unit.bench.made_up_server import MadeUpServer
from vllm_nvmeof_offload.cli import app

RIVALS = ("full", "peer_full")
TURN = TurnSample("a", 4, 0, 0, 0, 0.0, 0.5, 2.0, 90, 10, "1 2", None, gpu=45)


def bench(
    tmp_path: Path, name: str, servers: list[MadeUpServer], *options: str
) -> tuple[str, dict[str, Any]]:
    """Run it on servers a, b, …; return what it printed and its file."""
    path, picture = tmp_path / "out" / f"{name}.json", tmp_path / "out" / f"{name}.png"
    urls = [word for i, s in enumerate(servers) for word in ("--base-url", f"{'ab'[i]}={s.url}")]
    files = ["--dir", str(tmp_path / "disk"), "--json", str(path), "--plot", str(picture)]
    result = CliRunner().invoke(app, ["bench", "serve", name, *urls, *files, *options])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, ["bench", "report", str(path)])
    assert again.output.splitlines()[-1] in result.output
    assert not (tmp_path / "disk").exists()
    return result.output, json.loads(path.read_text())


def test_ttft_from_beginning_to_end(tmp_path: Path) -> None:
    with MadeUpServer() as one, MadeUpServer(resets=False, skew=1) as two:
        options = ("--lengths", "100,200", "--rounds", "2")
        text, content = bench(tmp_path, "ttft", [one, two], *options)
    samples = content["samples"]
    assert len(samples) == 2 * 2 * 2 * 2
    back = [row for row in samples if row["phase"] == "back"]
    assert all(row["cpu"] == row["length"] for row in back if row["arm"] == "a")
    assert all(row["gpu"] == row["length"] for row in back if row["arm"] == "b")
    assert "answers that equal the first arm's: 8 of 16" in text
    assert "was not emptied on b" in text
    assert content["conditions"]["models"] == {"a": "made-up", "b": "made-up"}


def test_files_of_the_user_beside_the_logs_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "out" / "ttft-logs" / "notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with MadeUpServer() as one:
        bench(tmp_path, "ttft", [one], "--lengths", "100", "--rounds", "1")
    assert theirs.read_text() == "mine"


def test_only_the_logs_of_our_servers_are_deleted(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    drop_logs(logs, ["a"])
    logs.mkdir()
    for name in ("a.log", "b.log", "theirs.log"):
        (logs / name).touch()
    drop_logs(logs, ["a", "b", "never started"])
    assert [path.name for path in logs.iterdir()] == ["theirs.log"]
    drop_logs(logs, ["theirs"])
    assert not logs.exists()


def test_hits_from_beginning_to_end(tmp_path: Path) -> None:
    with MadeUpServer() as one:
        options = ("--rates", "0,50,100", "--count", "4", "--prompt-tokens", "80", "--rounds", "1")
        text, content = bench(tmp_path, "hits", [one], *options)
    found = {row["rate"]: (row["cpu"], row["compared"], row["same"]) for row in content["samples"]}
    assert found == {0: (0, 0, 0), 50: (160, 2, 2), 100: (320, 4, 4)}
    assert "Tokens/s of 4 prompts at once" in " ".join(text.split())


def test_a_server_that_answers_nothing_ends_the_run(tmp_path: Path) -> None:
    with MadeUpServer(fails=80) as one:
        sizes = ("--rates", "0", "--count", "2", "--prompt-tokens", "80", "--rounds", "1")
        options = ["--base-url", f"a={one.url}", *sizes, "--json", str(tmp_path / "hits.json")]
        result = CliRunner().invoke(
            app, ["bench", "serve", "hits", *options, "--dir", str(tmp_path)]
        )
    assert result.exit_code != 0
    assert "arm a: all 2 requests failed" in result.stderr


def test_a_rate_has_the_cpu_seconds_of_both_servers_where_they_are_known() -> None:
    def sample(arm: str, cpu_s: float | None) -> HitSample:
        return HitSample(arm, 50, 0, 1, 0, 1.0, 9, 1, None, 0, 0, 0, 0, 0, 0, cpu_s)

    assert ratio_of_cpu([sample("full", 3.0), sample("peer_full", 2.0)], *RIVALS, 50) == [1.5]
    assert ratio_of_cpu([sample("full", 3.0), sample("peer_full", None)], *RIVALS, 50) == []


def test_the_cpu_time_of_a_group_counts_children_that_have_ended() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    script = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {busy!r}])"
    script += "\nprint(flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as group:
        assert group.stdin and group.stdout
        group.stdout.readline()
        assert group_cpu_s(group.pid) >= 0.3
        group.stdin.close()


def test_turns_from_beginning_to_end(tmp_path: Path) -> None:
    with MadeUpServer() as one, MadeUpServer(fails=70 + 16 + 70) as two:
        sizes = ("--first-tokens", "70", "--grow-tokens", "70", "--rounds", "1")
        text, content = bench(tmp_path, "turns", [one, two], "--concurrency", "2,3", *sizes)
    rows = content["samples"]
    lengths = sorted({row["prompt_tokens"] for row in rows if row["arm"] == "a"})
    assert lengths == [70, 156, 242, 328]  # each turn has all that was said before in front
    failed = [row for row in rows if row["failure"]]
    assert len(failed) == 2 + 3  # b's conversations end at their second turn
    assert "failed: HTTP 503: overloaded" in text
    assert "answers that equal the first arm's: 5 of 5" in text


def test_samples_measured_before_an_interruption_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Fleet.run

    def run(fleet: Fleet, coroutine: Any) -> Any:
        reply = asked(fleet, coroutine)
        if isinstance(reply, tuple) and reply[0].tokens_in == 200:
            raise KeyboardInterrupt
        return reply

    monkeypatch.setattr(Fleet, "run", run)
    path = tmp_path / "out" / "ttft.json"
    with MadeUpServer() as one:
        options = ["--base-url", one.url, "--lengths", "100,200", "--json", str(path)]
        result = CliRunner().invoke(
            app, ["bench", "serve", "ttft", *options, "--dir", str(tmp_path)]
        )
    assert result.exit_code == 130
    samples, conditions = load(path, "ttft", TtftSample)
    assert [(one.phase, one.length) for one in samples] == [("cold", 100)]
    assert conditions["cut_off"] is True
    shown = CliRunner().invoke(app, ["bench", "report", str(path)])
    assert "this run was cut off" in shown.output


def test_a_batch_has_the_hits_of_its_rate() -> None:
    settings, tokens = HitSettings(count=8, prompt_tokens=5), Tokens()
    all_of_it = dict(prompts_of(settings, tokens, 100, 0))
    half, other = (prompts_of(settings, tokens, 50, number) for number in (0, 1))
    assert sum(name in all_of_it for name, _ in half) == 4
    assert all(all_of_it[name] == prompt for name, prompt in half if name in all_of_it)
    new = [{tuple(p) for name, p in one if name not in all_of_it} for one in (half, other)]
    assert len(new[0] | new[1]) == 8  # a round's new prompts are no other's


def test_a_difference_is_in_per_cent_and_a_dash_where_one_is_missing() -> None:
    assert (report.changed(3.0, 2.0), report.changed(1.0, None)) == ("+50 %", "–")
    failed = replace(TURN, failure="x", ttft_s=None)
    found = report.turns_of([failed], "a", 4)
    assert (found.ttft_mean_s, found.ttft_p95_s) == (None, None)


def test_turns_are_added_up_over_rounds() -> None:
    rows = [
        TURN,
        replace(TURN, conversation=1, start_s=1.0, end_s=3.0, ttft_s=1.5, gpu=0),
        replace(TURN, round=1, end_s=1.0, ttft_s=1.0, gpu=45),
        replace(TURN, round=1, conversation=1, failure="x", ttft_s=None, gpu=0, prompt_tokens=0),
    ]
    found = report.turns_of(rows, "a", 4)
    assert found.tokens_per_s == pytest.approx(300 / (4.0 + 2.0))
    assert (found.ttft_mean_s, found.ttft_p95_s, found.failures) == (1.0, 1.5, 1)
    assert found.found[0] == pytest.approx(90 / 270)
    other = [replace(row, arm="b", end_s=2 * row.end_s, start_s=2 * row.start_s) for row in rows]
    assert report.ratio_of_turns(rows + other, "a", "b", 4) == [2.0, 2.0]


def test_ratios_of_ttft_are_of_the_same_prompt() -> None:
    def one(arm: str, phase: str, number: int, ttft_s: float) -> TtftSample:
        return TtftSample(arm, phase, 256, number, ttft_s, 1.0, 0, 0, 0, 0, True, None)

    rows = [one("pool", "cold", 0, 1.0), one("pool", "back", 0, 0.25), one("pool", "back", 1, 9.0)]
    rows += [one("peer", "back", 0, 0.5), one("peer", "back", 1, 9.0)]
    assert report.ratio_of_ttft(rows, "pool", 256) == [4.0]
    assert report.ratio_of_ttft(rows, "pool", None, "peer") == [0.5, 1.0]
    assert report.rivals({"pool", "peer", "full"}) == [("pool", "peer")]
