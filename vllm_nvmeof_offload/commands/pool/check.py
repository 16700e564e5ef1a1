# SPDX-License-Identifier: Apache-2.0
"""Checks a pool's table against its slots' headers, and rebuilds the table where asked to.

Reads 64 bytes a slot, and 4 KiB of each slot that the table lists or has lost. Payloads are
the scrub's work.

Reads every slot that the table lists, whole, and verifies header and payload CRC-32C.

With O_DIRECT where the file system has it: the page cache would vouch for what the medium
has lost.

What a check of a pool found: findings, how bad they are, and an exit code.

The codes are fsck(8)'s: 0 whole, 1 damaged and repaired, 4 damage is left, 8 the pool cannot
be used or was not checked.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_nvmeof_offload.commands.pool.offline import (
    OfflineRank,
    Progress,
    Table,
    held_survey,
    let_writes_end,
    open_rank,
)
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, Outcome, PoolError
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, verify
from vllm_nvmeof_offload.pool.recovery import scan_headers
from vllm_nvmeof_offload.units import MIB, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed
    from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = [
    "FINDINGS_LISTED_MAX",
    "Finding",
    "Report",
    "Severity",
    "SlotReader",
    "exit_code",
    "fsck",
    "scrub",
    "settled",
    "without_superblock",
]


#: Of one directory; all are counted.
FINDINGS_LISTED_MAX = 1000


def settled(repair: bool) -> Severity:
    """Of damage that a repair, if it was asked for, has undone."""
    return Severity.REPAIRED if repair else Severity.DAMAGE


class Severity(enum.IntEnum):
    """The values are exit codes."""

    NOTE = 0
    REPAIRED = 1
    DAMAGE = 4
    UNUSABLE = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """pool_slot: None where it is about the directory."""

    kind: str
    severity: Severity
    pool_slot: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "severity": self.severity.name.lower(), "slot": self.pool_slot}


@dataclass
class Report:
    """One rank directory's.

    checked: entries whose slots were looked at. read_bytes, seconds, direct: of a scrub.
    """

    surveyed: Surveyed
    checked: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    direct: bool | None = None
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    worst: Severity = Severity.NOTE

    def add(self, finding: Finding) -> None:
        self.worst = max(self.worst, finding.severity)
        self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        if len(self.findings) < FINDINGS_LISTED_MAX:
            self.findings.append(finding)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; sizes in bytes, time in seconds."""
        total = sum(self.counts.values())
        found: dict[str, Any] = {
            "directory": str(self.surveyed.path),
            "live": self.surveyed.lock.live,
            "verdict": "whole" if self.worst is Severity.NOTE else self.worst.name.lower(),
            "checked": self.checked,
            "counts": self.counts,
            "findings": [finding.as_json() for finding in self.findings],
            "findings_left_off": total - len(self.findings),
        }
        if self.direct is not None:
            found |= {
                "read_bytes": self.read_bytes,
                "seconds": self.seconds,
                "direct": self.direct,
            }
        return found


def exit_code(reports: Sequence[Report]) -> int:
    """The worst finding's."""
    return int(max((report.worst for report in reports), default=Severity.NOTE))


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


_THREADS_MAX = 8
_BUFFER_BYTES_MAX = 256 * MIB
_BATCH_PER_THREAD = 4


class SlotReader:
    """Reads whole slots of one rank directory into memory of its own, on several threads."""

    def __init__(self, rank: OfflineRank) -> None:
        """OSError if the slab cannot be opened."""
        self._rank = rank
        slot_bytes = rank.superblock.slot_bytes
        self.threads = max(1, min(_THREADS_MAX, _BUFFER_BYTES_MAX // slot_bytes))
        self._buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(self.threads):
            self._buffers.put(mmap.mmap(-1, slot_bytes))
        self.direct = False
        self._fd = rank.slab_fd
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):  # buffered then; `direct` says so
            fd = os.open(rank.surveyed.path / "slab", flags)
            try:
                os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
                self._fd, self.direct = fd, True
            except OSError:
                os.close(fd)

    def close(self) -> None:
        if self.direct:
            os.close(self._fd)

    def check(self, index: int, identity: SlotIdentity) -> Outcome:
        """Read one slot and say whether it proves to hold `identity`.

        Raises:
            PoolError: the whole target does not answer.
        """
        buffer = self._buffers.get()
        try:
            with memoryview(buffer) as view:
                try:
                    whole = self._read(view, index * len(view))
                except OSError as error:
                    return self._rank.read_error(error)
                if not whole:
                    return CHECKSUM_MISMATCH
                payload_bytes = self._rank.superblock.payload_bytes
                return verify(view, identity, payload_bytes, self._rank.place(index))
        finally:
            self._buffers.put(buffer)

    def _read(self, view: memoryview, offset: int) -> bool:
        """Fill `view`; False if the file ends before."""
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if done + count < len(view):
                count -= (done + count) % PAGE_BYTES
            if count <= 0:
                return False
            done += count
        if not self.direct:
            os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)
        return True


def scrub(
    directories: Sequence[RankDirectory],
    repair: bool = False,
    on_progress: Progress | None = None,
    settle: Callable[[], None] = let_writes_end,
) -> list[Report]:
    """Verify every slot that the next start would adopt.

    repair: drop the entries of damaged slots; never beside a live server. on_progress: counts
    bytes. settle: called beside a live server before suspects are read a second time.

    Raises:
        PoolLockedError: `repair`, and a live process holds one of them.
        PoolError: something cannot be read or written.
    """
    with held_survey(directories, writable=repair) as all_surveyed:
        return [_scrub(one, repair, on_progress, settle) for one in all_surveyed]


def _scrub(
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
        with contextlib.closing(SlotReader(rank)) as reader:
            report.direct = reader.direct
            started_s = time.monotonic()
            suspects = []
            for index, outcome in _read_all(rank, table, reader, on_progress):
                report.checked += 1
                report.read_bytes += rank.superblock.slot_bytes
                if not outcome.ok:
                    suspects.append(index)
            report.seconds = time.monotonic() - started_s
            if suspects and not repair and surveyed.lock.may_live:
                settle()
            _confirm(rank, table, reader, suspects, report, repair)
    return report


def _read_all(
    rank: OfflineRank, table: Table, reader: SlotReader, on_progress: Progress | None
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
            if on_progress is not None:
                done = start + len(batch)
                on_progress(rank.surveyed.directory, done * slot_bytes, len(indices) * slot_bytes)


def _confirm(
    rank: OfflineRank,
    table: Table,
    reader: SlotReader,
    suspects: Sequence[int],
    report: Report,
    repair: bool,
) -> None:
    """Read suspects once more (a server may have written them meanwhile); drop their entries."""
    dropped = False
    try:
        for index in suspects:
            identity = table.identity(index)
            if rank.entry(index).identity != identity:
                continue
            outcome = reader.check(index, identity)
            if outcome.ok:
                continue
            kind = f"slot is damaged: {outcome}"
            report.add(Finding(kind, settled(repair), rank.pool_slot(index)))
            if repair:
                rank.write_entry(index, bytes(ENTRY_BYTES))
                dropped = True
        if dropped:
            os.fsync(rank.table_fd)
    except OSError as error:
        number = errno.errorcode.get(error.errno or 0, "error")
        table_path = rank.surveyed.path / "table"
        raise PoolError(f"cannot repair {table_path}: {number}: {error}") from error
