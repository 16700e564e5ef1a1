# SPDX-License-Identifier: Apache-2.0
"""The core's input: its configuration, and the ranks' agreement in the handshake."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import SET_SIZE_MAX, Group, GroupKind, group_ids_of, leading
from vllm_nvmeof_offload.protocol import (
    AHEAD_CACHE_SHARE,
    CACHE_ROWS_MAX,
    EVERY_MEMBER,
    AdoptedEntries,
    RankHello,
    member_of,
    slot_of,
    slots_by_target,
    target_of,
)
from vllm_nvmeof_offload.units import slot_stride_bytes

#: The configured name of the eviction policy that credits the reuse of chunks (`Recency`).
CREDITED = "credited_lru"
#: The credit for each reuse of a chunk, in uses, as a multiple of the tier's slots. A request
#: touches each chunk about three times.
CREDIT_SHARE = 2.0


def ahead_shares(share: float) -> tuple[float, float, float]:
    """Return the shares of a single load, of preempted requests and of queued requests."""
    return share, share / 2, share / 2


_LAND, _RELOAD, _PREFETCH = ahead_shares(AHEAD_CACHE_SHARE)


class WritePolicy(enum.Enum):
    """The time at which a chunk in the CPU tier is written to the pool."""

    THROUGH = "through"  # as soon as it is stored
    ON_EVICTION = "on_eviction"  # when the CPU tier is about to reuse the slot (demotion)
    OFF = "off"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """The core's configuration. Shares are fractions of the cache slots.

    `world_size` is the number of ranks that report. `key_bytes` is the length of an offload key:
    vLLM's block hash plus four bytes for the group's number. `groups` are the offloaded KV cache
    groups, by position. A chunk is stored at its `store_threshold`-th sighting. `eviction_policy`
    is the configured name, as in the start line; the core gets the policy separately.
    `credit_share` states how much longer a reused chunk is kept (`Recency`); 0 is plain LRU. With
    `ON_EVICTION`, at least `clean_share` stays free or evictable without loss. With `kv_events`,
    `ManagerCore.take_changes` gets changes. One client can retain `retain_share` of each tier.
    Without `admission`, every hit is loaded. `equal_min` chunks of a group must be equal on a set's
    ranks before the ranks share one copy; from then on, every rank also stores one chunk in
    `sample_every`, for comparison. `peers` are the peers' addresses, by lane.
    """

    world_size: int = 1
    key_bytes: int = 36
    groups: tuple[Group, ...] = (Group(0, GroupKind.FULL, 1),)
    store_threshold: int = 1
    eviction_policy: str = CREDITED
    credit_share: float = CREDIT_SHARE
    write_policy: WritePolicy = WritePolicy.THROUGH
    weights_never_change: bool = False
    land_cache_share: float = _LAND
    reload_cache_share: float = _RELOAD
    prefetch_cache_share: float = _PREFETCH
    retain_share: float = 0.25
    admission: bool = True
    writes_pending_share: float = 0.5
    clean_share: float = 0.125
    report_deadline_s: float = 60.0
    kv_events: bool = False
    equal_min: int = 8
    sample_every: int = 1024
    peers: tuple[str, ...] = ()
    #: Whether the only group has full attention: every chunk then covers its own tokens, and a load
    #: with a gap still covers the tokens before the gap. A field, because it is read per op.
    full_attention_only: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        only = len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL
        object.__setattr__(self, "full_attention_only", only)

    def tokens_in(self, slots: int, set_sizes: Sequence[int] = ()) -> int:
        """Return the number of tokens in these slots, not counting windows and states. `set_sizes`
        is, by group, the number of ranks that share one copy of a chunk; empty if each rank has its
        own."""
        dense = self._dense or (self.groups[leading(self.groups)],)
        sizes = [set_sizes[self.groups.index(group)] if set_sizes else 1 for group in dense]
        per_slot = [group.tokens_per_chunk * size for group, size in zip(dense, sizes, strict=True)]
        unit = math.lcm(*per_slot)
        return slots * unit // sum(unit // tokens for tokens in per_slot)

    @property
    def boundary_slots(self) -> int:
        """The number of slots that the windows and states of one boundary occupy."""
        tails = (group for group in self.groups if group not in self._dense)
        return sum(group.reach_chunks or 0 for group in tails)

    @property
    def _dense(self) -> tuple[Group, ...]:
        """The groups whose chunks are all stored."""
        kinds = (GroupKind.FULL, GroupKind.LOCAL)
        return tuple(group for group in self.groups if group.kind in kinds)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The slots that every rank has, and their common shape. `pool_slots` is by target. By group,
    `group_bytes` is the size of a chunk on the rank where it is largest, and `set_sizes` is the
    number of ranks with equal bytes, which together store one copy of a chunk."""

    cache_slots: int
    pool_slots: tuple[int, ...]
    slot_bytes: int
    group_bytes: tuple[int, ...]
    set_sizes: tuple[int, ...] = (1,)

    @property
    def pool_slots_total(self) -> int:
        return sum(self.pool_slots)

    @property
    def lane_bytes(self) -> tuple[int, ...]:
        """The bytes that one rank reads per chunk, by group: first for chunks with a copy on every
        rank, then for chunks with one copy per set, averaged over the set's ranks."""
        single = (size // n for size, n in zip(self.group_bytes, self.set_sizes, strict=True))
        return (*self.group_bytes, *single)

    @property
    def slot_fill(self) -> float:
        """The share of a slot that a chunk fills, averaged over the groups."""
        return sum(self.group_bytes) / len(self.group_bytes) / self.slot_bytes


@dataclass(frozen=True, slots=True)
class Agreement:
    """The handshake's result. `notes` are lines for the log."""

    capacity: Capacity
    #: The places are in range and ascending. If a key has several, the lowest one is adopted.
    entries: AdoptedEntries
    unadopted: int  # the number of entries on the rank that found the most, minus those adopted
    notes: tuple[str, ...] = ()
    #: The share tag at the start; empty if no later start may adopt the chunks written.
    tag: bytes = b""
    sessions: bytes = b""  # an earlier process's sessions file


def agree(hellos: Sequence[RankHello]) -> Agreement:
    """Agree on the ranks' minimum capacity and on the intersection of their tables."""
    first = hellos[0]
    groups = tuple(of_rank.group for of_rank in first.groups)
    for hello in hellos:
        assert tuple(of_rank.group for of_rank in hello.groups) == groups, "ranks of other models"
    pool_slots = min(h.pool_slots for h in hellos)
    by_rank = [[slot_stride_bytes(g.payload_bytes) for g in hello.groups] for hello in hellos]
    group_bytes = tuple(max(of_group) for of_group in zip(*by_rank, strict=True))
    capacity = Capacity(
        min(CACHE_ROWS_MAX, *(h.cache_slots for h in hellos)),
        slots_by_target(pool_slots, first.target_count),
        first.slot_bytes,
        group_bytes or (first.slot_bytes,),
        _set_sizes(hellos) if groups else (1,),
    )
    found = max(len(h.adopted) for h in hellos)
    tag = first.tag if len({h.tag for h in hellos}) == 1 else b""
    shapes = {(h.engine_index, h.keyspace, h.target_count) for h in hellos}
    if len(shapes) > 1:
        # Slots then differ between ranks. This is harmless for new chunks, but fatal for adopted
        # ones.
        note = f"the ranks opened different pools {sorted(shapes)}: nothing is adopted"
        return Agreement(capacity, AdoptedEntries(), found, (note,))
    entries, found, lost = _adopted(hellos, dict(zip(groups, capacity.set_sizes, strict=False)))
    note = f"dropped {lost} pool entries of rank {first.rank} that another rank lacks"
    if len(entries):
        slots_of = np.array(capacity.pool_slots, np.int64)[target_of(entries.places)]
        in_range = slot_of(entries.places) < slots_of
        entries = entries if in_range.all() else _take(entries, np.flatnonzero(in_range))
    unadopted, notes = found - len(entries), (note,) if lost else ()
    return Agreement(capacity, entries, unadopted, notes, tag, first.sessions)


def _set_sizes(hellos: Sequence[RankHello]) -> tuple[int, ...]:
    """Return the number of ranks in a set, by group; 1 if the ranks do not agree."""
    by_rank = [[group.set_size for group in hello.groups] for hello in hellos]
    by_group = [set(of_group) for of_group in zip(*by_rank, strict=True)]
    sizes = [sizes.pop() if len(sizes) == 1 else 1 for sizes in by_group]
    return tuple(n if n <= SET_SIZE_MAX and len(hellos) % n == 0 else 1 for n in sizes)


def _adopted(
    hellos: Sequence[RankHello], set_sizes: Mapping[Group, int]
) -> tuple[AdoptedEntries, int, int]:
    """Return the entries found on all ranks that must have them, the number of entries on the rank
    that found the most, and the number of the first rank's entries that are not adopted. A chunk
    with a copy per rank must be on all ranks; a chunk with a copy per set must be on the same
    member of every set."""
    all_holders = [[_of_member(_in_order(hello.adopted), EVERY_MEMBER) for hello in hellos]]
    for size in sorted(set(set_sizes.values()) - {1}):
        ids = [group.group_id for group, of_group in set_sizes.items() if of_group == size]
        for member in range(size):
            holders = [hello.adopted for hello in hellos if hello.rank % size == member]
            of_member = [_of_member(_in_order(adopted), member) for adopted in holders]
            all_holders.append([_of_groups(entries, ids) for entries in of_member])
    parts = [functools.reduce(_in_both, holders) for holders in all_holders]
    found = sum(max(map(len, holders)) for holders in all_holders)
    lost = sum(len(holders[0]) for holders in all_holders) - sum(map(len, parts))
    return _merged(parts), found, lost


def _merged(parts: Sequence[AdoptedEntries]) -> AdoptedEntries:
    some = [part for part in parts if len(part)]
    if len(some) < 2:
        return (some or parts)[0]
    same = [part for part in some if part.key_bytes == some[0].key_bytes]
    merged = AdoptedEntries(
        np.concatenate([part.places for part in same]),
        np.concatenate([part.generations for part in same]),
        b"".join([part.keys for part in same]),
    )
    return _in_order(merged)


def _of_member(entries: AdoptedEntries, member: int) -> AdoptedEntries:
    has = member_of(entries.places) == member
    return entries if has.all() else _take(entries, np.flatnonzero(has))


def _of_groups(entries: AdoptedEntries, ids: Sequence[int]) -> AdoptedEntries:
    if not len(entries):
        return entries
    found = group_ids_of(entries.keys, len(entries))
    return _take(entries, np.flatnonzero(np.isin(found, ids)))


def _in_order(adopted: AdoptedEntries) -> AdoptedEntries:
    """Return the entries in order of place, without duplicates."""
    if bool((np.diff(adopted.places) > 0).all()):
        return adopted  # already in the order from `Pool.adopt`
    return _take(adopted, np.unique(adopted.places, return_index=True)[1])


def _in_both(one: AdoptedEntries, other: AdoptedEntries) -> AdoptedEntries:
    """Return the entries whose place, generation and key are the same in both."""
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
