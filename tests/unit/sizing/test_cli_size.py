# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof size` and `doctor --model`: tables, JSON, errors; spellings of links and rates."""

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
from vllm_nvmeof_offload.commands.size.deployment import (
    Deployment,
    parse_duration,
    parse_link,
    parse_rate,
    parse_tokens,
)
from vllm_nvmeof_offload.commands.size.report import Figure, LayersRow, ScaleRow, SizeReport
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.units import GIB

runner = CliRunner()
PLAIN = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


def size_json(*options: str) -> SizeReport:
    result = runner.invoke(app, ["size", *options, "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    value["deployment"] = Deployment(**value["deployment"])
    for name, kind in (("layers", LayersRow), ("figures", Figure), ("scaling", ScaleRow)):
        value[name] = [kind(**row) for row in value[name]]
    return SizeReport(**value)


def test_json_has_the_stated_shape_and_the_options_in_it() -> None:
    report = size_json(
        *("--preset", "Llama-3.1-70B-Instruct", "--gpus", "8", "--gpu-memory", "141GiB"),
        *("--tp", "8", "--context", "128k", "--concurrency", "64", "--drives", "24"),
        *("--drive-bytes", "15.36TB", "--drive-read", "6.5GB/s", "--link", "2x100GbE"),
        *("--ttft", "2s", "--kv-dtype", "fp8", "--blocks-per-chunk", "4", "--staging", "1TiB"),
    )
    deployment = report.deployment
    assert (deployment.gpus, deployment.tensor_parallel, deployment.kv_element_bytes) == (8, 8, 1)
    assert deployment.gpu_memory_bytes == 141 << 30
    assert deployment.context_tokens == 128 << 10
    assert deployment.drive_read_bytes_per_s == 6.5e9
    figures = {figure.name: figure for figure in report.figures}
    assert figures["KV of one token"].value == 160 << 10
    assert figures["chunk"].value == 64
    assert report.bottleneck == "links"


def test_the_options_defaults_are_the_deployments() -> None:
    assert size_json("--preset", "Qwen3-8B").deployment == Deployment()


def test_the_table_has_every_figure_and_its_formula(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PLAIN))
    report = size_json("--model", str(tmp_path))
    result = runner.invoke(app, ["size", "--model", str(file)], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    for figure in report.figures:
        for part in (figure.name, figure.text, figure.formula):
            assert part in result.stdout
    for line in (*report.assumptions, *report.notes, *report.commands, report.published_source):
        assert line in result.stdout
    for row in report.scaling:
        assert f"│ {row.drives} " in result.stdout


def test_the_lines_to_paste_are_what_a_server_takes() -> None:
    report = size_json(
        *("--preset", "Llama-3.1-70B-Instruct", "--gpus", "8", "--tp", "4", "--kv-dtype", "fp8"),
        *("--drives", "4", "--users", "20000", "--concurrency", "32"),
    )
    targets, pool, serve = report.commands
    env = dict(line.removeprefix("export ").split("=", 1) for line in (targets, pool))
    config = parse_config({}, env)
    assert config.targets == ["/mnt/kv/0", "/mnt/kv/1"], "two engines share four drives"
    figures = {figure.name: figure.value for figure in report.figures}
    assert config.pool_bytes is not None
    assert 0 <= config.pool_bytes - figures["pool of one engine"] < GIB
    words = serve.split()
    assert words[:2] == ["vllm", "serve"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--tensor-parallel-size"] == "4"
    assert options["--kv-cache-dtype"] == "fp8"
    assert 0 <= int(options["--kv-offloading-size"]) * GIB - figures["staging of one engine"] < GIB
    assert any("needs" in note and "drives" in note for note in report.notes)
    assert size_json("--preset", "Qwen3-8B", "--context", "8").commands == []


def test_the_lines_to_paste_start_as_many_ranks_as_were_sized() -> None:
    sizes = ("--tp", "16", "--pp", "2", "--pcp", "2", "--dcp", "2", "--block-tokens", "32")
    words = size_json("--preset", "Llama-3.1-70B-Instruct", *sizes).commands[-1].split()
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--tensor-parallel-size"] == "16"
    assert options["--pipeline-parallel-size"] == "2"
    assert options["--prefill-context-parallel-size"] == "2"
    assert options["--decode-context-parallel-size"] == "2"
    assert options["--block-size"] == "32"


def test_layers_of_every_kind_are_shown() -> None:
    shown = runner.invoke(
        app, ["size", "--preset", "Qwen3-Next-80B-A3B-Instruct"], env={"COLUMNS": "250"}
    ).stdout
    assert "one state per sequence, no KV per token" in shown
    assert "kept per boundary" in shown
    shown = runner.invoke(app, ["size", "--preset", "gpt-oss-120b"], env={"COLUMNS": "250"}).stdout
    assert "the last 128 tokens" in shown


def test_kv_copies_on_several_ranks_are_reported() -> None:
    report = size_json("--preset", "DeepSeek-V3", "--tp", "8")
    assert any(note.startswith("8 copies") for note in report.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model=None: give one of --model and --preset; presets are"),
        (["--preset", "Qwen3-9B"], "--preset='Qwen3-9B': unknown; did you mean Qwen/Qwen3-8B"),
        (["--model", "/proc/no/such"], "--model='/proc/no/such': cannot be read (No such file"),
        (["--ttft", "2 parsecs"], "--ttft='2 parsecs': is not a duration above 0; write 2s"),
        (["--ttft", "0s"], "--ttft='0s': is not a duration above 0"),
        (["--context", "lots"], "--context='lots': is not a number of tokens"),
        (["--drive-read", "6.5GB"], "--drive-read='6.5GB': is not a rate above 0; write 6.5GB/s"),
        (["--link", "wet string"], "--link='wet string': is not a link; write 100GbE"),
        (["--gpu-link", "pcie9x16"], "--gpu-link='pcie9x16': is not a link"),
        (["--gpu-memory", "some"], "--gpu-memory='some': is not a size"),
        (["--drives", "0"], "--drives=0: give a value greater than or equal to 1"),
        (["--tp", "0"], "--tp=0: give a value greater than or equal to 1"),
        (["--drive-fill", "1.5"], "--drive-fill=1.5: give a value less than or equal to 1"),
        (["--users", "0"], "--users=0: give a value greater than or equal to 1"),
        (["--prefill-tokens-per-s", "0"], "--prefill-tokens-per-s=0.0: give a value greater than"),
        (["--daily-tokens", "few"], "--daily-tokens='few': is not a number of tokens"),
        (["--drive-bytes", "0"], "--drive-bytes=0: give a value greater than 0"),
        (["--kv-dtype", "fp12"], "--kv-dtype='fp12': give auto or one of bfloat16"),
        (["--tp", "3"], "--tp=3: vLLM cannot split 8 KV heads; give"),
        (["--gpus", "3", "--tp", "2"], "--gpus=3: an engine uses 2"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_plain_line(options: list[str], message: str) -> None:
    model = [] if not options or options[0] in ("--model", "--preset") else ["--preset", "Qwen3-8B"]
    result = runner.invoke(app, ["size", *model, *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "count", "each"),
    [
        ("100GbE", 1, 12.5e9),
        ("2x400GbE", 2, 50e9),
        ("4 x 200Gb/s", 4, 25e9),
        ("12.5GB/s", 1, 12.5e9),
        ("3x1GiB/s", 3, float(1 << 30)),
        ("pcie4x4", 1, 16e9 * 4 / 8 * 128 / 130),
        ("2xPCIe5x16", 2, 32e9 * 16 / 8 * 128 / 130),
        ("pcie6x8", 1, 64e9 * 8 / 8 * 242 / 256),
    ],
)
def test_links_are_parsed(text: str, count: int, each: float) -> None:
    link = parse_link(text)
    assert (link.count, link.bytes_per_s) == (count, pytest.approx(each))
    assert link.total_bytes_per_s == pytest.approx(count * each)


def test_rates_durations_and_tokens_are_parsed() -> None:
    assert parse_rate("900MiB/s") == 900 << 20
    assert parse_duration("1.5 s") == 1.5
    assert parse_duration("500ms") == 0.5
    assert parse_tokens("128k") == 131072
    assert parse_tokens("1M") == 1 << 20
    assert parse_tokens("1000") == 1000


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
