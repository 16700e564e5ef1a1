# SPDX-License-Identifier: Apache-2.0
"""How fast each target is when it has enough to do, as far as what it was asked to do shows.

While operations are with the engine, what comes through a second is how many there are times
the bytes of each over how long each took (Little's law): so what is still under way when a
period is closed is not taken for time in which nothing came. An idle hour does not count. What
came through says what the target can do only if enough operations were with the engine: one at
a time meets latency. Of an unsaturated period it is certain that the target can do what it did,
and that with `n` operations in flight where it takes `s` to saturate it does about `n / s` of
what it can at least. The rate moves towards the nearer of these two bounds, and not at all
between them; in a saturated period they are one. So few reads do not make a target look slow,
and a target that has become slow is seen even if it is hardly used any more.

The pipeline's thread alone calls; the clock is the caller's.

What copies and I/O moved and how long each took, for metrics. The pipeline's thread alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from vllm_nvmeof_offload.protocol import RateReport
from vllm_nvmeof_offload.units import MIB

__all__ = [
    "RateMeter",
    "TransferMeter",
    "saturating",
]


_PERIOD_S = 0.25
#: Less than both of these is no measurement: it goes on into the next period.
_BUSY_S_MIN = 0.05
_ENDED_MIN = 4
#: After so long a time in which nothing ended that is what was measured.
_STALL_S = 1.0
#: Weight of the newest period.
_NEWEST = 0.5
_CHANGE_MIN = 0.1
#: In flight at a target, this much saturates it: 100 Gb/s × 0.6 ms. But never one alone.
_SATURATING_BYTES = 8 * MIB
_SATURATING_OPS_MIN = 2


def saturating(in_flight_max: int, slot_bytes: int) -> int:
    """How many operations on whole slots saturate a target; its bound does, by definition."""
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
    ended_s: float = 0.0  # they took, each counted from its beginning
    done_bytes: int = 0
    rate: float = 0.0  # bytes per second; 0: not known
    told: float = 0.0

    def count(self, now_s: float) -> None:
        """Count the time since the last call, before anything changes."""
        passed_s = max(0.0, now_s - self.counted_until_s)
        if self.in_flight:
            self.busy_s += passed_s
            self.operation_s += passed_s * self.in_flight
        self.counted_until_s += passed_s

    def fold(self, now_s: float) -> bool:
        """Close a period; True if the rate differs from what was told."""
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
        return abs(self.rate - self.told) > _CHANGE_MIN * self.told

    @property
    def _is_measurement(self) -> bool:
        if not self.ended:
            return bool(self.rate) and self.busy_s >= _STALL_S
        enough = self.busy_s >= _BUSY_S_MIN or self.ended >= _ENDED_MIN
        return bool(enough and self.busy_s and (self.done_bytes or self.rate))


class RateMeter:
    """Writes and reads of every target of one rank."""

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
        self._writes = [_Meter(saturating_writes) for _ in range(target_count)]
        self._reads = [_Meter(saturating_reads) for _ in range(target_count)]
        self._told_s = clock()

    def began(self, target: int, *, is_write: bool) -> float:
        """The engine has taken an operation; returns when."""
        meter = (self._writes if is_write else self._reads)[target]
        now_s = self._clock()
        meter.count(now_s)
        meter.in_flight += 1
        return now_s

    def ended(
        self, target: int, done_bytes: int, time_s: tuple[float, float | None], *, is_write: bool
    ) -> None:
        """An operation has its outcome; `done_bytes` is 0 if it failed. time_s: when it began,
        and when it ended where that is known: this thread may have been kept from hearing of it.
        """
        meter = (self._writes if is_write else self._reads)[target]
        began_s, ended_s = time_s[0], self._clock() if time_s[1] is None else time_s[1]
        meter.count(ended_s)
        meter.in_flight -= 1
        meter.ended += 1
        meter.ended_s += max(0.0, ended_s - began_s)
        meter.done_bytes += done_bytes

    def take(self) -> list[RateReport]:
        """What has changed by more than a tenth; at most once a period."""
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


class TransferMeter:
    """Counts into `counters`: `transfer_<what>:<direction>:<stage>`, time in microseconds.

    direction: store, from the GPU towards the pool, or load. stage: gpu, copies between KV
    cache and staging, or pool, reads and writes of slots. The time of a copy begins when the
    engine is given it, so it includes the wait for the job's fence; `TransferResult.seconds`,
    which begins with the job, includes that wait and the reads from the pool as well.
    """

    def __init__(self, counters: Counter[str], clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self._copies: dict[int, tuple[bool, int, float]] = {}  # ticket → is store, bytes, since

    def copying(self, ticket: int, size_bytes: int, *, is_store: bool) -> None:
        """The copy engine has taken a batch."""
        self._copies[ticket] = is_store, size_bytes, self._clock()

    def copied(self, ticket: int, *, ok: bool) -> None:
        """It is done with it."""
        is_store, size_bytes, began_s = self._copies.pop(ticket)
        label = "store:gpu" if is_store else "load:gpu"
        self._count(label, size_bytes if ok else 0, self._clock() - began_s)

    def moved(self, size_bytes: int, time_s: tuple[float, float | None], *, is_write: bool) -> None:
        """A read or write has its outcome. time_s: when it began, and ended if that is known."""
        began_s, ended_s = time_s[0], self._clock() if time_s[1] is None else time_s[1]
        self._count("store:pool" if is_write else "load:pool", size_bytes, ended_s - began_s)

    def _count(self, label: str, size_bytes: int, seconds: float) -> None:
        self._counters[f"transfer_operations:{label}"] += 1
        self._counters[f"transfer_bytes:{label}"] += size_bytes
        self._counters[f"transfer_us:{label}"] += round(max(0.0, seconds) * 1e6)
