# SPDX-License-Identifier: Apache-2.0
"""The log lines of a suspension: its start, one per minute while it lasts, its end."""

from __future__ import annotations

import logging

import pytest

from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.manager.requests import Suspension


class LogRig:
    """A suspension, its clock and its log lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, LOGGER_NAME)
        self.now_s = 1000.0
        self.suspension = Suspension(lambda: self.now_s)
        self._caplog = caplog

    def lines(self) -> list[str]:
        lines = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return lines


def test_beginning_and_end_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    rig.suspension.begin("my_monitor", ["a", "b"], known=False)
    (line,) = rig.lines()
    assert line.startswith("my_monitor may have changed the weights")
    assert "2 requests with older KV are not stored" in line
    assert "weights_never_change" in line
    rig.now_s += 20
    rig.suspension.ended("a")
    assert rig.lines() == []
    rig.suspension.ended("b")
    assert rig.lines() == ["every request is stored again, 20 s after that call"]
    rig.suspension.ended("b")
    assert rig.lines() == []


def test_a_lasting_suspension_is_logged_once_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    rig.suspension.begin("reload_weights", ["a"], known=True)
    assert "weights_never_change" not in rig.lines()[0]
    for _ in range(125):
        rig.suspension.log_while_it_lasts()
        rig.now_s += 1
    first, second = rig.lines()
    assert first.startswith("1 requests are still not stored, 60 s after a call")
    assert "120 s after" in second


def test_repeated_calls_are_logged_once_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    for _ in range(150):
        rig.suspension.begin("my_monitor", [], known=False)
        rig.suspension.log_while_it_lasts()
        rig.now_s += 1
    lines = rig.lines()
    assert len(lines) == 3
    assert all("every request is stored" in line for line in lines)


def test_a_suspension_that_began_unlogged_ends_unlogged(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    rig.suspension.begin("my_monitor", [], known=False)
    rig.lines()
    rig.now_s += 1
    rig.suspension.begin("my_monitor", ["a"], known=False)
    rig.suspension.ended("a")
    assert rig.lines() == []


def test_a_later_change_replaces_an_earlier_one(caplog: pytest.LogCaptureFixture) -> None:
    rig = LogRig(caplog)
    rig.suspension.begin("my_monitor", ["a"], known=False)
    rig.suspension.begin("my_monitor", ["b"], known=False)
    assert rig.suspension.requests == {"b"}
