# SPDX-License-Identifier: Apache-2.0
"""PROTOCOL.md's rules as assertions around the manager core, checked after every event."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_nvmeof_offload.errors import CANCELLED, STALE
from vllm_nvmeof_offload.manager.core import ManagerCore, Source, StorePlan
from vllm_nvmeof_offload.manager.index import Entry, State
from vllm_nvmeof_offload.protocol import (
    CancelCommand,
    Command,
    FetchCommand,
    LoadCommand,
    OpReport,
    ReleaseReport,
    Report,
    ResetCommand,
    SlotIdentity,
)

from .base import Clock, Knobs, Violation
from .event_rules import EventRules
from .memory import Tag
from .ops import SentOp
from .policy_rules import PolicyRules
from .rank import SimRank

_HAS_CACHE = {State.STORING, State.CACHED, State.WRITING, State.BOTH, State.FETCHING}
_HAS_POOL = {State.WRITING, State.BOTH, State.POOLED, State.FETCHING}
_STAGED = {State.CACHED, State.WRITING, State.BOTH}
_READ_FIRST = {State.POOLED, State.FETCHING}
_READS = ("load", "fetch")
#: STALE: the op waited for a read that was cut off; the entry may be whole in the pool, or gone.
_SPARES = (None, CANCELLED, STALE)
_PERSISTED = {State.BOTH, State.POOLED, State.FETCHING}


class Rules:
    """Passes the scheduler's calls to the core and checks them."""

    def __init__(
        self,
        core: ManagerCore,
        knobs: Knobs,
        clock: Clock,
        expected: dict[int, list[Tag]],
    ) -> None:
        self.ranks: list[SimRank] = []
        self.ops: dict[int, SentOp] = {}
        self._core = core
        self._policies = PolicyRules(core, knobs)
        self._events = EventRules(core)
        self._knobs = knobs
        self._clock = clock
        self._expected = expected
        self._copied: set[int] = set()  # stores that every rank reported OK
        self._failing: set[int] = set()  # a rank reported a failure: may be removed
        self._failed: set[int] = set()  # every rank has reported: must be removed
        self._void: set[int] = set()  # generations from before a reset
        self._in_pool: set[int] = set()  # in no cache slot before these reports
        self._waiting_since_s: float | None = None  # issue time of the oldest command not sent yet

    # -- calls ------------------------------------------------------------------------

    def lookup(self, key: bytes) -> bool:
        return self._core.lookup(key) is not None

    def prepare_load(self, keys: Sequence[bytes], limit_s: float | None = None) -> LoadCommand:
        command = self._core.prepare_load(keys, limit_s)
        op = self._sent("load", command.op)
        op.identities = tuple(chunk.identity for chunk in command.chunks)
        if [i.key for i in op.identities] != list(keys):
            raise Violation("8", "a load names other keys than were requested")
        for chunk in command.chunks:
            if chunk.identity.generation in self._failed | self._void:
                raise Violation("8", f"a load of {chunk.identity}, which failed or was voided")
            if chunk.cache_slot is not None:
                if chunk.pool_slot is not None:
                    self._fresh(chunk.cache_slot, chunk.identity)
                op.cache[chunk.cache_slot] = chunk.identity
            if chunk.pool_slot is not None:
                op.pool[chunk.pool_slot] = chunk.identity
        self.ops[command.op] = op
        self._policies.planned(self._used("cache"), load=True)
        return command

    def prepare_store(self, keys: Sequence[bytes]) -> StorePlan:
        self._policies.see(keys)
        new = self._policies.due([k for k in dict.fromkeys(keys) if k not in self._entries()])
        plan = self._core.prepare_store(keys)
        if plan is None:
            raise Violation("9", "prepare_store returned None")
        stored = list(plan.stored)
        if stored != new[: len(stored)] or plan.refused != len(new) - len(stored):
            raise Violation("9", f"stored {stored}, refused {plan.refused} of {new}")
        if plan.refused:
            self._policies.refused(self._used("cache"))
        if plan.command is not None:
            op = self._sent("store", plan.command.op)
            op.identities = tuple(chunk.identity for chunk in plan.command.chunks)
            for chunk in plan.command.chunks:
                self._fresh(chunk.cache_slot, chunk.identity)
                op.cache[chunk.cache_slot] = chunk.identity
            self.ops[plan.command.op] = op
        self._policies.planned(self._used("cache"), load=False)
        return plan

    def commanded(self, commands: Sequence[Command]) -> None:
        issued_s, self._waiting_since_s = self._waiting_since_s, None
        self._policies.commanded(commands)
        for command in commands:
            if isinstance(command, ResetCommand):
                self.ops[command.op] = self._sent("reset", command.op, issued_s)
                continue
            if isinstance(command, CancelCommand):
                if self.ops[command.target_op].kind not in ("load", "fetch"):
                    raise Violation("state", f"{command} cancels {self.ops[command.target_op]}")
                continue
            fetch = isinstance(command, FetchCommand)
            op = self._sent("fetch" if fetch else "write", command.op, issued_s)
            op.identities = (command.identity,)
            if fetch:
                self._fresh(command.cache_slot, command.identity)
            elif command.identity.generation not in self._copied:
                raise Violation("5", f"{command}: no report has completed its store")
            for other in self.ops.values():
                if other.pool.get(command.pool_slot, command.identity) != command.identity:
                    raise Violation("7", f"{command}: pool slot still used by {other}")
            op.cache[command.cache_slot] = command.identity
            op.pool[command.pool_slot] = command.identity
            self.ops[command.op] = op

    def report(self, reports: Sequence[Report]) -> None:
        before = {e.identity.generation: (e, e.state) for e in self._core.entries()}
        self._in_pool = {g for g, (_, state) in before.items() if state in _READ_FIRST}
        for report in reports:
            if isinstance(report, OpReport | ReleaseReport):
                self._apply(report)
        self._core.report(reports)
        self._commands_wait()
        after = {e.identity.generation for e in self._core.entries()}
        for generation in before.keys() - after - self._failing:
            entry, state = before[generation]
            if state is not State.POOLED:
                raise Violation("8", f"{entry} ({state.value}) was removed but did not fail")

    def reset(self) -> None:
        self._void.update(self._expected)
        self._commands_wait()

    # -- after every event ------------------------------------------------------------

    def check(self) -> None:
        """Check after an event that reached the manager."""
        gauges = self._core.gauges()
        caches: set[int] = set()
        pools: set[int] = set()
        users = self._users()
        for entry in self._core.entries():
            self._check_entry(entry)
            for tier, slot, seen in (
                ("cache", entry.cache_slot, caches),
                ("pool", entry.pool_slot, pools),
            ):
                if slot is None:
                    continue
                if slot in seen or not 0 <= slot < getattr(self._knobs, f"{tier}_slots"):
                    raise Violation("7", f"{tier} slot {slot} twice or out of range")
                seen.add(slot)
                for other in users.get((tier, slot), ()):
                    if other.generation != entry.identity.generation:
                        raise Violation("7", f"{tier} slot {slot}: {entry} and still {other}")
        for tier, seen in (("cache", caches), ("pool", pools)):
            taken, orphaned = gauges[f"{tier}_slots_used"], gauges[f"{tier}_slots_orphaned"]
            if taken != len(seen) + orphaned:
                raise Violation("leak", f"{tier}: {taken} taken, {len(seen)} + {orphaned} known")
            if taken > gauges[f"{tier}_slots"]:
                raise Violation("leak", f"{tier}: {taken} slots taken of {gauges}")
        if gauges["ops"] != len(self.ops) + gauges["commands_waiting"]:
            raise Violation("leak", f"{gauges['ops']} ops, {len(self.ops)} known outside")
        self._policies.check()
        self._events.check()
        self.check_memory()

    def check_memory(self) -> None:
        """Check after any event that every rank's memory and pool hold what the index records."""
        expected = self._expected
        for entry in self._core.entries():
            state, generation = entry.state, entry.identity.generation
            if state in _STAGED:
                for rank in self.ranks:
                    payload = rank.memory.slots[entry.cache_slot]  # type: ignore[index]
                    if payload != expected[generation]:
                        raise Violation("1", f"rank {rank.rank}: {entry} is over {payload}")
            if state in _PERSISTED:
                for rank in self.ranks:
                    if rank.io.committed.get(entry.pool_slot) != generation:  # type: ignore[arg-type]
                        raise Violation("5", f"rank {rank.rank} never wrote {entry}")

    def _check_entry(self, entry: Entry) -> None:
        generation, state = entry.identity.generation, entry.state
        if generation in self._failed or generation in self._void or state is State.DOOMED:
            raise Violation("8", f"{entry} failed or was voided but is still in the index")
        if (entry.cache_slot is not None) != (state in _HAS_CACHE) or (
            entry.pool_slot is not None
        ) != (state in _HAS_POOL):
            raise Violation("state", f"slots do not fit the state: {entry}")
        if state is State.STORING and self._core.lookup(entry.identity.key) is not Source.CPU:
            raise Violation("2", f"{entry} is not a hit")

    def adopted(self) -> None:
        """Check after a start: every adopted entry was computed with the loaded weights."""
        for entry in self._core.entries():
            if any(epoch for epoch, _ in self._expected[entry.identity.generation]):
                raise Violation("reset", f"adopted {entry} of other weights")

    def quiet(self) -> None:
        """Check when the engine stops stepping: no op still owes a report that will come."""
        for number, op in self.ops.items():
            young = self._clock() - op.issued_s < self._knobs.report_deadline_s
            if op.outcomes < self._knobs.ranks and young:
                raise Violation("report", f"stepping stopped while op {number} is owed: {op}")

    def idle(self) -> None:
        """Check after every op has ended and released its buffers: nothing may be left."""
        gauges = self._core.gauges()
        names = ("ops", "cache_slots_orphaned", "pool_slots_orphaned", "writes_pending")
        names += (
            "cache_slots_in_use",
            ("held_cache_slots", "reload"),
            ("held_cache_slots", "queue"),
            "requests_waiting",
        )
        if any(gauges[name] for name in names):
            raise Violation("leak", f"at the end: {gauges} {self.ops}")
        self._policies.idle()
        for rank in self.ranks:
            if not rank.pipeline.idle() or rank.copy.in_flight:
                raise Violation("leak", f"rank {rank.rank}'s pipeline is not idle")

    # -- helpers ----------------------------------------------------------------------

    def _sent(self, kind: str, number: int, issued_s: float | None = None) -> SentOp:
        if number in self.ops:
            raise Violation("state", f"op {number} used twice")
        return SentOp(kind, self._clock() if issued_s is None else issued_s)

    def _commands_wait(self) -> None:
        if self._waiting_since_s is None and self._core.gauges()["commands_waiting"]:
            self._waiting_since_s = self._clock()

    def _entries(self) -> dict[bytes, Entry]:
        return {entry.identity.key: entry for entry in self._core.entries()}

    def _users(self) -> dict[tuple[str, int], list[SlotIdentity]]:
        users: dict[tuple[str, int], list[SlotIdentity]] = {}
        for op in self.ops.values():
            for slot, identity in op.cache.items():
                users.setdefault(("cache", slot), []).append(identity)
            for slot, identity in op.pool.items():
                users.setdefault(("pool", slot), []).append(identity)
        return users

    def _used(self, tier: str) -> set[int]:
        return {slot for kind, slot in self._users() if kind == tier}

    def _fresh(self, slot: int, identity: SlotIdentity) -> None:
        """Rule 7: a slot is given out again only when no rank works on it."""
        for op in self.ops.values():
            if op.cache.get(slot, identity) != identity:
                raise Violation("7", f"cache slot {slot} for {identity}, still used by {op}")
        for rank in self.ranks:
            if rank.memory.watches.busy(("slot", slot)):
                raise Violation("7", f"cache slot {slot} given out, busy on rank {rank.rank}")

    def _apply(self, report: OpReport | ReleaseReport) -> None:
        op = self.ops[report.op]
        if isinstance(report, OpReport):
            op.outcomes += 1
            for index, outcome in report.failures:
                if op.failures.get(index, CANCELLED) == CANCELLED:
                    op.failures[index] = outcome
                if op.blames(index, outcome, self._in_pool):
                    self._failing.add(op.identities[index].generation)
            if op.outcomes == self._knobs.ranks:
                self._decided(op)
                # A buffer that a kernel still holds belongs to a chunk that failed.
                held = {one for i, one in enumerate(op.identities) if i in op.failures}
                op.cache = {slot: one for slot, one in op.cache.items() if one in held}
                op.pool = {slot: one for slot, one in op.pool.items() if one in held}
            if not report.released:
                return
        op.releases += 1
        if op.releases == self._knobs.ranks:
            del self.ops[report.op]

    def _decided(self, op: SentOp) -> None:
        for index, identity in enumerate(op.identities):
            failure = op.failures.get(index)
            if op.kind == "store" and failure is None:
                self._copied.add(identity.generation)
            elif op.kind == "store" or (op.kind in _READS and failure not in _SPARES):
                self._failed.add(identity.generation)
