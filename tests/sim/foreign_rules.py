# SPDX-License-Identifier: Apache-2.0
"""PROTOCOL.md's rules on other engines' chunks: which may be borrowed, and from whose regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm_nvmeof_offload.errors import CANCELLED, Outcome
from vllm_nvmeof_offload.groups import group_id_of
from vllm_nvmeof_offload.manager.core import FROM_POOL, ManagerCore, Source
from vllm_nvmeof_offload.manager.index import Entry, State
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    OURS,
    AttachCommand,
    Command,
    DetachCommand,
    FetchCommand,
    SlotIdentity,
    WriteCommand,
    member_of,
    owner_of,
    owners_of,
    target_of,
)

from .base import Clock, Violation
from .follower import COMPLETE, DEAD, NONE, SimFollower
from .ops import SentOp
from .owners import is_foreign
from .store import START_TAG

#: A pair of place and generation that could not be read is not accepted for so long.
_REFUSED_S = 30.0
#: After so many borrows from an owner it may be left alone for a while.
_TRIALS_MIN = 64
_BORROWED = (State.BORROWING, State.CACHED)


class ForeignRules:
    """The rules for one process's life. What may be borrowed is judged here once more, from the
    table itself and from what the ranks have reported."""

    def __init__(self, core: ManagerCore, clock: Clock, follower: SimFollower) -> None:
        self._core = core
        self._clock = clock
        self._follower = follower
        self._group_ids = [group.group_id for group in core.config.groups]
        self._tag: bytes | None = START_TAG  # None: our weights have no name any more
        self._floor = 0
        self._void: set[int] = set()  # generations that were offered before a reset
        self._refused: dict[tuple[int, int], float] = {}  # until when
        self._failed_attach: dict[int, object] = {}  # owner → its record then
        self._trials: Counter[int] = Counter()  # owner → borrows that ended
        #: Owners whose attach the ranks were sent, and those that a load names already.
        self._attached: set[int] = set()
        self._due: dict[int, object] = {}  # and their records then
        self._to_detach: set[int] = set()  # a rank could not attach them, others could
        self._attaching: dict[int, tuple[int, object]] = {}  # op → owner and its record

    # -- acceptance -------------------------------------------------------------------

    def reset(self, *, named: bool) -> None:
        """W2, W4: what was known is void; weights without a name share with nobody."""
        self._tag = START_TAG if named else None
        self._void |= self._follower.offered
        self._floor = self._follower.version_asked
        self._refused.clear()

    def looked_up(self, key: bytes, sources: int, source: Source | None, *, ours: bool) -> None:
        """A look-up has ended. ours: the index has an entry."""
        rows = self._follower.seen.rows_of(key) if sources & FROM_POOL and not ours else []
        refusals = [self._refusal(key, place, generation) for place, generation in rows]
        if source is Source.SHARED and "" not in refusals:
            raise Violation("S4", f"{key.hex()} hits, of {rows}: {refusals}")
        if source is None and "" in refusals and not self._may_distrust():
            raise Violation("2", f"{key.hex()} misses, of {rows}: {refusals}")

    def _may_distrust(self) -> bool:
        """Whether an owner may be left alone for reasons that are not known here: many failures,
        or an attach that was decided with a record which has changed since."""
        many = any(count >= _TRIALS_MIN for count in self._trials.values())
        return many or None in self._failed_attach.values()

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
                raise Violation("S4", f"{identity} is borrowed although there is one of our own")
            if refusal := self._refusal(identity.key, place, identity.generation):
                raise Violation("S4", f"{identity} at {place:x} is borrowed: {refusal}")
            if (place, identity.generation) not in self._follower.seen.rows_of(identity.key):
                raise Violation("S4", f"{identity} at {place:x}: the table has no such row")
            self._name(place)

    def _name(self, place: int) -> None:
        owner = owner_of(place)
        if owner not in self._attached:
            self._due.setdefault(owner, self._record(owner))

    def _fetched(self, identity: SlotIdentity, place: int) -> None:
        """A fetch leaves; the table may have changed since it was decided."""
        if identity.generation in self._void or self._tag is None:
            raise Violation("reset", f"a fetch of {identity} from before a reset")
        if self._refused.get((place, identity.generation), 0.0) > self._clock():
            raise Violation("S5", f"a fetch of {identity} at {place:x}, which has failed")
        if owner_of(place) not in self._attached:
            raise Violation("S4", f"a fetch of {identity} before its owner's attach")

    def commanded(self, commands: Sequence[Command]) -> None:
        """The commands of a step, whose loads have been planned."""
        for command in commands:
            if isinstance(command, AttachCommand):
                self._attach(command)
            elif isinstance(command, DetachCommand):
                self._detach(command)
            elif isinstance(command, WriteCommand):
                if owners_of(command.batch.places).any():
                    raise Violation("S1", f"{command} into a region of another engine")
                if any(map(is_foreign, command.batch.generations.tolist())):
                    raise Violation("E3", f"{command} of a borrowed chunk")
            elif isinstance(command, FetchCommand):
                for row, place in enumerate(command.batch.places.tolist()):
                    if owner_of(place) != OURS:
                        self._fetched(command.batch.identity(row), place)
        if self._due:
            raise Violation("S4", f"loads of owners {list(self._due)} leave before their attach")
        self._follower.has_moved = False

    def _attach(self, command: AttachCommand) -> None:
        owner = self._follower.owners.get(command.owner)
        of = None if owner is None else (owner.engine_index, owner.pool_uuid)
        if of != (command.engine_index, command.pool_uuid) or command.owner in self._attached:
            raise Violation("S4", f"{command} of {owner}")
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
            raise Violation("S4", f"{command}: its state is {state}")
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

    def borrow_ended(self, place: int, failure: Outcome | None) -> None:
        """Every rank has reported the row."""
        if failure != CANCELLED:
            self._trials[owner_of(place)] += 1

    # -- entries ----------------------------------------------------------------------

    @staticmethod
    def check_entry(entry: Entry) -> None:
        """A borrowed chunk stays in the CPU tier, and its owner has it in the pool."""
        foreign = is_foreign(entry.generation)
        if foreign and entry.state not in _BORROWED:
            raise Violation("E3", f"{entry} is a borrowed chunk")
        if entry.state is State.BORROWING and not foreign:
            raise Violation("state", f"{entry} is one of our own")
