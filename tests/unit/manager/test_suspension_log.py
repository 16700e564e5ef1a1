# SPDX-License-Identifier: Apache-2.0
"""What is logged of a suspension: its beginning, once a minute that it lasts, its end."""

from __future__ import annotations

import logging

import pytest

from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.manager.requests import Suspension


class Told:
    """A suspension, its clock, and what it has logged."""

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
    told = Told(caplog)
    told.suspension.begin("my_monitor", ["a", "b"], known=False)
    (line,) = told.lines()
    assert line.startswith("my_monitor may have changed the weights")
    assert "2 requests with KV of before are not stored" in line
    assert "weights_never_change" in line
    told.now_s += 20
    told.suspension.ended("a")
    assert told.lines() == []
    told.suspension.ended("b")
    assert told.lines() == ["every request is stored again, 20 s after that call"]
    told.suspension.ended("b")
    assert told.lines() == []


def test_that_it_lasts_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog)
    told.suspension.begin("reload_weights", ["a"], known=True)
    assert "weights_never_change" not in told.lines()[0]
    for _ in range(125):
        told.suspension.log_while_it_lasts()
        told.now_s += 1
    first, second = told.lines()
    assert first.startswith("1 requests are still not stored, 60 s after a call")
    assert "120 s after" in second


def test_a_call_each_second_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog)
    for _ in range(150):
        told.suspension.begin("my_monitor", [], known=False)
        told.suspension.log_while_it_lasts()
        told.now_s += 1
    lines = told.lines()
    assert len(lines) == 3
    assert all("every request is stored" in line for line in lines)


def test_one_that_began_without_a_line_ends_without_one(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog)
    told.suspension.begin("my_monitor", [], known=False)
    told.lines()
    told.now_s += 1
    told.suspension.begin("my_monitor", ["a"], known=False)
    told.suspension.ended("a")
    assert told.lines() == []


def test_a_later_change_takes_the_place_of_an_earlier_one(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog)
    told.suspension.begin("my_monitor", ["a"], known=False)
    told.suspension.begin("my_monitor", ["b"], known=False)
    assert told.suspension.requests == {"b"}
