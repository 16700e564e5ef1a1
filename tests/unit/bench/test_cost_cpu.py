# SPDX-License-Identifier: Apache-2.0
"""Waiting for quiet, with a made-up clock; the prompts of a round."""

from __future__ import annotations

import pytest
from vllm_nvmeof_bench.cost import (
    Settings,
    prompts_of,
    wait_until_quiet,
)
from vllm_nvmeof_bench.results import BenchError


class Machine:
    """A clock that only sleeping moves, and a server that works until `busy_until_s`."""

    def __init__(self, busy_until_s: float) -> None:
        self.now_s = 100.0
        self.busy_until_s = 100.0 + busy_until_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def cpu_s(self) -> float:
        return 7.0 + min(self.now_s, self.busy_until_s) - 100.0


@pytest.mark.parametrize(("busy_s", "waited_s"), [(0.0, 0.0), (0.3, 0.5), (2.0, 2.0)])
def test_a_server_is_quiet_when_its_cpu_time_stops_growing(busy_s: float, waited_s: float) -> None:
    machine = Machine(busy_s)
    assert wait_until_quiet(machine.cpu_s, machine.now, machine.sleep) == waited_s


def test_a_server_that_never_becomes_quiet_is_an_error() -> None:
    machine = Machine(1e9)
    with pytest.raises(BenchError, match="still uses 100% of a core"):
        wait_until_quiet(machine.cpu_s, machine.now, machine.sleep)


def test_prompts_are_the_same_for_every_arm_and_never_seen_before() -> None:
    settings = Settings()
    assert prompts_of(settings, "batch", 3) == prompts_of(settings, "batch", 3)
    seen = [
        tuple(prompt[:32])
        for case in ("single", "batch")
        for number in range(20)
        for prompt in prompts_of(settings, case, number)
    ]
    assert len(seen) == 20 * (1 + settings.batch_requests) == len(set(seen))
