# SPDX-License-Identifier: Apache-2.0
"""What copies and I/O moved and how long each took, for metrics. The pipeline's thread alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

__all__ = ["TransferMeter"]


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
