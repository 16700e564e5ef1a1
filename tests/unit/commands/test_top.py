# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof top` on recorded metrics: numbers, views at several widths, keys, errors.

`scrapes/` holds two readings of a real server of this package, without histograms. Between them the
GPU's cache was emptied, and six of twelve prompts returned.
"""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.exporter import Exporter
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands import top
from vllm_nvmeof_offload.commands.scrape import ANSWER_BYTES_MAX, Metrics, ScrapeError
from vllm_nvmeof_offload.commands.top import read
from vllm_nvmeof_offload.metrics import METRICS

SCRAPES = Path(__file__).with_name("scrapes")
BEFORE, AFTER = ((SCRAPES / f"{name}.txt").read_text() for name in ("before", "after"))
NAME = "vllm:nvmeof_"
MODEL = ',model_name="demo"'
DEAD = "http://127.0.0.1:1"


def reading(before: str | None = BEFORE, after: str = AFTER) -> dict[str, Any]:
    first = None if before is None else Metrics(before)
    return read("http://server:8000", first, Metrics(after), 2.0)


def changed(sample: str, value: float, text: str = AFTER) -> str:
    """The text with another value in its one line that contains `sample`."""
    lines = text.splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if sample in line.replace(MODEL, "")]
    lines[at] = f"{lines[at].rpartition(' ')[0]} {value}\n"
    return "".join(lines)


def shown(width: int, now: dict[str, Any], views: Iterable[str] = top.VIEWS) -> list[str]:
    out = io.StringIO()
    Console(width=width, file=out).print(top.server(now, views))
    return out.getvalue().splitlines()


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["top", "--interval", "0.1", *words])


def test_tokens_by_source_are_those_between_the_readings() -> None:
    tokens = reading()["prompt_tokens"]
    grown = {"gpu": 1440, "cpu": 0, "pool": 4448, "shared": 0, "computed": 229}
    assert {source: one["per_s"] * 2 for source, one in tokens.items()} == grown
    for source, one in tokens.items():
        assert one["share"] == pytest.approx(grown[source] / 6117)
    assert tokens["pool"]["total"] == 4448 and tokens["computed"]["total"] == 9848
    assert sum(one["share_total"] for one in tokens.values()) == pytest.approx(1)


def test_gauges_and_counters_are_given_by_labels() -> None:
    now = reading()
    assert now["tiers"]["cpu"] == {"slots": 30, "used": 30, "tokens": 1920}
    assert now["tiers"]["pool"]["used"] == 149
    amounts = now["metrics"]
    assert set(amounts) == {name for name in METRICS if not name.endswith("_info")}
    assert amounts["evictions"]["cpu"] == {"total": 189, "per_s": 35}
    assert amounts["transfer_bytes"]["load pool"]["per_s"] == 9596928 / 2
    assert amounts["entries"] == 149
    (first, second) = now["targets"]
    assert (first["path"], first["verdict"], second["path"]) == ("/mnt/kv/0", "ok", "/mnt/kv/1")
    assert second["written_bytes"]["total"] == 10272768
    assert now["config"]["admission"] == "always"


def test_reading_and_computing_are_compared_at_the_learned_rates() -> None:
    estimate = reading()["estimate"]
    assert estimate["compute_s"] == pytest.approx(1000 / 2355.98, rel=1e-4)
    assert estimate["read_s"] == pytest.approx(1000 / 64 * 135168 / 1.4867e9, rel=1e-4)
    slow = reading(after=changed("load_slowness{", 3.0))
    assert slow["estimate"]["read_s"] == pytest.approx(3 * estimate["read_s"])
    unknown = reading(after=changed("pool_read_bytes_per_second{", 0))
    assert unknown["estimate"]["read_s"] is None


def test_a_restarted_server_counts_from_0() -> None:
    restarted = reading(before=changed("nvmeof_stored_chunks_total", 10_000), after=AFTER)
    assert restarted["metrics"]["stored_chunks"]["per_s"] == 149 / 2


def test_without_an_earlier_reading_there_are_no_rates() -> None:
    now = reading(before=None)
    assert now["interval_s"] is None
    assert now["metrics"]["stored_chunks"] == {"total": 149, "per_s": None}
    assert now["prompt_tokens"]["pool"]["per_s"] is None
    assert now["prompt_tokens"]["pool"]["share_total"] > 0
    assert any("no rates yet" in line for line in shown(80, now))


def test_a_page_with_our_metrics_alone_will_do() -> None:
    """Without vLLM's, shares of prompt tokens are unknown, and all else is shown."""
    ours = "\n".join(line for line in AFTER.splitlines() if line.startswith(NAME))
    now = reading(before=ours, after=ours)
    assert now["prompt_tokens"]["computed"]["total"] is None
    assert now["prompt_tokens"]["pool"]["share_total"] is None
    assert now["prompt_tokens"]["pool"]["total"] == 4448
    assert any(line.startswith("computed") and "-" in line for line in shown(80, now))


def test_an_engine_that_has_counted_nothing_exports_no_gauges() -> None:
    counters = "\n".join(line for line in AFTER.splitlines() if "_total{" in line)
    now = reading(before=counters, after=counters)
    assert now["tiers"]["pool"]["slots"] == 0 and now["targets"] == []
    assert now["estimate"] == {"compute_s": None, "read_s": None}
    assert any(line.startswith("CPU tier") for line in shown(80, now))


def test_engines_are_added_and_processes_are_not() -> None:
    two = AFTER + AFTER.replace('engine="0"', 'engine="1"')
    two = changed('target_verdict{engine="1",target="0"}', 3, two)
    now = reading(after=two)
    assert now["tiers"]["cpu"]["slots"] == 60
    assert now["metrics"]["stored_chunks"]["total"] == 298
    assert now["targets"][0]["verdict"] == "gone"
    assert now["metrics"]["slot_bytes"] == 135168
    one = f"{NAME}entries 5\n"
    of_processes = f'{NAME}entries{{pid="1"}} 5\n{NAME}entries{{pid="2"}} 4\n'
    assert Metrics(of_processes).value(f"{NAME}entries") == Metrics(one).value(f"{NAME}entries")


@pytest.mark.parametrize(
    ("sample", "value", "line"),
    [
        ('target_verdict{engine="0",target="1"}', 2, "target 1 (/mnt/kv/1) is suspect"),
        ('unwritten_chunks_total{engine="0",reason="evicted"}', 3, "3 chunks evicted unwritten"),
        ('unstored_chunks_total{engine="0",reason="no_room"}', 7, "7 chunks not stored"),
        ('peer_events_total{engine="0",event="rest"}', 2, "2 pauses of peers"),
        ("stores_suspended{", 4, "KV of 4 running requests is not stored"),
        ('fallbacks{engine="0",part="io_uring"}', 1, "slower alternatives are in use for io_uring"),
    ],
)
def test_what_needs_attention_is_shown(sample: str, value: float, line: str) -> None:
    assert reading()["attention"] == []
    now = reading(after=changed(sample, value))
    (found,) = now["attention"]
    assert found.startswith(line)
    assert any(text.startswith(line) for text in shown(80, now))


def test_failed_chunks_need_attention_once() -> None:
    failed = changed(
        'failed_chunks_total{engine="0",operation="load",outcome="stale",target="1"}', 5
    )
    now = reading(after=failed)
    assert now["attention"] == ["5 failed operations on chunks"]
    assert [one["failed_chunks"] for one in now["targets"]] == [0, 5]


def test_once_prints_plain_text_or_json_in_a_pipe() -> None:
    with Exporter([BEFORE, AFTER]) as exporter:
        plain = run(f"http://{exporter.address}")
    assert plain.exit_code == 0
    assert "\x1b" not in plain.stdout and "rates over 0." in plain.stdout
    with Exporter([BEFORE, AFTER]) as exporter:
        found = run(f"http://{exporter.address}/metrics", "--once", "--json")
    (now,) = json.loads(found.stdout)
    assert now["metrics"]["loaded_tokens"]["pool"]["per_s"] == pytest.approx(
        4448 / now["interval_s"]
    )


def test_of_several_servers_the_others_are_shown_if_one_does_not_answer() -> None:
    with Exporter([BEFORE, AFTER]) as exporter:
        result = run(f"http://{exporter.address}", DEAD)
    assert result.exit_code == 2
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("127.0.0.1:")]
    assert [row[0] for row in rows] == [exporter.address, "127.0.0.1:1"]
    assert rows[0][1:5] == ["100%", "30%", "24%", "73%"]
    assert rows[1][-2:] == ["no", "answer"]
    assert "no answer (" in result.stdout and "30 of 30" in result.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no answer ("),
        ("<html>Not metrics</html>", "exports no vllm:nvmeof_… metrics: start the server with"),
        ("vllm:num_requests_running 1\n", "--kv-offloading-backend nvmeof"),
        (f"{NAME}stored_chunks_total one\n", "not in Prometheus' format"),
        (f"{NAME}stored_chunks_total \x1b[2J\n", "not in Prometheus' format"),
    ],
)
def test_a_server_without_our_metrics_is_refused_in_one_line(text: str | None, why: str) -> None:
    with Exporter([text or ""]) as exporter:
        result = run(DEAD if text is None else f"http://{exporter.address}")
    assert result.exit_code == 2
    assert why in result.stderr and result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr


def test_metrics_of_another_version_are_refused_in_one_line() -> None:
    page = changed('target_verdict{engine="0",target="1"}', 9)
    with Exporter([page]) as exporter:
        result = run(f"http://{exporter.address}")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "metrics of another version" in result.stderr and result.stderr.count("\n") == 1


def test_every_metric_that_is_not_0_is_shown() -> None:
    now = reading()
    text = "\n".join(shown(120, now, ["metrics"]))
    assert "lookups pool" in text and "peer bytes" not in text
    for name, amounts in now["metrics"].items():
        for one in amounts.values() if METRICS[name].labels else [amounts]:
            if one["total"] if isinstance(one, dict) else one:
                assert f"\n{name.replace('_', ' ')} " in text


def test_what_a_server_says_controls_no_terminal() -> None:
    now = reading(after=AFTER.replace("/mnt/kv/1", "/mnt/\x1b]0;kv"))
    assert now["targets"][1]["path"] == "/mnt/\\x1b]0;kv"


@pytest.mark.parametrize("line", ["vllm:x{ 1", 'vllm:x{a="0", =b"c"} 1'])
def test_an_unreadable_line_names_its_metric(line: str) -> None:
    with pytest.raises(ScrapeError, match="vllm:x"):
        Metrics(f"{line}\n").value("vllm:x")


def test_an_endless_answer_is_not_read_to_its_end() -> None:
    with Exporter(["#" * (ANSWER_BYTES_MAX + 1)]) as exporter:
        result = run(f"http://{exporter.address}")
    assert result.exit_code == 2 and "too long" in result.stderr


@contextmanager
def on_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`vllm-nvmeof top` in a terminal; yields the process and our side of the terminal."""
    ours, theirs = pty.openpty()
    code = "from vllm_nvmeof_offload.cli import app; app()"
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "top", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def until(terminal: int, text: str) -> str:
    """Read what the terminal shows until it contains `text`."""
    seen = ""
    while text not in seen:
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            raise AssertionError(f"no {text!r} in {seen!r}") from None
    return seen


#: Where `tcgetattr` has a terminal's local modes.
LOCAL = 3
#: A program takes the whole screen, and gives it back.
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def test_keys_switch_the_view_and_the_server_and_q_ends_it() -> None:
    with Exporter([BEFORE, AFTER]) as exporter:
        url = f"http://{exporter.address}"
        with on_a_terminal(url, f"{url}/", "--interval", "0.2") as (process, terminal):
            assert ENTER in until(terminal, "GPU hits")
            os.write(terminal, b"1")
            until(terminal, "prompt tokens from")
            os.write(terminal, b"3")
            until(terminal, "Admission: always")
            os.write(terminal, b"n")
            until(terminal, f"{url}/")
            os.write(terminal, b"q")
            until(terminal, LEAVE)
            assert process.wait(60) == 0


def test_an_interrupt_restores_the_terminal() -> None:
    with (
        Exporter([BEFORE, AFTER]) as exporter,
        on_a_terminal(f"http://{exporter.address}") as (process, terminal),
    ):
        until(terminal, "prompt tokens from")
        assert not termios.tcgetattr(terminal)[LOCAL] & termios.ECHO
        process.send_signal(signal.SIGINT)
        assert LEAVE in until(terminal, "interrupted")
        assert process.wait(60) == 130
        assert termios.tcgetattr(terminal)[LOCAL] & termios.ECHO
