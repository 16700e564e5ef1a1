# SPDX-License-Identifier: Apache-2.0
"""How full one rank's queues are, told when it changes and something else is told anyway."""

from __future__ import annotations

from vllm_nvmeof_offload.protocol import LevelReport
from vllm_nvmeof_offload.worker.iopump import IoPump
from vllm_nvmeof_offload.worker.lanes import Line
from vllm_nvmeof_offload.worker.streams import StreamSlots

__all__ = ["LevelNews"]


class LevelNews:
    """Of one rank; its queues begin empty."""

    def __init__(self, rank: int, streams: StreamSlots, pump: IoPump) -> None:
        self._streams = streams
        self._pump = pump
        self._told = LevelReport(rank)
        self._rank = rank

    def take(self) -> list[LevelReport]:
        """One report if anything has changed since the last."""
        waiting, (reads, writes) = self._pump.waiting, self._pump.in_flight
        now = LevelReport(
            self._rank,
            stream_slots_used=self._streams.used,
            stream_slot_waiting=self._streams.waiting,
            read_waiting=waiting(Line.DEMAND),
            prefetch_waiting=waiting(Line.URGENT) + waiting(Line.PREFETCH),
            write_waiting=waiting(Line.WRITE),
            reads_in_flight=reads,
            writes_in_flight=writes,
        )
        if now == self._told:
            return []
        self._told = now
        return [now]
