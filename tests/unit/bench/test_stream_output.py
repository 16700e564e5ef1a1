# SPDX-License-Identifier: Apache-2.0
"""File, tables, picture and command line of `bench stream`, on made-up samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import benchmark
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.stream.load import Settings
from vllm_nvmeof_bench.stream.report import Sample

from tests.unit.bench import printing
from tests.unit.bench.stream_made_up import CONDITIONS, everything, times
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.units import MIB


def printed(samples: list[Sample]) -> str:
    return printing.printed("stream", samples, CONDITIONS)


def test_every_part_has_its_table() -> None:
    text = printed(everything())
    for needed in (
        "Load from a throttled pool",
        "copies as slow as the target",
        "1.020 1.010–1.050",
        "where vLLM's own tiering would find a miss",
        "Preempted request",
        "150 ms 100–200",
        "Waiting request",
        "unthrottled",
        "never (recompute)",
        "1.050 (200 MB/s, loading is better)",
        "answers that differ",
    ):
        assert needed in text, needed


def test_an_unmeasured_case_is_a_dash() -> None:
    samples = times("resume", "crowd", "reload", [[0.1]])
    text = printed(samples)
    assert "–" in text
    assert "not measured" in text
    assert "Load from" not in text


@pytest.mark.parametrize("parts", [("load",), ("resume", "prefetch", "admission"), ()])
def test_the_picture_has_the_parts_that_ran(tmp_path: Path, parts: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "pictures" / "tier.png"
    samples = [one for one in everything() if one.part in parts]
    if not parts:
        with pytest.raises(BenchError, match="nothing to draw"):
            benchmark("stream").draw(path, samples, CONDITIONS)
        return
    benchmark("stream").draw(path, samples, CONDITIONS)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_file_holds_samples_and_conditions_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tier.json"
    dump(path, "stream", everything(), CONDITIONS)
    assert benchmark("stream").read(path)[:2] == (everything(), CONDITIONS)
    assert set(json.loads(path.read_text())) == {"schema", "bench", "samples", "conditions"}
    path.write_text('{"samples": [{"arm": "ours"}], "conditions": {}}')
    with pytest.raises(BenchError, match=r"tier\.json: not a file of"):
        benchmark("stream").read(path)


def test_a_file_of_samples_is_printed_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "tier.json"
    dump(path, "stream", everything(), CONDITIONS)
    result = CliRunner().invoke(app, ["bench", "report", str(path), "--check"])
    assert result.exit_code == 0, result.output
    dump(
        path,
        "stream",
        [*everything(), *times("resume", "crowd", "reload", [[9.0] * 9])],
        CONDITIONS,
    )
    assert CliRunner().invoke(app, ["bench", "report", str(path)]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "report", str(path), "--check"]).exit_code == 1


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_errors_are_one_plain_line(tmp_path: Path) -> None:
    for arguments, needed in (
        (["report", str(tmp_path / "none.json")], "none.json"),
        (["stream", "--parts", "loads"], "no part 'loads'; there are load, resume"),
        (["stream", "--dir", "/dev/shm", "--parts", "load"], "give a directory on a disk"),
    ):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].startswith("vllm-nvmeof: ")
        assert needed in result.stderr


def test_settings_split_the_tier_as_the_product_does() -> None:
    settings = Settings(tier_bytes=64 * MIB)
    assert (settings.cache_slots, settings.stream_slots) == (128, 42)
    assert settings.chunks(0.25) == 32
    assert settings.chunks_max == 1024
    assert ("paced", 2) in settings.cases
    assert not [case for case, _ in Settings(throttle_mb_per_s=0).cases if case == "paced"]
    with pytest.raises(BenchError, match="rounds"):
        Settings(rounds=0)
