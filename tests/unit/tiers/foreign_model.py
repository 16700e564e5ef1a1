# SPDX-License-Identifier: Apache-2.0
"""The model of what other engines have: their rows are lists in a dictionary.

Which of a key's rows is borrowed is not a rule: the model is given the one that the native tiers
took, and asserts that it may be taken.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm_nvmeof_offload.native import OwnerRecord
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, member_of, owner_of, target_of

NONE, SCANNING, COMPLETE, DEAD = range(4)
TAG = b"our weights' tag"
REFUSED_S = DISTRUSTED_S = 30.0

#: Place and generation.
Pair = tuple[int, int]


@dataclass
class ForeignModel:
    """targets: that are ours. now_s: the time."""

    targets: int = 1
    now_s: float = 0.0
    floor: int = 0
    rows: dict[bytes, list[Pair]] = field(default_factory=dict)
    owners: dict[int, OwnerRecord] = field(default_factory=dict)
    refused: dict[Pair, float] = field(default_factory=dict)
    distrusted: dict[int, float] = field(default_factory=dict)
    ended: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    attached: dict[int, bytes] = field(default_factory=dict)  # pool uuids, by owner
    #: Owners that were used first since the attachments were taken.
    used: list[int] = field(default_factory=list)

    def accepts(self, owner: int) -> bool:
        record = self.owners.get(owner)
        if record is None or record.state not in (COMPLETE, DEAD) or record.tag != TAG:
            return False
        if self.attached.get(owner, record.pool_uuid) != record.pool_uuid:
            return False
        return record.version >= self.floor and self.now_s >= self.distrusted.get(owner, 0.0)

    def rows_of(self, key: bytes, set_size: int) -> list[Pair]:
        """The rows that may be borrowed. set_size: of the key's group."""
        return [
            (place, generation)
            for place, generation in self.rows.get(key, ())
            if self.accepts(owner_of(place))
            and target_of(place) < self.targets
            and member_of(place) in (EVERY_MEMBER, *(range(set_size) if set_size > 1 else ()))
            and self.refused.get((place, generation), 0.0) <= self.now_s
        ]

    def has_elsewhere(self, key: bytes, set_size: int) -> bool:
        """Whether an owner that lives has what may be borrowed."""
        rows = self.rows_of(key, set_size)
        return any(self.owners[owner_of(place)].state == COMPLETE for place, _ in rows)

    def use(self, owner: int) -> None:
        if owner not in self.attached:
            self.attached[owner] = self.owners[owner].pool_uuid
            self.used.append(owner)

    def take_detachments(self) -> list[int]:
        gone = [
            owner
            for owner, uuid in self.attached.items()
            if self.owners[owner].state == NONE or self.owners[owner].pool_uuid != uuid
        ]
        for owner in gone:
            del self.attached[owner]
        return gone

    def refuse(self, pair: Pair) -> None:
        self.refused[pair] = self.now_s + REFUSED_S

    def count(self, owner: int, *, ok: bool) -> None:
        """A borrow has ended, and was not cancelled."""
        self.ended[owner] += 1
        self.failed[owner] += not ok
        if self.ended[owner] >= 64 and self.failed[owner] / self.ended[owner] > 0.02:
            self.distrusted[owner] = self.now_s + DISTRUSTED_S
            self.ended[owner] = self.failed[owner] = 0
        assert self.ended[owner] < 1024, "the counts are halved then"

    def reset(self) -> None:
        self.floor += 1
        self.refused.clear()
