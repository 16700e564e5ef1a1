# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md as assertions around the manager core, checked after every event."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import CANCELLED, STALE, Outcome
from vllm_nvmeof_offload.groups import GroupKind, group_id_of
from vllm_nvmeof_offload.manager.core import FROM_CPU, ManagerCore, Source, StorePlan
from vllm_nvmeof_offload.manager.ledger import Entry, State
from vllm_nvmeof_offload.metrics import Series
from vllm_nvmeof_offload.protocol import (
    OURS,
    AdoptedEntries,
    AttachCommand,
    CancelCommand,
    ChunkBatch,
    Command,
    FetchCommand,
    LoadCommand,
    OpReport,
    Report,
    ResetCommand,
    SlotIdentity,
    WriteCommand,
    member_of,
    owner_of,
    slot_of,
    slots_by_target,
    target_of,
    unpacked,
)

from .base import Clock, Knobs, Violation
from .event_rules import EventRules
from .follower import SimFollower
from .foreign_rules import ForeignRules
from .memory import Tag
from .ops import SentOp
from .owners import is_foreign
from .policy_rules import PolicyRules
from .rank import SimRank
from .sets import holds, overlap, split_cache, split_place
from .store import START_TAG

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
    ) -> None:
        """follower: of the other engines on our targets; None: there are none."""
        self.ranks: list[SimRank] = []
        self.ops: dict[int, SentOp] = {}
        self._core = core
        self._policies = PolicyRules(core, knobs)
        self._events = EventRules(core)
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
        command = self._core.prepare_load(keys, limit_s, tokens=tokens, ends=ends)
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
        self._used_here(keys)
        return command

    def turn(self) -> None:
        self.fetching(self._core.turn)

    def fetching(self, step: Callable[[], None]) -> None:
        """Run a step that may begin fetches: prefetches, or a probe."""
        before = self._entries()
        step()
        self._policies.turned(self._provisional_gone(before))

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
        plan = self._core.prepare_store(keys, ends, provisional, again=again)
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
        self._used_here(keys)
        if self._foreign is not None and plan.command is not None:
            self._foreign.stored(self.ops[plan.command.op])
        return plan

    def ended(self, keys: Sequence[bytes], ends: npt.NDArray[np.int64] | None) -> None:
        """A request that used these chunks has ended."""
        if self._foreign is not None:
            self._foreign.ended(keys, self._entries(), self._provisional)
        self._core.ended(keys, ends)
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

    def supersede(self, keys: Sequence[bytes]) -> None:
        self._core.supersede(keys)

    def commanded(self, commands: Sequence[Command]) -> None:
        issued_s, self._waiting_since_s = self._waiting_since_s, None
        self._policies.commanded(commands)
        entries = {entry.generation: entry for entry in self._core.entries()}
        if self._foreign is not None:
            self._foreign.commanded(commands)
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
