# SPDX-License-Identifier: Apache-2.0
"""A target's rate is bytes over busy time, reported on change, at most four times per second.

The depth in flight decides how far that rate can be trusted.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.chunks import place_in
from vllm_nvmeof_offload.native import CacheGeometry, PythonLanes
from vllm_nvmeof_offload.protocol import NOWHERE, ChunkBatch, OpKind, Urgency
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import MIB
from vllm_nvmeof_offload.worker import pipeline
from vllm_nvmeof_offload.worker.pipeline import TransferLimits, TransferPipeline

from .bench import FakeCopy, FakeIo, machine_of

_KINDS = list(OpKind)
_OK, _IO_ERROR = 0, 1
SLOTS = 64


class Meter:
    """A machine with a clock, whose chunks have `size` bytes; four at once saturate a target."""

    def __init__(self, targets: int = 1, size: int = 100) -> None:
        self.now_s = 0.0
        self._targets = targets
        self._op = 0
        self._room = 0
        self._taken: list[Any] = []
        self._lanes = PythonLanes(
            room=lambda: (self._room - len(self._taken),) * 2,
            submit=self._taken.extend,
            cancel=lambda token: False,
            poll=list,
        )
        self.machine = machine_of(
            self._lanes,
            cache_slots=1,
            stream_slots=SLOTS,
            slot_bytes=size,
            header_bytes=size,
            group_bytes=[0],
            targets=targets,
            reads_max=SLOTS,
            writes_max=SLOTS,
            read_deadline_ns=10**15,
            write_deadline_ns=10**15,
            saturating_reads=4,
            saturating_writes=4,
            retryable=[False],
        )
        self._begin(OpKind.STORE, cache=0, place=NOWHERE)
        self._copied()

    def began(self, target: int = 0, *, is_write: bool = False) -> int:
        """The engine gets a read or write; its token."""
        kind, cache = (OpKind.WRITE, 0) if is_write else (OpKind.LOAD, -1)
        self._begin(kind, cache, place_in(target, self._targets))
        self._advance(room=1)
        (op,) = self._taken
        return int(op.token)

    def _advance(self, room: int = 0) -> None:
        self._room = room
        self._taken.clear()
        while self.machine.advance(0.0):
            self.machine.take_health()

    def ended(self, *tokens: int, ok: bool = True, ended_s: float | None = None) -> None:
        """The engine has ended these, now or earlier."""
        code, ended_s = _OK if ok else _IO_ERROR, self.now_s if ended_s is None else ended_s
        self.machine.set_time(self.now_s)
        self.machine.ended([(token, code, 0, ended_s, -1, True) for token in tokens])
        self._copied()

    def write(self, seconds: float, count: int = 1, target: int = 0) -> None:
        """One after another, in so many seconds."""
        for _ in range(count):
            token = self.began(target, is_write=True)
            self.now_s += seconds / count
            self.ended(token)

    def read(self, seconds: float, *, at_once: int, count: int = 1, ok: bool = True) -> None:
        """`count` times, in so many seconds: so many reads together."""
        for _ in range(count):
            tokens = [self.began() for _ in range(at_once)]
            self.now_s += seconds / count
            self.ended(*tokens, ok=ok)

    def read_rate(self) -> float | None:
        """The rate that is reported now, or None."""
        self.machine.set_time(self.now_s)
        rates = self.machine.take_rates()
        return round(rates[-1][2], 3) if rates else None

    def rates(self) -> list[tuple[int, int, int]]:
        """Target, write rate, read rate."""
        self.machine.set_time(self.now_s)
        return [(at, round(write), round(read)) for at, write, read in self.machine.take_rates()]

    def _begin(self, kind: OpKind, cache: int, place: int) -> None:
        """A job of one chunk, always the same one."""
        self._op += 1
        self.machine.set_time(self.now_s)
        batch = ChunkBatch.of(
            b"key",
            np.array([1], np.uint64),
            np.array([cache], np.int32),
            np.array([place], np.int64),
            np.zeros(1, np.uint8),
        )
        if kind is OpKind.WRITE:
            self.machine.begin(self._op, _KINDS.index(kind), int(Urgency.WRITE), batch)
        else:
            blocks = np.zeros(1, np.int32), [1], [0]
            transfer = self._op, kind is OpKind.STORE, batch, *blocks
            self.machine.begin_transfers(CacheGeometry([([(1, 1, 1, 1)], 1)]), [transfer], 0)

    def _copied(self) -> None:
        self._advance()
        for number, *_ in self.machine.take_copies(0):
            self.machine.copied(number, _OK, 0)
        self.machine.take_reports()
        self.machine.take_finished()


def test_idle_time_does_not_count() -> None:
    bench = Meter()
    bench.write(0.1)
    bench.now_s += 100.0
    assert bench.rates() == [(0, 1000, 0)]


def test_concurrent_operations_share_busy_time() -> None:
    bench = Meter()
    tokens = [bench.began(is_write=True) for _ in range(4)]
    bench.now_s = 2.0
    bench.ended(*tokens)
    assert bench.rates() == [(0, 200, 0)]


def test_directions_and_targets_are_metered_separately() -> None:
    bench = Meter(targets=2)
    bench.write(1.0, target=1)
    token = bench.began(1)
    bench.now_s += 1 / 3
    bench.ended(token)
    assert bench.rates() == [(1, 100, 300)]


def test_a_rate_is_reported_at_most_four_times_per_second_and_only_if_changed() -> None:
    bench = Meter()
    bench.write(0.2, count=2)
    assert bench.rates() == []
    bench.write(0.1)
    assert bench.rates() == [(0, 1000, 0)]
    bench.write(1.5, count=16)
    assert bench.rates() == [], "three per cent"
    bench.write(1.5, count=45)
    ((_, rate, _),) = bench.rates()
    assert 1500 < rate < 3000, "half of the newest"


def test_a_target_that_stalls_gets_slower() -> None:
    bench = Meter()
    bench.write(1.0, count=10)
    assert bench.rates() == [(0, 1000, 0)]
    bench.began(is_write=True)
    rates = []
    for _ in range(3):
        bench.now_s += 2.0
        rates += bench.rates()
    assert [rate for _, rate, _ in rates] == [500, 250, 125]


def test_too_few_operations_in_too_short_a_time_are_no_measurement() -> None:
    bench = Meter()
    bench.write(0.03, count=3)
    bench.now_s = 2.0
    assert bench.rates() == []
    bench.write(0.01)
    bench.now_s += 1.0
    assert bench.rates() == [(0, 10_000, 0)], "four are"


def test_operations_in_flight_at_the_end_of_a_period_do_not_count_as_a_stall() -> None:
    """A target that completes most of its concurrent reads late in the second period."""
    bench = _known(1000)
    first, *others = [bench.began() for _ in range(4)]
    bench.now_s += 1.0
    bench.ended(first)
    assert bench.read_rate() is None, "4 × 250 bytes a second, as it was"
    bench.now_s += 0.1
    bench.ended(*others)
    bench.now_s += 0.2
    rate = bench.read_rate()
    assert rate is None or rate == pytest.approx(1000, rel=0.1)


def test_less_than_a_second_without_a_completion_is_no_measurement() -> None:
    bench = _known(1000)
    bench.began()
    bench.now_s += 0.9
    assert bench.read_rate() is None
    bench.now_s += 0.3
    assert bench.read_rate() == 500


def _known(rate: int) -> Meter:
    """A meter that has seen this rate while the target was saturated by four reads."""
    bench = Meter(size=rate // 4)
    bench.read(1.0, at_once=4)
    assert bench.read_rate() == rate
    return bench


def test_a_saturated_target_moves_both_ways() -> None:
    for newest in (500, 2000):
        bench = _known(1000)
        bench.read(1000 / newest, at_once=4)
        assert bench.read_rate() == (1000 + newest) / 2


def test_few_reads_do_not_make_a_target_look_slow() -> None:
    bench = _known(1000)
    bench.read(250 / 300, at_once=1)  # a quarter of what it can do is what one in four may do
    assert bench.read_rate() is None
    bench.read(250 / 300, at_once=2)
    assert bench.read_rate() is None


def test_few_reads_make_a_target_look_faster_than_it_was() -> None:
    bench = _known(1000)
    bench.read(1.0, at_once=1, count=12)
    assert bench.read_rate() == 2000


def test_few_reads_give_a_rate_while_none_is_known() -> None:
    bench = Meter()
    bench.read(1.0, at_once=1)
    assert bench.read_rate() == 100
    bench.read(0.4, at_once=4)
    assert bench.read_rate() == 550, "and a saturated target corrects it"


def test_single_reads_detect_a_target_that_became_slow() -> None:
    bench = _known(100_000)
    rates = []
    for _ in range(8):
        bench.now_s += 60.0
        bench.read(12.5, at_once=1)  # 2000 bytes a second: fifty times slower
        rates.append(bench.read_rate())
    known = [rate for rate in rates if rate is not None]
    assert known == sorted(known, reverse=True)
    assert 2000 <= known[-1] < 4 * 2000 * 1.1, "at most as fast as one read in four allows"


def test_failed_reads_cost_their_time() -> None:
    bench = _known(1000)
    bench.read(1.0, at_once=1, ok=False)
    assert bench.read_rate() == 500


def test_operations_in_flight_are_averaged_over_time() -> None:
    """Four reads for half of the busy time, then two that fail."""
    bench = _known(1000)
    bench.read(1.25, at_once=4)
    bench.read(1.25, at_once=2, ok=False)
    # 400 bytes in a second by three at a time: at most 400 × 4 / 3.
    assert bench.read_rate() == pytest.approx((1000 + 533.3) / 2, abs=0.1)


@pytest.mark.parametrize(
    ("in_flight_max", "slot_bytes", "operations"),
    [(64, 2 * MIB, 4), (64, 32 * MIB, 2), (128, 64 * 1024, 128), (3, 64 * 1024, 3), (1, MIB, 1)],
)
def test_the_saturation_depth_of_a_target(
    in_flight_max: int, slot_bytes: int, operations: int
) -> None:
    limits = TransferLimits(
        group_bytes=(1,), reads_in_flight_max=in_flight_max, writes_in_flight_max=in_flight_max
    )
    staging = StagingMap(0, slot_bytes, 1, SLOTS * 4)
    with mock.patch.object(pipeline, "Machine") as made:
        TransferPipeline(staging, FakeCopy(), FakeIo(), limits)
    io = made.call_args.args[0].io
    assert (io.saturating_reads, io.saturating_writes) == (operations, operations)


def test_time_until_a_completion_is_polled_does_not_count() -> None:
    bench = Meter()
    tokens = [bench.began() for _ in range(4)]
    bench.now_s = 5.0
    bench.ended(*tokens, ended_s=0.5)
    assert bench.read_rate() == pytest.approx(800)
    bench.read(0.5, at_once=4)
    bench.now_s += 1.0
    assert bench.read_rate() is None, "the same again; counted bytes stay counted"
