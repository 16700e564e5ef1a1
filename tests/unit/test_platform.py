# SPDX-License-Identifier: Apache-2.0
"""Platforms without a copy engine, and missing packages of a GPU, are refused in one line."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from vllm_nvmeof_offload.errors import ConfigError, install_extra
from vllm_nvmeof_offload.vllm_adapter.supported import refuse_platform

ROOT = Path(__file__).parents[2]


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
    assert re.search(r"need cuda-bindings: pip install '?cuda-bindings.* 'nvidia-ml-py", error)


def test_every_extra_can_be_installed_without_this_packages_name() -> None:
    """No package index has this package, so `NAME[extra]` would fetch somebody else's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, wanted in project["optional-dependencies"].items():
        command, verb, *packages = shlex.split(install_extra(extra))
        assert (command, verb) == ("pip", "install")
        assert [Requirement(one) for one in packages] == [Requirement(one) for one in wanted]
    listed = (ROOT / "docs" / "install.md").read_text()
    assert all(f"`[{extra}]`" in listed for extra in project["optional-dependencies"])
    shown = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    shown += [*ROOT.glob("vllm_nvmeof_offload/**/*.py"), *ROOT.glob("bench/**/*.py")]
    assert [path.name for path in shown if f"{project['name']}[" in path.read_text()] == []


def test_a_gpu_is_served_without_the_kernels_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "cuda.core")
    assert refused("cuda") == ""
