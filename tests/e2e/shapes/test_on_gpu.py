# SPDX-License-Identifier: Apache-2.0
"""Tests of the parts that only a GPU has: its layouts and copies, model runner V2, CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from vllm_nvmeof_bench.servers.engine import has_cpu_engine

from tests.e2e.shapes.rig import Outcome, Plan, Zygote, play_back
from tests.e2e.shapes.test_answers import ASKED, check_all_loaded, whole_chunks
from tests.gpu.device import has_gpu
from vllm_nvmeof_offload.units import GIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here"),
    pytest.mark.skipif(has_cpu_engine(), reason="this vLLM is its CPU build"),
]
#: As vLLM logs them.
RUNNER = "Using V2 Model Runner"
LAYOUT = "Using {} KV cache layout"


def _check_all_loaded_as_requested(
    lives: tuple[Outcome, Outcome], backend: str, layout: str
) -> None:
    check_all_loaded(lives, whole_chunks(ASKED, 64))
    for life in lives:
        assert RUNNER in life.log
        assert LAYOUT.format(layout) in life.log
        assert f"copies by {backend} on " in life.log


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("dma", "BLHNC"), ("kernel", "BLHNC"), ("kernel", "LBHNC"), ("auto", "LBHNC")],
)
def test_tokens_come_back(zygote: Zygote, tmp_path: Path, backend: str, layout: str) -> None:
    """The connector requests BLHNC; LBHNC gives many small pieces."""
    env = {} if layout == "BLHNC" else {"VLLM_KV_CACHE_LAYOUT": layout}
    options = {"async_scheduling": True}
    plan = Plan("llama", [ASKED], options, tmp_path, {"copy_backend": backend}, env)
    lives = play_back(zygote, plan, f"gpu-{backend}-{layout}")
    _check_all_loaded_as_requested(lives, backend, layout)


def test_tokens_come_back_between_cuda_graphs(zygote: Zygote, tmp_path: Path) -> None:
    """vLLM captures CUDA graphs while a CPU tier of this size is still being registered."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    size_gib = min(24.0, psutil.virtual_memory().available / 4 / GIB)
    options = {
        "enforce_eager": False,
        "compilation_config": graphs,
        "kv_offloading_size": size_gib,
    }
    lives = play_back(zygote, Plan("llama", [ASKED], options, tmp_path), "gpu-graphs")
    _check_all_loaded_as_requested(lives, "auto", "BLHNC")
