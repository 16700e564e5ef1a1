# SPDX-License-Identifier: Apache-2.0
"""The model of tiers whose slots may be divided among the members of a set of ranks.

Which free slot is taken is not a rule: the model takes the one that the native tiers took, and
asserts that it was free. Which chunks are evicted is a rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.chunks import cache_slot
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, place_of

from .model import Model, Need, Slot

#: In a part that is wanted: any member.
ANY = 254
#: Victims, by member, among which a part that suits is looked for.
VICTIMS_PER_MEMBER = 4


class MembersModel(Model):
    """set_sizes: by group. sample_every: one chunk of so many is stored by all ranks."""

    def __init__(
        self,
        cache_slots: int,
        pool_slots: int,
        group_ids: Sequence[int],
        set_sizes: Sequence[int],
        sample_every: int,
    ) -> None:
        self.set_sizes = set_sizes
        self.sample_every = sample_every
        self.stored: Counter[int] = Counter()  # by group
        #: The cache columns and places that the native tiers have given these chunks.
        self.given: dict[tuple[bool, bytes], int] = {}
        super().__init__(cache_slots, pool_slots, 3, group_ids)
        members = range(max(set_sizes))
        for row in range(cache_slots):
            self.cache[row].row = row
        for row in range(pool_slots):
            self.pool[row].row = row
        self.cache += [
            Slot(cache_slot(row, member), row=row, member=member)
            for row in range(cache_slots)
            for member in members
        ]
        self.pool += [
            Slot(place_of(0, row, member), row=row, member=member)
            for row in range(pool_slots)
            for member in members
        ]
        self._cached = {slot.number: slot for slot in self.cache}
        self._pooled = {slot.number: slot for slot in self.pool}
        #: For how many members a row is divided, by tier and row.
        self.divided: dict[tuple[bool, int], int] = {}

    # -- hooks of the model -----------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self.stored.clear()

    def rows_taken(self, slots: list[Slot]) -> int:
        return len({slot.row for slot in slots if not slot.free})

    def _cache_at(self, number: int) -> Slot:
        return self._cached[number]

    def _pool_at(self, place: int) -> Slot:
        return self._pooled[place]

    def _need_of_store(self, key: bytes) -> Need:
        group = self.group(key)
        assert group is not None
        if self.set_sizes[group] == 1:
            return Need(key)
        self.stored[group] += 1
        is_sample = self.stored[group] % self.sample_every == 0
        return Need(key) if is_sample else Need(key, self.set_sizes[group], ANY)

    def _set_size(self, key: bytes) -> int:
        group = self.group(key)
        assert group is not None
        return self.set_sizes[group]

    def _take(
        self, slots: list[Slot], need: Need, spared: set[bytes], *, is_store: bool = False
    ) -> Slot | None:
        able: list[Slot] = []
        for victims in self._victims(slots, spared, is_store=is_store):
            able += victims
            if self._free(slots, need) or self._make_room(slots, need, victims, able):
                break
        else:
            return None
        in_cache = slots is self.cache
        slot = (self._cached if in_cache else self._pooled)[self.given[in_cache, need.key]]
        assert slot in self._free(slots, need)
        if slot.member != EVERY_MEMBER:
            self.divided[slots is self.cache, slot.row] = need.set_size
        return slot

    # -- rows and parts ---------------------------------------------------------------

    def _in_row(self, slots: list[Slot], row: int) -> list[Slot]:
        """The whole slot, then its parts."""
        return [slot for slot in slots if slot.row == row]

    def _free(self, slots: list[Slot], need: Need) -> list[Slot]:
        """The slots that `need` may take: parts of divided rows, else of free rows."""
        parts, whole = [], []
        for row in {slot.row for slot in slots}:
            mine = self._in_row(slots, row)
            fitting = [slot for slot in mine if slot.free and self._fits(slot, need)]
            if all(slot.free for slot in mine):
                whole += fitting
            elif mine[0].free and self.divided[slots is self.cache, row] == need.set_size:
                parts += fitting if need.set_size > 1 else []
        return parts or whole

    def _fits(self, slot: Slot, need: Need) -> bool:
        if EVERY_MEMBER in (slot.member, need.member):
            return slot.member == need.member
        return slot.member < need.set_size and need.member in (ANY, slot.member)

    def _suits(self, slots: list[Slot], victim: Slot, need: Need) -> bool:
        """Whether `need` can be met once the victim is free."""
        if all(slot is victim or slot.free for slot in self._in_row(slots, victim.row)):
            return True
        same = self.divided[slots is self.cache, victim.row] == need.set_size
        return same and need.set_size > 1 and self._fits(victim, need)

    def _make_room(
        self, slots: list[Slot], need: Need, victims: list[Slot], able: list[Slot]
    ) -> bool:
        """Evict one of the victims, or all that is in a row of one of them, if it is `able`."""
        window = 1 if need.member == EVERY_MEMBER else VICTIMS_PER_MEMBER * need.set_size
        coming = iter(victims)
        passed: list[Slot] = []
        rows = 0
        while True:
            victim = next(coming, None) if len(passed) - rows < window else None
            if victim is not None and self._suits(slots, victim, need):
                self._evict(victim)
                return True
            if victim is not None:
                passed.append(victim)
            elif rows < len(passed):
                taken = [s for s in self._in_row(slots, passed[rows].row) if not s.free]
                if all(slot in able for slot in taken):
                    for slot in taken:
                        self._evict(slot)
                    return True
                rows += 1
            else:
                return False
