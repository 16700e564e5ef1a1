# SPDX-License-Identifier: Apache-2.0
"""How much of each kind may be with the I/O engine, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_nvmeof_offload.targets.health import TargetHealth

__all__ = ["PumpConfig"]


@dataclass(frozen=True, slots=True)
class PumpConfig:
    """Bounds. A deadline runs from the hand-over to the engine, in seconds.

    What may be in flight is shared evenly by the targets; each may have one at least.
    stream_slots: what loads are read into; None: more than enough.
    """

    rank: int = 0
    target_count: int = 1
    reads_in_flight_max: int = 64
    writes_in_flight_max: int = 32
    read_deadline_s: float = 5.0
    write_deadline_s: float = 30.0
    #: One a target, shared with who attaches targets again; None: nobody does.
    health: tuple[TargetHealth, ...] | None = None
    #: Has a reset that failed been made good, as its targets came back?
    reset_is_durable: Callable[[], bool] = lambda: False
    stream_slots: int | None = None

    @property
    def target_reads_max(self) -> int:
        return max(1, self.reads_in_flight_max // self.target_count)

    @property
    def target_streamed_max(self) -> int:
        """Reads of loads that a target has at a time, at most, while all are busy."""
        if self.stream_slots is None:
            return self.target_reads_max
        return max(1, min(self.target_reads_max, self.stream_slots // self.target_count))

    @property
    def target_writes_max(self) -> int:
        return max(1, self.writes_in_flight_max // self.target_count)
