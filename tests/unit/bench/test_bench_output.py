# SPDX-License-Identifier: Apache-2.0
"""The command line of `bench`: defaults, errors of one line, and the output of `bench copy`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import command, words_of
from vllm_nvmeof_bench.reports.copy import Sample, goals
from vllm_nvmeof_bench.results import Goal, missed

from tests.unit.bench.made_up import CONDITIONS, agentic, every_copy
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.units import KIB, MIB

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


# File, tables, targets and command line of `bench copy`, on made-up samples.


NO_GPU = not Path("/dev/nvidiactl").exists()


def rows(samples: list[Sample]) -> dict[str, Goal]:
    return {row.name: row for row in goals(samples, CONDITIONS)}


def slower(samples: list[Sample], share: float, **wanted: object) -> list[Sample]:
    """Scale the samples with these fields to `share` of their value."""
    return [
        replace(one, value=one.value * share)
        if all(getattr(one, name) == value for name, value in wanted.items())
        else one
        for one in samples
    ]


def test_every_goal_is_reached_by_samples_made_up_for_it() -> None:
    found = goals(every_copy(), CONDITIONS)
    assert len(found) == 7
    assert [row.name for row in found if row.reached is not True] == []


@pytest.mark.parametrize(
    ("target", "share", "wanted"),
    [
        ("DMA of blocks ≥ 512 KiB / one contiguous copy", 0.9,
         {"case": "transfer", "arm": "dma", "direction": "load", "block_bytes": 4 * MIB}),
        ("both directions at once / one direction, 2 MiB", 0.9,
         {"case": "both", "direction": "both"}),
        ("auto / the better of DMA and kernel ÷ 1.5", 0.9,
         {"case": "few", "arm": "auto", "direction": "store"}),
        ("auto / vLLM's own code, 16 to 64 KiB", 0.7,
         {"case": "transfer", "arm": "auto", "block_bytes": 32 * KIB}),
        ("bf16 matrix products beside copies by DMA / alone", 0.9,
         {"case": "loop_matrix", "arm": "dma"}),
        ("host time to submit 1000 blocks", 2.0, {"case": "submit", "direction": "load"}),
    ],
)  # fmt: skip
def test_one_bad_size_or_direction_misses_a_goal(
    target: str, share: float, wanted: dict[str, object]
) -> None:
    samples = slower(every_copy(), share, **wanted)
    row = rows(samples)[target]
    assert row.reached is False and row.n == 3
    for field in ("direction",):
        assert str(wanted.get(field, "")) in row.where
    assert row in missed(goals(samples, CONDITIONS))


def test_auto_may_choose_dma_where_the_kernel_is_not_clearly_faster() -> None:
    target = "auto / the better of DMA and kernel ÷ 1.5"
    small = {"case": "few", "arm": "kernel", "direction": "load"}
    assert rows(slower(every_copy(), 1.4, **small))[target].reached is True
    assert rows(slower(every_copy(), 2.0, **small))[target].measured == pytest.approx(0.75)


def test_the_cheapest_launch_that_makes_checksums_fast_enough_decides() -> None:
    target = "bf16 matrix products beside CRC-32C at 12.5 GB/s / alone"
    row = rows(every_copy())[target]
    assert row.measured == pytest.approx(0.992) and (row.n, row.where) == (3, "best")
    too_slow = slower(every_copy(), 0.9, case="crc_beside", arm="best")
    row = rows(too_slow)[target]
    assert row.measured == pytest.approx(0.98) and (row.reached, row.where) == (False, "many")
    assert rows(slower(every_copy(), 0.9, case="crc_beside"))[target].reached is None


def test_goals_are_ratios_of_medians() -> None:
    found = rows(every_copy())
    both = found["both directions at once / one direction, 2 MiB"]
    assert both.measured == pytest.approx(85.0 / 50.0)
    assert found["auto / vLLM's own code, 16 to 64 KiB"].measured == pytest.approx(0.98 / 0.7)


def test_without_vllms_arm_its_goal_is_neither_reached_nor_missed() -> None:
    samples = [one for one in every_copy() if one.arm != "vllm"]
    assert rows(samples)["auto / vLLM's own code, 16 to 64 KiB"].reached is None
    assert all(row.reached is None for row in goals([], CONDITIONS))


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_without_a_gpu_the_error_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "copy.json"
    done = CliRunner().invoke(app, ["bench", "copy", "--json", str(file), "--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert "vllm-nvmeof: bench copy needs an NVIDIA GPU: " in done.output
    assert not file.exists()
