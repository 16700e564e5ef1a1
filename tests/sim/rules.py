# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md as assertions around the manager core, checked after every event."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.chunks import cache_member, identity_of
from vllm_nvmeof_offload.errors import CANCELLED, STALE, Outcome, outcome_of
from vllm_nvmeof_offload.groups import GroupKind, group_id_of
from vllm_nvmeof_offload.manager.core import (
    FROM_CPU,
    FROM_POOL,
    ManagerCore,
    SessionIds,
    Source,
    StorePlan,
)
from vllm_nvmeof_offload.manager.handshake import WritePolicy
from vllm_nvmeof_offload.manager.ledger import Entry, State
from vllm_nvmeof_offload.metrics import Series
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    OURS,
    RELEASED,
    AdoptedEntries,
    AttachCommand,
    CancelCommand,
    ChunkBatch,
    Command,
    DetachCommand,
    FetchCommand,
    LoadCommand,
    OpReport,
    Report,
    ResetCommand,
    SessionsCommand,
    SlotIdentity,
    WriteCommand,
    member_of,
    owner_of,
    slot_of,
    slots_by_target,
    target_of,
    unpacked,
)

from .base import CLIENT, Clock, Knobs, Tag, Violation
from .follower import COMPLETE, DEAD, NONE, SimFollower
from .owners import is_foreign
from .rank import SimRank
from .shapes import holds, overlap, split_cache, split_place
from .store import START_TAG

# Sessions: what they retain is evicted last, for their time, and within their client's share.


_SESSIONS = 4

#: By the content of a file of sessions: each session's end, its chunks' generations by key, and
#: whether all that was asked for could be retained.
SavedRetention = dict[bytes, tuple[dict[int, int], dict[int, dict[bytes, int]], bool]]


class RetentionRules:
    """Requests of one client that ask for retention, and the rules for one process's life."""

    def __init__(
        self, core: ManagerCore, knobs: Knobs, clock: Clock, saved: SavedRetention
    ) -> None:
        self._core, self._knobs, self._clock, self._saved = core, knobs, clock, saved
        self._rng = random.Random(f"{knobs!r} {len(saved)}")
        self._until: dict[int, int] = {}
        self._chunks: dict[int, set[bytes]] = {}
        #: Whether all that was asked for could be retained since the last reset.
        self._fits = True

    def ended(self, keys: Sequence[bytes], ends: npt.NDArray[np.int64] | None) -> None:
        """A request has ended: it may ask for retention, or drop a session."""
        draw, name = self._rng.random(), self._rng.randrange(_SESSIONS)
        if draw >= self._knobs.retains:
            return
        session = SessionIds(name, CLIENT)
        if draw < 0.2 * self._knobs.retains:
            self._core.drop_session(session)
            self.clear(name)
            return
        seconds, priority = self._rng.randint(1, 6), self._rng.randint(1, 100)
        present = {entry.key for entry in self._core.entries()}
        self._core.retain(keys, ends, session, seconds, priority)
        self._until[name] = int(self._clock()) + seconds
        self._chunks.setdefault(name, set()).update(present.intersection(keys))
        self._fits &= self._fit()

    def _fit(self) -> bool:
        slots = min(self._knobs.cache_slots, self._knobs.pool_slots)
        share = int(self._core.config.retain_share * slots)
        return len(set().union(*self._chunks.values())) <= share

    def commanded(self, commands: Collection[Command]) -> None:
        """Remember what a file holds that is to be written."""
        for command in commands:
            if isinstance(command, SessionsCommand):
                generations = {entry.key: entry.generation for entry in self._core.entries()}
                chunks = {
                    name: {key: generations[key] for key in keys if key in generations}
                    for name, keys in self._chunks.items()
                }
                self._saved[command.content] = self._until.copy(), chunks, self._fits

    def restored(self, content: bytes) -> int:
        """Check at a start what is retained of this file. Returns the number of sessions."""
        if not content:
            return 0
        until, chunks, self._fits = self._saved[content]
        adopted = {entry.key: entry.generation for entry in self._core.entries()}
        for name, end in until.items():
            left = {key for key, one in chunks[name].items() if adopted.get(key) == one}
            if left and end > int(self._clock()):
                self._until[name], self._chunks[name] = end, left
        self._fits &= self._fit()
        sessions = self._core.gauges()["sessions"]
        if self._fits and sessions != len(self._until):
            raise Violation("retention", f"{sessions} sessions after a start, not {self._until}")
        return len(self._until)

    def turned(self) -> None:
        """Check after a turn, which ends the sessions whose time has passed."""
        for name in [name for name, end in self._until.items() if end <= int(self._clock())]:
            self.clear(name)
        gauges, knobs = self._core.gauges(), self._knobs
        if self._fits and gauges["sessions"] > len(self._until):
            raise Violation("retention", f"{gauges['sessions']} sessions, more than {self._until}")
        share = self._core.config.retain_share
        for tier, slots in (("cache", knobs.cache_slots), ("pool", knobs.pool_slots)):
            if gauges["slots_retained", tier] > int(share * slots):
                raise Violation("retention", f"one client retains too much: {gauges}")
        if not gauges["sessions"]:
            self.clear()

    def planned(
        self, before: Mapping[bytes, Entry], used: Collection[int], offered: Collection[bytes]
    ) -> None:
        """Check after a plan, which may have evicted chunks. used: the cache slots and places of
        ops; offered: keys of this plan."""
        retained = set().union(*self._chunks.values()) if self._fits else set()
        after = {entry.key: entry for entry in self._core.entries()}
        spared = retained.union(offered, self._core.held())
        others = [e for key, e in after.items() if key not in spared and before.get(key) == e]
        free = [e for e in others if e.cache not in used and e.state is State.BOTH]
        for key in retained.intersection(before).difference(offered):
            old, new = before[key], after.get(key)
            if old.cache >= 0 and (new is None or new.cache < 0) and free:
                raise Violation("retention", f"{old} has left the CPU tier before {free[0]}")
            if old.place < 0 or (new is not None and new.place >= 0):
                continue
            settled = (State.BOTH, State.POOLED)
            same = [e for e in others if e.state in settled and e.place not in used]
            same = [e for e in same if target_of(e.place) == target_of(old.place)]
            if same:
                raise Violation("retention", f"{old} has left the pool before {same[0]}")

    def clear(self, name: int | None = None) -> None:
        """Forget a session, or all of them."""
        for one in [*self._until] if name is None else [name]:
            self._until.pop(one, None)
            self._chunks.pop(one, None)
        self._fits |= name is None


# docs/protocol.md as assertions around the manager core, checked after every event.


_FILLED = {State.FETCHING, State.BORROWING}
_HAS_CACHE = {State.STORING, State.CACHED, State.WRITING, State.BOTH, *_FILLED}
_HAS_POOL = {State.WRITING, State.BOTH, State.POOLED, State.FETCHING}
_STAGED = {State.CACHED, State.WRITING, State.BOTH}
_READ_FIRST = {State.POOLED, *_FILLED}
_READS = ("load", "fetch")
#: STALE: the op waited for a read that was cut off; the entry may be whole in the pool, or gone.
_SPARES = (None, CANCELLED, STALE)
#: Row and member of a slot, by the column that names it.
_SPLIT: dict[str, Callable[[int], tuple[object, int]]] = {
    "cache": split_cache,
    "places": split_place,
}
_PERSISTED = {State.BOTH, State.POOLED, State.FETCHING}


class Rules:
    """Passes the scheduler's calls to the core and checks them."""

    def __init__(
        self,
        core: ManagerCore,
        knobs: Knobs,
        clock: Clock,
        expected: dict[int, list[Tag]],
        follower: SimFollower | None = None,
        saved: SavedRetention | None = None,
    ) -> None:
        """follower: of the other engines on our targets; None: there are none. saved: what this
        process and earlier ones have sent to be saved."""
        self.ranks: list[SimRank] = []
        self.ops: dict[int, SentOp] = {}
        self._core = core
        self._policies = PolicyRules(core, knobs)
        self._events = EventRules(core)
        self._retention = (
            RetentionRules(core, knobs, clock, {} if saved is None else saved)
            if knobs.retains
            else None
        )
        self._follower = follower
        self._foreign = None if follower is None else ForeignRules(core, clock, follower)
        self._knobs = knobs
        self._clock = clock
        self._expected = expected
        self._copied: set[int] = set()  # stores that every rank reported OK
        self._failing: set[int] = set()  # a rank reported a failure: may be removed
        self._failed: set[int] = set()  # every rank has reported: must be removed
        self._cut_off: set[int] = set()  # of the fills that these reports end as cancelled
        self._void: set[int] = set()  # generations from before a reset
        self._provisional: set[int] = set()
        self._in_pool: set[int] = set()  # in no cache slot before these reports
        self._resets_sent = 0
        self._tag: bytes | None = START_TAG  # of the weights; None: they have no name
        self._waiting_since_s: float | None = None  # issue time of the oldest command not sent yet

    # -- calls ------------------------------------------------------------------------

    def lookup(self, key: bytes, sources: int) -> bool:
        source = self._core.lookup(key, sources)
        found = source is not None
        if self._foreign is not None:
            self._foreign.looked_up(key, sources, source, ours=key in self._entries())
        if found and sources == FROM_CPU:
            entry = self._entries()[key]
            if entry.state in _READ_FIRST:
                raise Violation("2", f"{entry} is a hit of the CPU tier only")
        return found

    def prepare_load(
        self,
        keys: Sequence[bytes],
        limit_s: float | None,
        hits: Sequence[bytes],
        tokens: range,
        ends: npt.NDArray[np.int64] | None,
    ) -> LoadCommand:
        """hits: of the look-up that the load follows."""
        if not set(hits).issuperset(keys):
            raise Violation("10", f"a load of {keys}, of which a look-up has found only {hits}")
        self._kept(keys)  # somebody uses them
        if self._follower is not None:
            self._follower.between()  # the keys may be gone by now
        ours = self._entries()
        more = {"tokens": tokens, "ends": ends, "client": CLIENT}
        command = self._core.prepare_load(keys, limit_s, **more)
        op = self._sent("load", command.op, command.batch)
        if self._foreign is not None:
            self._foreign.planned(op, ours)
        if [i.key for i in op.identities] != list(keys):
            raise Violation("8", "a load names other keys than were requested")
        for row, identity in enumerate(op.identities):
            cache, place = op.cache.get(row), op.places.get(row)
            if op.is_gone(row) and identity.key in ours:
                raise Violation("10", f"a load of {identity} as if it were gone")
            if (place is not None and owner_of(place) != OURS) or _is_borrowed(identity, ours):
                # It is tried again. The fetch that borrows it may come with a later step.
                self._failed.discard(identity.generation)
            elif identity.generation in self._failed | self._void and not op.is_gone(row):
                raise Violation("8", f"a load of {identity}, which failed or was voided")
            if cache is not None and place is not None:
                self._fresh(cache, identity)
        self.ops[command.op] = op
        self._policies.planned(self._used(), self._provisional_gone(ours), None)
        self._retained(ours, keys)
        self._used_here(keys)
        return command

    def turn(self) -> None:
        self.fetching(self._core.turn)
        if self._retention is not None:
            self._retention.turned()

    def fetching(self, step: Callable[[], None]) -> None:
        """Run a step that may begin fetches: prefetches, or a probe."""
        before = self._entries()
        step()
        self._policies.turned(self._provisional_gone(before))
        self._retained(before, ())

    def prepare_store(
        self,
        keys: Sequence[bytes],
        ends: npt.NDArray[np.int64] | None = None,
        provisional: npt.NDArray[np.bool_] | None = None,
        again: Collection[bytes] = (),
    ) -> StorePlan:
        self._policies.see(set(keys).difference(again))
        known = self._entries()
        new = self._policies.due([key for key in dict.fromkeys(keys) if key not in known])
        plan = self._core.prepare_store(keys, ends, provisional, again=again, client=CLIENT)
        if provisional is not None:  # a request for which a provisional chunk lasts keeps it
            self._kept(key for key, one in zip(keys, provisional.tolist(), strict=True) if not one)
        if plan is None:
            raise Violation("9", "prepare_store returned None")
        stored = [] if plan.command is None else list(plan.command.batch.key_list())
        in_order = self._in_prefix_order(new, keys, ends)
        first, rest = set(in_order[: len(stored)]), in_order[len(stored) :]
        if stored != [k for k in new if k in first] or sorted(plan.refused) != sorted(rest):
            raise Violation("9", f"stored {stored}, refused {plan.refused} of {new}")
        if plan.refused:
            self._policies.refused(self._used())
        if plan.command is not None:
            op = self._sent("store", plan.command.op, plan.command.batch)
            for row, identity in enumerate(op.identities):
                self._fresh(op.cache[row], identity)
            self.ops[plan.command.op] = op
            if provisional is not None:
                later = {key for key, one in zip(keys, provisional.tolist(), strict=True) if one}
                self._provisional.update(i.generation for i in op.identities if i.key in later)
        self._policies.planned(self._used(), self._provisional_gone(known), keys)
        self._retained(known, keys)
        self._used_here(keys)
        if self._foreign is not None and plan.command is not None:
            self._foreign.stored(self.ops[plan.command.op])
        return plan

    def ended(self, keys: Sequence[bytes], ends: npt.NDArray[np.int64] | None) -> None:
        """A request that used these chunks has ended."""
        if self._foreign is not None:
            self._foreign.ended(keys, self._entries(), self._provisional)
        self._core.ended(keys, ends)
        if self._retention is not None:
            self._retention.ended(keys, ends)
        self._used_here(keys)
        self._commands_wait()

    def _used_here(self, keys: Sequence[bytes]) -> None:
        if self._foreign is not None:
            self._foreign.used(keys, self._entries(), self._provisional)

    def _provisional_gone(self, before: Mapping[bytes, Entry]) -> int:
        # By generation: in the same turn a key may be evicted and borrowed from another engine.
        left = {entry.generation for entry in self._entries().values()}
        gone = {entry.generation for entry in before.values()} - left
        return len(gone & self._provisional)

    def follows_what_is_there(
        self, refused: Collection[bytes], prefix: Sequence[bytes], keys: Sequence[bytes]
    ) -> None:
        """Check before a store of `keys`, a part of the request's `prefix`: what was refused of it
        is offered again, and before all that follows it."""
        missing = set(refused).difference(self._entries(), keys)
        behind = [key for key in prefix if key in missing or key in keys]
        if behind and behind[0] in missing:
            raise Violation("9", f"{keys} are stored behind {behind[0].hex()}, which was refused")

    def _in_prefix_order(
        self, new: list[bytes], keys: Sequence[bytes], ends: npt.NDArray[np.int64] | None
    ) -> list[bytes]:
        """By the token that each ends with; at the same token full attention comes first."""
        if ends is None:
            return new
        full = {g.group_id for g in self._knobs.groups if g.kind is GroupKind.FULL}
        at = {
            key: (end, group_id_of(key) not in full)
            for key, end in zip(keys, ends.tolist(), strict=True)
        }
        return sorted(new, key=lambda key: at[key])

    def keep(self, keys: Sequence[bytes]) -> None:
        """As the core's: provisional chunks last from now on."""
        self._kept(keys)
        self._core.keep(keys)
        self._commands_wait()

    def _kept(self, keys: Iterable[bytes]) -> None:
        if not self._provisional:
            return
        kept = set(keys)
        self._provisional -= {e.generation for e in self._core.entries() if e.key in kept}

    def restored(self, sessions: bytes) -> int:
        """Check a start with this file of sessions; return their number."""
        return 0 if self._retention is None else self._retention.restored(sessions)

    def supersede(self, keys: Sequence[bytes]) -> None:
        self._core.supersede(keys)

    def commanded(self, commands: Sequence[Command]) -> None:
        issued_s, self._waiting_since_s = self._waiting_since_s, None
        self._policies.commanded(commands)
        entries = {entry.generation: entry for entry in self._core.entries()}
        if self._foreign is not None:
            self._foreign.commanded(commands)
        if self._retention is not None:
            self._retention.commanded(commands)
        for command in commands:
            if isinstance(command, CancelCommand):
                self._cancelled(command)
            elif isinstance(command, AttachCommand):
                self.ops[command.op] = self._sent("attach", command.op, None, issued_s)
            elif isinstance(command, ResetCommand):
                self.ops[command.op] = self._sent("reset", command.op, None, issued_s)
                for rank in self.ranks:
                    rank.void_limits[command.op] = max(self._void, default=0)
                self._resets_sent += 1
            elif isinstance(command, FetchCommand):
                op = self._sent("fetch", command.op, command.batch, issued_s)
                self._fetches(command, op, entries)
                self.ops[command.op] = op
            elif isinstance(command, WriteCommand):
                op = self._sent("write", command.op, command.batch, issued_s)
                self._writes(command, op)
                self.ops[command.op] = op

    def _fetches(self, command: FetchCommand, op: SentOp, entries: Mapping[int, Entry]) -> None:
        for row, identity in enumerate(op.identities):
            if owner_of(op.places[row]) != OURS:
                self._failed.discard(identity.generation)  # it is tried again
            self._fresh(op.cache[row], identity)
            entry = entries.get(identity.generation)
            if entry is None or entry.cache != op.cache[row]:
                raise Violation("intent", f"{command}: row {row} was dropped: {entry}")

    def _writes(self, command: WriteCommand, op: SentOp) -> None:
        for row, identity in enumerate(op.identities):
            if identity.generation in self._provisional:
                raise Violation("provisional", f"{command} of {identity}")
            if identity.generation not in self._copied:
                raise Violation("5", f"{command}: no report has completed its store")
            if self._follower is not None and is_foreign(identity.generation):
                newest = max((g for g in self._expected if not is_foreign(g)), default=0)
                self._follower.written[identity.generation] = newest + 1
            for other, place, _ in self._users("places"):
                mine = split_place(op.places[row])
                if overlap(split_place(place), mine) and other != identity:
                    raise Violation("7", f"{command}: pool slot still used by {other}")

    def _cancelled(self, command: CancelCommand) -> None:
        op = self.ops[command.target_op]
        if op.kind not in ("load", "fetch"):
            raise Violation("state", f"{command} cancels {op}")
        for row in () if command.indexes is None else command.indexes.tolist():
            for identity, slot, other in self._users("cache"):
                if other is not op and (identity, slot) == (op.identities[row], op.cache.get(row)):
                    raise Violation("state", f"{command}: {other} waits for row {row}")

    def report(self, reports: Sequence[Report]) -> None:
        before = {e.generation: (e, e.state) for e in self._core.entries()}
        self._cut_off.clear()
        self._in_pool = {g for g, (_, state) in before.items() if state in _READ_FIRST}
        for report in unpacked(reports):
            if isinstance(report, OpReport):
                self._apply(report)
        unequal, resets = len(self._core.unequal_groups), self._core.counters["resets"]
        self._core.report(reports)
        self._commands_wait()
        if len(self._core.unequal_groups) > unequal:
            if self._core.counters["resets"] == self._resets_sent:
                raise Violation("17", "ranks are unequal, and the pool keeps what they shared")
            self.reset(self._tag, again=self._core.counters["resets"] == resets)
            return
        after = {e.generation for e in self._core.entries()}
        for generation in before.keys() - after - self._failing:
            entry, state = before[generation]
            # A fill that was cut off leaves its entry in the pool, and the core gives places to
            # waiting writes before it returns: this one's may be the coldest.
            evictable = state is State.POOLED or (state in _FILLED and generation in self._cut_off)
            if not evictable:
                raise Violation("8", f"{entry} ({state.name}) was removed but did not fail")

    def reset(self, tag: bytes | None, *, again: bool) -> None:
        """tag: of the weights; None: they have no name. again: one was queued already."""
        self._tag = tag
        self._void.update(g for g in self._expected if not is_foreign(g))
        if self._retention is not None:
            self._retention.clear()
        if self._foreign is not None:
            self._foreign.reset(tag, again=again)
        self._commands_wait()

    # -- after every event ------------------------------------------------------------

    def check(self) -> None:
        """Check after an event that reached the manager."""
        gauges = self._core.gauges()
        caches: dict[object, list[int]] = {}  # members by row
        pools: dict[object, list[int]] = {}
        users = {tier: self._by_row(tier) for tier in ("cache", "places")}
        slots = slots_by_target(self._knobs.pool_slots, self._knobs.targets)
        entries = self._core.entries()
        for entry in entries:
            self._check_entry(entry)
            for tier, slot, seen in (
                ("cache", entry.cache, caches),
                ("places", entry.place, pools),
            ):
                if slot < 0:
                    continue
                part = row, member = _SPLIT[tier](slot)
                limit = slots[target_of(slot)] if tier == "places" else self._knobs.cache_slots
                number = slot_of(slot) if tier == "places" else row
                if number >= limit or any(overlap(part, (row, m)) for m in seen.get(row, ())):
                    raise Violation("7", f"{tier} slot {part} twice or out of range")
                seen.setdefault(row, []).append(member)
                for other, used in users[tier].get(row, ()):
                    if other.generation != entry.generation and overlap(part, (row, used)):
                        raise Violation("7", f"{tier} slot {part}: {entry} and still {other}")
        for tier, rows in (("cache", caches), ("pool", pools)):
            self._check_taken(tier, set(rows), gauges)
        unsent = self._core.counters["resets"] - self._resets_sent
        if self._foreign is not None:
            unsent += self._foreign.attaches_unsent
        if gauges["ops"] != len(self.ops) + unsent:
            raise Violation("leak", f"{gauges['ops']} ops, {len(self.ops)} known outside")
        self._policies.check()
        self._events.check(entries)
        self._check_memory(entries)

    def _check_taken(self, tier: str, rows: set[object], gauges: Mapping[Series, float]) -> None:
        """No slot leaks. rows: those of entries; a divided one may have orphans besides, and
        counts as retired with one of its parts."""
        taken, orphaned = gauges["slots_used", tier], gauges[f"{tier}_slots_orphaned"]
        least = most = len(rows) + orphaned
        if self._knobs.set_size > 1:
            retired = self._core.counters["retired_pool_slots"] if tier == "pool" else 0
            least = len(rows) - int(retired)
        if not least <= taken <= most:
            raise Violation("leak", f"{tier}: {taken} taken, {len(rows)} + {orphaned} known")
        if taken > gauges["slots", tier]:
            raise Violation("leak", f"{tier}: {taken} slots taken of {gauges}")

    def check_memory(self) -> None:
        """Check after any event that every rank's memory and pool hold what the index records."""
        self._check_memory(self._core.entries())

    def _check_memory(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            state, generation = entry.state, entry.generation
            if state in _STAGED:
                row, member = split_cache(entry.cache)
                for rank in self._holders(member):
                    payload = rank.io.payload_of(generation)
                    found = rank.memory.slots[row][: len(payload)]
                    if found != payload:
                        raise Violation("1", f"rank {rank.rank}: {entry} is over {found}")
            if state in _PERSISTED:
                slot = slot_of(entry.place) * self._knobs.targets + target_of(entry.place)
                for rank in self._holders(member_of(entry.place)):
                    if rank.io.committed.get(slot) != generation:
                        raise Violation("5", f"rank {rank.rank} never wrote {entry}")

    def _holders(self, member: int) -> list[SimRank]:
        """The ranks that have what is in a place or cache slot with this member."""
        return [rank for rank in self.ranks if holds(rank.rank, member, self._knobs)]

    def _check_entry(self, entry: Entry) -> None:
        generation, state = entry.generation, entry.state
        ForeignRules.check_entry(entry)
        if generation in self._failed or generation in self._void:
            raise Violation("8", f"{entry} failed or was voided but is still in the index")
        if (entry.cache >= 0) != (state in _HAS_CACHE) or (entry.place >= 0) != (
            state in _HAS_POOL
        ):
            raise Violation("state", f"slots do not fit the state: {entry}")
        if state is State.STORING and self._core.lookup(entry.key) is not Source.CPU:
            raise Violation("2", f"{entry} is not a hit")

    def adopted(self) -> None:
        """Check after a start: every adopted entry was computed with the loaded weights, since the
        last reset that one of its holders has finished."""
        self._check_intersection()
        for entry in self._core.entries():
            holders = self._holders(member_of(entry.place))
            generation = entry.generation
            if self._follower is not None:
                generation = self._follower.written.get(generation, generation)
            if generation <= max(rank.io.store.void_limit for rank in holders):
                raise Violation("reset", f"adopted {entry} from before a reset")
            if any(epoch for epoch, *_ in self._expected[entry.generation]):
                raise Violation("reset", f"adopted {entry} of other weights")

    def _check_intersection(self) -> None:
        """Adopted is what all have that hold it, and nothing else."""
        found = [_identities(rank.adopted) for rank in self.ranks]
        on_all: set[tuple[bytes, int]] = set()
        for place, identity in set().union(*found):
            holders = self._holders(member_of(place))
            if all((place, identity) in found[rank.rank] for rank in holders):
                on_all.add(identity)
        adopted = {(entry.key, entry.generation) for entry in self._core.entries()}
        lost = {key for key, _ in on_all} - {key for key, _ in adopted}
        if lost or adopted - on_all:
            raise Violation("17", f"adopted {adopted} of {on_all}")

    def quiet(self) -> None:
        """Check when the engine stops stepping: no op still owes a report that will come."""
        for number, op in self.ops.items():
            young = self._clock() - op.issued_s < self._knobs.report_deadline_s
            if op.owes_outcomes and young:
                raise Violation("report", f"stepping stopped while op {number} is owed: {op}")

    def idle(self) -> None:
        """Check after every op has ended and released its buffers: nothing may be left."""
        gauges = self._core.gauges()
        names = ("ops", "cache_slots_orphaned", "pool_slots_orphaned", "cache_slots_in_use")
        names += (
            ("writes_pending", "sent"),
            ("held_cache_slots", "reload"),
            ("held_cache_slots", "queue"),
            "requests_waiting",
        )
        if any(gauges[name] for name in names):
            raise Violation("leak", f"at the end: {gauges} {self.ops}")
        self._policies.idle()
        if self._foreign is not None:
            self._foreign.idle(self._core.entries())
        for rank in self.ranks:
            if rank.opener and rank.opener.open_count != len(rank.io.regions):
                raise Violation("leak", f"rank {rank.rank} has files open: {rank.io.regions}")
            if not rank.pipeline.idle() or rank.copy.in_flight:
                raise Violation("leak", f"rank {rank.rank}'s pipeline is not idle")

    # -- helpers ----------------------------------------------------------------------

    def _sent(
        self, kind: str, number: int, batch: ChunkBatch | None, issued_s: float | None = None
    ) -> SentOp:
        if number in self.ops:
            raise Violation("state", f"op {number} used twice")
        issued_s = self._clock() if issued_s is None else issued_s
        return SentOp.of(kind, issued_s, batch, self._knobs.ranks)

    def _commands_wait(self) -> None:
        if self._waiting_since_s is None and self._core.gauges()["commands_waiting"]:
            self._waiting_since_s = self._clock()

    def _entries(self) -> dict[bytes, Entry]:
        return {entry.key: entry for entry in self._core.entries()}

    def _users(self, tier: str) -> Iterator[tuple[SlotIdentity, int, SentOp]]:
        for op in self.ops.values():
            for row, slot in getattr(op, tier).items():
                yield op.identities[row], slot, op

    def _by_row(self, tier: str) -> dict[object, list[tuple[SlotIdentity, int]]]:
        """What ops under way name, with the member, by the row of its slot."""
        users: dict[object, list[tuple[SlotIdentity, int]]] = {}
        for identity, slot, _ in self._users(tier):
            row, member = _SPLIT[tier](slot)
            users.setdefault(row, []).append((identity, member))
        return users

    def _used(self) -> set[int]:
        return {slot for _, slot, _ in self._users("cache")}

    def _retained(self, before: Mapping[bytes, Entry], keys: Collection[bytes]) -> None:
        if self._retention is not None:
            places = {place for _, place, _ in self._users("places")}
            self._retention.planned(before, self._used() | places, keys)

    def _fresh(self, slot: int, identity: SlotIdentity) -> None:
        """Rule 7: a slot is given out again only when no rank works on it."""
        part = row, member = split_cache(slot)
        for other, used, op in self._users("cache"):
            if overlap(split_cache(used), part) and other != identity:
                raise Violation("7", f"cache slot {part} for {identity}, still used by {op}")
        for rank in self._holders(member):
            if rank.memory.watches.busy(("slot", row)):
                raise Violation("7", f"cache slot {part} given out, busy on rank {rank.rank}")

    def _apply(self, report: OpReport) -> None:
        op = self.ops.get(report.op)
        if op is None:
            raise Violation("13", f"{report}: every rank has reported all of this op already")
        for row, outcome, released in op.rows_of(report):
            if outcome is not None:
                self._ended(report.op, row, outcome)
            if released:
                op.released(row)
        if not any(op.outcomes) and not any(op.releases):
            del self.ops[report.op]

    def _ended(self, number: int, row: int, outcome: Outcome) -> None:
        op = self.ops[number]
        if not op.outcomes[row]:
            raise Violation("13", f"{op}: row {row} had its outcome on every rank")
        op.outcomes[row] -= 1
        if not outcome.ok:
            if op.failures.get(row, CANCELLED) == CANCELLED:
                op.failures[row] = outcome
            self._foreign_failed(number, row, outcome)
            if op.blames(row, outcome, self._in_pool):
                self._failing.add(op.identities[row].generation)
        if not op.outcomes[row]:
            self._decided(number, row)

    def _foreign_failed(self, number: int, row: int, outcome: Outcome) -> None:
        op = self.ops[number]
        place = op.places.get(row, 0)
        if self._foreign is None:
            return
        if op.kind == "attach":
            self._foreign.attach_failed(number)
        elif owner_of(place) != OURS and outcome != CANCELLED:
            self._foreign.borrow_failed(place, op.identities[row].generation)

    def _decided(self, number: int, row: int) -> None:
        op = self.ops[number]
        failure, place = op.failures.get(row), op.places.get(row, 0)
        if op.kind == "attach":
            assert self._foreign is not None
            self._foreign.attach_ended(number, failed=failure is not None)
        if not op.identities or op.is_gone(row):
            return
        generation = op.identities[row].generation
        entry = self._entries().get(op.identities[row].key)
        # It may have been borrowed once more, into another slot.
        filled = entry is not None and entry.cache == op.cache.get(row)
        if owner_of(place) != OURS:
            assert self._foreign is not None
            self._foreign.borrow_ended(place, generation, failure)
            if failure is None:
                self._copied.add(generation)
            if failure not in (None, CANCELLED) and filled:
                self._failed.add(generation)
            elif failure == CANCELLED and op.fills(row):
                self._cut_off.add(generation)
            return
        if is_foreign(generation) and not self._is_entry(op, row):
            return
        if op.kind == "store" and failure is None:
            self._copied.add(generation)
        elif op.kind == "store" or (op.kind in _READS and failure not in _SPARES):
            if filled or not is_foreign(generation):
                self._failed.add(generation)
        elif failure == CANCELLED and op.fills(row):
            self._cut_off.add(generation)

    def _is_entry(self, op: SentOp, row: int) -> bool:
        """Whether the row still is the chunk's entry, or there is none: what was borrowed may be
        borrowed again, in the same generation and into other slots."""
        entry = self._entries().get(op.identities[row].key)
        if entry is None:
            return True
        return entry.cache == op.cache.get(row) or entry.place == op.places.get(row)


def _is_borrowed(identity: SlotIdentity, entries: Mapping[bytes, Entry]) -> bool:
    entry = entries.get(identity.key)
    return entry is not None and (entry.state, entry.generation) == (
        State.BORROWING,
        identity.generation,
    )


def _identities(adopted: AdoptedEntries) -> set[tuple[int, tuple[bytes, int]]]:
    """Places, with keys and generations."""
    keys = [row.tobytes() for row in adopted.key_rows()]
    identities = zip(keys, adopted.generations.tolist(), strict=True)
    return set(zip(adopted.places.tolist(), identities, strict=True))


class EventRules:
    """One process's router, which starts empty."""

    def __init__(self, core: ManagerCore) -> None:
        self._core = core
        self._has: dict[Source, set[bytes]] = {tier: set() for tier in Source}

    def check(self, entries: Sequence[Entry]) -> None:
        """Check after every event; takes the changes as vLLM's scheduler does after every step."""
        while self._core.changed_keys:
            for change in self._core.take_changes():
                has = self._has[change.tier]
                for key in change.keys:
                    # A reset may report the removal of a key whose arrival was not reported.
                    if not change.removed and key in has:
                        raise Violation("events", f"{key!r} stored in {change.tier} twice")
                    (has.discard if change.removed else has.add)(key)
        for tier, states in ((Source.CPU, _STAGED), (Source.POOL, _PERSISTED)):
            held = {e.key for e in entries if e.state in states}
            if held != self._has[tier]:
                raise Violation("events", f"{tier}: {held ^ self._has[tier]} reported wrongly")


class PolicyRules:
    """The policies' rules for one process's life; `Rules` checks the protocol's."""

    def __init__(self, core: ManagerCore, knobs: Knobs) -> None:
        self._core = core
        self._knobs = knobs
        self._sightings: Counter[bytes] = Counter()
        self._dropped = 0
        self._clean_min = max(1, int(core.config.clean_share * knobs.cache_slots))
        self._roomy = True  # no request for a cache slot has failed so far
        self._demotes = knobs.write_policy == "on_eviction"

    def see(self, keys: Iterable[bytes]) -> None:
        """Check before the core is asked to store these keys."""
        self._sightings.update(set(keys))

    def due(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys that were looked up often enough."""
        return [key for key in keys if self._sightings[key] >= self._knobs.store_threshold]

    def turned(self, provisional: int) -> None:
        """Note what fetches have taken: a request that leaves in the same step may give it back.
        They may have evicted entries, this many provisional ones among them."""
        self._note_room()
        if self._take_dropped() > provisional:
            raise Violation("hole", "a fetch evicted a chunk that was never written")

    def _take_dropped(self) -> int:
        dropped = self._core.counters["unwritten_chunks", "evicted"] - self._dropped
        self._dropped += dropped
        return int(dropped)

    def planned(
        self, used_cache: Iterable[int], provisional: int, offered: Sequence[bytes] | None
    ) -> None:
        """Check after a store or a load was planned: the plan may have evicted entries, this many
        provisional ones among them. offered: the store's keys; None: it was a load."""
        self._note_room()  # a slot that it has taken may be free again before the next command
        dropped = self._take_dropped()
        if dropped <= provisional:
            return
        if offered is None:
            raise Violation("hole", "a load evicted a chunk that was never written")
        gauges = self._core.gauges()
        if gauges["slots", "pool"] and not self._core.targets.suspects:
            raise Violation("hole", f"{dropped} chunks were evicted that could have been written")
        if self._knobs.set_size > 1:
            return  # the rows of those that are left may have other parts that cannot be evicted
        used, held = set(used_cache), set(self._core.held())
        if not self._demotes:
            held.update(offered)  # without a prefix its continuation would be unreachable
        for entry in self._core.entries():
            free = entry.cache not in used and entry.key not in held
            if entry.state is State.BOTH and free:
                raise Violation("demotion", f"an unwritten chunk was evicted before {entry}")

    def refused(self, used_cache: Iterable[int]) -> None:
        """Check rule 9 after a store was refused because no cache slot could be had."""
        gauges = self._core.gauges()
        used, held, unwritten = set(used_cache), set(self._core.held()), 0
        if gauges["slots_used", "cache"] < gauges["slots", "cache"]:
            raise Violation("9", "refused a store with a cache slot free")
        for entry in self._core.entries():
            free = entry.cache not in used and entry.key not in held
            whole = cache_member(entry.cache) == EVERY_MEMBER
            if entry.state is State.BOTH and free and whole:
                raise Violation("9", f"refused a store although {entry} could be evicted")
            unwritten += entry.state is State.CACHED and free and whole
        suspects = len(self._core.targets.suspects)
        takes_writes = gauges["slots", "pool"] and suspects < self._knobs.targets
        if unwritten > (gauges["writes_pending", "waiting"] if takes_writes else 0):
            raise Violation("9", f"refused a store although {unwritten} chunks could be evicted")

    def commanded(self, commands: Iterable[Command]) -> None:
        self._note_room()
        writes = [command for command in commands if isinstance(command, WriteCommand)]
        if writes and self._knobs.write_policy == "off":
            raise Violation("off", f"{writes[0]}")
        if writes and self._demotes and self._roomy:
            raise Violation("demotion", f"{writes[0]} although the CPU tier has room")

    def check(self) -> None:
        self._dropped = self._core.counters["unwritten_chunks", "evicted"]
        self._note_room()
        gauges, knobs = self._core.gauges(), self._knobs
        for reason, share in (("reload", knobs.reload_share), ("queue", knobs.prefetch_share)):
            held = gauges["held_cache_slots", reason]
            if held > int(share * knobs.cache_slots):
                raise Violation("budget", f"{reason}: {held} slots held")
        for key in self._core.held():
            if self._core.lookup(key) is not Source.CPU:
                raise Violation("held", f"{key.hex()} is held but not in the CPU tier")

    def _note_room(self) -> None:
        gauges = self._core.gauges()
        free = gauges["slots", "cache"] - gauges["slots_used", "cache"]
        self._roomy &= free >= self._clean_min

    def idle(self) -> None:
        """Check with nothing under way: every chunk that was due is written."""
        gauges = self._core.gauges()
        self._check_prefetches()
        waiting = gauges["writes_pending", "waiting"]
        if not gauges["slots", "pool"] or self._core.targets.suspects or not waiting:
            return
        if not self._demotes:
            raise Violation("leak", f"not written at the end: {gauges}")
        cached = sum(entry.cache >= 0 for entry in self._core.entries())
        clean = cached - waiting
        short = self._clean_min - clean - gauges["slots", "cache"] + gauges["slots_used", "cache"]
        if short > 0:
            raise Violation("demotion", f"{short} demotions are due but not started: {gauges}")

    def _check_prefetches(self) -> None:
        """Check that every prefetch was used, cancelled, or counted as failed or wasted."""
        begun, ended = Counter[str](), Counter[str]()
        for series, count in self._core.counters.items():
            if series[0] == "prefetches":
                begun[series[1]] += int(count)
            elif series[0] == "prefetches_ended":
                ended[series[1]] += int(count)
        if begun.total() != ended.total():
            raise Violation("prefetch", f"started {dict(begun)}, ended {dict(ended)}")


#: A pair of place and generation that could not be read is not accepted for so long.
_REFUSED_S = 30.0
#: An owner is left alone for so long if more than one of `_FAILED_SHARE` borrows has failed, of so
#: many at least. The counts are halved at `_TRIALS_MAX`.
_DISTRUSTED_S = 30.0
_TRIALS_MIN, _TRIALS_MAX, _FAILED_SHARE = 64, 1024, 50
#: A chunk that others gave up is written if so many requests have used it here.
_USES_MIN = 2


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

    # -- entries ----------------------------------------------------------------------

    @staticmethod
    def check_entry(entry: Entry) -> None:
        if entry.state is State.BORROWING and not is_foreign(entry.generation):
            raise Violation("state", f"{entry} is one of our own")


@dataclass
class SentOp:
    """An op seen from outside: what its rows name, and how many ranks owe what on each."""

    kind: str
    issued_s: float
    identities: tuple[SlotIdentity, ...] = ()
    cache: dict[int, int] = field(default_factory=dict)  # row → cache slot, until its release
    places: dict[int, int] = field(default_factory=dict)
    outcomes: list[int] = field(default_factory=list)  # by row: ranks that owe it
    releases: list[int] = field(default_factory=list)
    failures: dict[int, Outcome] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, issued_s: float, batch: ChunkBatch | None, ranks: int) -> SentOp:
        """batch: None for a reset or an attach, which has one row."""
        if batch is None:
            return cls(kind, issued_s, outcomes=[ranks], releases=[ranks])
        return cls(
            kind,
            issued_s,
            tuple(identity_of(batch, row) for row in range(len(batch))),
            {row: slot for row, slot in enumerate(batch.cache.tolist()) if slot >= 0},
            {row: place for row, place in enumerate(batch.places.tolist()) if place >= 0},
            [ranks] * len(batch),
            [ranks] * len(batch),
        )

    @property
    def owes_outcomes(self) -> bool:
        return any(self.outcomes)

    def rows_of(self, report: OpReport) -> Iterator[tuple[int, Outcome | None, bool]]:
        """(row, outcome, released) of each row of a report; None: only a release."""
        rows = range(len(self.outcomes)) if report.indexes is None else report.indexes.tolist()
        for at, row in enumerate(rows):
            code = 0 if report.codes is None else int(report.codes[at])
            number = 0 if report.errnos is None else int(report.errnos[at])
            released = report.released is None or bool(report.released[at])
            yield row, None if code == RELEASED else outcome_of(code, number), released

    def released(self, row: int) -> None:
        """A rank has released the row, which gives up its slots when all of them have."""
        if self.releases[row] <= self.outcomes[row]:
            raise Violation("13", f"{self}: row {row} is released before its outcome")
        self.releases[row] -= 1
        if not self.releases[row]:
            self.cache.pop(row, None)
            self.places.pop(row, None)

    def is_gone(self, row: int) -> bool:
        """Whether the row of a load names neither slot nor place. Asked before its release."""
        return self.kind == "load" and row not in self.cache and row not in self.places

    def fills(self, row: int) -> bool:
        """Whether the row reads the pool into a cache slot. Asked before its release."""
        return self.kind in ("load", "fetch") and row in self.cache and row in self.places

    def blames(self, row: int, outcome: Outcome, in_pool: set[int]) -> bool:
        """Whether a rank's failure proves that the chunk is bad, so that it may be removed.

        in_pool: generations that were only in the pool, or being read from it. An op that did
        not read the pool has proved nothing about those generations.
        """
        if self.kind == "store":
            return True
        if self.kind not in ("load", "fetch") or outcome == CANCELLED or self.is_gone(row):
            return False
        waited = self.identities[row].generation in in_pool and row not in self.places
        return outcome != STALE or not waited
