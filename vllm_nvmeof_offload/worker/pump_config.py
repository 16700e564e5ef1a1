# SPDX-License-Identifier: Apache-2.0
"""How much of each kind may be with the I/O engine, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PumpConfig"]


@dataclass(frozen=True, slots=True)
class PumpConfig:
    """Bounds. A deadline runs from the hand-over to the engine, in seconds.

    What may be in flight is shared evenly by the targets; each may have one at least.
    """

    rank: int = 0
    target_count: int = 1
    reads_in_flight_max: int = 64
    writes_in_flight_max: int = 32
    read_deadline_s: float = 5.0
    write_deadline_s: float = 30.0

    @property
    def target_reads_max(self) -> int:
        return max(1, self.reads_in_flight_max // self.target_count)

    @property
    def target_writes_max(self) -> int:
        return max(1, self.writes_in_flight_max // self.target_count)
