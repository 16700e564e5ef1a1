# SPDX-License-Identifier: Apache-2.0
"""Other engines whose regions lie on the same targets: scripted, without an engine of their own. A
rank opens their regions late, sometimes in vain, and never those of another pool."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind
from vllm_nvmeof_offload.groups import Group
from vllm_nvmeof_offload.io.base import ForeignSlab
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    TAG_BYTES,
    AttachCommand,
    SlotIdentity,
    place_of,
    slots_by_target,
)
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.worker.regions import FoundPool, OpenRegions

from .base import Clock, Knobs, Tag, Violation
from .requests import Clients, prefix_hashes
from .shapes import block_tokens, holds, key_of, own, set_size_of, spread
from .store import NAMED_WEIGHTS, START_TAG, VERSIONS, Claim, Record, tag_of_version

#: Added to the number of a foreign owner's weights; those of our processes are small.
_OTHER_WEIGHTS = 1_000_000
#: Our own generations begin behind those of other engines.
_GENERATIONS_MAX = 1 << 32
#: Of one owner; a turn brings at most a request's chunks.
_LATE_WRITES_MAX = 64


def is_foreign(generation: int) -> bool:
    """Whether another engine has stored the chunk."""
    return 0 < generation < _GENERATIONS_MAX


def with_owners(knobs: Knobs, seed: int, owners: int | None) -> Knobs:
    """`knobs` with so many other engines on the same targets. None: the seed chooses, none in
    three quarters of all runs. Without a pool there are none: there is no target to share."""
    rng = random.Random(f"owners of {seed}")
    if owners is None:
        owners = rng.choice((1, 2, 3)) if rng.random() < 0.25 else 0
    if not owners or not knobs.pool_slots:
        return knobs

    def rate(most: float) -> float:
        return most * rng.random() if rng.random() < 0.6 else 0.0

    faulty = knobs.profile != "calm"
    knobs = replace(
        knobs,
        owners=owners,
        weights_never_change=rng.random() < 0.7,  # else a reset ends all sharing
        owner_slots=rng.choice((8, 20, 60)),
        owner_turns=rng.choice((0.01, 0.05, 0.15)),
        owner_resets=rate(0.02),
        owner_leaves=rate(0.01),
        owner_damage=rate(0.05) if faulty else 0.0,
        owner_lies=rate(0.3) if faulty else 0.0,
        owner_late=rate(0.3),
        scans=rng.choice((0.02, 0.2, 0.8)),
        region_fails=rate(0.1) if faulty else 0.0,
        attach_fails=rate(0.5) if faulty else 0.0,
        attach_s=rng.choice((0.0, 0.01, 0.01, 0.2)),
    )
    if knobs.profile == "borrowing":  # from the same owners for so long that one is distrusted
        return replace(_busy(knobs, rng), owner_leaves=0.0, region_fails=0.1, crash=0.0)
    knobs = _busy(knobs, rng) if rng.random() < 0.6 else knobs
    rng = random.Random(f"names of {seed}")
    if rng.random() < 0.5:
        return knobs
    resets = max(0.01, knobs.reset), max(0.01, knobs.owner_resets)
    return replace(knobs, names=rng.choice((0.3, 0.8)), reset=resets[0], owner_resets=resets[1])


def _busy(knobs: Knobs, rng: random.Random) -> Knobs:
    """Little is ours, much is theirs, and nothing else keeps it from being borrowed."""
    return replace(
        knobs,
        cache_slots=rng.randint(4, 12),
        stream_slots=rng.randint(2, 4),
        land_share=rng.choice((0.0, 0.5, 1.0)),
        admission=False,
        owner_slots=rng.choice((20, 60)),
        owner_turns=rng.choice((0.15, 0.4)),
        scans=rng.choice((0.2, 0.8)),
        attach_fails=knobs.attach_fails * 0.2,
        read_fails=knobs.read_fails * 0.3,
        region_fails=knobs.region_fails * 0.5,
        hangs=knobs.hangs * 0.3,
        reset=rng.choice((0.0, 0.004, 0.01)),
        crash=rng.choice((0.0, 0.004, 0.01)),
    )


@dataclass(frozen=True)
class Line:
    """A line of a region's table."""

    key: bytes
    generation: int
    epoch: int
    member: int


@dataclass(frozen=True)
class Named:
    """What the newest superblock of a rank says."""

    epoch: int
    tag: bytes


class Owner:
    """One pool of one engine: its files, which a process that has opened them can read for ever."""

    def __init__(self, engine_index: int, pool_uuid: bytes, knobs: Knobs) -> None:
        self.engine_index = engine_index
        self.pool_uuid = pool_uuid
        self.named = Named(0, START_TAG)
        self.tag = START_TAG  # of the headers that it writes
        self.weights = 0
        self.gone = False  # its directories were removed
        self.dead = False  # nobody holds its lock
        #: By rank: slot, numbered over all targets, → its bytes, its line of the table.
        self.data: list[dict[int, Record]] = [{} for _ in range(knobs.ranks)]
        self.tables: list[dict[int, Line]] = [{} for _ in range(knobs.ranks)]
        #: By rank: the slab ends before this slot.
        self.ends = [1 << 62] * knobs.ranks
        self.late: list[Callable[[], None]] = []  # writes that have not landed

    def __str__(self) -> str:
        return f"engine-{self.engine_index} ({self.pool_uuid.hex()[:4]})"


class Owners:
    """The other engines. `expected`: generation → the right payload, of theirs too."""

    def __init__(
        self, knobs: Knobs, seed: int, clients: Clients, expected: dict[int, list[Tag]]
    ) -> None:
        self._knobs = knobs
        self.rng = self._rng = random.Random(f"what the owners of {seed} do")
        self._clients = clients
        self._expected = expected
        self._generation = self._epochs = self._weights = 0
        self.counts: Counter[str] = Counter()
        self.written: dict[int, int] = {}  # see `SimFollower.written`
        #: By engine index; ours is 0.
        self.engines = {k + 1: self._new(k + 1) for k in range(knobs.owners)}

    def _new(self, engine_index: int) -> Owner:
        owner = Owner(engine_index, self._rng.randbytes(16), self._knobs)
        self._begin(owner, START_TAG, START_TAG, 0)
        return owner

    def step(self) -> None:
        """What happens elsewhere in one tick."""
        rng, knobs = self._rng, self._knobs
        owner = rng.choice(list(self.engines.values()))
        if owner.gone:
            if rng.random() < 0.2:
                self.engines[owner.engine_index] = self._new(owner.engine_index)
            return
        while owner.late and rng.random() < 0.7:
            owner.late.pop(rng.randrange(len(owner.late)))()
        draw = rng.random()
        if draw < knobs.owner_turns:
            self._serve(owner)
        if rng.random() < knobs.owner_resets:
            self._reset(owner)
        if rng.random() < knobs.owner_damage:
            self._damage(owner)
        if rng.random() < knobs.owner_leaves:
            self._leave(owner)

    # -- stores -----------------------------------------------------------------------

    def _serve(self, owner: Owner) -> None:
        """Serve a conversation's turn, and store its chunks."""
        owner.dead = False
        tokens = self._clients.turn_elsewhere(self._rng)
        hashes = prefix_hashes(tokens)
        self.counts["turns_elsewhere"] += 1
        has = {
            line.key
            for table in owner.tables
            for line in table.values()
            if self._is_of(owner, line)
        }
        for position, group in enumerate(self._knobs.groups):
            size = group.tokens_per_chunk
            for end in range(size, len(tokens) + 1, size):
                key = key_of(hashes[end - 1], group)
                if key not in has and self._rng.random() < 0.95:
                    self._store(owner, key, position, group, hashes[:end])

    def _is_of(self, owner: Owner, line: Line) -> bool:
        return line.epoch == owner.named.epoch

    def _store(
        self, owner: Owner, key: bytes, position: int, group: Group, hashes: list[int]
    ) -> None:
        self._generation += 1
        generation, size = self._generation, block_tokens(group)
        first = len(hashes) - group.tokens_per_chunk
        tags = [
            (owner.weights, hashes[at + size - 1], position)
            for at in range(first, len(hashes), size)
        ]
        self._expected[generation] = tags
        member = self._member(group)
        number = self._slot(owner)
        line = Line(key, generation, owner.named.epoch, member)
        identity = SlotIdentity(key, generation)
        for rank in range(self._knobs.ranks):
            if not holds(rank, member, self._knobs):
                continue
            record = self._record(identity, tags, owner.tag, rank)
            self._land(owner, rank, number, record, line)

    def _record(self, identity: SlotIdentity, tags: list[Tag], tag: bytes, rank: int) -> Record:
        knobs = self._knobs
        mine = [own(one, rank, knobs) for one in tags]
        payload = tuple(spread(mine, knobs.pages[rank]))
        return Record(Claim(identity, tag, len(payload) * knobs.page_bytes), payload)

    def _land(self, owner: Owner, rank: int, number: int, record: Record, line: Line) -> None:
        """Write data, then the line of the table; each may be late, on each rank by itself."""

        def enter() -> None:
            owner.tables[rank][number] = line

        def write() -> None:
            owner.data[rank][number] = record
            self._now_or_later(owner, enter)

        self._now_or_later(owner, write)

    def _now_or_later(self, owner: Owner, write: Callable[[], None]) -> None:
        if self._rng.random() < self._knobs.owner_late and len(owner.late) < _LATE_WRITES_MAX:
            owner.late.append(write)
        else:
            write()

    def _member(self, group: Group) -> int:
        """Ranks with equal bytes keep one copy of some chunks."""
        size = set_size_of(group, self._knobs)
        if size == 1 or self._knobs.unequal or self._rng.random() < 0.5:
            return EVERY_MEMBER
        return self._rng.randrange(size)

    def _slot(self, owner: Owner) -> int:
        """A free slot, or one that is recycled."""
        knobs = self._knobs
        slots = slots_by_target(knobs.owner_slots, knobs.targets)
        target = self._rng.randrange(knobs.targets)
        used = {
            number
            for table in owner.tables
            for number, at in table.items()
            if self._is_of(owner, at)
        }
        numbers = [slot * knobs.targets + target for slot in range(slots[target])]
        free = [number for number in numbers if number not in used]
        return self._rng.choice(free or numbers)

    # -- what goes wrong --------------------------------------------------------------

    def _begin(self, owner: Owner, tag: bytes, named: bytes, weights: int) -> None:
        """A new epoch. named: the tag that the superblock says; headers have `tag`."""
        self._epochs += 1
        owner.named = Named(self._epochs, named)
        owner.tag, owner.weights = tag, weights

    def _reset(self, owner: Owner) -> None:
        """Drop everything: with the same weights, with others, or back with those of the start."""
        draw = self._rng.random()
        if draw < 0.3:
            self._begin(owner, owner.tag, owner.named.tag, owner.weights)
        elif draw < 0.6:
            self._begin(owner, START_TAG, START_TAG, 0)
        elif self._knobs.names and self._rng.random() < 0.7:
            version = self._rng.randrange(VERSIONS)
            tag = tag_of_version(version)
            lies = self._rng.random() < self._knobs.owner_lies
            other = tag_of_version((version + 1) % VERSIONS)
            self._begin(owner, tag, other if lies else tag, NAMED_WEIGHTS + version)
            self.counts["owners_with_a_wrong_name"] += lies
            self.counts["owners_with_named_weights"] += 1
        else:
            self._weights += 1
            tag = self._rng.randbytes(TAG_BYTES)
            # A superblock of another process of that engine came late.
            lies = self._rng.random() < self._knobs.owner_lies
            self._begin(owner, tag, START_TAG if lies else tag, _OTHER_WEIGHTS + self._weights)
            self.counts["owners_with_a_wrong_tag"] += lies
            self.counts["owners_with_other_weights"] += 1
        self.counts["owner_resets"] += 1

    def _damage(self, owner: Owner) -> None:
        rank = self._rng.randrange(self._knobs.ranks)
        data = owner.data[rank]
        if not data:
            return
        if self._rng.random() < 0.1:
            owner.ends[rank] = self._rng.randint(0, max(data))
            self.counts["truncated_regions"] += 1
            return
        number = self._rng.choice(sorted(data))
        data[number] = data[number].damaged(header=number % 2 == 0)

    def _leave(self, owner: Owner) -> None:
        if self._rng.random() < 0.5:
            owner.dead = True
            self.counts["dead_owners"] += 1
            return
        owner.gone = True
        owner.late.clear()
        self.counts["owners_gone"] += 1


def place_in(number: int, member: int, targets: int) -> int:
    """The place, without its owner, of a slot that is numbered over all targets."""
    return place_of(number % targets, number // targets, member)


#: Errors that speak against another engine's files, and not against the target: removed, closed,
#: replaced, cut short.
REGION_ERRNOS = (errno.ENOENT, errno.EBADF, errno.ESTALE, 0)


class SimOpener:
    """Stands in for `RegionFiles`. A descriptor is a number that is never used again."""

    def __init__(
        self, owners: Owners, rank: int, knobs: Knobs, clock: Clock, rng: random.Random
    ) -> None:
        self._owners = owners
        self._rank = rank
        self._knobs = knobs
        self._clock = clock
        self._rng = rng
        self._opening: list[tuple[float, OpenRegions]] = []
        self._files: dict[int, Owner] = {}
        self._fds = 0
        self.counts: Counter[str] = Counter()

    def open(self, command: AttachCommand, targets: Sequence[int]) -> None:
        owner = self._owners.engines[command.engine_index]
        late_s = self._knobs.attach_s * self._rng.choice((0.0, self._rng.random(), 3.0))
        due_s = self._clock() + late_s
        wrong = owner.gone or owner.pool_uuid != command.pool_uuid
        if wrong or not targets or self._rng.random() < self._knobs.attach_fails:
            self.counts["failed_attaches"] += 1
            error = errno.ENOENT if wrong or not targets else errno.EIO
            self._opening.append((due_s, OpenRegions(command, error=error)))
            return
        found = {target: self._open(owner) for target in targets}
        self._opening.append((due_s, OpenRegions(command, found)))

    def _open(self, owner: Owner) -> ForeignSlab:
        self._fds += 1
        self._files[self._fds] = owner
        self.counts["opened_regions"] += 1
        return ForeignSlab(self._fds, owner.pool_uuid, self._rank)

    def take(self) -> list[OpenRegions]:
        now_s = self._clock()
        due = [answer for due_s, answer in self._opening if due_s <= now_s]
        self._opening = [late for late in self._opening if late[0] > now_s]
        return due

    def close(self, regions: Iterable[ForeignSlab]) -> None:
        for region in regions:
            del self._files[region.fd]
            self.counts["closed_regions"] += 1

    def look_for(self, region_uuid: bytes) -> None:
        """Peers name only what is open here, or nowhere."""

    def take_found(self) -> list[FoundPool]:
        return []

    def files(self, region: ForeignSlab) -> Owner:
        """What a descriptor leads to, also after the directory was removed."""
        if region.fd not in self._files:
            raise Violation("files", f"rank {self._rank}: {region} was closed while it was read")
        return self._files[region.fd]

    @property
    def open_count(self) -> int:
        """Descriptors, without those that nobody has been given."""
        waiting = sum(len(answer.by_target) for _, answer in self._opening)
        return len(self._files) - waiting


class SimHealth(TargetHealth):
    """A target's health, which may not learn of errors of other engines' files."""

    def __init__(self) -> None:
        super().__init__(can_return=False)

    def ended(self, attachment: int, outcome: Outcome, place: int, *, is_write: bool) -> None:
        if outcome.kind is OutcomeKind.IO_ERROR and outcome.errno in REGION_ERRNOS:
            raise Violation("19", f"{outcome} of another engine's region counts for the target")
        super().ended(attachment, outcome, place, is_write=is_write)
