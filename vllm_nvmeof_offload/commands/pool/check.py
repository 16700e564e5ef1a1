# SPDX-License-Identifier: Apache-2.0
"""The command `pool check`, which compares tables with slots and repairs table entries.

The check reads the 4 KiB header of each slot whose table entry is in use or missing. A deep check
reads each stored slot in full and verifies the checksums of header and payload, with O_DIRECT if
the file system supports it, because the page cache would hide media errors.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_nvmeof_offload.commands.pool import offline
from vllm_nvmeof_offload.commands.pool.offline import DAMAGED, LIVE, MISSING, OfflineRank, Progress
from vllm_nvmeof_offload.errors import as_pool_error
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, SlotHeader
from vllm_nvmeof_offload.pool.log import damaged_pages
from vllm_nvmeof_offload.pool.ownership import hold
from vllm_nvmeof_offload.pool.recovery import written_slots
from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed, survey
from vllm_nvmeof_offload.pool.takeover import OwnerState
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

#: The maximum number of defects listed per directory; further defects are only counted.
_LISTED_MAX = 1000
_HEADER_THREADS = 16
_BATCH_PER_THREAD = 16
#: Waits longer than a server takes between writing a slot and writing its table entry.
_let_writes_end = functools.partial(time.sleep, 1.0)


class Damage(enum.IntEnum):
    """The severity of a defect. The values are exit codes of fsck(8)."""

    NOTE = 0
    REPAIRED = 1
    DAMAGE = 4
    UNUSABLE = 8  # the pool cannot be used, or was not checked


@dataclass
class Report:
    """The result for one rank directory.

    `checked` is the number of live entries whose slots were read. A deep check sets `read_bytes`,
    `seconds` and `direct`. `findings` has the kind, severity and slot of each defect, as in the
    JSON; the slot, numbered within the directory, is None for a defect in the directory itself.
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
        """Add a defect. Without `damage` it is repairable: REPAIRED if `repair`, else DAMAGE."""
        if damage is None:
            damage = Damage.REPAIRED if self.repair else Damage.DAMAGE
        self.worst = max(self.worst, damage)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.findings) < _LISTED_MAX:
            severity = damage.name.lower()
            self.findings.append({"kind": kind, "severity": severity, "slot": slot})

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "directory": str(self.surveyed.path),
            "live": self.surveyed.owner.kind == "live",
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
    return int(max((report.worst for report in reports), default=Damage.NOTE))


def check(
    directories: Sequence[RankDirectory],
    repair: bool = False,
    deep: bool = False,
    on_progress: Progress = lambda *_: None,
    settle: Callable[[], None] = _let_writes_end,
) -> list[Report]:
    """Check tables against slots. Pass all parts of a pool together, because they share an epoch.

    `repair` rebuilds wrong entries from the slots' headers or drops them, but never while a server
    runs: all directories are held from before the first survey until the last repair, so that no
    server starts on a partly repaired pool. A superblock is not repaired, because its content is
    stored nowhere else. `on_progress` counts bytes. If a server runs, `settle` is called before
    suspects are judged. Raises PoolLockedError if a live process holds a directory to be repaired,
    and PoolError if a file cannot be read, locked or written.
    """
    held = hold([one.path for one in directories]) if repair else contextlib.nullcontext()
    with held as before_write:
        reports = [Report(one, repair) for one in survey(directories)]
        for report in reports:
            if repair:
                # The survey reported this process as a live owner.
                report.surveyed = replace(report.surveyed, owner=OwnerState("free"))
            if (superblock := report.surveyed.superblock) is not None:
                with offline.open_rank(report.surveyed, before_write, deep) as rank:
                    _check_rank(rank, report, on_progress, settle)
                if superblock.log_pages:
                    _check_log(report, superblock.log_pages)
                continue
            problem, slab = report.surveyed.problem, report.surveyed.path / "slab"
            if problem == "there is none" and not (slab.exists() and slab.stat().st_size):
                report.add("no pool here yet", damage=Damage.NOTE)
            else:
                kind = f"superblock: {problem}; the next start begins empty here"
                report.add(kind, damage=Damage.UNUSABLE)
        return reports


def _check_rank(
    rank: OfflineRank, report: Report, on_progress: Progress, settle: Callable[[], None]
) -> None:
    """Find suspect slots, judge each again in ascending order, list defects and repair entries.

    While a server runs, a slot that is being written looks damaged for a moment. The check
    therefore waits and judges each suspect again by its new entry. Repairs extend a truncated table
    entry by entry, so that a crash leaves a short table instead of zeros for missing entries.
    """
    table, slots = rank.table(), rank.superblock.slots
    if rank.slab_slots < slots:
        # Entries of slots beyond the slab's end are listed separately.
        kind = f"slab has {rank.slab_slots} of {slots} slots; the next start extends it"
        report.add(kind, damage=Damage.NOTE)
    if missing := int((table.states == MISSING).sum()):
        report.add(f"table has {slots - missing} of {slots} entries")
    suspects = _suspects(rank, table, report, on_progress)
    if suspects and not report.repair and report.surveyed.owner.may_live:
        settle()
    with as_pool_error(f"cannot repair {rank.surveyed.path / 'table'}"):
        for index in suspects:
            is_live, is_missing = table.states[index] == LIVE, table.states[index] == MISSING
            judgement = rank.judge(index, table.identity(index) if is_live else None)
            if judgement is None:
                continue
            if judgement.worth_listing:
                report.add(judgement.kind, index)
            entry = judgement.replacement
            if rank.before_write is not None and (any(entry) or not is_missing):
                rank.before_write()
                if os.pwrite(rank.table_fd, entry, index * ENTRY_BYTES) != ENTRY_BYTES:
                    raise OSError(errno.ENOSPC, "short write", str(rank.surveyed.path / "table"))
        if rank.before_write is not None and report.worst is not Damage.NOTE:
            rank.before_write()
            os.ftruncate(rank.table_fd, slots * ENTRY_BYTES)
        if report.worst is Damage.REPAIRED:
            os.fsync(rank.table_fd)


def _suspects(
    rank: OfflineRank, table: offline.Table, report: Report, on_progress: Progress
) -> list[int]:
    """Return the slots that do not prove their entry or lack one. Read-ahead is bounded."""
    slot_bytes, directory = rank.superblock.slot_bytes, rank.surveyed.directory
    indices = np.flatnonzero(np.isin(table.states, (LIVE, DAMAGED, MISSING)))
    written = set(written_slots(rank.slab_fd, indices, slot_bytes).tolist())

    def is_suspect(index: int) -> bool:
        state = table.states[index]
        if state == LIVE and rank.threads:
            return not rank.check(index, table.identity(index)).ok
        header = rank.header(index) if state != DAMAGED and index in written else None
        if not isinstance(header, SlotHeader):
            return bool(state != MISSING)
        return bool(state == MISSING or rank.mismatch(index, header, table.identity(index)))

    suspects: list[int] = []
    workers, unit = rank.threads or _HEADER_THREADS, slot_bytes if rank.threads else HEADER_BYTES
    began_s, batch_max = time.monotonic(), workers * _BATCH_PER_THREAD
    with ThreadPoolExecutor(workers, thread_name_prefix="pool-check") as threads:
        for start in range(0, len(indices), batch_max):
            batch = indices[start : start + batch_max].tolist()
            verdicts = threads.map(is_suspect, batch)
            suspects += [index for index, bad in zip(batch, verdicts, strict=True) if bad]
            on_progress(directory, (start + len(batch)) * unit, len(indices) * unit)
    live = np.flatnonzero(table.states == LIVE).tolist()
    report.checked = len(live)
    if rank.threads:
        report.read_bytes = sum(rank.bytes_of(table.identity(index)) for index in live)
        report.seconds, report.direct = time.monotonic() - began_s, rank.direct_fd is not None
    return suspects


def _check_log(report: Report, pages: int) -> None:
    with offline.open_log(report.surveyed) as log:
        try:
            found = os.fstat(log.fileno()).st_size // PAGE_BYTES
            damaged = damaged_pages(log.fileno(), pages)
        except OSError as error:
            report.add(f"log cannot be read: {error.strerror}", damage=Damage.NOTE)
            return
    if found < pages:
        kind = f"log has {found} of {pages} pages; the next start extends it"
        report.add(kind, damage=Damage.NOTE)
    if damaged:
        report.add(f"log has {damaged} damaged pages, which servers rewrite", damage=Damage.NOTE)
