# SPDX-License-Identifier: Apache-2.0
"""The command line: defaults are the settings' own, and a wrong argument costs one plain line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import command, words_of

from tests.unit.bench.trace_files import agentic
from vllm_nvmeof_offload.cli import app

#: Wrong arguments, in which NONE is a missing file and TRACE a folder of sessions → the refusal.
WRONG = {
    "report NONE": "not a benchmark's results file",
    "pool --arms uring": "no arm 'uring'; choose from ours",
    "pool --blocks 2MiB --bytes-per-round 4MiB": "fewer than 8 blocks",
    "copy --parts transfer,loop": "loops",
    "latency --cases erase": "no case 'erase'",
    "latency --depths 1000": "smaller --depths",
    "latency --target here": "NAME=DIRECTORY",
    "latency --slot 5000": "multiples of 4 KiB",
    "peers --rates 400": "400",
    "peers --rates 400:x": "400:x",
    "peers --rates 400:0": "400:0",
    "peers --rates 1:2:3": "1:2:3",
    "hotpath --chunks 512 --entries 1000": "1000 entries are too few for ops of 512 chunks",
    "simulate NONE": "no such file or folder",
    "replay NONE": "no such file or folder",
    "replay TRACE --arms gpu": "no arm 'gpu'",
    "replay TRACE --base-url ftp://host": "give NAME=http://HOST:PORT",
    "replay TRACE --duration 0": "give more than 0 s",
    "replay TRACE --token-ids 300:5000 --block-tokens 2": "has only 2048",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_argument_costs_one_plain_line(arguments: str, tmp_path: Path) -> None:
    places = {"NONE": str(tmp_path / "none"), "TRACE": str(agentic(tmp_path / "traces"))}
    words = [places.get(word, word) for word in arguments.split()]
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("vllm-nvmeof: ") and WRONG[arguments] in last


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


@pytest.mark.parametrize("name", ["pool", "copy", "latency", "ttft", "turns", "stall", "moving"])
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
