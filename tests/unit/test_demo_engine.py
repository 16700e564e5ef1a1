# SPDX-License-Identifier: Apache-2.0
"""Servers are started for the engine that the installed vLLM has."""

from __future__ import annotations

import itertools
import sys
from dataclasses import fields
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_nvmeof_bench.demo.workload import model_shape
from vllm_nvmeof_bench.servers import engine
from vllm_nvmeof_bench.servers.server import OffloadSpec, ServerSpec

from tests.e2e.servers import llm_options
from tests.e2e.shapes.rig import Plan


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def answer(name: str) -> str:
        assert name == "vllm"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", answer)


@pytest.mark.parametrize(
    ("version", "is_cpu"), [("0.32.0+cpu", True), ("0.33.0", False), (None, False)]
)
def test_the_version_names_the_engine(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_cpu: bool
) -> None:
    installed(monkeypatch, version)
    assert engine.has_cpu_engine() is is_cpu


def test_a_build_for_gpus_gets_no_cpu_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")  # as the Makefile says it to everything
    installed(monkeypatch, "0.33.0")
    env = ServerSpec(tmp_path, 64, 8, env={"X": "y"}).environment()
    assert not {name for name in env if name.startswith(("VLLM_TARGET", "VLLM_CPU"))}
    assert (env["TRITON_F32_DEFAULT"], env["HF_HUB_OFFLINE"], env["X"]) == ("ieee", "1", "y")


def test_a_build_for_cpus_gets_its_memory_and_its_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    installed(monkeypatch, "0.32.0+cpu")
    env = ServerSpec(tmp_path, 64, 8, cores_reserved=3).environment()
    assert (env["VLLM_TARGET_DEVICE"], env["VLLM_CPU_NUM_OF_RESERVED_CPU"]) == ("cpu", "3")
    assert "TRITON_F32_DEFAULT" not in env


def test_a_vllm_without_a_script_is_started_by_its_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = ServerSpec(tmp_path, 64, 8).command(80)
    assert command[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    (tmp_path / "vllm").touch()
    command = ServerSpec(tmp_path, 64, 8).command(80)
    assert command[:2] == [str(tmp_path / "vllm"), "serve"]


def test_a_gpu_gets_a_model_that_takes_it_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0+cpu")
    small = model_shape()
    installed(monkeypatch, "0.33.0")
    large = model_shape()
    assert large.parameters > 10 * small.parameters
    assert large.kv_bytes_per_token == small.kv_bytes_per_token, "the tiers' sizes are the same"


def _options(command: list[str]) -> dict[str, object]:
    """The options of a command line, named as the arguments of `LLM`."""
    pairs = itertools.pairwise(command)
    return {name[2:].replace("-", "_"): value for name, value in pairs if name.startswith("--")}


@pytest.mark.parametrize("version", ["0.33.0", "0.32.0+cpu"])
def test_engines_on_a_gpu_do_not_measure_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    installed(monkeypatch, version)
    spec = ServerSpec(tmp_path, 64, 8, offload=OffloadSpec(0.25))
    wanted = engine.engine_memory()
    assert set(wanted) == (
        {"kv_cache_memory_bytes", "gpu_memory_utilization"} if version == "0.33.0" else set()
    )
    for found in (_options(spec.command(80)), llm_options(spec), Plan("llama").arguments()):
        about_memory = {name: found[name] for name in found if "memory" in name}
        assert about_memory.keys() == wanted.keys()
        assert all(float(str(about_memory[name])) == wanted[name] for name in wanted)
        assert "num_gpu_blocks_override" in found, "vLLM would take the 2 GiB for real"


def test_vllm_knows_the_arguments_about_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils").EngineArgs
    installed(monkeypatch, "0.33.0")
    assert engine.engine_memory().keys() <= {one.name for one in fields(arguments)}


class OnCuda:
    """vLLM's platform, answering as one of CUDA with an H100."""

    def __init__(self, real: object) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self, device_id: int = 0) -> object:
        from vllm.platforms.interface import DeviceCapability

        return DeviceCapability(9, 0)


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed here")
def test_vllm_s_sampler_on_a_gpu_does_without_flashinfer_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    monkeypatch.setattr(sampler, "current_platform", OnCuda(sampler.current_platform))
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        sampler.flashinfer_sampler_supported()
    installed(monkeypatch, "0.33.0")
    for name, value in engine.engine_environment().items():
        monkeypatch.setenv(name, value)
    assert sampler.flashinfer_sampler_supported() is False


def test_where_flashinfer_is_installed_vllm_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    installed(monkeypatch, "0.33.0")
    monkeypatch.setattr(engine, "find_spec", lambda name: object())
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine.engine_environment()
    installed(monkeypatch, "0.32.0+cpu")
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine.engine_environment()
