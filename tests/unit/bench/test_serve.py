# SPDX-License-Identifier: Apache-2.0
"""`bench serve`: `ttft`, `hits`, `turns`, `moving` and `stall` on made-up servers and samples; the
client, the arms, vLLM's tiering."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import report_of
from vllm_nvmeof_bench.home import drop_logs
from vllm_nvmeof_bench.report import Table
from vllm_nvmeof_bench.reports import serve as report
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
from vllm_nvmeof_bench.reports.serve import HitSample, TtftSample, TurnSample, ratio_of_hits
from vllm_nvmeof_bench.reports.stall import ALONE, BACK, IN_GPU, PHASES
from vllm_nvmeof_bench.reports.stall import Sample as GapSample
from vllm_nvmeof_bench.reports.stall import goals as stall_goals
from vllm_nvmeof_bench.results import BenchError, Goal, load, rows_in
from vllm_nvmeof_bench.serve import fleet, measure
from vllm_nvmeof_bench.serve.fleet import (
    ARMS,
    BLOCK_TOKENS,
    Fleet,
    Sizes,
    arms_of,
    offload_of,
    server_spec,
)
from vllm_nvmeof_bench.serve.measure import HitSettings, TtftSettings, prompts_of, read_times
from vllm_nvmeof_bench.serve.moving import Settings, server_of
from vllm_nvmeof_bench.serve.stall import Settings as StallSettings
from vllm_nvmeof_bench.serve.stall import Watched, Window
from vllm_nvmeof_bench.servers import client as client_module
from vllm_nvmeof_bench.servers import engine
from vllm_nvmeof_bench.servers.client import Answer, Client, Hits, Metrics, Tokens
from vllm_nvmeof_bench.servers.server import group_cpu_s, split_extra

from tests.unit.bench.made_up_server import SEPARATOR, MadeUpServer
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.units import GIB

RIVALS = ("full", "peer_full")
TURN = TurnSample("a", 4, 0, 0, 0, 0.0, 0.5, 2.0, 90, 10, "1 2", None, gpu=45)


def bench(
    tmp_path: Path, name: str, servers: list[MadeUpServer], *options: str
) -> tuple[str, dict[str, Any]]:
    """Run it on servers a, b, …; return what it printed and its file."""
    path = tmp_path / "out" / f"{name}.json"
    urls = [word for i, s in enumerate(servers) for word in ("--base-url", f"{'ab'[i]}={s.url}")]
    files = ["--dir", str(tmp_path / "disk"), "--json", str(path)]
    result = CliRunner().invoke(app, ["bench", "serve", name, *urls, *files, *options])
    assert result.exit_code == 0, result.output
    again = CliRunner().invoke(app, ["bench", "report", str(path)])
    assert again.output.splitlines()[-1] in result.output
    assert not (tmp_path / "disk").exists()
    content = json.loads(path.read_text())
    return result.output, content | {"samples": rows_in(content)}


def test_ttft_from_beginning_to_end(tmp_path: Path) -> None:
    written = 'vllm:nvmeof_target_written_bytes_total{target="a"} 1228800\n'
    with MadeUpServer(page=written) as one, MadeUpServer(resets=False, skew=1) as two:
        options = ("--lengths", "100,200", "--rounds", "2")
        text, content = bench(tmp_path, "ttft", [one, two], *options)
    samples = content["samples"]
    assert len(samples) == 2 * 2 * 2 * 2
    assert re.search(r"KiB per token\s*\n.*\n\s*a\s+2\.0\s", text), "of 600 tokens"
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


class _FullAtFirst(MadeUpServer):
    """Its CPU tier has no room for the first eight prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = 0

    def take(self, prompt: list[int]) -> None:
        super().take(prompt)
        self.prompts += len(prompt) == 80

    def page(self) -> str:
        refused = min(self.prompts, 8)
        return f'{super().page()}vllm:nvmeof_unstored_chunks_total{{reason="no_room"}} {refused}\n'


def test_returning_prompts_are_sent_until_all_are_stored(tmp_path: Path) -> None:
    sizes = ("--rates", "100", "--count", "4", "--prompt-tokens", "80", "--rounds", "1")
    with _FullAtFirst() as one, MadeUpServer() as other:
        bench(tmp_path, "hits", [one, other], *sizes)
    assert one.prompts == 8 + 4 + 4, "twice without room, then stored, then measured"
    assert other.counts["cpu"] == 4 * 80
    assert other.counts["gpu"] == 2 * 4 * 80, "as often as the other server"


def test_what_other_arms_left_in_the_page_cache_is_written_before_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []
    sizes = ("--rates", "100", "--count", "4", "--prompt-tokens", "80", "--rounds", "2")
    with MadeUpServer() as one:
        monkeypatch.setattr(
            measure, "sync_file_system", lambda place: asked.append((place, one.counts["cpu"]))
        )
        bench(tmp_path, "hits", [one], *sizes)
    assert asked == [(tmp_path / "disk", 0), (tmp_path / "disk", 4 * 80)]


def test_the_drive_is_read_in_each_round(tmp_path: Path) -> None:
    sizes = ("--rates", "50,100", "--count", "4", "--prompt-tokens", "80", "--rounds", "2")
    with MadeUpServer() as one:
        _, content = bench(tmp_path, "hits", [one], *sizes, "--drive")
    found = [(row["arm"], row["round"]) for row in content["samples"]]
    assert found == [(arm, number) for number in range(2) for arm in ("drive", "a", "a")]


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

    both = [sample("full", 3.0), sample("peer_full", 2.0)]
    assert ratio_of_hits(both, *RIVALS, 50, "cpu_s") == [1.5]
    one = [sample("full", 3.0), sample("peer_full", None)]
    assert ratio_of_hits(one, *RIVALS, 50, "cpu_s") == []


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


def test_servers_that_restart_are_new_and_have_new_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps: list[str] = []

    class Started(contextlib.AbstractContextManager["Started"]):
        """A server that was started here: made up, and gone once it was stopped."""

        def __init__(self, spec: object, log_path: Path) -> None:
            self.server = MadeUpServer(skew=len(steps)).__enter__()
            self.url, self.pid, self.stopped = self.server.url, 1, False
            steps.append("start")

        def wait_ready(self) -> None: ...

        def stop(self) -> None:
            if not self.stopped:
                self.server.__exit__(None, None, None)
                steps.append("stop")
            self.stopped = True

        def __exit__(self, *error: object) -> None:
            self.stop()

    monkeypatch.setattr(fleet, "Server", Started)
    monkeypatch.setattr(fleet, "Client", lambda url, model="made-up", **more: Client(url, model=""))
    given = {"ours": SPEC, "theirs": "http://127.0.0.1:1"}
    with MadeUpServer() as theirs:
        given["theirs"] = theirs.url
        with fleet.serving(given, tmp_path, lambda what: None, {}) as found:  # type: ignore[arg-type]
            assert list(found.clients) == ["ours", "theirs"]
            before, kept = found.clients["ours"], found.clients["theirs"]
            first = found.run(before.attempt(LONG, 1))
            found.restart()
            assert steps == ["start", "stop", "start"]
            assert found.clients["ours"] is not before and found.clients["theirs"] is kept
            again = found.run(found.clients["ours"].attempt(LONG, 1))
            assert first.failure is None and again.failure is None
            assert first.tokens != again.tokens, "another server answers"
    assert steps == ["start", "stop", "start", "stop"]


def test_the_limit_is_timed_with_bytes_from_the_disk(tmp_path: Path) -> None:
    with contextlib.closing(read_times(tmp_path, 5 << 20)) as times:
        assert min(next(times) for _ in range(3)) > [0.0]
    assert list(tmp_path.iterdir()) == []


def test_the_stand_in_is_timed_under_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[tuple[Any, ...]] = []

    class Limit(contextlib.nullcontext[Any]):
        def __init__(self, *limits: Any) -> None:
            super().__init__(self)
            groups.append(limits)

        def add(self, pid: int) -> None:
            groups.append((pid,))

    monkeypatch.setattr(measure, "Throttle", Limit)
    with contextlib.closing(read_times(tmp_path, 5 << 20, (None, 7))) as times:
        assert [len(next(times)) for _ in range(2)] == [2, 2]
    assert groups == [(tmp_path, 7, 7), (os.getpid(),)] * 2


def test_a_time_is_compared_with_what_the_storage_needs() -> None:
    def sample(arm: str, seconds: float) -> HitSample:
        return HitSample(arm, 100, 0, 4, 0, seconds, 9, 1, None, 0, 0, 0, 0, 0, 0)

    times = {"pool": 1.5, "drive": 0.5, "target": 2.2, "stand_in": 2.0}
    parts = report.REPORTS[1].tables([sample(*one) for one in times.items()], {})
    tables = [one for one in parts if isinstance(one, Table)]
    (found,) = (one.cells for one in tables if one.title.startswith("Time / minimum"))
    assert found == [["pool/drive", "3.00"], ["target/stand_in", "1.10"]]


def test_a_batch_has_the_hits_of_its_rate() -> None:
    settings, tokens = HitSettings(count=8, prompt_tokens=5), Tokens()
    all_of_it = dict(prompts_of(settings, tokens, 100, 0))
    half, other = (prompts_of(settings, tokens, 50, number) for number in (0, 1))
    assert sum(name in all_of_it for name, _ in half) == 4
    assert all(all_of_it[name] == prompt for name, prompt in half if name in all_of_it)
    new = [{tuple(p) for name, p in one if name not in all_of_it} for one in (half, other)]
    assert len(new[0] | new[1]) == 8  # a round's new prompts are no other's


def test_a_failed_turn_has_no_time() -> None:
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


SIZES = Sizes(working_tokens=9600, request_tokens_max=1000, gpu_tokens=1024)
LONG = list(range(100, 200))
SPEC = object()


def run_on(server: MadeUpServer, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
    async def both() -> Any:
        client = Client(server.url, model="")
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(both())


def test_a_stream_is_timed_and_counted() -> None:
    with MadeUpServer() as server:
        reply = run_on(server, lambda client: client.attempt([1, 2, 3], 2))
    assert reply.failure is None
    assert 0 < reply.ttft_s <= reply.end_s
    assert (reply.tokens_in, reply.tokens_out) == (3, 2)
    assert (reply.tokens, reply.text) == ([6, 7], f"<6{SEPARATOR}><7{SEPARATOR}>")


def test_a_refused_request_is_a_failure_with_its_reason() -> None:
    with MadeUpServer(fails=3) as server:
        reply = run_on(server, lambda client: client.attempt([1, 2, 3], 2))
    assert reply.failure == "HTTP 503: overloaded"
    assert reply.times == []
    assert reply.tokens_out == 0


def test_a_stopped_server_is_a_failure_too() -> None:
    with MadeUpServer() as server:
        url = server.url

    async def gone() -> Any:
        client = Client(url, model="made-up")
        try:
            return await client.attempt([1], 1)
        finally:
            await client.close()

    assert "ConnectError" in str(asyncio.run(gone()).failure)


@pytest.mark.parametrize(("idle_s_max", "made"), [(3600.0, 1), (0.0, 2)])
def test_a_connection_that_was_idle_too_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, idle_s_max: float, made: int
) -> None:
    """vLLM's server closes it after five seconds, which may be just when a request is sent."""
    assert client_module._IDLE_S_MAX < 5 / 2
    monkeypatch.setattr(client_module, "_IDLE_S_MAX", idle_s_max)
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def read_twice() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        async with server, Client(f"http://{host}:{port}") as client:
            await client.metrics()
            await client.metrics()
        await asyncio.gather(*filter(None, served))

    asyncio.run(read_twice())
    assert len(served) == made


def test_hits_are_counted_by_source() -> None:
    async def work(client: Client) -> list[Hits]:
        found = [await client.hits()]
        for reset in (False, False, True):
            if reset:
                assert await client.forget_gpu()
            await client.attempt(LONG, 1)
            found.append(await client.hits())
        return found

    with MadeUpServer() as server:
        none, first, again, after = run_on(server, work)
    # Each reading follows a prompt of three tokens.
    assert first - none == Hits(prompt=103)
    assert again - first == Hits(prompt=103, gpu=100)
    assert after - again == Hits(prompt=103, cpu=100)


def test_our_counters_take_precedence_over_vllms() -> None:
    text = (
        "vllm:external_prefix_cache_hits_total 100\n"
        'vllm:nvmeof_loaded_tokens_total{source="cpu"} 30\n'
        'vllm:nvmeof_loaded_tokens_total{source="pool"} 60\n'
        'vllm:prompt_tokens_cached_by_source_total{source="host"} 100\n'
    )
    assert Hits.of(Metrics(text)) == Hits(cpu=30, pool=60, other=10)


def test_a_server_without_these_routes_gives_zeros() -> None:
    async def work(client: Client) -> tuple[Hits, bool]:
        await client.settle()
        return await client.hits(), await client.forget_gpu()

    with MadeUpServer(resets=False, metrics=False) as server:
        assert run_on(server, work) == (Hits(), False)


def test_arms_by_name_and_by_url() -> None:
    assert [arm.name for arm in arms_of(["pool", "peer"], [])] == ["pool", "peer"]
    first, second = arms_of(["pool"], ["ours=http://a:1/v1/", "http://b:2"])
    assert (first.name, first.url) == ("ours", "http://a:1")
    assert (second.name, second.url) == ("server2", "http://b:2")


@pytest.mark.parametrize(
    ("names", "urls", "needed"),
    [
        (["poool"], [], "no arm 'poool'; choose from none, cpu"),
        ([], [], "nothing to measure"),
        ([], ["a=http://x", "a=http://y"], "the same name"),
        ([], ["localhost:8000"], "NAME=http://HOST:PORT"),
    ],
)
def test_invalid_arms_are_refused(names: list[str], urls: list[str], needed: str) -> None:
    with pytest.raises(BenchError, match=needed):
        arms_of(names, urls)


@pytest.mark.parametrize("text", ["", "5", "9:3", "-1:100", "a:b"])
def test_invalid_token_ids_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="token ids"):
        Tokens.parse(text)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("full", "peer_full"), ("pool", "peer"), ("pool", "lifeboat"), ("pool", "kvcr")],
)
def test_the_peer_gets_what_its_counterpart_gets(ours: str, theirs: str, tmp_path: Path) -> None:
    mine, rival = (offload_of(ARMS[name], SIZES, tmp_path) for name in (ours, theirs))
    assert mine is not None and mine.size_gib is not None and rival is not None
    assert mine.size_gib * GIB == rival.extra["cpu_bytes_to_use"]
    settings = parse_config(*split_extra(mine.extra))
    block_bytes = rival.extra["block_size"] * SIZES.shape.kv_bytes_per_token
    assert settings.chunk_bytes_min == block_bytes
    assert settings.offload_prompt_only is rival.extra["offload_prompt_only"] is False


def test_kvcr_can_take_all_chunks_of_a_store_and_accepts_its_file(tmp_path: Path) -> None:
    found = offload_of(ARMS["kvcr"], SIZES, tmp_path)
    assert found is not None
    (tier,) = found.extra["secondary_tiers"]
    assert tier["secondary_g2_slots"] >= found.extra["cpu_bytes_to_use"] // SIZES.chunk_bytes
    assert tier["g3"]["capacity_bytes_per_file"] % SIZES.chunk_bytes == 0


def test_arms_differ_from_a_plain_server_only_in_offloading(tmp_path: Path) -> None:
    commands = {
        name: server_spec(arm, SIZES, tmp_path, tmp_path).command(1) for name, arm in ARMS.items()
    }
    bare = commands.pop("none")
    assert all(command[: len(bare)] == bare for command in commands.values())
    third, whole = SIZES.staging_bytes("third"), SIZES.staging_bytes("all")
    assert 0.3 < third / whole < 0.4
    cpu = offload_of(ARMS["cpu"], SIZES, tmp_path)
    assert cpu is not None and parse_config(*split_extra(cpu.extra)).pool_bytes == 0


PLACE = Path("place")


@pytest.mark.parametrize(("value", "warns"), [("1", True), ("0", False), (None, False)])
def test_a_kernel_that_can_stall_the_stand_in_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None, warns: bool
) -> None:
    monkeypatch.setattr(fleet, "read_text", lambda *parts: value)
    sizes = on(monkeypatch, cpu=True)
    found = fleet._conditions([ARMS["target"]], sizes, tmp_path)["stand_in"]
    assert ("set kernel.sched_autogroup_enabled to 0" in found) is warns
    assert "stand_in" not in fleet._conditions([ARMS["pool"]], sizes, tmp_path)


def on(monkeypatch: pytest.MonkeyPatch, *, cpu: bool) -> Sizes:
    for module in (fleet, engine):
        monkeypatch.setattr(module, "has_cpu_engine", lambda: cpu)
    return TtftSettings(lengths=(1000,), server_args="--a 'b c'").sizes()


def test_the_copy_backend_can_be_set_for_our_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = on(monkeypatch, cpu=False)
    plain, kernel = arms_of(["full", "full:kernel"], ())
    assert kernel.name == "full:kernel"
    assert kernel.about == f"{plain.about}; copies by kernel"
    offload, by_kernel = (offload_of(arm, sizes, PLACE) for arm in (plain, kernel))
    assert offload is not None and by_kernel is not None
    assert by_kernel.extra == {**offload.extra, "copy_backend": "kernel"}


@pytest.mark.parametrize("name", ["full:gds", "full:", "peer:dma", "none:dma"])
def test_other_arms_have_no_copy_backend(name: str) -> None:
    with pytest.raises(BenchError, match="may be followed by :dma or :kernel"):
        arms_of([name], ())


def test_on_a_gpu_servers_get_the_given_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = on(monkeypatch, cpu=False)
    (arm,) = arms_of(["peer"], ())
    spec = server_spec(arm, sizes, tmp_path, PLACE)
    assert (spec.dtype, spec.extra_args) == ("bfloat16", ("--a", "b c"))
    assert spec.offload is not None
    assert spec.offload.extra["spec_name"] == "TieringOffloadingSpec"
    assert "spec_module_path" not in spec.offload.extra, "vLLM's own, as it is"
    assert spec.offload.extra["cpu_bytes_to_use"] == sizes.staging_bytes("third")
    assert sizes.chunk_bytes == BLOCK_TOKENS * sizes.shape.kv_bytes_per_token // 2


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(BenchError, match=r"^--server-args \"--a 'b\": No closing quotation$"):
        TtftSettings(server_args="--a 'b").sizes()


def test_on_the_cpu_engine_the_model_is_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = on(monkeypatch, cpu=False).shape.parameters
    sizes = on(monkeypatch, cpu=True)
    (arm,) = arms_of(["peer"], ())
    spec = server_spec(arm, sizes, tmp_path, PLACE)
    assert spec.dtype == "float32"
    assert spec.offload is not None
    assert spec.offload.extra["spec_module_path"] == "vllm_nvmeof_bench.serve.peer"
    assert sizes.chunk_bytes == BLOCK_TOKENS * sizes.shape.kv_bytes_per_token
    assert 50 * sizes.shape.parameters < large


@pytest.mark.parametrize(("model", "groups"), [("gemma3", 6), ("lfm2", 3)])
def test_sizes_count_the_blocks_of_every_group(model: str, groups: int, tmp_path: Path) -> None:
    sizes = TtftSettings(model=model, lengths=(1024,), rounds=1).sizes()
    assert sizes.shape.groups == groups
    assert sizes.chunk_bytes * groups == BLOCK_TOKENS * sizes.shape.kv_bytes_per_token
    assert sizes.slots(1024) == 1024 // BLOCK_TOKENS * groups
    spec = server_spec(arms_of(["none"], ())[0], sizes, tmp_path, tmp_path)
    assert spec.gpu_blocks - 1 == sizes.gpu_tokens // BLOCK_TOKENS * groups


BLOCKS, PAGE, PER_CHUNK, CHUNKS = 12, 4096, 2, 5


def test_stored_bytes_are_loaded_into_other_blocks() -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.base")
    peer = pytest.importorskip("vllm_nvmeof_bench.serve.peer")
    cache = np.random.default_rng(3).integers(0, 255, (2, BLOCKS, PAGE), np.uint8)
    before = cache.copy()
    memory = np.zeros((CHUNKS, 2 * PAGE * PER_CHUNK), np.uint8)
    tensors = [CacheTensor(one.ctypes.data, PAGE, PAGE, BLOCKS) for one in cache]
    region = SimpleNamespace(
        base_tensor=SimpleNamespace(data_ptr=lambda: memory.ctypes.data), cleanup=lambda: None
    )
    groups = [ChunkGeometry(tensors, PER_CHUNK), ChunkGeometry(tensors[:1], PER_CHUNK)]
    worker = peer.HostCopyWorker(groups, region, memory.strides[0])
    try:
        gpu = base.GPULoadStoreSpec([7, 1, 4, 5], group_sizes=(3, 1), block_indices=(0, 2))
        cpu = base.BlockIDsLoadStoreSpec([3, 0, 2])
        assert worker.submit_store(10, gpu, cpu)
        worker.wait({10})
        [result] = worker.get_finished()
        assert (result.job_id, result.success, result.transfer_size) == (10, True, 7 * PAGE)
        cache[:] = 0
        # From the middle of the first chunk: blocks 1 and 2 of what was stored, and a group's only.
        back = base.GPULoadStoreSpec([2, 9, 11], group_sizes=(2, 1), block_indices=(1, 2))
        assert worker.submit_load(11, cpu, back)
        end_s = time.monotonic() + 120
        while not (done := worker.get_finished()) and time.monotonic() < end_s:
            worker.wait({11})
        assert [one.job_id for one in done] == [11]
        assert np.array_equal(cache[:, [2, 9]], before[:, [1, 4]])
        assert np.array_equal(cache[:, 11], [before[0, 5], np.zeros(PAGE)])
    finally:
        worker.shutdown()


# `bench serve moving`: its arithmetic on made-up samples, and a run against made-up servers.


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


# `bench serve stall`: gaps and goals on made-up samples, and a round with a made-up server.


STALLED = {
    "prompt_chunks": 3072,
    "prompt_tokens": 98_305,
    "settings": {"decoding": 8},
    "arms": {"full": {"says": "our CPU tier, holds all, and pool"}},
}


def every_gap() -> list[GapSample]:
    """Three rounds of every arm and phase, made up so that all goals are reached."""
    longest = {"none": 4000.0, "full": 20.0, "pool": 28.0, "peer_full": 60.0}
    return [
        GapSample(
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


def row(samples: Sequence[GapSample], start: str) -> Goal:
    (found,) = (goal for goal in stall_goals(samples, STALLED) if goal.name.startswith(start))
    return found


def test_goals_are_of_the_longest_gaps_medians() -> None:
    found = row(every_gap(), "longest gap beside a load")
    assert (found.measured, found.n, found.reached) == (pytest.approx(20 / 60), 3, True)
    slow = [
        replace(one, gaps_ms=[99.0, 1.0]) if (one.arm, one.phase) == ("full", BACK) else one
        for one in every_gap()
    ]
    assert row(slow, "longest gap beside a load").reached is False
    assert row([], "longest gap beside a load").reached is None


def test_a_load_may_add_two_steps_to_the_longest_gap() -> None:
    samples = every_gap()
    assert row(samples, "steps that a load from the CPU tier").measured == pytest.approx(1.1)
    assert row(samples, "steps that a load from the pool").measured == pytest.approx(1.9)
    faster = [replace(one, tokens=800) if one.phase == ALONE else one for one in samples]
    found = row(faster, "steps that a load from the pool")
    assert (found.measured, found.n, found.reached) == (pytest.approx(3.8), 3, False)
    assert row([], "steps that a load from the pool").reached is None


def test_a_wrong_answer_or_a_short_prompt_misses_a_goal() -> None:
    assert [goal.reached for goal in stall_goals(every_gap(), STALLED)] == [True] * 5
    wrong = [replace(one, same=one.same and one.arm != "pool") for one in every_gap()]
    assert row(wrong, "answers that differ").measured == 6
    short = stall_goals(every_gap(), STALLED | {"prompt_chunks": 256})
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
    settings = StallSettings(rounds=2)
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
        StallSettings(chunks=0)


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
    assert any("finished decoding" in str(one) for one in tables([before, beside], STALLED))
    assert not any("finished decoding" in str(one) for one in tables(every_gap(), STALLED))


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
