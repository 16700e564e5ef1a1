# SPDX-License-Identifier: Apache-2.0
"""Tables, picture and command line of `bench cost`, on made-up samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_nvmeof_bench.cost import Settings, extra_config, measure, server_spec
from vllm_nvmeof_bench.reports.cost import ARMS
from vllm_nvmeof_bench.results import BenchError

from vllm_nvmeof_offload.config import parse_config


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
    assert extras["ours_prompt_only"].offload_prompt_only is True
