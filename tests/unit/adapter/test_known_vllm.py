# SPDX-License-Identifier: Apache-2.0
"""Known versions, signatures and capabilities of vLLM, and its front end. test_plugin.py runs whole
vLLMs that are unknown.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from vllm_nvmeof_offload import plugin
from vllm_nvmeof_offload.errors import ConfigError, IntegrationError
from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter.vllm_release import Capability, difference


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


def test_an_unknown_vllm_without_a_hook_gets_one_line_that_names_known_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise IntegrationError("no hook")

    warnings: list[str] = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.0"))
    monkeypatch.setattr(plugin, "_register", fail)
    monkeypatch.setattr(plugin, "_warned", False)
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *args: warnings.append(text % args))
    plugin.register()
    plugin.register()
    (only,) = warnings
    assert only.startswith("nvmeof backend not available: vLLM 0.34.0 is not known to this ")
    assert "use vLLM 0.32 or 0.33" in only and "(no hook)" in only and "\n" not in only


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


class Base:
    def __init__(self) -> None:
        self.made: int = 0


class Thing(Base):
    def call(self, job: int, source: str, fast: bool = False) -> None: ...
    def demanding(self, job: int, source: str, target: str) -> None: ...
    def named(self, job: int, *, urgent: bool) -> None: ...


@dataclass
class Row:
    number: int
    name: str = ""


class Pair(NamedTuple):
    left: int
    right: int = 0


@pytest.fixture(autouse=True)
def made_up() -> Iterator[None]:
    module: Any = ModuleType("made_up_vllm")
    module.Thing, module.Row, module.Pair = Thing, Row, Pair
    sys.modules["made_up_vllm"] = module
    yield
    del sys.modules["made_up_vllm"]


@pytest.mark.parametrize(
    "need",
    [
        "Thing",
        "Thing.call",
        "Thing.call(job, source)",
        "Thing.call(job, source, fast)",
        "Thing.call(job, source, fast=)",
        "Thing.named(job, urgent=)",
        "Thing has made call",
        "Row(number, name)",
        "Row(number=)",
        "Row has number name",
        "Pair has left right",
    ],
)
def test_a_need_is_met(need: str) -> None:
    assert difference(f"made_up_vllm:{need}") is None


@pytest.mark.parametrize(
    ("need", "said"),
    [
        ("Gone", "Gone is gone"),
        ("Thing.gone(job)", "Thing.gone is gone"),
        ("Thing.call(source, job)", "Thing.call(self, job: 'int', source: 'str', "),
        ("Thing.call(job)", "Thing.call(self, "),
        ("Thing.call(job, source, quick=)", "Thing.call(self, "),
        ("Thing.demanding(job, source)", "Thing.demanding(self, "),
        ("Thing.named(job)", "Thing.named(self, "),
        ("Thing has made other", "Thing.other is gone"),
        ("Row(name)", "Row(number: 'int', name: 'str' = '')"),
    ],
)
def test_what_differs_is_named(need: str, said: str) -> None:
    found = difference(f"made_up_vllm:{need}")
    assert found is not None and found.startswith(said)
    assert found.endswith(("is gone", "has other parameters"))


def test_a_module_that_is_gone_is_named() -> None:
    assert difference("no_such_vllm.base:Thing") == "no_such_vllm is gone"


def test_a_capability_names_each_difference() -> None:
    needs = "Thing.call(job, source)", "New.call(job)", "Gone"
    calls = Capability("calls", *(f"made_up_vllm:{need}" for need in needs))
    assert list(calls.differences()) == ["New.call is gone", "Gone is gone"]


def test_the_imported_vllm_has_every_indispensable_capability() -> None:
    assert list(vllm_release.missing()) == []
    assert len({one.name for one in vllm_release.REQUIRED}) == len(vllm_release.REQUIRED)


ENGINE = """
import sys, types
vllm = types.ModuleType("vllm")
vllm.envs = types.SimpleNamespace(VLLM_USE_RUST_FRONTEND={by_variable})
sys.modules["vllm"] = vllm
from vllm_nvmeof_offload.vllm_adapter.vllm_release import drops_connector_stats
print(drops_connector_stats())
"""
#: A front end, which starts the launcher of the engine.
FRONT_END = """
import subprocess, sys
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
subprocess.run([sys.argv[1], "-c", launcher, sys.argv[2]], check=True)
"""


@pytest.mark.parametrize(
    ("program", "by_variable", "dropped"),
    [
        ("python-frontend", False, False),
        ("python-frontend", True, True),
        ("vllm-rs", False, True),
    ],
)
def test_the_rust_front_end_is_known_by_its_variable_or_its_process(
    tmp_path: Path, program: str, by_variable: bool, dropped: bool
) -> None:
    front_end = tmp_path / program
    front_end.symlink_to(os.path.realpath(sys.executable))
    engine = ENGINE.format(by_variable=by_variable)
    done = subprocess.run(
        [str(front_end), "-c", FRONT_END, sys.executable, engine],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(dropped)]
