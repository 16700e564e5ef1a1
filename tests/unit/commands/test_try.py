# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof try` on a fake server: proofs that a prompt was loaded, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.bench.made_up_server import MadeUpServer
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands.try_server import Tried

TOKENS = 200
GPU_TOKENS = 1600
ROOM = (
    'vllm:nvmeof_capacity_tokens{tier="pool"} 5000\n'
    'vllm:nvmeof_capacity_tokens{tier="cpu"} 90\n'
    "vllm:num_requests_running 0\n"
)
SIZE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'


def attempt(server: MadeUpServer, *more: str) -> Result:
    words = ["try", "--url", server.url, "--tokens", str(TOKENS), *more]
    return CliRunner().invoke(app, words)


def found(server: MadeUpServer) -> dict[str, Any]:
    result = attempt(server, "--json")
    assert result.exit_code in (0, 1), result.output
    tried: dict[str, Any] = json.loads(result.stdout)
    assert tried["proved"] is (result.exit_code == 0)
    return tried


def test_a_returning_prompt_is_loaded_after_a_reset() -> None:
    with MadeUpServer(page=ROOM) as server:
        tried = found(server)
        shown = attempt(server)
    assert tried["proved"] and tried["same_answer"] and not tried["warnings"]
    assert tried["tokens"] == {"gpu": 0, "cpu": TOKENS, "pool": 0, "shared": 0, "computed": 0}
    assert tried["emptied"] == "emptied by /reset_prefix_cache"
    assert tried["first_ttft_s"] > 0 and tried["second_ttft_s"] > 0
    assert "loaded from a tier" in shown.stdout
    assert f"CPU tier {TOKENS}, pool 0" in shown.stdout


def test_it_names_the_measured_request_for_explain() -> None:
    with MadeUpServer(page=ROOM) as server:
        tried = found(server)
        before = server.asked
        shown = attempt(server).stdout
    # The prompt, two short requests for counters, the prompt again, and one for counters.
    assert tried["second_id"] == f"cmpl-{before - 1}"
    (line,) = (line for line in shown.splitlines() if line.startswith("details"))
    assert line.endswith(f" vllm-nvmeof explain cmpl-{2 * before - 1}")


def test_other_prompts_replace_the_gpus_content_where_it_cannot_be_reset() -> None:
    with MadeUpServer(page=ROOM + SIZE, resets=False, gpu_tokens=GPU_TOKENS) as server:
        tried = found(server)
        asked = server.counts["prompt"]
    assert tried["proved"] and tried["tokens"]["cpu"] == TOKENS
    assert tried["emptied"].startswith("flooded with ")
    assert GPU_TOKENS + TOKENS <= asked < GPU_TOKENS + 5 * TOKENS, "the flood is bounded"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (ROOM, "vllm:cache_config_info has no num_gpu_blocks"),
        (ROOM + SIZE.replace('"100"', '"None"'), "vllm:cache_config_info has no num_gpu_blocks"),
        (
            ROOM.replace("5000", "1900") + SIZE,
            "it holds 1,600 tokens, too many for the larger tier (1,900)",
        ),
    ],
)
def test_it_says_why_the_gpus_cache_cannot_be_emptied(page: str, why: str) -> None:
    with MadeUpServer(page=page, resets=False) as server:
        result = attempt(server)
    assert result.exit_code == 2
    assert why in result.stderr and "VLLM_SERVER_DEV_MODE=1" in result.stderr


def test_another_answer_is_no_proof() -> None:
    with MadeUpServer(page=ROOM, wavers=True) as server:
        tried = found(server)
    assert not tried["proved"] and not tried["same_answer"]
    assert tried["tokens"]["cpu"] == TOKENS


def test_a_prompt_that_stays_in_gpu_memory_is_no_proof() -> None:
    with MadeUpServer(page=ROOM + SIZE, resets=False) as server:
        tried = found(server)
    assert not tried["proved"] and tried["same_answer"]
    assert tried["tokens"]["gpu"] == TOKENS


def test_a_prompt_that_was_not_stored_is_not_sent_again() -> None:
    with MadeUpServer(page=ROOM) as server:
        result = CliRunner().invoke(app, ["try", "--url", server.url, "--tokens", "20"])
        asked = server.asked
    assert result.exit_code == 1
    assert "was not stored" in result.stderr and "NOT PROVED" in result.stdout
    assert asked == 2, "the prompt, and the request before the metrics are read"


def test_an_address_without_a_server_is_refused_in_one_line() -> None:
    result = CliRunner().invoke(app, ["try", "--url", "http://[::1"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "no answer" in result.stderr and result.stderr.count("\n") == 1


def test_a_models_name_cannot_control_the_terminal() -> None:
    with MadeUpServer(page=ROOM, model="a\x1b[2J") as server:
        result = attempt(server)
    assert "model a\\x1b[2J" in result.stdout and "\x1b" not in result.stdout


def test_other_traffic_is_reported() -> None:
    with MadeUpServer(page=ROOM.replace("running 0", "running 3"), others=10) as server:
        (running, tokens) = found(server)["warnings"]
    assert running.startswith("3 other requests were running")
    assert tokens.startswith("20 prompt tokens of other requests")


@pytest.mark.parametrize(
    ("second_s", "text"),
    [
        (0.5, "4.0 times as fast"),
        (2.0, "1.0 times as fast"),
        (2.1, "1.0 times as fast"),
        (6.0, "slower: 3.0 times as long"),
    ],
)
def test_a_slower_second_time_is_called_slower(second_s: float, text: str) -> None:
    assert Tried("", "", 1, first_ttft_s=2.0, second_ttft_s=second_s).compared == text


@pytest.mark.parametrize("fails", [-1, TOKENS], ids=["models", "prompt"])
@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        ('{"error": {"message": "no such\\nmodel", "code": 503}}', "no such model"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Not Found"}', "Not Found"),
        ("", "Service Unavailable"),
        ("<p>", "<p>"),
    ],
)
def test_a_refusal_is_one_sentence(fails: int, refusal: str, why: str) -> None:
    with MadeUpServer(page=ROOM, fails=fails, refusal=refusal) as server:
        result = attempt(server)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(f": HTTP 503: {why}\n")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"metrics": False}, "HTTP 404"),
        ({}, "exports no vllm:nvmeof_"),
        ({"page": ROOM, "fails": TOKENS}, "HTTP 503: overloaded"),
    ],
)
def test_a_server_that_cannot_be_tried_is_refused_in_one_line(
    options: dict[str, Any], why: str
) -> None:
    with MadeUpServer(**options) as server:
        result = attempt(server)
    assert result.exit_code == 2
    assert why in result.stderr.splitlines()[-1]
