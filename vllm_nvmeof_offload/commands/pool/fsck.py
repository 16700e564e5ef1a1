# SPDX-License-Identifier: Apache-2.0
"""Checks a pool's table against its slots' headers, and rebuilds the table where asked to.

Reads 64 bytes a slot, and 4 KiB of each slot that the table lists or has lost. Payloads are
the scrub's work.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from vllm_nvmeof_offload.commands.pool.offline import (
    OfflineRank,
    Progress,
    Table,
    held_survey,
    let_writes_end,
    open_rank,
)
from vllm_nvmeof_offload.commands.pool.report import Finding, Report, Severity, settled
from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.recovery import scan_headers
from vllm_nvmeof_offload.pool.table import ENTRY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed

__all__ = ["fsck", "without_superblock"]


def fsck(
    directories: Sequence[RankDirectory],
    repair: bool = False,
    on_progress: Progress | None = None,
    settle: Callable[[], None] = let_writes_end,
) -> list[Report]:
    """Check `directories`; give all parts of a pool at once, its epoch is over all of them.

    repair: rebuild what the table has wrong from the slots' headers. Never beside a live
    server. A superblock is not repaired: what it said is nowhere else. on_progress: counts
    headers. settle: called beside a live server before suspects are judged.

    Raises:
        PoolLockedError: `repair`, and a live process holds one of them.
        PoolError: something cannot be read or written.
    """
    with held_survey(directories, writable=repair) as all_surveyed:
        return [_check(one, repair, on_progress, settle) for one in all_surveyed]


def _check(
    surveyed: Surveyed,
    repair: bool,
    on_progress: Progress | None,
    settle: Callable[[], None],
) -> Report:
    report = Report(surveyed)
    if surveyed.superblock is None:
        report.add(without_superblock(surveyed))
        return report
    with open_rank(surveyed, writable=repair) as rank:
        table = rank.table()
        _check_lengths(rank, table, report, repair)
        report.checked = int(table.live.sum())
        suspects = _suspects(rank, table, on_progress)
        if suspects and not repair and surveyed.lock.may_live:
            settle()
        try:
            _judge(rank, table, suspects, report, repair)
            if repair and report.worst is not Severity.NOTE:
                os.ftruncate(rank.table_fd, rank.superblock.slots * ENTRY_BYTES)
                os.fsync(rank.table_fd)
        except OSError as error:
            raise PoolError(f"cannot repair {surveyed.path / 'table'}: {error}") from error
    return report


def without_superblock(surveyed: Surveyed) -> Finding:
    """The finding where there is no superblock that a start would use."""
    slab = surveyed.path / "slab"
    if surveyed.problem == "there is none" and not (slab.exists() and slab.stat().st_size):
        return Finding("no pool here yet", Severity.NOTE)
    return Finding(
        f"superblock: {surveyed.problem}; the next start begins empty here", Severity.UNUSABLE
    )


def _check_lengths(rank: OfflineRank, table: Table, report: Report, repair: bool) -> None:
    slots = rank.superblock.slots
    if rank.slab_slots < slots:
        # What was stored beyond its end is found entry by entry.
        kind = f"slab has {rank.slab_slots} of {slots} slots; the next start extends it"
        report.add(Finding(kind, Severity.NOTE))
    missing = int(table.missing.sum())
    if missing:
        kind = f"table has {slots - missing} of {slots} entries"
        report.add(Finding(kind, settled(repair)))


def _judge(
    rank: OfflineRank, table: Table, suspects: Sequence[int], report: Report, repair: bool
) -> None:
    """Judge every suspect, in ascending order.

    A table that was cut short grows with the repairs, so that a crash in between leaves it
    short, and not with zeros in the place of entries that are only lost.
    """
    for index in suspects:
        judgement = rank.judge(index, table.identity(index) if table.live[index] else None)
        if judgement is None:
            continue
        if judgement.worth_listing:
            report.add(Finding(judgement.kind, settled(repair), rank.pool_slot(index)))
        if repair and (any(judgement.replacement) or not table.missing[index]):
            rank.write_entry(index, judgement.replacement)


def _suspects(rank: OfflineRank, table: Table, on_progress: Progress | None) -> list[int]:
    """Slots whose header does not prove their entry, or whose entry is lost."""
    indices = np.flatnonzero(table.live | table.damaged | table.missing)
    suspects: list[int] = []
    done = 0
    for batch, headers in scan_headers(rank.slab_fd, indices, rank.superblock.slot_bytes):
        for index, header in zip(batch, headers, strict=True):
            proven = (
                header is not None
                and table.live[index]
                and header.identity == table.identity(index)
                and header.payload_bytes == rank.superblock.payload_bytes
                and header.place == rank.place(index)
            )
            if not proven and not (header is None and table.missing[index]):
                suspects.append(index)
        done += len(batch)
        if on_progress is not None:
            on_progress(rank.surveyed.directory, done, len(indices))
    return suspects
