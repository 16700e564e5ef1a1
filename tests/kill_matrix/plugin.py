# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: notes which test runs which line, or runs the tests under one of the
simulator's mutants."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

_NOTED = pytest.StashKey[Any]()
_broken = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    if place := os.environ.get("NVMEOF_COVERAGE"):
        import coverage

        noted = coverage.Coverage(
            data_file=place, data_suffix=True, source_pkgs=["vllm_nvmeof_offload"]
        )
        noted.start()
        config.stash[_NOTED] = noted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    noted = item.config.stash.get(_NOTED, None)
    if noted is not None:
        noted.switch_context(item.nodeid)
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    _broken.close()
    noted = config.stash.get(_NOTED, None)
    if noted is not None:
        noted.stop()
        noted.save()


def pytest_collection_finish() -> None:
    name = os.environ.get("NVMEOF_MUTANT")
    if not name:
        return
    from tests.sim import test_mutants
    from tests.sim.mutants import NATIVE, broken, tests_build

    assert test_mutants  # importing it registers the mutants
    if name in NATIVE:
        _use(tests_build)
    _broken.enter_context(broken(name))


def _use(build: Any) -> None:
    """Let all modules that have taken a class of the native module have that of this build."""
    from vllm_nvmeof_offload.native import _tiers

    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if module is not _tiers else ():
            for native in ("Tiers", "Foreign", "Machine"):
                if value is getattr(_tiers, native):
                    setattr(module, name, getattr(build, native))
