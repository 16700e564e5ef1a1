# SPDX-License-Identifier: Apache-2.0
"""Mutants of rules 1 to 6: order, fences, waits, writes, checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from vllm_nvmeof_offload.errors import OK, Outcome
from vllm_nvmeof_offload.manager import handshake
from vllm_nvmeof_offload.manager.handshake import Agreement
from vllm_nvmeof_offload.protocol import AdoptedEntries, RankHello
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline

from . import world
from .mutants import Patch, mutant, native
from .rank import Metadata, Output, SimRank
from .storage import SimIo
from .store import Claim, Record

# -- rule 1: per-slot order and identity --------------------------------------------------


native("gates_ignore_order", "gates_accept_stale", "failed_copy_counts_as_copied")


@mutant
def loads_come_before_the_fills_that_they_need() -> list[Patch]:
    """With STALE instead of the machine's assertion it would look like chunks that are gone."""
    real = SimRank.execute

    def execute(self: Any, metadata: Metadata) -> Output:
        early = [job for job in metadata.loads.items() if metadata.commands]
        for op, job in early:
            self._loads[op] = job
            self._submit(op, job)
        return real(
            self,
            replace(
                metadata, loads=dict([item for item in metadata.loads.items() if item not in early])
            ),
        )

    return [(SimRank, "execute", execute)]


# -- rule 2: a store in flight is a hit ---------------------------------------------------


native("store_in_flight_is_a_miss")


# -- rule 3: GPU order --------------------------------------------------------------------


native(
    "copies_of_several_fences_are_one",
    "an_open_fences_chunks_go_with_the_passed_ones",
    "each_job_is_a_copy_of_its_own",
)


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


@mutant
def chunks_share_a_younger_fence() -> list[Patch]:
    real = TransferPipeline.load

    def load(self: Any, command: Any, pieces: Any, fence: object) -> None:
        real(self, command, pieces, fence)
        self._open = dict.fromkeys(self._open, fence)

    return [(TransferPipeline, "load", load)]


# -- rule 4: GPU blocks and waits ---------------------------------------------------------


native("job_finishes_while_dma_runs")


@mutant
def wait_returns_before_the_copy() -> list[Patch]:
    return [(SimRank, "wait", lambda self, ops: None)]


@mutant
def wait_for_a_load_does_not_cancel() -> list[Patch]:
    return [(TransferPipeline, "cancel", lambda self, op, rows=None: None)]


# -- rule 5: write after copy, table after write, every rank ------------------------------


native("write_begins_with_the_store", "failed_write_counts_as_written", "first_rank_decides")


@mutant
def table_is_written_before_data() -> list[Patch]:
    real = SimIo.submit

    def submit(self: Any, ops: Any) -> None:
        real(self, ops)
        for flight in list(self._flights.values())[-len(ops) :]:
            flight.data_s, flight.table_s = flight.table_s, flight.data_s

    return [(SimIo, "submit", submit)]


@mutant
def adoption_is_the_union() -> list[Patch]:
    real = world.agree

    def union(one: AdoptedEntries, other: AdoptedEntries) -> AdoptedEntries:
        more = np.flatnonzero(~np.isin(other.places, one.places))
        return handshake._in_order(
            AdoptedEntries(
                np.concatenate([one.places, other.places[more]]),
                np.concatenate([one.generations, other.generations[more]]),
                one.keys + other.key_rows()[more].tobytes(),
            )
        )

    def agree(hellos: Sequence[RankHello]) -> Agreement:
        adopted = reduce(union, (hello.adopted for hello in hellos))
        return real([replace(hello, adopted=adopted) for hello in hellos])

    return [(world, "agree", agree)]


# -- rule 6: nothing wrong is accepted ----------------------------------------------------


native(
    "pipeline_ignores_failed_reads",
    "a_cancelled_read_counts_as_proven",
    "a_failed_check_reports_other_blocks",
    "a_job_finishes_before_its_checks",
    "a_part_is_copied_unproven",
    "an_unproven_slot_is_lent",
)


@mutant
def reads_ignore_the_generation() -> list[Patch]:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, wanted: Claim) -> Outcome:
        if record is not None and record.intact:
            found = record.claim.identity
            if found.key == wanted.identity.key:
                return real(self, record, wanted._replace(identity=found))
        return real(self, record, wanted)

    return [(SimIo, "verify", verify)]


@mutant
def reads_ignore_the_checksum() -> list[Patch]:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, wanted: Claim) -> Outcome:
        if record is not None and record.claim == wanted:
            return OK
        return real(self, record, wanted)

    return [(SimIo, "verify", verify)]


@mutant
def tag_is_not_compared() -> list[Patch]:
    return [(SimIo, "verify", _verify_without("tag"))]


@mutant
def length_of_another_group_is_accepted() -> list[Patch]:
    return [(SimIo, "verify", _verify_without("payload_bytes"))]


def _verify_without(field: str) -> Any:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, wanted: Claim) -> Outcome:
        if record is not None:
            wanted = wanted._replace(**{field: getattr(record.claim, field)})
        return real(self, record, wanted)

    return verify
