# SPDX-License-Identifier: Apache-2.0
"""Servers on one target that quantize the same files differently do not share chunks.

The weights differ only by `--quantization-config`. They must neither share nor adopt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import LOADED

PROMPTS = rig.prompts(count=4)


def quantized(spec: ServerSpec, **more: Any) -> ServerSpec:
    config = json.dumps({"linear": "fp8_per_channel", **more})
    options = ("--quantization", "online", "--quantization-config", config)
    return replace(spec, dtype="bfloat16", extra_args=(*spec.extra_args, *options))


def mixed(spec: ServerSpec) -> ServerSpec:
    return quantized(spec, ignore=[r"re:.*layers\.[0-2]\..*"])


def tokens(server: Server) -> list[list[int]]:
    return [list(answer.tokens) for answer in rig.ask_and_settle(server, PROMPTS)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers of the weights with some layers left as they are."""
    with rig.start(mixed(rig.spec()), "share-quantized-reference") as server:
        return tokens(server)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    return rig.spec(tmp_path_factory.mktemp("quantized") / "pool", share="host")


@pytest.fixture(scope="module")
def first(spec: ServerSpec) -> Iterator[Server]:
    with rig.start(quantized(spec), "share-quantized-first") as server:
        yield server


def test_other_weights_of_the_same_files_are_not_shared(
    spec: ServerSpec, first: Server, expected: list[list[int]]
) -> None:
    before = tokens(first)
    assert before != expected, "the weights differ in some answer"
    with rig.start(mixed(spec), "share-quantized-second") as second:
        assert tokens(second) == expected
        assert rig.metrics(second).value("vllm:nvmeof_shared_entries") == 0
        assert rig.metrics(second).value(LOADED) == 0
    first.stop()
    with rig.start(quantized(spec), "share-quantized-again") as again:
        assert tokens(again) == before
        assert rig.metrics(again).value(LOADED) > 0, "the same command finds its own KV"
