# SPDX-License-Identifier: Apache-2.0
"""File, tables, picture and command line of `bench stream`, on made-up samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import report_of
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.stream.load import Settings

from tests.unit.bench.stream_made_up import CONDITIONS, everything
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.units import MIB


def test_the_file_holds_samples_and_conditions_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tier.json"
    dump(path, "stream", everything(), CONDITIONS)
    assert report_of("stream").read(path)[:2] == (everything(), CONDITIONS)
    assert set(json.loads(path.read_text())) == {"schema", "bench", "samples", "conditions"}
    path.write_text('{"samples": [{"arm": "ours"}], "conditions": {}}')
    with pytest.raises(BenchError, match=r"tier\.json: not a results file of"):
        report_of("stream").read(path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_errors_are_one_plain_line(tmp_path: Path) -> None:
    for arguments, needed in (
        (["report", str(tmp_path / "none.json")], "none.json"),
        (["stream", "--parts", "loads"], "no part 'loads'; choose from load, resume"),
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
