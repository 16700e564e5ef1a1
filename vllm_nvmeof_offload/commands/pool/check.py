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

#: Defects listed per directory; all are counted.
_LISTED_MAX = 1000
_THREADS_MAX = 8
_BUFFER_BYTES_MAX = 256 * MIB
_BATCH_PER_THREAD = 4


class Verdict(enum.IntEnum):
    """How bad a defect is. The values are the exit codes of fsck(8)."""

    NOTE = 0
    REPAIRED = 1
    DAMAGE = 4
    #: The pool cannot be used, or was not checked.
    UNUSABLE = 8


@dataclass(frozen=True, slots=True)
class Defect:
    """pool_slot: None if it is about the directory."""

    kind: str
    verdict: Verdict
    pool_slot: int | None = None


@dataclass
class Report:
    """The result for one rank directory.

    checked: entries whose slots were read. read_bytes, seconds, direct: set by a scrub.
    """

    surveyed: Surveyed
    repair: bool
    checked: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    direct: bool | None = None
    findings: list[Defect] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    worst: Verdict = Verdict.NOTE

    def add(self, kind: str, verdict: Verdict, pool_slot: int | None = None) -> None:
        self.worst = max(self.worst, verdict)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.findings) < _LISTED_MAX:
            self.findings.append(Defect(kind, verdict, pool_slot))

    def add_damage(self, kind: str, pool_slot: int | None = None) -> None:
        """Add damage that the repair, if one was asked for, undoes."""
        self.add(kind, Verdict.REPAIRED if self.repair else Verdict.DAMAGE, pool_slot)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; sizes in bytes, time in seconds."""
        found: dict[str, Any] = {
            "directory": str(self.surveyed.path),
            "live": self.surveyed.lock.live,
            "verdict": "whole" if self.worst is Verdict.NOTE else self.worst.name.lower(),
            "checked": self.checked,
            "counts": self.counts,
            "findings": [
                {"kind": one.kind, "severity": one.verdict.name.lower(), "slot": one.pool_slot}
                for one in self.findings
            ],
            "findings_left_off": sum(self.counts.values()) - len(self.findings),
        }
        if self.direct is not None:
            found["read_bytes"] = self.read_bytes
            found["seconds"] = self.seconds
            found["direct"] = self.direct
        return found


def exit_code(reports: Sequence[Report]) -> int:
    """The worst verdict of all."""
    return int(max((report.worst for report in reports), default=Verdict.NOTE))


def fsck(
    directories: Sequence[RankDirectory],
    repair: bool = False,
    on_progress: Progress | None = None,
    settle: Callable[[], None] = let_writes_end,
) -> list[Report]:
    """Check tables against headers. Give all parts of a pool at once: they share an epoch.

    repair: rebuild wrong entries from the slots' headers, never beside a live server. A
    superblock is not repaired: its content is nowhere else. on_progress: counts headers.
    settle: called beside a live server before suspects are judged.

    Raises:
        PoolLockedError: `repair`, and a live process holds one of them.
        PoolError: something cannot be read or written.
    """

    def check(rank: OfflineRank, table: Table, report: Report) -> None:
        slots = rank.superblock.slots
        if rank.slab_slots < slots:
            # Entries of slots beyond its end are found one by one.
            kind = f"slab has {rank.slab_slots} of {slots} slots; the next start extends it"
            report.add(kind, Verdict.NOTE)
        missing = int(table.missing.sum())
        if missing:
            report.add_damage(f"table has {slots - missing} of {slots} entries")
        report.checked = int(table.live.sum())
        suspects = _suspects(rank, table, on_progress)
        _settle(report, suspects, settle)
        with _repairing(rank):
            _judge(rank, table, suspects, report)
            if repair and report.worst is not Verdict.NOTE:
                os.ftruncate(rank.table_fd, slots * ENTRY_BYTES)
                os.fsync(rank.table_fd)

    return _check_each(directories, repair, check)


def scrub(
    directories: Sequence[RankDirectory],
    repair: bool = False,
    on_progress: Progress | None = None,
    settle: Callable[[], None] = let_writes_end,
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
                report.read_bytes += rank.superblock.slot_bytes
                if not outcome.ok:
                    suspects.append(index)
            report.seconds = time.monotonic() - started_s
            _settle(report, suspects, settle)
            with _repairing(rank):
                _confirm(rank, table, reader, suspects, report)

    return _check_each(directories, repair, check)


def _check_each(
    directories: Sequence[RankDirectory],
    repair: bool,
    check: Callable[[OfflineRank, Table, Report], None],
) -> list[Report]:
    with held_survey(directories, writable=repair) as all_surveyed:
        reports = [Report(one, repair) for one in all_surveyed]
        for report in reports:
            if report.surveyed.superblock is None:
                _add_no_superblock(report)
                continue
            with open_rank(report.surveyed, writable=repair) as rank:
                check(rank, rank.table(), report)
        return reports


def _add_no_superblock(report: Report) -> None:
    problem, slab = report.surveyed.problem, report.surveyed.path / "slab"
    if problem == "there is none" and not (slab.exists() and slab.stat().st_size):
        report.add("no pool here yet", Verdict.NOTE)
    else:
        report.add(f"superblock: {problem}; the next start begins empty here", Verdict.UNUSABLE)


def _settle(report: Report, suspects: Sequence[int], settle: Callable[[], None]) -> None:
    """Beside a live server, let the writes end that made healthy slots look damaged."""
    if suspects and not report.repair and report.surveyed.lock.may_live:
        settle()


@contextlib.contextmanager
def _repairing(rank: OfflineRank) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PoolError(f"cannot repair {rank.surveyed.path / 'table'}: {error}") from error


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


def _judge(rank: OfflineRank, table: Table, suspects: Sequence[int], report: Report) -> None:
    """Judge every suspect, in ascending order.

    A table that was cut short grows with the repairs, so that a crash in between leaves it
    short, and not with zeros in the place of entries that are only lost.
    """
    for index in suspects:
        judgement = rank.judge(index, table.identity(index) if table.live[index] else None)
        if judgement is None:
            continue
        if judgement.worth_listing:
            report.add_damage(judgement.kind, rank.pool_slot(index))
        if report.repair and (any(judgement.replacement) or not table.missing[index]):
            rank.write_entry(index, judgement.replacement)


class SlotReader:
    """Reads whole slots of one rank directory into memory of its own, on several threads."""

    def __init__(self, rank: OfflineRank) -> None:
        """Raises OSError if the slab cannot be opened."""
        self._rank = rank
        slot_bytes = rank.superblock.slot_bytes
        self.threads = max(1, min(_THREADS_MAX, _BUFFER_BYTES_MAX // slot_bytes))
        self._buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(self.threads):
            self._buffers.put(mmap.mmap(-1, slot_bytes))
        self.direct = False
        self._fd = rank.slab_fd
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):  # then reads are buffered, and `direct` is False
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
        """Verify that one slot holds `identity`; PoolError if the whole target does not answer."""
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
    rank: OfflineRank, table: Table, reader: SlotReader, suspects: Sequence[int], report: Report
) -> None:
    """Read suspects once more, because a server may have written them since; drop entries."""
    for index in suspects:
        identity = table.identity(index)
        if rank.entry(index).identity != identity:
            continue
        outcome = reader.check(index, identity)
        if not outcome.ok:
            report.add_damage(f"slot is damaged: {outcome}", rank.pool_slot(index))
            if report.repair:
                rank.write_entry(index, bytes(ENTRY_BYTES))
    if report.worst is Verdict.REPAIRED:
        os.fsync(rank.table_fd)
