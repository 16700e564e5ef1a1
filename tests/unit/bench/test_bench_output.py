# SPDX-License-Identifier: Apache-2.0
"""Tables, picture and command line, on made-up samples."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import command, words_of
from vllm_nvmeof_bench.results import dump

from tests.unit.bench.made_up import everything
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
        (["pool", "--arms", "uring"], "no arm 'uring'; choose from ours"),
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


@pytest.mark.parametrize(
    "name", ["pool", "copy", "cost", "latency", "ttft", "turns", "stream", "stall", "follow"]
)
def test_without_options_the_settings_have_their_own_defaults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    found = replace(command(name), measure=lambda settings, path: taken.append(settings))
    monkeypatch.setattr("vllm_nvmeof_bench.benchmark.command", lambda name: found)
    CliRunner().invoke(
        app, ["bench", *words_of(name).split(), "--json", str(tmp_path / "none.json")]
    )
    assert taken == [found.settings()]
