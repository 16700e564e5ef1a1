# SPDX-License-Identifier: Apache-2.0
"""Needs of capabilities, against made-up modules, and the imported vLLM's capabilities."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter.vllm_release import Capability, difference


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


def test_the_first_form_that_fits_is_taken_and_else_the_closest_one_is_named() -> None:
    new, old = "made_up_vllm:New.call(job)", "made_up_vllm:Thing.call(job, source)"
    both = Capability("calls", {"new": (new,), "old": (old,)})
    assert both.form == "old" and both.take() is Thing.call
    worse = ("made_up_vllm:Gone", "made_up_vllm:Thing.demanding(job)")
    neither = Capability("calls", {"new": worse, "old": (new,)})
    assert neither.form is None and neither.take() is None
    assert list(neither.differences()) == ["New.call is gone"]


def test_the_imported_vllm_has_every_indispensable_capability() -> None:
    assert list(vllm_release.missing()) == []
    assert vllm_release.DEVICE_BLOCKS.form == vllm_release.BLOCK_IDS
    assert len({one.name for one in vllm_release.REQUIRED}) == len(vllm_release.REQUIRED)
