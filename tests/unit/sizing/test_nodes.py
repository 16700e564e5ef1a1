# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode nodes in `vllm-nvmeof size`: DualPath's range, and agents at a TTFT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.model import preset
from vllm_nvmeof_offload.commands.size.report import build, ratio_range, turns_per_s
from vllm_nvmeof_offload.errors import ConfigError

PAPER: dict[str, Any] = {
    "prefill_nodes": 2, "decode_nodes": 4, "node_gpus": 8, "node_storage_links": 1,
    "node_link": "400GbE", "node_memory_bytes_per_s": 500e9,
}  # fmt: skip


def paper(**more: Any) -> Deployment:
    return Deployment(**{**PAPER, **more})


def test_the_range_of_ratios_is_dualpaths() -> None:
    assert ratio_range(paper()) == (pytest.approx(1 / 7), pytest.approx(7 / 2))
    assert ratio_range(paper(node_memory_bytes_per_s=250e9))[1] == pytest.approx(1.0)
    assert ratio_range(paper(node_storage_links=2)) == (pytest.approx(1 / 3), 1.0)
    least, most = ratio_range(paper(node_storage_links=8))
    assert least > most, "there is no such ratio"


def test_turns_are_bound_by_links_or_by_compute() -> None:
    assert turns_per_s(6, 50e9, 1.5e9, 2, 0.0) == 200.0
    assert turns_per_s(6, 50e9, 1.5e9, 2, 0.02) == 100.0


def test_decode_nodes_that_help_bring_their_storage_links() -> None:
    report = build(preset("Llama-3.1-8B-Instruct"), paper(node_storage_links=3))
    formulas = {one.name: one.formula for one in report.figures}
    assert formulas["turns per second"].startswith("18 × 400GbE")
    assert formulas["turns per second, own links only"].startswith("6 × 400GbE")


def test_nodes_with_a_storage_link_for_each_gpu_have_no_ratio() -> None:
    report = build(preset("Llama-3.1-8B-Instruct"), paper(node_storage_links=8))
    texts = {one.name: one.text for one in report.figures}
    assert texts["least prefill per decode node"] == "inf ×"
    assert any("outside the range" in note for note in report.notes)


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


def test_turns_that_read_nothing_have_no_rate() -> None:
    report = build(preset("Llama-3.1-8B-Instruct"), paper(context_tokens=7))
    found = [one.name for one in report.figures if one.section == "cluster"]
    assert found[-1] == "prefill per decode node"
    assert any("nothing is stored" in note for note in report.notes)


def test_one_kind_of_nodes_without_the_other_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --prefill-nodes and --decode-nodes"):
        Deployment(prefill_nodes=2)
    with pytest.raises(ConfigError, match=r"^--decode-nodes.*3"):
        Deployment(decode_nodes=3)
    options = ["--preset", "Qwen3-8B", "--prefill-nodes", "2", "--decode-nodes", "4"]
    shown = CliRunner().invoke(app, ["size", *options])
    assert shown.exit_code == 0, shown.output
    assert "agents at the TTFT" in shown.output
