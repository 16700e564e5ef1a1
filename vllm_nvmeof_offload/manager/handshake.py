# SPDX-License-Identifier: Apache-2.0
"""What the core is made from: its configuration, and the ranks' agreement in the handshake."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import Group, GroupKind, leading
from vllm_nvmeof_offload.protocol import AdoptedEntries, RankHello, slots_by_target, targets_of
from vllm_nvmeof_offload.units import slot_stride_bytes

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

    key_bytes: of every offload key: vLLM's block hash, and four bytes of the group's number.
    groups: the KV cache groups that are offloaded, by position.
    store_threshold: a chunk is stored on its n-th sighting (`StoreThreshold`).
    eviction_policy: its configured name, which the start line shows; the core gets the policy too.
    credit_share: how much longer a chunk that came back is kept (`Recency`); 0: plain LRU.
    clean_share: on-eviction writing keeps at least this share free, or evictable without a loss.
    kv_events: record changes in `ManagerCore.kv_events`; the caller takes them after each step.
    admission: False loads whatever is found. The operator pins the two rates; None: learned.
    read_bytes_per_s: of one rank, over all targets.
    """

    world_size: int = 1
    key_bytes: int = 36
    groups: tuple[Group, ...] = (Group(0, GroupKind.FULL, 1),)
    store_threshold: int = 1
    eviction_policy: str = CREDITED
    credit_share: float = CREDIT_SHARE
    write_policy: WritePolicy = WritePolicy.THROUGH
    weights_never_change: bool = False
    land_cache_share: float = 0.5
    reload_cache_share: float = 0.25
    prefetch_cache_share: float = 0.25
    admission: bool = True
    prefill_tokens_per_s: float | None = None
    read_bytes_per_s: float | None = None
    writes_pending_share: float = 0.5
    clean_share: float = 0.125
    report_deadline_s: float = 60.0
    kv_events: bool = False

    @property
    def full_attention_only(self) -> bool:
        """One group, of full attention. Then every chunk brings its own tokens, and a load whose
        middle is missing still brings those before it."""
        return len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL

    def tokens_in(self, slots: int) -> int:
        """The tokens of which so many slots hold the KV, without boundaries' windows and states."""
        dense = self._dense or (self.groups[leading(self.groups)],)
        unit = math.lcm(*(group.tokens_per_chunk for group in dense))
        return slots * unit // sum(unit // group.tokens_per_chunk for group in dense)

    @property
    def boundary_slots(self) -> int:
        """The slots that the windows and states of one boundary take."""
        tails = (group for group in self.groups if group not in self._dense)
        return sum(group.reach_chunks or 0 for group in tails)

    @property
    def _dense(self) -> tuple[Group, ...]:
        """The groups of which every chunk is kept."""
        kinds = (GroupKind.FULL, GroupKind.LOCAL)
        return tuple(group for group in self.groups if group.kind in kinds)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Slots that every rank has, and the shape they share. pool_slots: by target.

    group_bytes: by group, what one of its chunks takes of a slot, on the rank where that is most.
    """

    cache_slots: int
    pool_slots: tuple[int, ...]
    slot_bytes: int
    group_bytes: tuple[int, ...]

    @property
    def pool_slots_total(self) -> int:
        return sum(self.pool_slots)

    @property
    def slot_fill(self) -> float:
        """The share of a slot that a chunk takes, on average over the groups."""
        return sum(self.group_bytes) / len(self.group_bytes) / self.slot_bytes


@dataclass(frozen=True, slots=True)
class Agreement:
    """The handshake's result. notes: lines for the log."""

    capacity: Capacity
    #: Places in range and ascending. A key may be in several; the lowest one is adopted.
    entries: AdoptedEntries
    #: Entries of the rank that found most, less those that are adopted.
    unadopted: int
    notes: tuple[str, ...] = ()
    #: The share tag of the start; empty: no later start adopts what is written.
    tag: bytes = b""


def agree(hellos: Sequence[RankHello]) -> Agreement:
    """Capacity is the minimum over the ranks, the index the intersection of their tables."""
    first = hellos[0]
    groups = tuple(of_rank.group for of_rank in first.groups)
    for hello in hellos:
        assert tuple(of_rank.group for of_rank in hello.groups) == groups, "ranks of other models"
    pool_slots = min(h.pool_slots for h in hellos)
    capacity = Capacity(
        min(h.cache_slots for h in hellos),
        slots_by_target(pool_slots, first.target_count),
        first.slot_bytes,
        _group_bytes(hellos) if groups else (first.slot_bytes,),
    )
    found = max(len(h.adopted) for h in hellos)
    tag = first.tag if len({h.tag for h in hellos}) == 1 else b""
    shapes = {(h.engine_index, h.keyspace, h.target_count) for h in hellos}
    if len(shapes) > 1:
        # Slot numbers then mean different places on different ranks, which is harmless for
        # chunks that are written from now on, and fatal for chunks that would be adopted.
        note = f"ranks opened different pools {sorted(shapes)}: nothing is adopted"
        return Agreement(capacity, AdoptedEntries(), found, (note,))
    entries = _in_order(first.adopted)
    for hello in hellos[1:]:
        entries = _in_both(entries, _in_order(hello.adopted))
    lost = len(first.adopted) - len(entries)
    note = f"{lost} pool entries of rank {first.rank} are not on every rank: dropped"
    if len(entries):
        slots_of = np.array(capacity.pool_slots, np.int64)[targets_of(entries.places)]
        in_range = (entries.places & 0xFFFFFFFF) < slots_of
        entries = entries if in_range.all() else _take(entries, np.flatnonzero(in_range))
    return Agreement(capacity, entries, found - len(entries), (note,) if lost else (), tag)


def _group_bytes(hellos: Sequence[RankHello]) -> tuple[int, ...]:
    by_rank = [[slot_stride_bytes(g.payload_bytes) for g in hello.groups] for hello in hellos]
    return tuple(max(of_group) for of_group in zip(*by_rank, strict=True))


def _in_order(adopted: AdoptedEntries) -> AdoptedEntries:
    """By place, each once."""
    if bool((np.diff(adopted.places) > 0).all()):
        return adopted  # as `Pool.adopt` gives them
    return _take(adopted, np.unique(adopted.places, return_index=True)[1])


def _in_both(one: AdoptedEntries, other: AdoptedEntries) -> AdoptedEntries:
    """The entries whose place, generation and key are equal in both."""
    _, ours, theirs = np.intersect1d(
        one.places, other.places, assume_unique=True, return_indices=True
    )
    if one.key_bytes != other.key_bytes:
        return _take(one, ours[:0])
    same = one.generations[ours] == other.generations[theirs]
    same &= one.key_rows()[ours] == other.key_rows()[theirs]
    return one if same.all() and len(same) == len(one) else _take(one, ours[same])


def _take(entries: AdoptedEntries, rows: npt.NDArray[np.int64]) -> AdoptedEntries:
    keys = entries.key_rows()[rows].tobytes() if len(entries) else b""
    return AdoptedEntries(entries.places[rows], entries.generations[rows], keys)
