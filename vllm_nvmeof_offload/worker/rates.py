# SPDX-License-Identifier: Apache-2.0
"""Measures transfers: the rate of each target, and sums for metrics. The pipeline's thread only.

A target's rate is measured while operations are with the engine: bytes per second are the
operations in flight, times the bytes of each, over the time that each took (Little's law). So
operations still under way when a period ends are not counted as idle time, and an idle hour does
not count. One operation at a time measures latency, not bandwidth. An unsaturated period
therefore gives two bounds: the target can do what it did, and, if `n` operations were in flight
where `s` saturate it, at most about `s / n` times as much. The rate moves towards the nearer of
these two bounds, and not at all between them; in a saturated period they are one. So few reads do
not make a target look slow, and a target that has become slow is noticed even if it is hardly
used any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import RateReport
from vllm_nvmeof_offload.units import MIB

_PERIOD_S = 0.25
#: Less than both of these is no measurement: it goes on into the next period.
_BUSY_S_MIN = 0.05
_ENDED_MIN = 4
#: After this much time in which nothing ended, the rate that was measured is that nothing came.
_STALL_S = 1.0
#: Weight of the newest period.
_NEWEST = 0.5
_CHANGE_MIN = 0.1
#: This much in flight at a target saturates it: 100 Gb/s × 0.6 ms. One operation never does.
_SATURATING_BYTES = 8 * MIB
_SATURATING_OPS_MIN = 2


def saturating(in_flight_max: int, slot_bytes: int) -> int:
    """Operations on whole slots that saturate a target; its bound does, by definition."""
    enough = max(_SATURATING_OPS_MIN, -(-_SATURATING_BYTES // slot_bytes))
    return min(in_flight_max, enough)


@dataclass(slots=True)
class _Meter:
    """One target in one direction."""

    saturating: int  # operations in flight
    in_flight: int = 0
    counted_until_s: float = 0.0
    busy_s: float = 0.0
    operation_s: float = 0.0  # operations in flight × seconds
    ended: int = 0
    ended_s: float = 0.0  # the sum of their times
    done_bytes: int = 0
    rate: float = 0.0  # bytes per second; 0: not known

    def count(self, now_s: float) -> None:
        """Count the time since the last call, before anything changes."""
        passed_s = max(0.0, now_s - self.counted_until_s)
        if self.in_flight:
            self.busy_s += passed_s
            self.operation_s += passed_s * self.in_flight
        self.counted_until_s += passed_s

    def fold(self, now_s: float) -> float:
        """Close a period if it is a measurement; return the rate."""
        self.count(now_s)
        if self._is_measurement:
            in_flight_mean = self.operation_s / self.busy_s
            seen = in_flight_mean * self.done_bytes / self.ended_s if self.ended_s else 0.0
            if not self.rate:
                self.rate = seen
            most = seen * max(1.0, self.saturating / in_flight_mean)
            self.rate += _NEWEST * (min(max(self.rate, seen), most) - self.rate)
            self.busy_s, self.operation_s = 0.0, 0.0
            self.ended, self.ended_s, self.done_bytes = 0, 0.0, 0
        return self.rate

    @property
    def _is_measurement(self) -> bool:
        if not self.ended:
            return bool(self.rate) and self.busy_s >= _STALL_S
        enough = self.busy_s >= _BUSY_S_MIN or self.ended >= _ENDED_MIN
        return bool(enough and self.busy_s and (self.done_bytes or self.rate))


def _differ(reported: tuple[float, float], now: tuple[float, float]) -> bool:
    pairs = zip(reported, now, strict=True)
    return any(abs(new - old) > _CHANGE_MIN * old for old, new in pairs)


class RateMeter:
    """Rates of writes and reads of every target of one rank."""

    def __init__(
        self,
        rank: int,
        target_count: int,
        clock: Callable[[], float],
        *,
        saturating_reads: int,
        saturating_writes: int,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._meters = {
            True: [_Meter(saturating_writes) for _ in range(target_count)],
            False: [_Meter(saturating_reads) for _ in range(target_count)],
        }
        self._reported = [(0.0, 0.0)] * target_count
        self._taken_s = clock()

    def began(self, target: int, *, is_write: bool) -> float:
        """Count an operation that the engine has taken; return the time."""
        meter = self._meters[is_write][target]
        now_s = self._clock()
        meter.count(now_s)
        meter.in_flight += 1
        return now_s

    def ended(
        self, target: int, done_bytes: int, began_s: float, ended_s: float, *, is_write: bool
    ) -> None:
        """Count an operation that has its outcome; `done_bytes` is 0 if it failed."""
        meter = self._meters[is_write][target]
        meter.count(ended_s)
        meter.in_flight -= 1
        meter.ended += 1
        meter.ended_s += max(0.0, ended_s - began_s)
        meter.done_bytes += done_bytes

    def take(self) -> list[RateReport]:
        """Return the rates that changed by more than a tenth; at most once per period."""
        now_s = self._clock()
        if now_s - self._taken_s < _PERIOD_S:
            return []
        self._taken_s = now_s
        reports = []
        meters = zip(self._meters[True], self._meters[False], strict=True)
        for target, (writes, reads) in enumerate(meters):
            rates = writes.fold(now_s), reads.fold(now_s)
            if _differ(self._reported[target], rates):
                self._reported[target] = rates
                reports.append(RateReport(self._rank, target, *rates))
        return reports


def count_transfer(
    counters: Counts, direction: str, stage: str, size_bytes: int, seconds: float
) -> None:
    """Count one of `transfer_operations`, `transfer_bytes` and `transfer_seconds`.

    direction: store, from the GPU towards the pool, or load. stage: gpu (copies between KV cache
    and staging) or pool (reads and writes of slots). The time of a copy begins when the engine
    gets it, so it includes the wait for the job's fence; `TransferResult.seconds` begins with the
    job and includes that wait and the reads from the pool as well.
    """
    counters["transfer_operations", direction, stage] += 1
    counters["transfer_bytes", direction, stage] += size_bytes
    counters["transfer_seconds", direction, stage] += max(0.0, seconds)
