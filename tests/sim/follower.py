# SPDX-License-Identifier: Apache-2.0
"""The scripted follower: it scans other engines' tables, early or late, and writes the real
foreign table. Some of what it says is wrong, because it reads beside its owners' writes."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

from vllm_nvmeof_offload.native import Foreign, ForeignReader, ForeignWriter, OwnerRecord
from vllm_nvmeof_offload.protocol import owned_by

from .base import Knobs
from .owners import Line, Named, Owner, Owners, place_in
from .store import START_TAG

#: States of an owner's record, as the native `OwnerState`.
NONE, SCANNING, COMPLETE, DEAD = range(4)
#: Where a line lies: rank of the first set, slot.
At = tuple[int, int]
#: What the table has of a line: place with its owner, and generation.
Row = tuple[int, int]


@dataclass
class _Followed:
    """One owner, as the follower knows it."""

    number: int
    named: Named | None = None  # the superblock by which it scanned last
    state: int = SCANNING
    tag: bytes = bytes(16)
    rows: dict[At, tuple[Line, Row]] = field(default_factory=dict)
    #: Lines that were there when the engine asked for a new version: not offered.
    baseline: dict[At, Line] = field(default_factory=dict)
    unseen: set[int] = field(default_factory=set)  # targets of which this epoch has no scan yet


class SimFollower:
    """The follower of one process of ours. `offered`: generations that were ever in the table."""

    def __init__(self, owners: Owners, knobs: Knobs, rng: random.Random) -> None:
        self._owners = owners
        self._knobs = knobs
        self._rng = rng
        fd = os.memfd_create("foreign table", os.MFD_CLOEXEC)
        self._writer = ForeignWriter(fd, 256)
        #: The manager's.
        self.foreign = Foreign(fd)
        #: The rules'.
        self.seen = ForeignReader(fd)
        os.close(fd)
        self._followed: dict[Owner, _Followed] = {}
        self._numbers = 0
        self._version = 0
        self.offered: set[int] = set()
        #: Borrowed chunks that were given to our pool, in any life → the generation that our own
        #: next one had then.
        self.written = owners.written
        #: By number, for those who open the files.
        self.owners: dict[int, Owner] = {}
        self.has_moved = False  # in the step that is being made
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """One tick."""
        if self._rng.random() >= self._knobs.scans:
            return
        if self._writer.version_asked > self._version:
            self._begin_anew()
        self._discover()
        if self._followed:
            owner = self._rng.choice(list(self._followed))
            self._scan(owner, self._followed[owner])

    def between(self) -> None:
        """The table may change between a look-up and the load that follows it."""
        if self._rng.random() < 0.2:
            self.has_moved = True
            self.step()

    @property
    def version_asked(self) -> int:
        return self._writer.version_asked

    # -- owners -----------------------------------------------------------------------

    def _discover(self) -> None:
        present = [owner for owner in self._owners.engines.values() if not owner.gone]
        for owner in [one for one in self._followed if one not in present]:
            followed = self._followed.pop(owner)
            self._drop(followed)
            followed.state = NONE
            self._record(owner, followed)
        for owner in present:
            if owner not in self._followed:
                self._numbers += 1
                self._followed[owner] = _Followed(self._numbers)
                self.owners[self._numbers] = owner

    def _begin_anew(self) -> None:
        """What the tables have now is not offered any more, or all of it is."""
        self._version = self._writer.version_asked
        self.counts["followed_anew"] += 1
        for owner, followed in self._followed.items():
            self._drop(followed)
            takes_all = self._version == self._writer.version_of_all
            followed.baseline = {} if takes_all else dict(self._lines(owner))
            self._record(owner, followed)

    def _record(self, owner: Owner, followed: _Followed) -> None:
        record = OwnerRecord(
            self._version,
            followed.tag,
            owner.pool_uuid,
            owner.engine_index,
            followed.state,
            len(followed.rows),
        )
        self._writer.set_owner(followed.number, record)

    def _drop(self, followed: _Followed) -> None:
        for line, row in followed.rows.values():
            self._remove(line, row)
        followed.rows.clear()

    # -- scans ------------------------------------------------------------------------

    def _scan(self, owner: Owner, followed: _Followed) -> None:
        """Read the newest superblock, then the tables, of a target that hangs none."""
        rng, knobs = self._rng, self._knobs
        named, targets = owner.named, set(range(knobs.targets))
        if rng.random() < 0.3:
            targets = {rng.randrange(knobs.targets)}
        if followed.named != named:
            self._drop(followed)
            followed.named, followed.state = named, SCANNING
            followed.unseen = set(range(knobs.targets))
        followed.tag = named.tag
        if rng.random() < knobs.owner_lies:
            followed.tag = START_TAG
        found = {
            at: line
            for at, line in self._lines(owner)
            if line.epoch == named.epoch and followed.baseline.get(at) != line
        }
        for at in [at for at in followed.rows if at[1] % knobs.targets in targets]:
            line, row = followed.rows[at]
            if found.get(at) != line:
                del followed.rows[at]
                self._remove(line, row)
        for at, line in found.items():
            if at[1] % knobs.targets in targets and at not in followed.rows:
                followed.rows[at] = line, self._put(followed.number, at, line)
        followed.unseen -= targets
        if not followed.unseen:
            followed.state = DEAD if owner.dead else COMPLETE
        self.counts["scans"] += 1
        self._record(owner, followed)

    def _lines(self, owner: Owner) -> list[tuple[At, Line]]:
        """Of rank 0, and of all members of the first set where sets have several. A chunk of which
        every member has its part is in rank 0's table."""
        return [
            ((rank, number), line)
            for rank in range(self._knobs.set_size)
            for number, line in owner.tables[rank].items()
            if not rank or line.member == rank
        ]

    def _put(self, number: int, at: At, line: Line) -> Row:
        place = owned_by(number, place_in(at[1], line.member, self._knobs.targets))
        generation = line.generation
        if self._rng.random() < self._knobs.owner_lies * 0.1:
            self.counts["torn_rows"] += 1
            if self._rng.random() < 0.5:
                generation |= 1 << 31  # that of no chunk
            else:
                place += self._rng.randrange(3)  # another slot's, or the next one's
        self._writer.put(line.key, place, generation)
        self.offered.add(generation)
        return place, generation

    def _remove(self, line: Line, row: Row) -> None:
        assert self._writer.remove(line.key, *row)
