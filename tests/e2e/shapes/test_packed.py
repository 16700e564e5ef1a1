# SPDX-License-Identifier: Apache-2.0
"""The layout that the connector requests on a GPU: all layers of a block are contiguous."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.shapes.rig import Plan, Zygote, only_cpu_engine, play_back
from tests.e2e.shapes.test_answers import ASKED, check_all_loaded, whole_chunks

pytestmark = only_cpu_engine  # on a GPU: test_on_gpu.py
PACKED = "Using BLHNC KV cache layout"


def test_packed_blocks_are_loaded(zygote: Zygote, tmp_path: Path) -> None:
    """With the CPU's copies; the answers equal those of an engine with one tensor per layer."""
    plan = Plan("llama", [ASKED], {"enable_prefix_caching": False}, tmp_path, packed=True)
    lives = play_back(zygote, plan, "packed")
    check_all_loaded(lives, whole_chunks(ASKED, 64))
    for life in lives:
        assert PACKED in life.log
        assert "copies by host memcpy" in life.log


def test_the_engine_of_a_gpu_serves_over_a_stub(zygote: Zygote, tmp_path: Path) -> None:
    """Worker, registration, fences, tickets and wake-ups are as on a GPU; only CUDA is a stub."""
    plan = Plan(
        "llama",
        [ASKED],
        {"enable_prefix_caching": False},
        tmp_path / "pool",
        {"copy_backend": "auto"},
        {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        packed=True,
        stub_gpu=True,
    )
    lives = play_back(zygote, plan, "stub-gpu")
    check_all_loaded(lives, whole_chunks(ASKED, 64))
    for life in lives:
        assert PACKED in life.log
        assert "copies by auto on stub" in life.log
        assert "a STUB stands in for the GPU" in life.log
    # vLLM's own metrics count the moved bytes; stored and loaded bytes are equal.
    stored = lives[0].grown(0, "kv_offload_store_bytes")
    assert stored == lives[0].grown(1, "kv_offload_load_bytes") > 0
