# SPDX-License-Identifier: Apache-2.0
"""The servers that a benchmark starts, on a CPU engine and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve import arms
from vllm_nvmeof_bench.serve.arms import BLOCK_TOKENS, Sizes, arms_of, offload_of, server_spec
from vllm_nvmeof_bench.serve.measure import TtftSettings
from vllm_nvmeof_bench.servers import engine

PLACE = Path("place")


def on(monkeypatch: pytest.MonkeyPatch, *, cpu: bool) -> Sizes:
    for module in (arms, engine):
        monkeypatch.setattr(module, "has_cpu_engine", lambda: cpu)
    return TtftSettings(lengths=(1000,), server_args="--a 'b c'").sizes()


def test_the_copy_backend_can_be_set_for_our_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = on(monkeypatch, cpu=False)
    plain, kernel = arms_of(["full", "full:kernel"], ())
    assert kernel.name == "full:kernel"
    assert kernel.about == f"{plain.about}; copies by kernel"
    offload, by_kernel = (offload_of(arm, sizes, PLACE) for arm in (plain, kernel))
    assert offload is not None and by_kernel is not None
    assert by_kernel.extra == {**offload.extra, "copy_backend": "kernel"}


@pytest.mark.parametrize("name", ["full:gds", "full:", "peer:dma", "none:dma"])
def test_other_arms_have_no_copy_backend(name: str) -> None:
    with pytest.raises(BenchError, match="may be followed by :dma or :kernel"):
        arms_of([name], ())


def test_on_a_gpu_servers_get_the_given_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = on(monkeypatch, cpu=False)
    (arm,) = arms_of(["peer"], ())
    spec = server_spec(arm, sizes, tmp_path, PLACE)
    assert (spec.dtype, spec.extra_args) == ("bfloat16", ("--a", "b c"))
    assert spec.offload is not None
    assert spec.offload.extra["spec_name"] == "TieringOffloadingSpec"
    assert "spec_module_path" not in spec.offload.extra, "vLLM's own, as it is"
    assert spec.offload.extra["cpu_bytes_to_use"] == sizes.staging_bytes("third")
    assert sizes.chunk_bytes == BLOCK_TOKENS * sizes.shape.kv_bytes_per_token // 2


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(BenchError, match=r"^--server-args \"--a 'b\": No closing quotation$"):
        TtftSettings(server_args="--a 'b").sizes()


def test_on_the_cpu_engine_the_model_is_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = on(monkeypatch, cpu=False).shape.parameters
    sizes = on(monkeypatch, cpu=True)
    (arm,) = arms_of(["peer"], ())
    spec = server_spec(arm, sizes, tmp_path, PLACE)
    assert spec.dtype == "float32"
    assert spec.offload is not None
    assert spec.offload.extra["spec_module_path"] == "vllm_nvmeof_bench.serve.peer"
    assert sizes.chunk_bytes == BLOCK_TOKENS * sizes.shape.kv_bytes_per_token
    assert 50 * sizes.shape.parameters < large
