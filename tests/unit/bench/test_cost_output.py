# SPDX-License-Identifier: Apache-2.0
"""Tables, picture and command line of `bench cost`, on made-up samples."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import benchmark
from vllm_nvmeof_bench.cost.measure import Settings, extra_config, measure, server_spec
from vllm_nvmeof_bench.cost.report import ARMS, goals
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.tables import show

from tests.unit.bench.made_up_costs import CONDITIONS, everything, rounds
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.config import parse_config


def printed(samples: list) -> str:  # type: ignore[type-arg]
    out = io.StringIO()
    console = Console(file=out, width=200)
    show(console, benchmark("cost").parts(samples, CONDITIONS, goals(samples, CONDITIONS)))
    return out.getvalue()


def test_tables_show_medians_ratios_and_unknown_values() -> None:
    text = printed(everything())
    assert "Medians of 8 rounds" in text
    assert "1.010  1.010 to 1.010" in text
    assert "our scheduler, µs / step" in text
    assert "cores used by idle servers: none 0.001, ours 0.002" in text
    text = printed(everything(known=False))
    assert "our scheduler, µs / step" not in text
    assert "not measured" in text


def test_without_samples_every_goal_is_unmeasured() -> None:
    assert printed([]).count("not measured") == 5  # idle servers were


@pytest.mark.parametrize("known", [True, False])
def test_the_picture_is_a_png(tmp_path: Path, known: bool) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "pictures" / "cost.png"
    samples = everything(known=known) + rounds("ours_cpu_only", "batch", 1.002)
    benchmark("cost").draw(path, samples, CONDITIONS)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_file_of_samples_is_printed_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    dump(path, "cost", everything(), CONDITIONS)
    result = CliRunner().invoke(app, ["bench", "report", str(path), "--check"])
    assert result.exit_code == 0, result.output
    dump(path, "cost", everything(ours=1.10), CONDITIONS)
    assert CliRunner().invoke(app, ["bench", "report", str(path)]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "report", str(path), "--check"]).exit_code == 1


def test_errors_are_one_plain_line(tmp_path: Path) -> None:
    for arguments, needed in (
        (["report", str(tmp_path / "none.json")], "none.json"),
        (["cost", "--arms", "uring"], "no arm 'uring'; there are none, ours"),
        (["cost", "--arms", "ours"], "nothing to compare"),
    ):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert result.exit_code == 2
        assert result.stderr.startswith("vllm-nvmeof: ")
        assert needed in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_too_little_space_is_reported_before_a_server_starts(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give another --dir"):
        measure(Settings(directory=tmp_path / "disk", pool_bytes=1 << 60), tmp_path / "cost.json")
    assert list(tmp_path.iterdir()) == []


def test_the_arms_differ_only_as_their_names_state(tmp_path: Path) -> None:
    settings = Settings(arms=ARMS)
    specs = {arm: server_spec(arm, settings, tmp_path / "model", tmp_path) for arm in ARMS}
    commands = {arm: spec.command(1) for arm, spec in specs.items()}
    bare = commands["none"]
    assert all(command[: len(bare)] == bare for command in commands.values())
    default = parse_config({})
    extras = {
        arm: parse_config({**extra_config(arm, settings, tmp_path / arm)}) for arm in ARMS[1:]
    }
    changed = {
        arm: {key for key, value in extra if value != getattr(default, key)} - {"targets"}
        for arm, extra in extras.items()
    }
    assert changed["ours"] == {"pool_bytes"}
    assert changed["ours_prompt_only"] == {"pool_bytes", "offload_prompt_only"}
    assert extras["ours_cpu_only"].pool_bytes == 0
    assert extras["ours_prompt_only"].offload_prompt_only is True
