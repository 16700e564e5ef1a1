# SPDX-License-Identifier: Apache-2.0
"""Mutants of sharing: other engines' chunks are hints that prove themselves, and only borrowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_nvmeof_offload.manager import core
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    ChunkBatch,
    Command,
    OpReport,
    ResetCommand,
    WriteCommand,
    owned_by,
)
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.regions import Regions

from .mutants import Patch, mutant, native
from .storage import SimIo
from .store import START_TAG

native(
    "a_borrowed_chunk_is_written",
    "a_deduped_chunk_is_never_written",
    "a_duplicate_is_written",
    "a_foreign_entry_survives_a_reset",
    "a_foreign_entry_survives_its_acceptance",
    "a_foreign_entry_survives_new_weights",
    "a_foreign_failure_dooms_an_own_row",
    "a_hint_with_an_old_generation_touches",
    "a_refused_pair_comes_back",
    "a_regions_error_marks_its_target",
    "an_owner_of_many_failures_is_believed",
    "other_weights_are_accepted",
    "reads_do_not_wait_for_their_files",
)


@mutant
def tag_is_not_compared_in_a_region() -> list[Patch]:
    def tag_of(self: Any, flight: Any, record: Any) -> bytes:
        foreign = flight.region is not None and record is not None
        return record.claim.tag if foreign else flight.op.stamp.tag

    return [(SimIo, "tag_of", tag_of)]


@mutant
def tag_is_taken_from_the_region() -> list[Patch]:
    """From the newest superblock there."""

    def tag_of(self: Any, flight: Any, record: Any) -> bytes:
        if flight.region is None:
            return flight.op.stamp.tag
        return self.opener.files(flight.region).named.tag

    return [(SimIo, "tag_of", tag_of)]


@mutant
def a_named_reset_keeps_its_tag() -> list[Patch]:
    """A later start takes the chunks for its own."""
    real = core.ManagerCore.take_commands

    def take(self: Any) -> list[Command]:
        return [
            replace(one, tag=START_TAG) if isinstance(one, ResetCommand) and one.named else one
            for one in real(self)
        ]

    return [(core.ManagerCore, "take_commands", take)]


@mutant
def a_name_survives_new_weights() -> list[Patch]:
    return [(core.ManagerCore, "weights_changed", lambda self: None)]


@mutant
def an_attach_failure_is_ignored_on_one_rank() -> list[Patch]:
    """Only the rank that reports last is believed."""
    real = core.ManagerCore.report

    def report(self: Any, reports: Any) -> None:
        real(self, [_forgiven(self, one) for one in reports])

    return [(core.ManagerCore, "report", report)]


def _forgiven(manager: Any, report: Any) -> Any:
    if not isinstance(report, OpReport):
        return report
    op = manager._ledger[report.op]
    if op.kind is not core.OpKind.ATTACH or op.ranks_left == 1:
        return report
    return replace(report, codes=None, errnos=None)


@mutant
def loads_leave_before_the_attach() -> list[Patch]:
    real = core.ManagerCore.take_commands

    def take(self: Any) -> list[Command]:
        commands = real(self)
        late, self._late = getattr(self, "_late", []), []
        for command in commands:
            (self._late if isinstance(command, AttachCommand) else late).append(command)
        return late

    return [(core.ManagerCore, "take_commands", take)]


@mutant
def a_reader_writes_into_a_region() -> list[Patch]:
    real = TransferPipeline.command

    def command(self: Any, one: Command) -> None:
        if isinstance(one, WriteCommand):
            keys, generations, cache, _, groups = one.batch
            places = owned_by(1, 0) | one.batch.places
            batch = ChunkBatch((keys, generations, cache, places.tobytes(), groups))
            one = WriteCommand(one.op, batch)
        real(self, one)

    return [(TransferPipeline, "command", command)]


@mutant
def files_are_closed_under_their_reads() -> list[Patch]:
    def drop(self: Any, owner: int, target: int) -> None:
        self._io.detach_region(owner, target)
        self._opener.close([self._used.pop((owner, target))])

    return [(Regions, "_drop", drop)]
