# SPDX-License-Identifier: Apache-2.0
"""A target's rate is bytes over busy time, reported on change, at most four times per second.

The depth in flight decides how far that rate can be trusted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.chunks import place_in
from vllm_nvmeof_offload.native import CacheGeometry, PythonLanes
from vllm_nvmeof_offload.protocol import NOWHERE, ChunkBatch, OpKind, Urgency

from .bench import machine_of

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


def _known(rate: int) -> Meter:
    """A meter that has seen this rate while the target was saturated by four reads."""
    bench = Meter(size=rate // 4)
    bench.read(1.0, at_once=4)
    assert bench.read_rate() == rate
    return bench


def test_operations_in_flight_are_averaged_over_time() -> None:
    """Four reads for half of the busy time, then two that fail."""
    bench = _known(1000)
    bench.read(1.25, at_once=4)
    bench.read(1.25, at_once=2, ok=False)
    # 400 bytes in a second by three at a time: at most 400 × 4 / 3.
    assert bench.read_rate() == pytest.approx((1000 + 533.3) / 2, abs=0.1)
