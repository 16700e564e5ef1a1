# SPDX-License-Identifier: Apache-2.0
"""Where slots lie in staging."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StagingMap"]


@dataclass(frozen=True, slots=True)
class StagingMap:
    """Cache slots first, stream slots behind them, equal strides."""

    base_address: int
    slot_bytes: int
    cache_slots: int
    stream_slots: int

    def cache_address(self, slot: int) -> int:
        assert 0 <= slot < self.cache_slots
        return self.base_address + slot * self.slot_bytes

    def stream_address(self, slot: int) -> int:
        assert 0 <= slot < self.stream_slots
        return self.base_address + (self.cache_slots + slot) * self.slot_bytes
