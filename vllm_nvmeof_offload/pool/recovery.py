# SPDX-License-Identifier: Apache-2.0
"""What an earlier process left: entries from the tables, or from the slots' headers.

The table is read first (64 bytes a slot). Entries that are damaged or cut off are looked up in
their slots' header pages, which costs one 4 KiB read each, and are written back.

Makes claimed directories into one pool: what to keep, how much space, which epoch.

A superblock is written last, and removed first where a directory is started anew, so that a
crash in between leaves either the old pool or an empty directory.
"""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    EPOCH_MAX,
    SlotHeader,
    SlotPlace,
    Superblock,
    decode_table,
    encode_entry,
    parse_header,
    sync_directory,
    write_superblock,
)
from vllm_nvmeof_offload.pool.slab import NO_SPACE, Slab, probe_o_direct, read_o_direct
from vllm_nvmeof_offload.protocol import AdoptedEntries
from vllm_nvmeof_offload.units import HEADER_BYTES, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_nvmeof_offload.pool.ownership import Claim, PoolSpec

__all__ = [
    "Prepared",
    "Progress",
    "RankFiles",
    "adopt_entries",
    "choose_direct",
    "next_epoch",
    "prepare",
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """superblocks: as written, one a target. slots_per_target: for which there is space.
    adopt_slots: how many of them, by target, may hold what an earlier process stored.
    """

    superblocks: list[Superblock]
    slots_per_target: int
    adopt_slots: list[int]


def next_epoch(epoch: int) -> int:
    """Epochs are compared for equality; at the end of 32 bits they start over."""
    return epoch + 1 if epoch < EPOCH_MAX else 1


def prepare(spec: PoolSpec, claim: Claim, slabs: Sequence[Slab]) -> Prepared:
    """Wipe what is of another pool, reserve space, write the superblocks.

    Raises:
        PoolError: no space for one slot.
        OSError: a file cannot be read, written or resized.
    """
    kept = _keep_or_wipe(spec, claim, slabs)
    count = _allocate(spec, slabs)
    living = [superblock for superblock in kept if superblock is not None]
    pool_uuid = living[0].uuid if living else uuid.uuid4().bytes
    # The highest one: a reset that reached only some of the targets has voided all.
    epoch = max((superblock.epoch for superblock in living), default=1)
    adopt_slots = [min(superblock.slots, count) if superblock else 0 for superblock in kept]
    if living and not (spec.adopt and all(superblock.adoptable for superblock in living)):
        adopt_slots = [0] * len(kept)
        epoch = next_epoch(epoch)
    superblocks = [
        replace(
            _geometry(spec, index),
            uuid=pool_uuid,
            epoch=epoch,
            slots=count,
            adoptable=spec.adoptable,
        )
        for index in range(len(kept))
    ]
    for slab, superblock, found in zip(slabs, superblocks, kept, strict=True):
        if superblock == found:
            # A full disk has no room for a second one. A kill may have kept this one from
            # becoming durable.
            sync_directory(slab.directory)
        else:
            write_superblock(slab.directory, superblock)
    return Prepared(superblocks, count, adopt_slots)


def _geometry(spec: PoolSpec, index: int) -> Superblock:
    """The facts that must agree, with the others blank."""
    return Superblock(
        uuid=bytes(16),
        keyspace=spec.keyspace.digest,
        slot_bytes=spec.slot_bytes,
        payload_bytes=spec.payload_bytes,
        slots=0,
        target_index=index,
        target_count=len(spec.targets),
        rank=spec.rank,
        world_size=spec.world_size,
        epoch=0,
        adoptable=True,
    )


def _keep_or_wipe(spec: PoolSpec, claim: Claim, slabs: Sequence[Slab]) -> list[Superblock | None]:
    """Wipe every directory whose superblock is not of this pool; return the others'.

    The number of slots may differ (a pool that was given more or less space): the slots that
    both have stay where they are. Anything else that differs makes it another pool.
    """
    kept: list[Superblock | None] = []
    pool_uuid: bytes | None = None
    for index, slab in enumerate(slabs):
        found = claim.read_superblock(index)
        if found is not None:
            blank = replace(found, uuid=bytes(16), slots=0, epoch=0, adoptable=True)
            if blank != _geometry(spec, index) or found.uuid != (pool_uuid or found.uuid):
                logger.warning("%s holds a pool of another shape: starting empty", slab.directory)
                found = None
        if found is None:
            slab.wipe()
        else:
            pool_uuid = found.uuid
        kept.append(found)
    return kept


def _allocate(spec: PoolSpec, slabs: Sequence[Slab]) -> int:
    """Reserve space on all targets; return the slots of each, equal on all."""
    wanted = spec.slots_per_target
    counts = [slab.allocate(wanted, spec.slot_bytes) for slab in slabs]
    count = min(counts)
    full = slabs[counts.index(count)].directory
    if count < 1:
        raise PoolError(
            f"{full}: no space for one slot of {format_bytes(spec.slot_bytes)}; "
            f"free some, or choose another target"
        )
    if count < wanted:
        logger.warning(
            "%s has no space for %d slots of %s: %d on each target are used",
            full,
            wanted,
            format_bytes(spec.slot_bytes),
            count,
        )
    for slab in slabs:
        slab.cut(count, spec.slot_bytes)
        slab.sync()
    return count


def choose_direct(spec: PoolSpec, slabs: Sequence[Slab]) -> tuple[str, ...]:
    """Open slabs for O_DIRECT where it really works; return the fallbacks, for people.

    Raises:
        PoolError: it does not work and the specification says "on".
    """
    fallbacks: list[str] = []
    for slab in slabs if spec.o_direct != "off" else ():
        try:
            _probe_direct(slab)
            slab.use_direct()
        except OSError as error:
            if spec.o_direct == "on":
                raise PoolError(
                    f"{slab.directory}: O_DIRECT does not work there ({error}); "
                    f'set o_direct to "auto" or "off", or use xfs or ext4'
                ) from error
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            fallbacks.append(f"o_direct→buffered on {slab.directory}: {name}")
            logger.warning("%s", fallbacks[-1])
    return tuple(fallbacks)


def _probe_direct(slab: Slab) -> None:
    """Raise OSError unless O_DIRECT works; a full disk, with no room for a probe, says nothing."""
    try:
        probe_o_direct(slab.directory)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        read_o_direct(slab.directory / "slab")
