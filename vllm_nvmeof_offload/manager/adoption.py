# SPDX-License-Identifier: Apache-2.0
"""What all ranks agree on at start: the capacity, and the entries that every one of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    """entries: pool slots in range and ascending, slots and keys distinct. notes: for people."""

    capacity: Capacity
    entries: AdoptedEntries
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
        return Agreement(capacity, AdoptedEntries(), tuple(notes))
    entries = _in_order(first.adopted)
    for hello in hellos[1:]:
        entries = _in_both(entries, _in_order(hello.adopted))
    lost = len(first.adopted) - len(entries)
    if lost:
        notes.append(f"{lost} pool entries of rank {first.rank} are not on every rank: dropped")
    slots = entries.pool_slots
    entries = _select(entries, (slots >= 0) & (slots < capacity.pool_slots))
    return Agreement(capacity, _distinct_keys(entries), tuple(notes))


def _in_order(adopted: AdoptedEntries) -> AdoptedEntries:
    """By pool slot, each once."""
    slots = adopted.pool_slots
    if bool((np.diff(slots) > 0).all()):
        return adopted  # as `Pool.adopt` gives them
    order = np.argsort(slots, kind="stable")
    once = np.ones(len(slots), np.bool_)
    once[1:] = np.diff(slots[order]) != 0
    return _take(adopted, order[once])


def _in_both(one: AdoptedEntries, other: AdoptedEntries) -> AdoptedEntries:
    """What is alike in both: slot, generation and key."""
    _, ours, theirs = np.intersect1d(
        one.pool_slots, other.pool_slots, assume_unique=True, return_indices=True
    )
    same = one.generations[ours] == other.generations[theirs]
    same &= _keys(one)[ours] == _keys(other)[theirs]
    return _take(one, ours[same])


def _distinct_keys(entries: AdoptedEntries) -> AdoptedEntries:
    """Of a key on several slots the lowest is kept."""
    if len(set(entries.keys)) == len(entries):
        return entries
    # Later assignments win, so go from the highest slot down to the lowest.
    rows = dict(zip(reversed(entries.keys), range(len(entries) - 1, -1, -1), strict=True))
    return _take(entries, np.array(sorted(rows.values()), np.int64))


def _select(entries: AdoptedEntries, wanted: npt.NDArray[np.bool_]) -> AdoptedEntries:
    return entries if bool(wanted.all()) else _take(entries, np.flatnonzero(wanted))


def _take(entries: AdoptedEntries, rows: npt.NDArray[np.int64]) -> AdoptedEntries:
    keys = tuple(_keys(entries)[rows].tolist())
    return AdoptedEntries(entries.pool_slots[rows], entries.generations[rows], keys)


def _keys(entries: AdoptedEntries) -> npt.NDArray[np.object_]:
    return np.fromiter(entries.keys, object, len(entries))
