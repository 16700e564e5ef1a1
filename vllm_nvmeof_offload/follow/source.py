# SPDX-License-Identifier: Apache-2.0
"""The sources of a region's rows: scans of its table, or one scan and then its log.

A scan reads the whole table, which costs 9 ms per million entries. A table whose file has not
changed for a while is scanned less often, but still scanned: the kernel sets a file's time before
it copies the bytes, so a change may slightly follow the time that was seen.

If nothing was written, polling the log costs one read of 4 KiB. A reader that falls a lap
behind notices this from the pages' numbers, and scans again (`pool.log`).

The owner writes the table entry before the log record. Another host sees the entry only after the
owner has synced the table, so a scan there does not undo what the log reported since the previous
scan.

Files that another host may write are read with O_DIRECT, because this host's page cache may not
show what was written. Reopening them to read their times makes a network file system ask its
server. Data written by this host's own kernel is in its page cache.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Protocol

from vllm_nvmeof_offload.native import ForeignRegion, ForeignWriter
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import LOG_FILE, TABLE_FILE, Superblock

#: A table that has not changed for QUIET_S is read only every QUIET_READ_S.
QUIET_S, QUIET_READ_S = 1.0, 5.0
#: A table with a log is still scanned at this interval if its file has changed, because records may
#: be lost.
RESCAN_S = 30.0
#: An owner on another host syncs its table every second. Entries logged before the log's end was
#: found may reach the table only then, so the table is scanned once more after this time.
SYNCED_S = 2.0


class Source(Protocol):
    """Keeps a region's rows in the foreign table up to date. Used on one thread."""

    def begin(self) -> None:
        """Start over with a scan, because the rows were restarted (`ForeignRegion.begin`)."""

    def poll(self, rows: ForeignRegion, table: ForeignWriter, now_s: float) -> bool:
        """Apply new entries. Returns whether the superblock was replaced, as far as this source can
        see. Raises OSError if a file cannot be read; entries that it has already offered stay."""

    def log_fd(self) -> int:
        """Return the descriptor of a log that `ForeignRegion.with_news` can check instead of a
        poll, or -1."""

    def close(self) -> None:
        """Close the files. The next poll reopens them: the path may lead to other files by then."""


class ScanSource:
    """Implements `Source` with the table only."""

    def __init__(self, directory: Path, is_direct: bool) -> None:
        """`is_direct` states whether another host may write the files."""
        self._path = directory / TABLE_FILE
        self._is_direct = is_direct
        self._fd = -1
        self._read_s, self._changed_ns = float("-inf"), 0

    def begin(self) -> None:
        self._read_s = float("-inf")

    def poll(self, rows: ForeignRegion, table: ForeignWriter, now_s: float) -> bool:
        changed_ns = self._look()
        if (
            changed_ns != self._changed_ns
            or time.time_ns() - changed_ns < QUIET_S * 1e9
            or now_s - self._read_s >= QUIET_READ_S
        ):
            self.scan(rows, table, now_s)
        else:
            rows.ripen(table, int(now_s * 1e9))
        return False

    def has_changed(self) -> bool:
        """Return whether the table was written since the last scan began. Raises OSError as
        `poll`."""
        return self._look() != self._changed_ns

    def scan(
        self,
        rows: ForeignRegion,
        table: ForeignWriter,
        now_s: float,
        log_is_ahead: bool = False,
    ) -> None:
        """Read the table. `log_is_ahead` is as in `ForeignRegion.scan`. Raises OSError as
        `poll`."""
        changed_ns = self._look()
        _check(rows.scan(table, self._fd, int(now_s * 1e9), log_is_ahead))
        self._read_s, self._changed_ns = now_s, changed_ns

    def log_fd(self) -> int:
        return -1

    def _look(self) -> int:
        """Return the file's modification time, by its file system's clock."""
        if self._is_direct:
            self.close()
        if self._fd < 0:
            self._fd = _open(self._path, self._is_direct)
        return os.fstat(self._fd).st_mtime_ns

    def close(self) -> None:
        self._fd = _closed(self._fd)


class LogSource:
    """Implements `Source` with the table and the log."""

    def __init__(self, directory: Path, pages: int, is_direct: bool) -> None:
        """`pages` is the log's length. `is_direct` is as for `ScanSource`."""
        self._table = ScanSource(directory, is_direct)
        self._is_direct = is_direct
        self._path = directory / LOG_FILE
        self._pages = pages
        self._fd = -1
        self._is_found = False  # whether the log's end is known
        self._rescan_s = float("-inf")

    def begin(self) -> None:
        self._is_found = False
        self._table.begin()

    def poll(self, rows: ForeignRegion, table: ForeignWriter, now_s: float) -> bool:
        if self._fd < 0:
            with contextlib.suppress(FileNotFoundError):
                self._fd = _open(self._path, self._is_direct)
        if self._fd < 0:  # the log was removed
            self._is_found = False
            return self._table.poll(rows, table, now_s)
        if not self._is_found:
            self._find(rows, table, now_s, log_is_ahead=self._is_direct)
        why = rows.follow_log(table, self._fd, int(now_s * 1e9))
        if why == rows.OVERRUN:
            table.log_overran()
            self._find(rows, table, now_s, log_is_ahead=False)  # the log has lost records
        elif why != rows.RESET:
            _check(why)
            if now_s >= self._rescan_s:
                self._rescan_s = now_s + RESCAN_S
                if self._table.has_changed():
                    self._table.scan(rows, table, now_s, log_is_ahead=self._is_direct)
        return why == rows.RESET

    def _find(
        self, rows: ForeignRegion, table: ForeignWriter, now_s: float, log_is_ahead: bool
    ) -> None:
        """Find the log's end, then scan, so that each entry is in the scan or the later log."""
        self._is_found = False
        _check(rows.seek_log(self._fd, self._pages))
        self._table.scan(rows, table, now_s, log_is_ahead)
        self._is_found = True
        self._rescan_s = now_s + (SYNCED_S if self._is_direct else RESCAN_S)

    def log_fd(self) -> int:
        return self._fd if self._is_found and not self._is_direct else -1

    def close(self) -> None:
        self._fd = _closed(self._fd)
        self._table.close()


def source_of(directory: Path, superblock: Superblock) -> Source:
    """Return the region's best source: its log, or scans if an older release wrote none."""
    is_direct = superblock.is_leased  # only leased regions are written by several hosts
    if superblock.log_pages:
        return LogSource(directory, superblock.log_pages, is_direct)
    return ScanSource(directory, is_direct)


def _open(path: Path, is_direct: bool) -> int:
    return open_private(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))


def _closed(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
