# SPDX-License-Identifier: Apache-2.0
"""Platforms without a copy engine, and missing packages of a GPU, are refused in one line."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.vllm_adapter.supported import refuse_platform


def platform(kind: str) -> SimpleNamespace:
    return SimpleNamespace(
        device_type=kind, is_cpu=lambda: kind == "cpu", is_cuda=lambda: kind == "cuda"
    )


def refused(kind: str) -> str:
    try:
        refuse_platform(platform(kind))
    except ConfigError as error:
        return str(error)
    return ""


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    def find_spec(name: str) -> object:
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(name)
        return None if name in missing else object()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_the_cpu_needs_no_gpu_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "cuda")
    assert refused("cpu") == ""


@pytest.mark.parametrize("kind", ["rocm", "xpu", "tpu"])
def test_platforms_without_a_copy_engine_are_refused(kind: str) -> None:
    error = refused(kind)
    assert error.startswith("--kv-offloading-backend='nvmeof': ")
    assert f"'{kind}'" in error and "NVIDIA GPUs" in error


def test_a_gpu_is_served_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    assert refused("cuda") == ""


@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_a_gpu_without_them_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    without(monkeypatch, missing)
    error = refused("cuda")
    assert "cuda-bindings" in error and "pip install 'vllm-nvmeof-offload[cuda]'" in error


def test_a_gpu_is_served_without_the_kernels_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "cuda.core")
    assert refused("cuda") == ""
