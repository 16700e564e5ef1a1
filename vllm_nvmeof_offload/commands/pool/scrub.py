# SPDX-License-Identifier: Apache-2.0
"""Reads every slot that the table lists, whole, and verifies header and payload CRC-32C.

With O_DIRECT where the file system has it: the page cache would vouch for what the medium
has lost.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from vllm_nvmeof_offload.commands.pool.fsck import without_superblock
from vllm_nvmeof_offload.commands.pool.offline import (
    OfflineRank,
    Progress,
    Table,
    held_survey,
    let_writes_end,
    open_rank,
)
from vllm_nvmeof_offload.commands.pool.report import Finding, Report, settled
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, Outcome, PoolError
from vllm_nvmeof_offload.pool.layout import verify
from vllm_nvmeof_offload.pool.table import ENTRY_BYTES
from vllm_nvmeof_offload.units import MIB, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed
    from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = ["SlotReader", "scrub"]

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
