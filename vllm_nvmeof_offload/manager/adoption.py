# SPDX-License-Identifier: Apache-2.0
"""What all ranks agree on at start: the capacity, and the entries that every one of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.protocol import AdoptedEntries, RankHello

__all__ = ["Agreement", "Capacity", "agree"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Slots that every rank has, and the shape they share."""

    cache_slots: int = 0
    pool_slots: int = 0
    target_count: int = 1
    slot_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """entries: (pool slot, generation, key). notes: what an operator should read."""

    capacity: Capacity
    entries: tuple[tuple[int, int, bytes], ...]
    notes: tuple[str, ...]


def agree(hellos: Sequence[RankHello]) -> Agreement:
    """Capacity is the minimum over the ranks, the index the intersection of their tables."""
    first = hellos[0]
    notes: list[str] = []
    capacity = Capacity(
        min(h.cache_slots for h in hellos),
        min(h.pool_slots for h in hellos),
        first.target_count,
        first.slot_bytes,
    )
    shapes = {(h.engine_index, h.keyspace, h.target_count) for h in hellos}
    if len(shapes) > 1:
        # Slot numbers then mean different places on different ranks, which is harmless for
        # what is written from now on, and fatal for what would be adopted.
        notes.append(f"ranks opened different pools {sorted(shapes)}: nothing is adopted")
        return Agreement(capacity, (), tuple(notes))
    entries = _triples(first.adopted)
    for hello in hellos[1:]:
        entries &= _triples(hello.adopted)
    lost = len(first.adopted) - len(entries)
    if lost:
        notes.append(f"{lost} pool entries of rank {first.rank} are not on every rank: dropped")
    inside = sorted(e for e in entries if e[0] < capacity.pool_slots)
    return Agreement(capacity, tuple(inside), tuple(notes))


def _triples(adopted: AdoptedEntries) -> set[tuple[int, int, bytes]]:
    return set(
        zip(adopted.pool_slots.tolist(), adopted.generations.tolist(), adopted.keys, strict=True)
    )
