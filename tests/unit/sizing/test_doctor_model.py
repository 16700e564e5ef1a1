# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor --model`: groups, bytes and verdicts of models, and errors by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.sizing import families
from tests.unit.sizing.families import FAMILIES, Family
from vllm_nvmeof_offload.cli import app

KIB = 1 << 10


def file_of(family: Family, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({**family.config, "torch_dtype": "bfloat16"}))
    return folder


def run(*words: object, code: int = 0) -> Any:
    options = ["doctor", "--model", *map(str, words)]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "240"})
    assert result.exit_code == code, result.output
    return result


def report(*words: object, code: int = 0) -> SimpleNamespace:
    value = json.loads(run(*words, "--json", code=code).stdout)
    value["groups"] = [SimpleNamespace(**row) for row in value["groups"]]
    return SimpleNamespace(**value)


def test_a_model_with_windows_has_bytes_per_token_and_per_boundary(tmp_path: Path) -> None:
    made = report(file_of(families.GEMMA_3, tmp_path), "--tp", 4)
    assert made.works
    assert [(row.kind, row.reach_tokens) for row in made.groups] == [
        *[("window", 1024)] * 6,
        ("full", None),
    ]
    full, window = made.groups[-1], made.groups[0]
    assert (full.token_bytes, full.boundary_bytes, full.slot_fill) == (20 * KIB, None, 1.0)
    assert (window.token_bytes, window.boundary_chunks) == (None, 1024 // window.chunk_tokens)
    assert window.boundary_bytes == 1024 * 9 * 2 * KIB
    assert window.slot_fill == 0.9
    assert made.token_bytes == 20 * KIB
    assert made.boundary_bytes == 1024 * 52 * 2 * KIB
    assert made.unit_tokens == full.chunk_tokens == 32
    # 104 KiB in each token of 52 layers' windows, 20 KiB in each token of full attention.
    assert made.boundary_tokens == 10656 >= 2 * 1024 * 104 / 20
    assert "auto keeps a boundary every 10656 tokens" in run(tmp_path, "--tp", 4).stdout
    assert made.gpu_block_bytes == 10 * 16 * 2 * KIB


def test_states_have_one_block_per_chunk(tmp_path: Path) -> None:
    folder = file_of(families.QWEN3_NEXT, tmp_path)
    made = report(folder)
    assert made.blocks_per_chunk == 1
    assert [row.stored for row in made.groups] == [
        *["the state at a boundary"] * 3,
        "every whole chunk",
    ]
    refused = run(folder, "--blocks-per-chunk", 4, code=2)
    assert "--blocks-per-chunk=4: this model has states" in refused.stderr


def test_a_block_of_compressed_kv_counts_each_groups_own_bytes(tmp_path: Path) -> None:
    made = report(file_of(families.DEEPSEEK_V4, tmp_path))
    assert made.token_bytes == 3850
    assert all(row.block_bytes < made.gpu_block_bytes for row in made.groups)
    assert made.unit_tokens == 256
    refused = run(tmp_path, "--layout", "lbhnc", code=2)
    assert "--layout='LBHNC': vLLM cannot unify pages of" in refused.stderr
    assert "give BLHNC" in refused.stderr


def test_windows_that_vllm_recomputes_are_not_stored(tmp_path: Path) -> None:
    made = report(file_of(families.DEEPSEEK_V4_1, tmp_path))
    assert made.works
    assert {(row.kind, row.stored) for row in made.groups} == {
        ("full", "every whole chunk"),
        ("not stored", "nothing: vLLM recomputes it"),
    }


def test_stages_of_a_pipeline_have_their_own_bytes(tmp_path: Path) -> None:
    """GPT-OSS: 36 layers, of which the middle one of three stages has no more than the others."""
    folder = file_of(families.GPT_OSS, tmp_path)
    whole, staged = report(folder), report(folder, "--pp", 3)
    assert staged.works
    assert [row.block_bytes * 3 for row in staged.groups] == [
        row.block_bytes for row in whole.groups
    ]
    assert [row.layers for row in staged.groups] == ["6 × sliding window", "6 × full attention"]
    # Chunks have equally many tokens on all stages, whatever their bytes; here a window's.
    assert {row.chunk_tokens for row in staged.groups} == {128}


def test_ranks_that_share_the_tokens_of_a_block(tmp_path: Path) -> None:
    """Of Qwen3-Next, four ranks hold each of two KV heads; each of them has its own state."""
    folder = file_of(families.QWEN3_NEXT, tmp_path)
    whole, shared = report(folder, "--tp", 8), report(folder, "--tp", 8, "--dcp", 4)
    assert shared.decode_context_parallel == 4
    for before, after in zip(whole.groups, shared.groups, strict=True):
        times = 4 if after.kind == "full" else 1
        assert after.block_tokens == times * before.block_tokens
        assert after.block_bytes == before.block_bytes
    assert shared.token_bytes * 4 == whole.token_bytes
    assert shared.unit_tokens == 4 * whole.unit_tokens
    shown = run(folder, "--tp", 8, "--dcp", 4).stdout
    assert "one rank of --tp 8 --dcp 4" in shown


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_shown_whole(name: str, tmp_path: Path) -> None:
    folder = file_of(FAMILIES[name], tmp_path)
    made, shown = report(folder), run(folder).stdout
    assert made.works and shown.rstrip().endswith("works")
    for row in made.groups:
        assert f"{row.group} {row.kind}" in shown
        assert row.stored in shown
    for note in made.notes:
        assert note in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pp", "37"], "--pp=37: the model has 36 layers"),
        (
            ["--tp", "8", "--dcp", "2"],
            "--dcp=2: vLLM does not support this option for layers with sliding window",
        ),
        (
            ["--pcp", "2"],
            "--pcp=2: vLLM does not support this option for layers with sliding window",
        ),
        (["--kv-dtype", "fp12"], "--kv-dtype='fp12': give auto or one of"),
        (["--layout", "NHD"], "--layout='NHD': is not a known layout; write BLHNC or LBHNC"),
    ],
)
def test_errors_name_the_value_and_the_remedy(
    words: list[str], message: str, tmp_path: Path
) -> None:
    result = run(file_of(families.GPT_OSS, tmp_path), *words, code=2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
