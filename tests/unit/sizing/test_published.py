# SPDX-License-Identifier: Apache-2.0
"""Figures that others published, row by row, from configurations; rows that do not follow."""

from __future__ import annotations

import json
from decimal import ROUND_HALF_DOWN, Decimal
from pathlib import Path
from typing import Any

import pytest

from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import preset, preset_names
from vllm_nvmeof_offload.commands.size.report import build

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
#: The printed sizes of these two models do not follow from the table's own inputs.
AT_ODDS = {
    # 32 KB and 5 MB on one GPU: the row is that of tensor_parallel_size=4, left unsaid.
    "meta-llama/Llama-3.1-70B-Instruct",
    # 8 KV heads of 128 in 36 layers make 32 KB and 2.25 MB. The row agrees with itself
    # (72 pieces of 28 KB), as for 7 heads, which no tensor-parallel size gives.
    "Qwen/Qwen3-8B",
}


def rounded(count: int, unit_bytes: int, unit: str) -> str:
    """As the vLLM blog's table prints sizes: KB for KiB, halves down (0.875 is 0.87), no zeros."""
    number = (Decimal(count) / unit_bytes).quantize(Decimal("0.01"), ROUND_HALF_DOWN)
    return f"{number.normalize():f} {unit}"


def printed(row: dict[str, Any], tp: int) -> tuple[str, str]:
    model = preset(row["model"])
    sizes = KvSizes(model, Deployment(tensor_parallel=tp, block_tokens=row["block_tokens"]))
    return (
        rounded(sizes.fragment_bytes(model.caches[0]), 1 << 10, "KB"),
        rounded(sizes.block_bytes(), 1 << 20, "MB"),
    )


@pytest.mark.parametrize("row", PUBLISHED["block_sizes"], ids=lambda row: row["model"])
def test_the_table_of_block_sizes_follows_to_the_digit(row: dict[str, Any]) -> None:
    ours = printed(row, row["tp"])
    assert (ours == (row["old"], row["new"])) == (row["model"] not in AT_ODDS), ours


def test_the_two_inconsistent_rows_are_explained() -> None:
    rows = {row["model"]: row for row in PUBLISHED["block_sizes"]}
    assert len(rows) == 15
    llama, qwen = rows["meta-llama/Llama-3.1-70B-Instruct"], rows["Qwen/Qwen3-8B"]
    assert printed(llama, 1) == ("32 KB", "5 MB")
    assert printed(llama, 4) == (llama["old"], llama["new"])
    assert printed(qwen, 1) == ("32 KB", "2.25 MB")
    assert rounded(28 * 1024 * 2 * 36, 1 << 20, "MB") == qwen["new"]


@pytest.mark.parametrize("row", PUBLISHED["data24"], ids=lambda row: f"{row['drives']} drives")
def test_the_table_of_drives_is_a_multiple_of_its_first_row(row: dict[str, Any]) -> None:
    report = build(preset("Qwen3-8B"), Deployment())
    (ours,) = (one for one in report.scaling if one.drives == row["drives"])
    assert (ours.published_gpus, ours.published_sessions) == (row["gpus"], row["sessions"])


def test_the_ends_of_the_table_of_drives() -> None:
    rows = {row["drives"]: (row["gpus"], row["sessions"]) for row in PUBLISHED["data24"]}
    assert rows[1] == (4, 16)
    assert rows[24] == (96, 384)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_the_parameters_that_its_page_states(name: str) -> None:
    """A wrong layer count, width or head count in the presets would show here."""
    stated = PUBLISHED["parameters_billions"][name]
    found = preset(name).weights.source.split("estimated: ")[1].split(" billion")[0]
    assert float(found) == pytest.approx(stated, rel=0.013)
