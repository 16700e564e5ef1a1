# SPDX-License-Identifier: Apache-2.0
"""What an earlier process left: entries from the tables, or from the slots' headers.

The table is read first (64 bytes a slot). Entries that are damaged or cut off are looked up in
their slots' header pages, which costs one 4 KiB read each, and are written back.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.layout import SlotHeader, SlotPlace, parse_header
from vllm_nvmeof_offload.pool.table import ENTRY_BYTES, decode_table, encode_entry
from vllm_nvmeof_offload.protocol import AdoptedEntries
from vllm_nvmeof_offload.units import HEADER_BYTES

__all__ = [
    "Progress",
    "RankFiles",
    "adopt_entries",
    "read_table",
    "scan_headers",
    "written_slots",
]

logger = logging.getLogger(LOGGER_NAME)

#: Called with (header pages read, header pages to read) while a table is rebuilt.
Progress = Callable[[int, int], None]

_SCAN_THREADS = 16
_SCAN_BATCH = 1024
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class RankFiles:
    """One target's files.

    slots: how many of its slots an earlier process can have written and are still there.
    table_slots: how many entries its table had when it was opened (fewer: damage).
    place: what the header of a pool slot must name; others' headers are not adopted.
    """

    slab_fd: int
    table_fd: int
    target_index: int
    slots: int
    table_slots: int
    place: Callable[[int], SlotPlace]


@dataclass(frozen=True, slots=True)
class _Found:
    pool_slots: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    keys: list[bytes]


def adopt_entries(
    files: list[RankFiles],
    *,
    epoch: int,
    slot_bytes: int,
    payload_bytes: int,
    on_progress: Progress | None = None,
) -> AdoptedEntries:
    """Return what may be looked up again, in ascending order of pool slots.

    Skipped: entries of another epoch, not adoptable ones, and ones that cannot be recovered.
    Of two slots that hold one key the lower pool slot is kept: both are right (a key names its
    content), and the choice is the same on every rank.
    """
    parts: list[_Found] = []
    for one in files:
        pool_slots = np.arange(one.slots, dtype=np.int64) * len(files) + one.target_index
        raw = read_table(one.table_fd, min(one.slots, one.table_slots))
        whole = raw.size // ENTRY_BYTES
        table = decode_table(raw, pool_slots[:whole])
        usable = table.valid & table.adoptable & (table.epochs == epoch)
        lost = np.concatenate([np.flatnonzero(table.damaged), np.arange(whole, one.slots)])
        if lost.size:
            logger.warning("rebuilding %d of %d table entries from slots", lost.size, one.slots)
            parts.append(
                _from_headers(one, lost, pool_slots, epoch, slot_bytes, payload_bytes, on_progress)
            )
        rows = np.flatnonzero(usable)
        if core is not None:
            keys: list[bytes] = core.entry_keys(raw, rows)
        else:
            keys, order = _keys(table.keys[rows], table.key_bytes[rows])
            rows = rows[order]
        parts.append(_Found(pool_slots[rows], table.generations[rows], keys))
    return _merge(parts)


def read_table(fd: int, slots: int) -> npt.NDArray[np.uint8]:
    """Read up to `slots` entries; shorter if the file is, or cannot be read."""
    raw = np.empty(slots * ENTRY_BYTES, np.uint8)
    view = raw.data
    done = 0
    try:
        while done < len(view):
            count = os.preadv(fd, [view[done : done + _READ_BYTES]], done)
            if count == 0:
                break
            done += count
    except OSError as error:
        logger.warning("cannot read a pool's table beyond byte %d: %s", done, error)
    return raw[: done // ENTRY_BYTES * ENTRY_BYTES]


def _keys(
    keys: npt.NDArray[np.uint8], key_bytes: npt.NDArray[np.uint8]
) -> tuple[list[bytes], npt.NDArray[np.int64]]:
    """Cut uint8[n, 46] into `bytes`, one length at a time; also return the order they are in."""
    result: list[bytes] = []
    orders: list[npt.NDArray[np.int64]] = []
    for length in np.unique(key_bytes).tolist():
        rows = np.flatnonzero(key_bytes == length)
        cut = np.ascontiguousarray(keys[rows, :length])
        result.extend(cut.view(f"V{length}").ravel().tolist())
        orders.append(rows)
    return result, np.concatenate(orders) if orders else np.empty(0, np.int64)


def _merge(parts: list[_Found]) -> AdoptedEntries:
    pool_slots = np.concatenate([part.pool_slots for part in parts])
    generations = np.concatenate([part.generations for part in parts])
    keys = parts[0].keys if len(parts) == 1 else [key for part in parts for key in part.keys]
    order = np.argsort(pool_slots, kind="stable")
    if len(order) and (np.diff(order) != 1).any():
        keys = [keys[i] for i in order.tolist()]
    if len(set(keys)) != len(keys):
        # Later assignments win, so go from the highest slot down to the lowest.
        kept = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        rows = sorted(kept.values())
        logger.info("pool holds %d keys twice; the lower slot is kept", len(keys) - len(rows))
        order = order[np.asarray(rows, np.int64)]
        keys = [keys[i] for i in rows]
    return AdoptedEntries(pool_slots[order], generations[order], tuple(keys))


def _from_headers(
    one: RankFiles,
    indices: npt.NDArray[np.int64],
    pool_slots: npt.NDArray[np.int64],
    epoch: int,
    slot_bytes: int,
    payload_bytes: int,
    on_progress: Progress | None,
) -> _Found:
    """Read the header pages of the slots `indices`; repair the table beside."""
    slots: list[int] = []
    generations: list[int] = []
    keys: list[bytes] = []
    done = 0
    for batch, headers in scan_headers(one.slab_fd, indices, slot_bytes):
        for index, header in zip(batch, headers, strict=True):
            pool_slot = int(pool_slots[index])
            entry = bytes(ENTRY_BYTES)
            if (
                header is not None
                and header.payload_bytes == payload_bytes
                and header.place == one.place(pool_slot)
            ):
                entry = encode_entry(pool_slot, header.identity, header.stamp)
                if header.stamp.adoptable and header.stamp.epoch == epoch:
                    slots.append(pool_slot)
                    generations.append(header.identity.generation)
                    keys.append(header.identity.key)
            if any(entry) or index < one.table_slots:
                _repair(one.table_fd, entry, index * ENTRY_BYTES)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(indices))
    return _Found(np.array(slots, np.int64), np.array(generations, np.uint64), keys)


def _repair(fd: int, entry: bytes, offset: int) -> None:
    try:
        os.pwrite(fd, entry, offset)
    except OSError as error:
        logger.debug("cannot repair a table entry at %d: %s", offset, error)


def scan_headers(
    fd: int, indices: npt.NDArray[np.int64], slot_bytes: int
) -> Iterator[tuple[list[int], list[SlotHeader | None]]]:
    """Yield batches of slot indices with their headers (None: no intact one)."""

    def read(index: int) -> SlotHeader | None:
        try:
            return parse_header(os.pread(fd, HEADER_BYTES, index * slot_bytes))
        except OSError as error:
            logger.debug("cannot read the header of slot %d: %s", index, error)
            return None

    wanted = written_slots(fd, indices, slot_bytes)
    present = set(wanted.tolist())
    with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="pool-scan") as threads:
        for start in range(0, len(indices), _SCAN_BATCH):
            batch = indices[start : start + _SCAN_BATCH].tolist()
            read_here = [index for index in batch if index in present]
            headers = dict(zip(read_here, threads.map(read, read_here), strict=True))
            yield batch, [headers.get(index) for index in batch]


def written_slots(
    fd: int, indices: npt.NDArray[np.int64], slot_bytes: int
) -> npt.NDArray[np.int64]:
    """Drop slots that were never written: the file system knows, and spares us the reads."""
    size = os.fstat(fd).st_size
    bounds: list[int] = []  # first and end slot of each stretch of data, ascending
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                break
            return indices
        first = max(start // slot_bytes, bounds[-1] if bounds else 0)
        bounds += [first, max(first, -(-position // slot_bytes))]
    # Inside a stretch an odd number of bounds lies at or below the index.
    below = np.searchsorted(np.array(bounds, np.int64), indices, side="right")
    kept: npt.NDArray[np.int64] = indices[below % 2 == 1]
    return kept
