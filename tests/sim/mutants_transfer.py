# SPDX-License-Identifier: Apache-2.0
"""Mutants of rules 1 to 6: order, fences, waits, writes, checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from vllm_nvmeof_offload.errors import OK, Outcome
from vllm_nvmeof_offload.manager import core
from vllm_nvmeof_offload.manager.handshake import Agreement
from vllm_nvmeof_offload.manager.index import Event, State
from vllm_nvmeof_offload.manager.ledger import Ledger, Op
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.manager.writes import WriteBehind
from vllm_nvmeof_offload.protocol import AdoptedEntries, OpReport, RankHello
from vllm_nvmeof_offload.worker.io_scheduler import IoEvent
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.slots import Grant, SlotGates
from vllm_nvmeof_offload.worker.tasks import Step

from . import world
from .mutants import Patch, mutant
from .rank import SimRank
from .storage import SimIo
from .store import Record

# -- rule 1: per-slot order and identity --------------------------------------------------


@mutant
def gates_ignore_order() -> list[Patch]:
    def turn(self: Any, gate: Any) -> list[Grant]:
        grants = []
        while gate.queue:
            task, identity, fill = gate.queue.popleft()
            if fill:
                gate.filling = identity
            gate.readers += not fill
            grants.append(Grant(task, stale=False))
        return grants

    return [(SlotGates, "_grant", turn)]


@mutant
def gates_accept_stale() -> list[Patch]:
    real = SlotGates._grant

    def turn(self: Any, gate: Any) -> list[Grant]:
        grants = real(self, gate)
        gate.readers += sum(grant.stale for grant in grants)
        return [Grant(grant.task, stale=False) for grant in grants]

    return [(SlotGates, "_grant", turn)]


@mutant
def failed_copy_counts_as_copied() -> list[Patch]:
    real = TransferPipeline._copied
    return [(TransferPipeline, "_copied", lambda self, task, outcome: real(self, task, OK))]


# -- rule 2: a store in flight is a hit ---------------------------------------------------


@mutant
def store_in_flight_is_a_miss() -> list[Patch]:
    real = Tiers.lookup

    def lookup(self: Any, key: bytes) -> Any:
        entry = self.index.awake.get(key)
        return None if entry and entry.state is State.STORING else real(self, key)

    return [(Tiers, "lookup", lookup)]


# -- rule 3: GPU order --------------------------------------------------------------------


@mutant
def stores_ignore_the_fence() -> list[Patch]:
    real = TransferPipeline.store
    store = lambda self, command, pieces, fence: real(self, command, pieces, 0.0)  # noqa: E731
    return [(TransferPipeline, "store", store)]


@mutant
def loads_ignore_the_fence() -> list[Patch]:
    real = TransferPipeline.load
    load = lambda self, command, pieces, fence: real(self, command, pieces, 0.0)  # noqa: E731
    return [(TransferPipeline, "load", load)]


# -- rule 4: GPU blocks and waits ---------------------------------------------------------


@mutant
def job_finishes_while_dma_runs() -> list[Patch]:
    real = TransferPipeline._submit_copies

    def submit(self: Any) -> None:
        before = set(self._tickets)
        real(self)
        for ticket in self._tickets.keys() - before:
            batch = self._tickets[ticket]
            self._tickets[ticket] = replace(batch, tasks=[])
            for task in batch.tasks:
                self._copied(task, OK)

    return [(TransferPipeline, "_submit_copies", submit)]


@mutant
def wait_returns_before_the_copy() -> list[Patch]:
    return [(SimRank, "wait", lambda self, ops: None)]


@mutant
def wait_for_a_load_does_not_cancel() -> list[Patch]:
    return [(TransferPipeline, "cancel", lambda self, op: None)]


# -- rule 5: write after copy, table after write, every rank ------------------------------


@mutant
def write_begins_with_the_store() -> list[Patch]:
    real = core.ManagerCore.prepare_store

    def prepare_store(self: Any, keys: Any) -> Any:
        plan = real(self, keys)
        for key in plan.stored:
            entry = self._tiers.index.find(key)
            if self._tiers.on(entry, Event.COPIED) is State.CACHED:
                self._writes.want(entry)
        return plan

    return [(core.ManagerCore, "prepare_store", prepare_store)]


@mutant
def table_is_written_before_data() -> list[Patch]:
    real = SimIo.submit

    def submit(self: Any, ops: Any) -> int:
        count = real(self, ops)
        for flight in list(self._flights.values())[-count:] if count else []:
            flight.data_s, flight.table_s = flight.table_s, flight.data_s
        return count

    return [(SimIo, "submit", submit)]


@mutant
def failed_write_counts_as_written() -> list[Patch]:
    real = WriteBehind.ended
    return [
        (WriteBehind, "ended", lambda self, entry, slot, failure: real(self, entry, slot, None))
    ]


@mutant
def first_rank_decides() -> list[Patch]:
    real = Ledger.apply

    def apply(self: Any, report: Any) -> tuple[Op, bool, bool]:
        first = isinstance(report, OpReport) and self._ops[report.op].outcomes_left
        op, _, released = real(self, report)
        return op, first == self._world_size, released

    return [(Ledger, "apply", apply)]


@mutant
def adoption_is_the_union() -> list[Patch]:
    real = world.agree

    def union(one: AdoptedEntries, other: AdoptedEntries) -> AdoptedEntries:
        more = [i for i, slot in enumerate(other.pool_slots) if slot not in one.pool_slots]
        return AdoptedEntries(
            np.concatenate([one.pool_slots, other.pool_slots[more]]),
            np.concatenate([one.generations, other.generations[more]]),
            one.keys + tuple(other.keys[i] for i in more),
        )

    def agree(hellos: Sequence[RankHello]) -> Agreement:
        adopted = reduce(union, (hello.adopted for hello in hellos))
        return real([replace(hello, adopted=adopted) for hello in hellos])

    return [(world, "agree", agree)]


# -- rule 6: nothing wrong is accepted ----------------------------------------------------


@mutant
def reads_ignore_the_generation() -> list[Patch]:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, identity: Any) -> Outcome:
        if record is not None and record.intact and record.identity.key == identity.key:
            return OK
        return real(self, record, identity)

    return [(SimIo, "verify", verify)]


@mutant
def reads_ignore_the_checksum() -> list[Patch]:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, identity: Any) -> Outcome:
        if record is not None and record.identity == identity:
            return OK
        return real(self, record, identity)

    return [(SimIo, "verify", verify)]


@mutant
def pipeline_ignores_failed_reads() -> list[Patch]:
    real = TransferPipeline._io_event

    def event(self: Any, event: IoEvent) -> None:
        if event.outcome is not None and event.released and event.task.step is Step.IO:
            event = IoEvent(event.task, OK, released=True)
        real(self, event)

    return [(TransferPipeline, "_io_event", event)]
