# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: notes which test runs which line, or which test of each suite fails first,
under one of the simulator's mutants if wanted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

SUITES = {
    "unit": ["tests/unit"],
    "contract": ["tests/contract"],
    "faults": ["tests/faults"],
    "sim": ["tests/sim/test_simulator.py"],
}
#: For the build of the native module that has mutants, with none of them.
NO_MUTANT = "-"
_NOTED = pytest.StashKey[Any]()
_broken = ExitStack()


def suite_of(test: str) -> str:
    return next(suite for suite, places in SUITES.items() if test.startswith(tuple(places)))


class Played:
    """Runs the tests of a suite until one fails or its time is over. Those of the gate go first.

    Written down after every test: by suite how many ran, for how long, and which one failed.
    """

    def __init__(self, place: Path, limit_s: float) -> None:
        self._place, self._limit_s = place, limit_s
        self._suites: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from tests import gate

        suites = list(SUITES)
        items.sort(key=lambda item: (suites.index(suite_of(item.nodeid)), not gate.has(item)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        suite = self._suites.setdefault(suite_of(item.nodeid), {"tests": 0, "seconds": 0.0})
        if suite.get("killed_by") or suite.get("was_cut"):
            item.add_marker(pytest.mark.skip("its suite has ended"))
        elif suite["seconds"] > self._limit_s:
            suite["was_cut"] = True
            item.add_marker(pytest.mark.skip("its suite has ended"))
        else:
            suite["tests"] += 1
            self._write(running=item.nodeid)
        began_s = time.monotonic()
        done = yield
        suite["seconds"] = round(suite["seconds"] + time.monotonic() - began_s, 2)
        self._write()
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._suites[suite_of(report.nodeid)].setdefault("killed_by", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid:
            suite = self._suites.setdefault(suite_of(report.nodeid), {"tests": 0, "seconds": 0.0})
            suite.setdefault("killed_by", report.nodeid)

    def _write(self, **running: str) -> None:
        self._place.write_text(json.dumps(self._suites | running))


def pytest_configure(config: pytest.Config) -> None:
    if place := os.environ.get("NVMEOF_PLAYED"):
        played = Played(Path(place), float(os.environ["NVMEOF_LIMIT_S"]))
        config.pluginmanager.register(played)
    elif place := os.environ.get("NVMEOF_COVERAGE"):
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
    from tests.sim.mutants import NATIVE, broken, tests_build

    if name in {*NATIVE, NO_MUTANT}:
        _use(tests_build)
    if name != NO_MUTANT:
        _broken.enter_context(broken(name))


def _use(build: Any) -> None:
    """Let all modules that have taken classes of the native module have those of this build."""
    from vllm_nvmeof_offload.native import _tiers

    there = {id(value): name for name, value in vars(_tiers).items() if isinstance(value, type)}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if module is not _tiers else ():
            if id(value) in there:
                setattr(module, name, getattr(build, there[id(value)]))
