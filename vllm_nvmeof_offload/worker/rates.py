# SPDX-License-Identifier: Apache-2.0
"""How fast each target is: bytes that came through it over the time in which it was busy.

Busy means that at least one operation was with the engine, so that an idle hour does not make
a target look slow. The pipeline's thread alone calls; the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_nvmeof_offload.protocol import RateReport

__all__ = ["RateMeter"]

_PERIOD_S = 1.0
#: Less is no measurement: it goes on into the next period.
_BUSY_S_MIN = 0.05
#: Weight of the newest period.
_NEWEST = 0.5
_CHANGE_MIN = 0.1


@dataclass(slots=True)
class _Meter:
    """One target in one direction."""

    in_flight: int = 0
    busy_since_s: float = 0.0
    busy_s: float = 0.0
    done_bytes: int = 0
    rate: float = 0.0  # bytes per second; 0: not known
    told: float = 0.0

    def fold(self, now_s: float) -> bool:
        """Close a period; True if the rate differs from what was told."""
        if self.in_flight:
            self.busy_s += now_s - self.busy_since_s
            self.busy_since_s = now_s
        if self.busy_s >= _BUSY_S_MIN and (self.done_bytes or self.rate):
            newest = self.done_bytes / self.busy_s
            self.rate = self.rate + _NEWEST * (newest - self.rate) if self.rate else newest
            self.busy_s, self.done_bytes = 0.0, 0
        return abs(self.rate - self.told) > _CHANGE_MIN * self.told


class RateMeter:
    """Writes and reads of every target of one rank."""

    def __init__(self, rank: int, target_count: int, clock: Callable[[], float]) -> None:
        self._rank = rank
        self._clock = clock
        self._writes = [_Meter() for _ in range(target_count)]
        self._reads = [_Meter() for _ in range(target_count)]
        self._told_s = clock()

    def began(self, target: int, *, is_write: bool) -> None:
        """The engine has taken an operation."""
        meter = (self._writes if is_write else self._reads)[target]
        if not meter.in_flight:
            meter.busy_since_s = self._clock()
        meter.in_flight += 1

    def ended(self, target: int, done_bytes: int, *, is_write: bool) -> None:
        """An operation has its outcome; `done_bytes` is 0 if it failed."""
        meter = (self._writes if is_write else self._reads)[target]
        meter.in_flight -= 1
        meter.done_bytes += done_bytes
        if not meter.in_flight:
            meter.busy_s += self._clock() - meter.busy_since_s

    def take(self) -> list[RateReport]:
        """What has changed by more than a tenth; at most once a second."""
        now_s = self._clock()
        if now_s - self._told_s < _PERIOD_S:
            return []
        self._told_s = now_s
        reports = []
        for target, (write, read) in enumerate(zip(self._writes, self._reads, strict=True)):
            changed = [write.fold(now_s), read.fold(now_s)]
            if any(changed):
                write.told, read.told = write.rate, read.rate
                reports.append(RateReport(self._rank, target, write.rate, read.rate))
        return reports
