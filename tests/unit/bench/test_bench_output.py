# SPDX-License-Identifier: Apache-2.0
"""Tables, picture and command line, on made-up samples."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner
from vllm_nvmeof_bench import plots
from vllm_nvmeof_bench.benchmark import benchmark, command
from vllm_nvmeof_bench.pool.report import goals
from vllm_nvmeof_bench.results import dump
from vllm_nvmeof_bench.tables import show

from tests.unit.bench.made_up import everything, rounds
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.units import KIB, MIB

CONDITIONS = {
    "arms": {
        "ours": {"available": True, "runs": "io_uring (made up)"},
        "fio": {"available": False, "reason": "fio is not installed"},
    },
    "disk": {"file_system": "ext4", "device": "made-up"},
    "load_average_at_start": [0.1, 0.1, 0.1],
    "load_average_at_end": [0.2, 0.2, 0.2],
}


def printed(samples: list, width: int = 200) -> str:  # type: ignore[type-arg]
    out = io.StringIO()
    console = Console(file=out, width=width)
    show(console, benchmark("pool").parts(samples, CONDITIONS, goals(samples, {})))
    return out.getvalue()


def test_tables_show_medians_and_what_is_missing() -> None:
    samples = [one for one in everything((64 * KIB, 2 * MIB)) if one.arm != "fio"]
    samples += rounds("ours", "batch_write", 4 * MIB, [1111.0, 2222.0, 3333.0])
    text = printed(samples)
    assert "2,222" in text
    assert "median of 3 rounds" in text
    assert "fio: not measured: fio is not installed" in text
    assert "not measured" in text
    assert "p99 in µs" in text
    assert "4.444 (64 KiB, vllm_fs)" in text


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "pictures" / "pool.png"
    benchmark("pool").draw(path, everything((64 * KIB, 512 * KIB, 2 * MIB)), CONDITIONS)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("cases", "panels"),
    [
        ({"batch_read"}, ["batch read", "CPU time, batch read"]),
        ({"single_read", "writes_alone"}, ["one 128 MiB job, read", "those writes"]),
        ({"batch_read", "mixed", "read_beside_writes"}, [
            "batch read", "half reads, half writes", "CPU time, batch read",
            "one 2 MiB read beside 64 MiB of queued writes",
        ]),
    ],
)  # fmt: skip
def test_a_picture_shows_only_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: set[str], panels: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    finish = plots.finish

    def noted(panel: object, name: str, **rest: object) -> None:
        drawn.append(name)
        finish(panel, name, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(plots, "finish", noted)
    samples = [one for one in everything((512 * KIB, 2 * MIB)) if one.case in cases]
    benchmark("pool").draw(tmp_path / "pool.png", samples, CONDITIONS)
    assert drawn == panels


def test_a_file_of_samples_is_printed_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    dump(path, "pool", everything((64 * KIB, 512 * KIB, 2 * MIB)), CONDITIONS)
    result = CliRunner().invoke(app, ["bench", "report", str(path), "--check"])
    assert result.exit_code == 0, result.output
    slow = everything((64 * KIB, 512 * KIB, 2 * MIB), ours=1000.0)
    dump(path, "pool", slow, CONDITIONS)
    assert CliRunner().invoke(app, ["bench", "report", str(path)]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "report", str(path), "--check"]).exit_code == 1


def test_errors_are_one_plain_line(tmp_path: Path) -> None:
    for arguments, needed in (
        (["report", str(tmp_path / "none.json")], "none.json"),
        (["pool", "--arms", "uring"], "no arm 'uring'; there are ours"),
        (["pool", "--blocks", "2MiB", "--bytes-per-round", "4MiB"], "fewer than 8 blocks"),
    ):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert result.exit_code == 2
        assert result.stderr.startswith("vllm-nvmeof: ")
        assert needed in result.stderr


def test_without_the_benchmarks_one_line_names_the_remedy() -> None:
    program = (
        "import sys; sys.modules['vllm_nvmeof_bench'] = None; "
        "from vllm_nvmeof_offload.cli import app; app()"
    )
    command = [sys.executable, "-c", program, "bench", "report", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "are not installed" in result.stderr
    assert "PYTHONPATH=bench" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["pool", "copy", "cost", "latency", "ttft", "turns", "stream"])
def test_without_options_the_settings_have_their_own_defaults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    found = replace(command(name), measure=lambda settings, path: taken.append(settings))
    monkeypatch.setattr("vllm_nvmeof_bench.benchmark.command", lambda name: found)
    CliRunner().invoke(app, ["bench", name, "--json", str(tmp_path / "none.json")])
    assert taken == [found.settings()]
