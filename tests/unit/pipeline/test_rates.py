# SPDX-License-Identifier: Apache-2.0
"""A target's rate is bytes over busy time, told when it has changed, at most once a second."""

from __future__ import annotations

from vllm_nvmeof_offload.worker.rates import RateMeter


class Meter:
    """A meter with a clock."""

    def __init__(self, targets: int = 1) -> None:
        self.now_s = 0.0
        self.meter = RateMeter(3, targets, lambda: self.now_s)

    def write(self, seconds: float, size: int, target: int = 0) -> None:
        self.meter.began(target, is_write=True)
        self.now_s += seconds
        self.meter.ended(target, size, is_write=True)

    def rates(self) -> list[tuple[int, int, int]]:
        reports = self.meter.take()
        return [(r.target, round(r.write_bytes_per_s), round(r.read_bytes_per_s)) for r in reports]


def test_idle_time_does_not_count() -> None:
    bench = Meter()
    bench.write(0.5, 500)
    bench.now_s += 100.0
    assert bench.rates() == [(0, 1000, 0)]


def test_operations_at_the_same_time_share_it() -> None:
    bench = Meter()
    for _ in range(4):
        bench.meter.began(0, is_write=True)
    bench.now_s = 2.0
    for _ in range(4):
        bench.meter.ended(0, 100, is_write=True)
    assert bench.rates() == [(0, 200, 0)]


def test_directions_and_targets_are_apart() -> None:
    bench = Meter(targets=2)
    bench.write(1.0, 100, target=1)
    bench.meter.began(1, is_write=False)
    bench.now_s += 1.0
    bench.meter.ended(1, 300, is_write=False)
    assert bench.rates() == [(1, 100, 300)]


def test_told_at_most_once_a_second_and_only_if_changed() -> None:
    bench = Meter()
    bench.write(0.9, 900)
    assert bench.rates() == []
    bench.write(0.2, 200)
    assert bench.rates() == [(0, 1000, 0)]
    bench.write(1.5, 1600)
    assert bench.rates() == [], "three per cent"
    bench.write(1.5, 4500)
    ((_, rate, _),) = bench.rates()
    assert 1500 < rate < 3000, "half of the newest"


def test_a_target_that_stalls_gets_slower() -> None:
    bench = Meter()
    bench.write(1.0, 1000)
    assert bench.rates() == [(0, 1000, 0)]
    bench.meter.began(0, is_write=True)
    rates = []
    for _ in range(3):
        bench.now_s += 2.0
        rates += bench.rates()
    assert [rate for _, rate, _ in rates] == [500, 250, 125]


def test_too_short_a_time_is_no_measurement() -> None:
    bench = Meter()
    bench.write(0.01, 1000)
    bench.now_s = 2.0
    assert bench.rates() == []
