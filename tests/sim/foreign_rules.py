# SPDX-License-Identifier: Apache-2.0
"""Rules 19 to 21 of docs/protocol.md: other engines' chunks, and from whose regions they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.chunks import identity_of
from vllm_nvmeof_offload.errors import CANCELLED, Outcome
from vllm_nvmeof_offload.groups import group_id_of
from vllm_nvmeof_offload.manager.core import FROM_POOL, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import WritePolicy
from vllm_nvmeof_offload.manager.ledger import Entry, State
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    OURS,
    AttachCommand,
    Command,
    DetachCommand,
    FetchCommand,
    HintCommand,
    ResetCommand,
    SlotIdentity,
    WriteCommand,
    member_of,
    owner_of,
    target_of,
)

from .base import Clock, Violation
from .follower import COMPLETE, DEAD, NONE, SimFollower
from .ops import SentOp
from .owners import is_foreign
from .store import START_TAG

#: A pair of place and generation that could not be read is not accepted for so long.
_REFUSED_S = 30.0
#: An owner is left alone for so long if more than one of `_FAILED_SHARE` borrows has failed, of so
#: many at least. The counts are halved at `_TRIALS_MAX`.
_DISTRUSTED_S = 30.0
_TRIALS_MIN, _TRIALS_MAX, _FAILED_SHARE = 64, 1024, 50
#: A chunk that others gave up is written if so many requests have used it here.
_USES_MIN = 2
#: Hints that an owner is sent in a second, and that are taken at a time.
_HINTS_PER_S, _HINTS_MAX = 64, 256


class ForeignRules:
    """The rules for one process's life. What may be borrowed is judged here once more, from the
    table itself and from what the ranks have reported."""

    def __init__(self, core: ManagerCore, clock: Clock, follower: SimFollower) -> None:
        self._core = core
        self._clock = clock
        self._follower = follower
        self._group_ids = [group.group_id for group in core.config.groups]
        self._tag: bytes | None = START_TAG  # None: our weights have no name any more
        self._begins = False  # the last reset has a new tag, and no step has taken it
        self._floor = 0
        self._void: set[int] = set()  # generations that were offered before a reset
        self._refused: dict[tuple[int, int], float] = {}  # until when
        #: Owner → its record then; None: it has changed since the attach was decided, and what the
        #: core knows of it is not known here.
        self._failed_attach: dict[int, object] = {}
        self._trials: dict[int, tuple[int, int]] = {}  # owner → borrows that ended, that failed
        self._distrusted: dict[int, float] = {}  # owner → until when
        #: Owners whose attach the ranks were sent, and those that a load names already.
        self._attached: set[int] = set()
        self._due: dict[int, object] = {}  # and their records then
        self._to_detach: set[int] = set()  # a rank could not attach them, others could
        self._attaching: dict[int, tuple[int, object]] = {}  # op → owner and its record
        #: Generations of chunks that need no write while others have them.
        self._deduped: set[int] = set()
        self._uses: Counter[int] = Counter()  # generation → requests that have ended, at most
        self._sure: Counter[int] = Counter()  # the same of this stay in the CPU tier, at least
        self._lost: set[int] = set()  # of these generations: nobody had them when they were used
        self._owed: set[int] = set()  # and they have to be written
        self._borrows: Counter[tuple[int, int]] = Counter()  # (place, generation) → since a hint
        self._borrowed_again: set[tuple[int, int]] = set()
        self._hinted: dict[int, list[float]] = {}  # owner → when its hints left
        self._hints_taken = 0

    # -- acceptance -------------------------------------------------------------------

    def reset(self, tag: bytes | None, *, again: bool) -> None:
        """Rule 20: what was known is void, and weights without a name share with nobody. With a new
        name all counts that others have stored under it. again: no step has taken the last reset.
        """
        if again and self._begins:
            return
        self._begins = tag != self._tag
        self._void = set() if self._begins else self._void | self._follower.offered
        self._tag = tag
        self._floor = self._follower.version_asked
        self._refused.clear()
        self._owed.clear()
        self._borrows.clear()
        self._borrowed_again.clear()

    def looked_up(self, key: bytes, sources: int, source: Source | None, *, ours: bool) -> None:
        """A look-up has ended. ours: the index has an entry."""
        rows = self._follower.seen.rows_of(key) if sources & FROM_POOL and not ours else []
        refusals = [self._refusal(key, place, generation) for place, generation in rows]
        if source is Source.SHARED and "" not in refusals:
            raise Violation("20", f"{key.hex()} hits, of {rows}: {refusals}")
        if source is None and "" in refusals and None not in self._failed_attach.values():
            raise Violation("2", f"{key.hex()} misses, of {rows}: {refusals}")

    def _refusal(self, key: bytes, place: int, generation: int) -> str:
        """Why this row may not be borrowed now; empty: it may."""
        owner = owner_of(place)
        record = self._follower.seen.owner(owner)
        if record.state not in (COMPLETE, DEAD):
            return f"its state is {record.state}"
        if record.tag != self._tag:
            return "other weights"
        if record.version < self._floor or generation in self._void:
            return "from before a reset"
        if self._failed_attach.get(owner) == self._record(owner):
            return "a rank could not attach it"
        if self._refused.get((place, generation), 0.0) > self._clock():
            return "it has failed"
        if self._distrusted.get(owner, 0.0) > self._clock():
            return "many borrows from its owner have failed"
        if target_of(place) in self._core.targets.suspects:
            return "its target is away"
        unequal = [self._group_ids[position] for position in self._core.unequal_groups]
        if member_of(place) != EVERY_MEMBER and group_id_of(key) in unequal:
            return "our ranks are unequal"
        return ""

    def _record(self, owner: int) -> object:
        record = self._follower.seen.owner(owner)
        return record.version, record.tag, record.pool_uuid, record.engine_index, record.state

    # -- ops --------------------------------------------------------------------------

    def planned(self, op: SentOp, ours: Iterable[bytes]) -> None:
        """A load is about to leave. ours: keys that the index had."""
        known = set(ours)
        for row, place in op.places.items():
            if owner_of(place) == OURS:
                continue
            identity = op.identities[row]
            if identity.key in known:
                raise Violation("20", f"{identity} is borrowed although there is one of our own")
            if refusal := self._refusal(identity.key, place, identity.generation):
                raise Violation("20", f"{identity} at {place:x} is borrowed: {refusal}")
            self._follower.counts["borrows_by_name"] += self._tag != START_TAG
            if (place, identity.generation) not in self._follower.seen.rows_of(identity.key):
                raise Violation("20", f"{identity} at {place:x}: the table has no such row")
            self._name(place)
            if op.cache.get(row) is not None:
                self._borrowing(identity.generation)

    def _name(self, place: int) -> None:
        owner = owner_of(place)
        if owner not in self._attached:
            self._due.setdefault(owner, self._record(owner))

    def _fetched(self, identity: SlotIdentity, place: int) -> None:
        """A fetch leaves; the table may have changed since it was decided."""
        if identity.generation in self._void or self._tag is None:
            raise Violation("reset", f"a fetch of {identity} from before a reset")
        if self._refused.get((place, identity.generation), 0.0) > self._clock():
            raise Violation("20", f"a fetch of {identity} at {place:x}, which has failed")
        if owner_of(place) not in self._attached:
            raise Violation("20", f"a fetch of {identity} before its owner's attach")

    def commanded(self, commands: Sequence[Command]) -> None:
        """The commands of a step, whose loads have been planned."""
        for command in commands:
            if isinstance(command, AttachCommand):
                self._attach(command)
            elif isinstance(command, DetachCommand):
                self._detach(command)
            elif isinstance(command, ResetCommand):
                self._begins = False
            elif isinstance(command, WriteCommand):
                if owner_of(command.batch.places).any():
                    raise Violation("19", f"{command} into a region of another engine")
                self._written(command)
            elif isinstance(command, FetchCommand):
                for row, place in enumerate(command.batch.places.tolist()):
                    if owner_of(place) != OURS:
                        self._fetched(identity_of(command.batch, row), place)
                        self._borrowing(int(command.batch.generations[row]))
            elif isinstance(command, HintCommand):
                self._hint(command)
        self._heeded()
        if self._due:
            raise Violation("20", f"loads of owners {list(self._due)} leave before their attach")
        self._follower.has_moved = False

    def _attach(self, command: AttachCommand) -> None:
        owner = self._follower.owners.get(command.owner)
        of = None if owner is None else (owner.engine_index, owner.pool_uuid)
        if of != (command.engine_index, command.pool_uuid) or command.owner in self._attached:
            raise Violation("20", f"{command} of {owner}")
        self._attached.add(command.owner)
        # That of the time when a fetch was decided is not known any more.
        other = None if self._follower.has_moved else self._record(command.owner)
        record = self._due.pop(command.owner, other)
        self._attaching[command.op] = command.owner, record

    def _detach(self, command: DetachCommand) -> None:
        """Of an owner that is gone, or that some rank could not attach."""
        owner = command.owner
        state = self._follower.seen.owner(owner).state
        if (state != NONE or owner not in self._attached) and owner not in self._to_detach:
            raise Violation("20", f"{command}: its state is {state}")
        self._attached.discard(owner)
        self._to_detach.discard(owner)

    @property
    def attaches_unsent(self) -> int:
        return len(self._due)

    def attach_failed(self, op: int) -> None:
        """A rank has reported it."""
        owner, record = self._attaching[op]
        self._failed_attach[owner] = record

    def attach_ended(self, op: int, *, failed: bool) -> None:
        """Every rank has reported."""
        owner, _ = self._attaching.pop(op)
        if failed:
            self._attached.discard(owner)
            self._to_detach.add(owner)

    def borrow_failed(self, place: int, generation: int) -> None:
        """A rank has reported the row, which was not cancelled."""
        self._refused[place, generation] = self._clock() + _REFUSED_S

    def borrow_ended(self, place: int, generation: int, failure: Outcome | None) -> None:
        """Every rank has reported the row."""
        if failure is None:
            self._borrows[place, generation] += 1
            if self._borrows[place, generation] > 1:
                self._borrowed_again.add((place, generation))
        if failure == CANCELLED:
            return
        owner = owner_of(place)
        ended, failed = self._trials.get(owner, (0, 0))
        ended, failed = ended + 1, failed + (failure is not None)
        if ended >= _TRIALS_MIN and failed * _FAILED_SHARE > ended:
            self._distrusted[owner] = self._clock() + _DISTRUSTED_S
            ended = failed = 0
        elif ended >= _TRIALS_MAX:
            ended, failed = ended // 2, failed // 2
        self._trials[owner] = ended, failed

    # -- chunks that need not be written ----------------------------------------------

    def _elsewhere(self, key: bytes) -> bool | None:
        """Whether a living owner has what may be borrowed; None: it is not known here."""
        rows = self._follower.seen.rows_of(key)
        able = [place for place, generation in rows if not self._refusal(key, place, generation)]
        living = [
            place for place in able if self._follower.seen.owner(owner_of(place)).state == COMPLETE
        ]
        unsure = None in self._failed_attach.values()
        return None if living and unsure else bool(living)

    def stored(self, op: SentOp) -> None:
        """Our own chunks, whose store has just been planned."""
        for identity in op.identities:
            if elsewhere := self._elsewhere(identity.key):
                self._deduped.add(identity.generation)
            elif elsewhere is None:
                self._lost.add(identity.generation)  # either is right

    def _borrowing(self, generation: int) -> None:
        """A chunk is read into a cache slot."""
        self._deduped.add(generation)
        self._owed.discard(generation)
        del self._sure[generation]

    def ended(
        self, keys: Iterable[bytes], entries: Mapping[bytes, Entry], provisional: set[int]
    ) -> None:
        """A request that used these chunks is about to end. provisional: see `used`."""
        for key in keys:
            entry = entries.get(key)
            if entry is not None and entry.cache >= 0:
                self._uses[entry.generation] += 1
                self._sure[entry.generation] += entry.generation not in provisional

    def used(
        self, keys: Iterable[bytes], entries: Mapping[bytes, Entry], provisional: set[int]
    ) -> None:
        """These chunks were used. provisional: generations that are not to be written yet."""
        for key in keys:
            entry = entries.get(key)
            if entry is None or entry.generation not in self._deduped:
                continue
            generation, elsewhere = entry.generation, self._elsewhere(key)
            if elsewhere or self._uses[generation] < _USES_MIN:
                continue
            self._lost.add(generation)
            sure = self._sure[generation] >= _USES_MIN and generation not in provisional
            if entry.state is State.CACHED and elsewhere is False and sure:
                self._owed.add(generation)

    def _written(self, command: WriteCommand) -> None:
        for row, generation in enumerate(command.batch.generations.tolist()):
            deduped = is_foreign(generation) or generation in self._deduped
            if deduped and generation not in self._lost:
                raise Violation("21", f"{command}: others have {identity_of(command.batch, row)}")
            self._owed.discard(generation)
            self._deduped.discard(generation)

    def idle(self, entries: Sequence[Entry]) -> None:
        """Check at the end: what others have lost is written, if the pool takes anything."""
        config, gauges = self._core.config, self._core.gauges()
        able = config.write_policy is WritePolicy.THROUGH and gauges["slots", "pool"]
        if not able or self._core.targets.suspects:
            return
        for entry in entries:
            if entry.generation in self._owed:
                raise Violation("21", f"{entry} was never written, and nobody else has it")

    # -- hints ------------------------------------------------------------------------

    def _hint(self, command: HintCommand) -> None:
        columns = (command.places, command.generations, command.counts)
        for place, generation, count in zip(*(one.tolist() for one in columns), strict=True):
            owner, row = owner_of(place), (place, generation)
            if row not in self._borrowed_again or not 0 < count <= self._borrows[row]:
                raise Violation("21", f"{command}: {self._borrows[row]} borrows of {row}")
            if owner not in self._attached:
                raise Violation("21", f"{command}: no rank knows the owner of {row}")
            self._borrows[row] = 0
            times = self._hinted.setdefault(owner, [])
            times.append(self._clock())
            if len(times) > _HINTS_PER_S * (2 + times[-1] - times[0]):
                raise Violation("21", f"{command}: {len(times)} hints since {times[0]}")
        if command.owners.tolist() != owner_of(command.places).tolist():
            raise Violation("21", f"{command}: its owners are others")

    def _heeded(self) -> None:
        """Of others' hints those count that name a chunk of ours by its place and generation."""
        entries = self._core.entries()
        ours = {entry.place: entry.generation for entry in entries if entry.place >= 0}
        hints = self._follower.seen.take_hints(_HINTS_MAX)
        self._hints_taken += sum(ours.get(place) == generation for place, generation, _ in hints)
        if (taken := self._core.counters["shared_hints", "received"]) != self._hints_taken:
            raise Violation("21", f"{taken} hints taken, {self._hints_taken} of {hints} are right")

    # -- entries ----------------------------------------------------------------------

    @staticmethod
    def check_entry(entry: Entry) -> None:
        if entry.state is State.BORROWING and not is_foreign(entry.generation):
            raise Violation("state", f"{entry} is one of our own")
