# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode nodes in `vllm-nvmeof size`: DualPath's range, and agents at a TTFT."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.model import preset
from vllm_nvmeof_offload.commands.size.nodes import Nodes, agents_at, turns_per_s
from vllm_nvmeof_offload.commands.size.report import build
from vllm_nvmeof_offload.errors import ConfigError

PAPER = Nodes(2, 4, gpus=8, storage_links=1, link_bytes_per_s=50e9, memory_bytes_per_s=500e9)


def test_the_range_of_ratios_is_dualpaths() -> None:
    assert PAPER.ratio_range() == (pytest.approx(1 / 7), pytest.approx(7 / 2))
    assert replace(PAPER, memory_bytes_per_s=250e9).ratio_range()[1] == pytest.approx(1.0)
    assert replace(PAPER, storage_links=2).ratio_range() == (pytest.approx(1 / 3), 1.0)
    least, most = replace(PAPER, storage_links=8).ratio_range()
    assert least > most, "there is no such ratio"


def test_turns_are_bound_by_links_or_by_compute() -> None:
    assert PAPER.links(helped=False) == 2
    assert PAPER.links(helped=True) == 6
    assert turns_per_s(6, 50e9, 1.5e9, 2, 0.0) == 200.0
    assert turns_per_s(6, 50e9, 1.5e9, 2, 0.02) == 100.0
    assert agents_at(100.0, 2.0, 3.0) == 500


def test_the_report_has_a_cluster_only_if_one_is_given() -> None:
    shape = preset("Llama-3.1-8B-Instruct")
    assert "cluster" not in {one.section for one in build(shape, Deployment()).figures}
    given = Deployment(prefill_nodes=2, decode_nodes=4, turn_gap_seconds=3.0)
    report = build(shape, given)
    found = {one.name: one.value for one in report.figures if one.section == "cluster"}
    assert found["most prefill per decode node"] == pytest.approx(3.5)
    assert found["turns per second"] == pytest.approx(3 * found["turns per second, own links only"])
    assert found["agents at the TTFT"] == int(found["turns per second"] * (2.0 + 3.0))
    assert not any("outside the range" in note for note in report.notes)
    wide = build(shape, replace(given, prefill_nodes=8, decode_nodes=2))
    assert any("8 prefill and 2 decode nodes are outside" in note for note in wide.notes)
    slow = build(shape, replace(given, turn_compute_seconds=1.0))
    turns = [one.value for one in slow.figures if one.name.startswith("turns per second")]
    assert turns == [2.0, 2.0]


def test_one_kind_of_nodes_without_the_other_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --prefill-nodes and --decode-nodes"):
        Deployment(prefill_nodes=2)
    with pytest.raises(ConfigError, match=r"^--decode-nodes.*3"):
        Deployment(decode_nodes=3)
    options = ["--preset", "Qwen3-8B", "--prefill-nodes", "2", "--decode-nodes", "4"]
    shown = CliRunner().invoke(app, ["size", *options])
    assert shown.exit_code == 0, shown.output
    assert "agents at the TTFT" in shown.output
