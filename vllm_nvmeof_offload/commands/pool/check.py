# SPDX-License-Identifier: Apache-2.0
"""fsck and scrub: checks of pools on disk, and the repairs that they can make.

fsck compares a table with the slots' headers: 64 bytes per slot, and 4 KiB of each slot that the
table lists or has lost. scrub reads every slot that the table lists, whole, and verifies the
checksums of header and payload, with O_DIRECT where the file system has it: the page cache would
hide what the medium has lost.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_nvmeof_offload.commands.pool.offline import (
    Judgement,
    OfflineRank,
    Progress,
    SlotReader,
    Table,
    held_survey,
    open_log,
    open_rank,
)
from vllm_nvmeof_offload.errors import Outcome, PoolError
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, parse_header
from vllm_nvmeof_offload.pool.log import damaged_pages
from vllm_nvmeof_offload.pool.recovery import scan_headers
from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed
from vllm_nvmeof_offload.units import PAGE_BYTES

#: Defects listed per directory; all are counted.
_LISTED_MAX = 1000
_BATCH_PER_THREAD = 4
#: Waits for as long as a live server's write and its table entry may reasonably be apart.
_let_writes_end = functools.partial(time.sleep, 1.0)


class Damage(enum.IntEnum):
    """How bad a defect is. The values are the exit codes of fsck(8)."""

    NOTE = 0
    REPAIRED = 1
    DAMAGE = 4
    #: The pool cannot be used, or was not checked.
    UNUSABLE = 8


@dataclass
class Report:
    """The result for one rank directory.

    checked: entries whose slots were read. read_bytes, seconds, direct: set by a scrub.
    findings: kind, severity and slot of each defect, as in JSON; no slot: about the directory.
    Slots are numbered within the directory.
    """

    surveyed: Surveyed
    repair: bool
    checked: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    direct: bool | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    worst: Damage = Damage.NOTE

    def add(self, kind: str, slot: int | None = None, damage: Damage | None = None) -> None:
        """Add a defect. damage None: the repair, if one was asked for, undoes it."""
        if damage is None:
            damage = Damage.REPAIRED if self.repair else Damage.DAMAGE
        self.worst = max(self.worst, damage)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.findings) < _LISTED_MAX:
            severity = damage.name.lower()
            self.findings.append({"kind": kind, "severity": severity, "slot": slot})

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; sizes in bytes, time in seconds."""
        found: dict[str, Any] = {
            "directory": str(self.surveyed.path),
            "live": self.surveyed.lock.live,
            "verdict": "whole" if self.worst is Damage.NOTE else self.worst.name.lower(),
            "checked": self.checked,
            "counts": self.counts,
            "findings": self.findings,
            "findings_left_off": sum(self.counts.values()) - len(self.findings),
        }
        if self.direct is not None:
            found |= {name: getattr(self, name) for name in ("read_bytes", "seconds", "direct")}
        return found


def exit_code(reports: Sequence[Report]) -> int:
    """The worst damage of all."""
    return int(max((report.worst for report in reports), default=Damage.NOTE))


def fsck(
    directories: Sequence[RankDirectory],
    repair: bool = False,
    on_progress: Progress = lambda *_: None,
    settle: Callable[[], None] = _let_writes_end,
) -> list[Report]:
    """Check tables against headers. Give all parts of a pool at once: they share an epoch.

    repair: rebuild wrong entries from the slots' headers, never beside a live server. A
    superblock is not repaired: its content is nowhere else. on_progress: counts headers.
    settle: called beside a live server before suspects are judged. PoolLockedError if a live
    process holds one that is to be repaired, PoolError if something cannot be read or written.
    """

    def check(rank: OfflineRank, table: Table, report: Report) -> None:
        slots = rank.superblock.slots
        if rank.slab_slots < slots:
            # Entries of slots beyond its end are found one by one.
            kind = f"slab has {rank.slab_slots} of {slots} slots; the next start extends it"
            report.add(kind, damage=Damage.NOTE)
        missing = int(table.missing.sum())
        if missing:
            report.add(f"table has {slots - missing} of {slots} entries")
        report.checked = int(table.live.sum())
        suspects = _suspects(rank, table, on_progress)

        def judge(index: int) -> Judgement | None:
            return rank.judge(index, table.identity(index) if table.live[index] else None)

        with _repairing(rank, report):
            _confirm(rank, table, report, suspects, settle, judge)
            if rank.before_write is not None and report.worst is not Damage.NOTE:
                rank.before_write()
                os.ftruncate(rank.table_fd, slots * ENTRY_BYTES)

    return _check_each(directories, repair, check)


def scrub(
    directories: Sequence[RankDirectory],
    repair: bool = False,
    on_progress: Progress = lambda *_: None,
    settle: Callable[[], None] = _let_writes_end,
) -> list[Report]:
    """Verify every slot that the next start would adopt. Arguments and errors are those of fsck.

    repair: drop the entries of damaged slots. on_progress: counts bytes.
    """

    def check(rank: OfflineRank, table: Table, report: Report) -> None:
        with contextlib.closing(SlotReader(rank)) as reader:
            report.direct = reader.direct
            started_s = time.monotonic()
            suspects = []
            for index, outcome in _read_all(rank, table, reader, on_progress):
                report.checked += 1
                report.read_bytes += reader.bytes_of(table.identity(index))
                if not outcome.ok:
                    suspects.append(index)
            report.seconds = time.monotonic() - started_s

            def judge(index: int) -> Judgement | None:
                identity = table.identity(index)
                if rank.entry(index).identity != identity:
                    return None  # a server has written the slot since
                outcome = reader.check(index, identity)
                kind = f"slot is damaged: {outcome}"
                return None if outcome.ok else Judgement(kind, bytes(ENTRY_BYTES))

            with _repairing(rank, report):
                _confirm(rank, table, report, suspects, settle, judge)

    return _check_each(directories, repair, check)


def _check_each(
    directories: Sequence[RankDirectory],
    repair: bool,
    check: Callable[[OfflineRank, Table, Report], None],
) -> list[Report]:
    with held_survey(directories, writable=repair) as (all_surveyed, before_write):
        reports = [Report(one, repair) for one in all_surveyed]
        for report in reports:
            if report.surveyed.superblock is not None:
                with open_rank(report.surveyed, before_write) as rank:
                    check(rank, rank.table(), report)
                _check_log(report)
                continue
            problem, slab = report.surveyed.problem, report.surveyed.path / "slab"
            if problem == "there is none" and not (slab.exists() and slab.stat().st_size):
                report.add("no pool here yet", damage=Damage.NOTE)
            else:
                kind = f"superblock: {problem}; the next start begins empty here"
                report.add(kind, damage=Damage.UNUSABLE)
        return reports


def _check_log(report: Report) -> None:
    """Note what readers of the log do not find there: they read the table instead."""
    superblock = report.surveyed.superblock
    pages = superblock.log_pages if superblock else 0
    if not pages:
        return
    with open_log(report.surveyed) as fd:
        try:
            found, damaged = os.fstat(fd).st_size // PAGE_BYTES, damaged_pages(fd, pages)
        except OSError as error:
            report.add(f"log cannot be read: {error.strerror}", damage=Damage.NOTE)
            return
    if found < pages:
        kind = f"log has {found} of {pages} pages; the next start extends it"
        report.add(kind, damage=Damage.NOTE)
    if damaged:
        report.add(f"log has {damaged} damaged pages, which are written again", damage=Damage.NOTE)


@contextlib.contextmanager
def _repairing(rank: OfflineRank, report: Report) -> Iterator[None]:
    """Make what the block repairs durable; PoolError if a repair fails."""
    try:
        yield
        if report.worst is Damage.REPAIRED:
            os.fsync(rank.table_fd)
    except OSError as error:
        raise PoolError(f"cannot repair {rank.surveyed.path / 'table'}: {error}") from error


def _confirm(
    rank: OfflineRank,
    table: Table,
    report: Report,
    suspects: Sequence[int],
    settle: Callable[[], None],
    judge: Callable[[int], Judgement | None],
) -> None:
    """Judge every suspect once more, in ascending order; list its defect and repair its entry.

    Beside a live server a slot that is being written looks damaged for a moment: then this waits
    before, and each suspect is judged by itself, from its entry as it is then.
    A table that was cut short grows with the repairs, so that a crash in between leaves it
    short, and not with zeros in the place of entries that are only lost.
    """
    if suspects and not report.repair and report.surveyed.lock.may_live:
        settle()
    for index in suspects:
        judgement = judge(index)
        if judgement is None:
            continue
        if judgement.worth_listing:
            report.add(judgement.kind, index)
        if report.repair and (any(judgement.replacement) or not table.missing[index]):
            rank.write_entry(index, judgement.replacement)


def _suspects(rank: OfflineRank, table: Table, on_progress: Progress) -> list[int]:
    """Slots whose header does not prove their entry, or whose entry is lost."""
    indices = np.flatnonzero(table.live | table.damaged | table.missing)
    suspects: list[int] = []
    done = 0
    slot_bytes = rank.superblock.slot_bytes
    for batch, headers in scan_headers(rank.slab_fd, indices, slot_bytes, parse_header):
        for index, header in zip(batch, headers, strict=True):
            proven = (
                header is not None
                and table.live[index]
                and rank.proves(index, header, table.identity(index))
            )
            if not proven and not (header is None and table.missing[index]):
                suspects.append(index)
        done += len(batch)
        on_progress(rank.surveyed.directory, done, len(indices))
    return suspects


def _read_all(
    rank: OfflineRank, table: Table, reader: SlotReader, on_progress: Progress
) -> Iterator[tuple[int, Outcome]]:
    """Read on all threads, a bounded number ahead, in ascending order."""
    indices = np.flatnonzero(table.live).tolist()
    batch_max = reader.threads * _BATCH_PER_THREAD
    slot_bytes = rank.superblock.slot_bytes
    with ThreadPoolExecutor(reader.threads, thread_name_prefix="pool-scrub") as threads:
        for start in range(0, len(indices), batch_max):
            batch = indices[start : start + batch_max]
            outcomes = threads.map(reader.check, batch, map(table.identity, batch))
            yield from zip(batch, outcomes, strict=True)
            done = start + len(batch)
            on_progress(rank.surveyed.directory, done * slot_bytes, len(indices) * slot_bytes)
