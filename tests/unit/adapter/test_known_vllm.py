# SPDX-License-Identifier: Apache-2.0
"""Known versions and signatures of vLLM; test_plugin.py runs whole vLLMs that are unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload import plugin
from vllm_nvmeof_offload.errors import ConfigError, IntegrationError
from vllm_nvmeof_offload.vllm_adapter import vllm_release


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1", True),
        ("0.33.1.dev12+g1234567", True),
        ("0.31.0", False),
        ("0.34.0rc1", False),
        ("0.330.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_a_version_is_known_by_its_first_two_numbers(
    monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    problem = vllm_release.unknown_version()
    assert (problem is None) == known
    assert vllm_release.release() == (version[:4] if known else "unknown")
    vllm_release.refuse_unknown(True)
    if problem is not None:
        assert problem.startswith(f"vLLM {version} is not known to this vllm-nvmeof-offload; use")
        assert all(release in problem for release in vllm_release.KNOWN)
        with pytest.raises(ConfigError, match=rf"^allow_unknown_vllm=False: vLLM {version}"):
            vllm_release.refuse_unknown(False)


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.33.0", "vLLM 0.33.0 is not as expected (no hook). --kv-transfer-config with "),
        ("0.34.0", "vLLM 0.34.0 is not known to this vllm-nvmeof-offload; use vLLM 0.32 or 0.33"),
    ],
)
def test_an_unsupported_vllm_gets_one_line_that_names_supported_versions(
    monkeypatch: pytest.MonkeyPatch, version: str, line: str
) -> None:
    def fail() -> None:
        raise IntegrationError("no hook")

    warnings: list[str] = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setattr(plugin, "_register", fail)
    monkeypatch.setattr(plugin, "_warned", False)
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *args: warnings.append(text % args))
    plugin.register()
    plugin.register()
    (only,) = warnings
    assert only.startswith(f"nvmeof backend not available: {line}")
    assert "(no hook)" in only and "\n" not in only


def _base(self: Any, job: int, source: str, fast: bool = False) -> None: ...
def _same(self: Any, job: int, source: str, fast: bool = False) -> None: ...
def _any_name(self: Any, job: int, source: str, **_: Any) -> None: ...
def _more(self: Any, job: int, source: str, fast: bool = False, x: int = 1) -> None: ...
def _fewer(self: Any, job: int) -> None: ...
def _without_fast(self: Any, job: int, source: str) -> None: ...
def _swapped(self: Any, source: str, job: int, fast: bool = False) -> None: ...
def _renamed(self: Any, job: int, origin: str, fast: bool = False) -> None: ...
def _demands_more(self: Any, job: int, source: str, fast: bool, x: int) -> None: ...


@pytest.mark.parametrize(
    ("ours", "accepted"),
    [
        (_same, True),
        (_any_name, True),
        (_more, True),
        (_fewer, False),
        (_without_fast, False),
        (_swapped, False),
        (_renamed, False),
        (_demands_more, False),
    ],
)
def test_a_method_of_ours_must_take_every_call_that_vllms_takes(
    ours: Callable[..., Any], accepted: bool
) -> None:
    assert vllm_release.accepts(ours, _base) == accepted
