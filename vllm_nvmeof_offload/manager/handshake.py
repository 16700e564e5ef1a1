# SPDX-License-Identifier: Apache-2.0
"""What the core is made from: its configuration, and the ranks' agreement in the handshake."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_offload.protocol import AdoptedEntries, RankHello

#: Configured name of the eviction policy under which a chunk's returns count (`Recency`).
CREDITED = "credited_lru"
#: By how many uses each return lets a chunk count as used later, as a share of the tier's slots.
#: A request touches each of its chunks about three times.
CREDIT_SHARE = 2.0


class WritePolicy(enum.Enum):
    """When a chunk of the CPU tier is written to the pool."""

    THROUGH = "through"  # as soon as it is stored
    ON_EVICTION = "on_eviction"  # when the CPU tier is about to need its slot: demotion
    OFF = "off"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """world_size: ranks that report. Shares are fractions of the cache slots.

    store_threshold: a chunk is stored on its n-th sighting (`StoreThreshold`).
    eviction_policy: its configured name, which the start line shows; the core gets the policy too.
    credit_share: how much longer a chunk that came back is kept (`Recency`); 0: plain LRU.
    clean_share: on-eviction writing keeps at least this share free, or evictable without a loss.
    kv_events: record changes in `ManagerCore.kv_events`; the caller takes them after each step.
    admission: False loads whatever is found. The operator pins the two rates; None: learned.
    read_bytes_per_s: of one rank, over all targets.
    """

    world_size: int = 1
    store_threshold: int = 1
    eviction_policy: str = CREDITED
    credit_share: float = CREDIT_SHARE
    write_policy: WritePolicy = WritePolicy.THROUGH
    weights_never_change: bool = False
    land_cache_share: float = 0.5
    reload_cache_share: float = 0.25
    prefetch_cache_share: float = 0.25
    tokens_per_chunk: int = 1
    admission: bool = True
    prefill_tokens_per_s: float | None = None
    read_bytes_per_s: float | None = None
    writes_pending_share: float = 0.5
    clean_share: float = 0.125
    report_deadline_s: float = 60.0
    kv_events: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """Slots that every rank has, and the shape they share."""

    cache_slots: int
    pool_slots: int
    target_count: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """The handshake's result. notes: lines for the log."""

    capacity: Capacity
    #: Pool slots in range and ascending; slots and keys distinct.
    entries: AdoptedEntries
    #: Entries of the rank that found most, less those that are adopted.
    unadopted: int
    notes: tuple[str, ...] = ()


def agree(hellos: Sequence[RankHello]) -> Agreement:
    """Capacity is the minimum over the ranks, the index the intersection of their tables."""
    first = hellos[0]
    capacity = Capacity(
        min(h.cache_slots for h in hellos),
        min(h.pool_slots for h in hellos),
        first.target_count,
        first.slot_bytes,
    )
    found = max(len(h.adopted) for h in hellos)
    shapes = {(h.engine_index, h.keyspace, h.target_count) for h in hellos}
    if len(shapes) > 1:
        # Slot numbers then mean different places on different ranks, which is harmless for
        # chunks that are written from now on, and fatal for chunks that would be adopted.
        note = f"ranks opened different pools {sorted(shapes)}: nothing is adopted"
        return Agreement(capacity, AdoptedEntries(), found, (note,))
    ours = first.adopted
    keys = np.fromiter(ours.keys, object, len(ours))
    _, rows = np.unique(ours.pool_slots, return_index=True)
    for hello in hellos[1:]:
        theirs = hello.adopted
        _, mine, others = np.intersect1d(
            ours.pool_slots[rows], theirs.pool_slots, return_indices=True
        )
        rows = rows[mine]
        same = ours.generations[rows] == theirs.generations[others]
        same &= keys[rows] == np.fromiter(theirs.keys, object, len(theirs))[others]
        rows = rows[same]
    lost = len(ours) - len(rows)
    note = f"{lost} pool entries of rank {first.rank} are not on every rank: dropped"
    slots = ours.pool_slots[rows]
    lowest: dict[bytes, int] = {}  # a key that is on several slots keeps the lowest
    for row in rows[(slots >= 0) & (slots < capacity.pool_slots)].tolist():
        lowest.setdefault(ours.keys[row], row)
    rows = np.fromiter(lowest.values(), np.int64, len(lowest))
    entries = AdoptedEntries(ours.pool_slots[rows], ours.generations[rows], tuple(lowest))
    return Agreement(capacity, entries, found - len(entries), (note,) if lost else ())
