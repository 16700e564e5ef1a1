# SPDX-License-Identifier: Apache-2.0
"""Windows that vLLM recomputes after a hit (bounded replay), on vLLM's own scheduler.

The made-up model in `replay_child` verifies the KV that it reads in every step.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.unit.adapter import run_child
from tests.unit.imported_vllm import ImportedVllm

pytestmark = pytest.mark.timeout(300)

#: Tokens of the made-up model's window, and of the whole chunks of a long prompt.
WINDOW, CHUNKS = 32, 96
NOTHING = {"cpu": 0, "pool": 0, "failed": 0, "replayed": 0, "preemptions": 0}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, imported_vllm: ImportedVllm) -> dict[str, Any]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_NVMEOF_")}
    small = {"num_hidden_layers": 1, "num_key_value_heads": 1}
    scratch = tmp_path_factory.mktemp("replay")
    return run_child("replay_child", scratch, env, run=imported_vllm.run, **small)


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        ("stored", {}),
        ("from the GPU", {"replayed": WINDOW}),
        ("from the CPU tier", {"cpu": CHUNKS, "replayed": WINDOW}),
        ("from the pool", {"pool": CHUNKS, "replayed": WINDOW}),
        ("after a failure", {"cpu": CHUNKS, "replayed": WINDOW}),
    ],
)
def test_a_hit_replays_its_window(found: dict[str, Any], case: str, counts: dict[str, int]) -> None:
    assert found[case] == {**NOTHING, **counts}


def test_a_hit_that_vllm_would_recompute_whole_is_not_loaded(found: dict[str, Any]) -> None:
    assert found["short, stored"] == found["no longer than the window"] == NOTHING


def test_a_failed_load_recomputes_the_request(found: dict[str, Any]) -> None:
    """vLLM has dropped the windows' blocks within the hit, so it cannot resume there."""
    assert found["failed"] == {**NOTHING, "pool": CHUNKS, "failed": CHUNKS}


def test_preempted_requests_replay_too(found: dict[str, Any]) -> None:
    assert found["two at once"]["preemptions"] > 0
    assert found["two at once"]["replayed"] > 0
