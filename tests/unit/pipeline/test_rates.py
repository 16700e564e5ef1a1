# SPDX-License-Identifier: Apache-2.0
"""A target's rate is bytes over busy time, reported on change, at most four times per second.

The depth in flight decides how far that rate can be trusted.
"""

from __future__ import annotations

import pytest

from vllm_nvmeof_offload.units import MIB
from vllm_nvmeof_offload.worker.rates import RateMeter, saturating


class Meter:
    """A meter with a clock."""

    def __init__(self, targets: int = 1) -> None:
        self.now_s = 0.0
        self.meter = RateMeter(
            3, targets, lambda: self.now_s, saturating_reads=4, saturating_writes=4
        )

    def write(self, seconds: float, size: int, target: int = 0) -> None:
        began_s = self.meter.began(target, is_write=True)
        self.now_s += seconds
        self.meter.ended(target, size, began_s, self.now_s, is_write=True)

    def read(self, seconds: float, size: int, *, at_once: int, count: int = 1) -> None:
        """`count` times: so many reads together, each of so many bytes."""
        for _ in range(count):
            began = [self.meter.began(0, is_write=False) for _ in range(at_once)]
            self.now_s += seconds
            for began_s in began:
                self.meter.ended(0, size, began_s, self.now_s, is_write=False)

    def read_rate(self) -> float | None:
        """The rate that is reported now, or None."""
        reports = self.meter.take()
        return reports[-1].read_bytes_per_s if reports else None

    def rates(self) -> list[tuple[int, int, int]]:
        reports = self.meter.take()
        return [(r.target, round(r.write_bytes_per_s), round(r.read_bytes_per_s)) for r in reports]


def test_idle_time_does_not_count() -> None:
    bench = Meter()
    bench.write(0.5, 500)
    bench.now_s += 100.0
    assert bench.rates() == [(0, 1000, 0)]


def test_concurrent_operations_share_busy_time() -> None:
    bench = Meter()
    for _ in range(4):
        bench.meter.began(0, is_write=True)
    bench.now_s = 2.0
    for _ in range(4):
        bench.meter.ended(0, 100, 0.0, bench.now_s, is_write=True)
    assert bench.rates() == [(0, 200, 0)]


def test_directions_and_targets_are_metered_separately() -> None:
    bench = Meter(targets=2)
    bench.write(1.0, 100, target=1)
    bench.meter.began(1, is_write=False)
    bench.now_s += 1.0
    bench.meter.ended(1, 300, 1.0, bench.now_s, is_write=False)
    assert bench.rates() == [(1, 100, 300)]


def test_a_rate_is_reported_at_most_four_times_per_second_and_only_if_changed() -> None:
    bench = Meter()
    bench.write(0.2, 200)
    assert bench.rates() == []
    bench.write(0.1, 100)
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


def test_too_few_operations_in_too_short_a_time_are_no_measurement() -> None:
    bench = Meter()
    for _ in range(3):
        bench.write(0.01, 1000)
    bench.now_s = 2.0
    assert bench.rates() == []
    bench.write(0.01, 1000)
    bench.now_s += 1.0
    assert bench.rates() == [(0, 100_000, 0)], "four are"


def test_operations_in_flight_at_the_end_of_a_period_do_not_count_as_a_stall() -> None:
    """A target that completes most of its concurrent reads late in the second period."""
    bench = _known(1000)
    began = [bench.meter.began(0, is_write=False) for _ in range(4)]
    bench.now_s += 1.0
    bench.meter.ended(0, 250, began[0], bench.now_s, is_write=False)
    assert bench.read_rate() is None, "4 × 250 bytes a second, as it was"
    bench.now_s += 0.1
    for began_s in began[1:]:
        bench.meter.ended(0, 250, began_s, bench.now_s, is_write=False)
    bench.now_s += 0.2
    rate = bench.read_rate()
    assert rate is None or rate == pytest.approx(1000, rel=0.1)


def test_less_than_a_second_without_a_completion_is_no_measurement() -> None:
    bench = _known(1000)
    bench.meter.began(0, is_write=False)
    bench.now_s += 0.9
    assert bench.read_rate() is None
    bench.now_s += 0.3
    assert bench.read_rate() == 500


def _known(rate: int) -> Meter:
    """A meter that has seen this rate while the target was saturated by four reads."""
    bench = Meter()
    bench.read(1.0, rate // 4, at_once=4)
    assert bench.read_rate() == rate
    return bench


def test_a_saturated_target_moves_both_ways() -> None:
    for newest in (500, 2000):
        bench = _known(1000)
        bench.read(1.0, newest // 4, at_once=4)
        assert bench.read_rate() == (1000 + newest) / 2


def test_few_reads_do_not_make_a_target_look_slow() -> None:
    bench = _known(1000)
    bench.read(1.0, 300, at_once=1)  # a quarter of what it can do is what one in four may do
    assert bench.read_rate() is None
    bench.read(1.0, 300, at_once=2)
    assert bench.read_rate() is None


def test_few_reads_make_a_target_look_faster_than_it_was() -> None:
    bench = _known(1000)
    bench.read(1.0, 3000, at_once=1)
    assert bench.read_rate() == 2000


def test_few_reads_give_a_rate_while_none_is_known() -> None:
    bench = Meter()
    bench.read(1.0, 100, at_once=1)
    assert bench.read_rate() == 100
    bench.read(1.0, 250, at_once=4)
    assert bench.read_rate() == 550, "and a saturated target corrects it"


def test_single_reads_detect_a_target_that_became_slow() -> None:
    bench = _known(100_000)
    rates = []
    for _ in range(8):
        bench.now_s += 60.0
        bench.read(1.0, 2000, at_once=1)  # fifty times slower
        rates.append(bench.read_rate())
    known = [rate for rate in rates if rate is not None]
    assert known == sorted(known, reverse=True)
    assert 2000 <= known[-1] < 4 * 2000 * 1.1, "at most as fast as one read in four allows"


def test_failed_reads_cost_their_time() -> None:
    bench = _known(1000)
    bench.read(1.0, 0, at_once=1)
    assert bench.read_rate() == 500


def test_operations_in_flight_are_averaged_over_time() -> None:
    """Four reads for a tenth of the busy time, then one: hardly more than one."""
    bench = _known(1000)
    bench.read(0.5, 100, at_once=4)
    bench.read(0.5, 0, at_once=2)
    # 400 bytes in a second by three at a time: at most 400 × 4 / 3.
    assert bench.read_rate() == pytest.approx((1000 + 533.3) / 2, abs=0.1)


@pytest.mark.parametrize(
    ("in_flight_max", "slot_bytes", "operations"),
    [(64, 2 * MIB, 4), (64, 32 * MIB, 2), (128, 64 * 1024, 128), (3, 64 * 1024, 3), (1, MIB, 1)],
)
def test_the_saturation_depth_of_a_target(
    in_flight_max: int, slot_bytes: int, operations: int
) -> None:
    assert saturating(in_flight_max, slot_bytes) == operations


def test_time_until_a_completion_is_polled_does_not_count() -> None:
    bench = Meter()
    for _ in range(4):
        bench.meter.began(0, is_write=False)
    bench.now_s = 5.0
    for _ in range(4):
        bench.meter.ended(0, 100, 0.0, 0.5, is_write=False)
    assert bench.read_rate() == pytest.approx(800)
    bench.read(0.5, 100, at_once=4)
    bench.now_s += 1.0
    assert bench.read_rate() is None, "the same again; counted bytes stay counted"
