# SPDX-License-Identifier: Apache-2.0
"""Start of a pool: prepares the claimed directories and adopts an earlier process's chunks.

Preparation decides what to keep, how much space there is and which epoch begins. A directory that
starts empty loses its superblock first, and gets a new one last, so that a crash in between
leaves either the old pool or an empty directory.

Adoption reads the table first (64 bytes per slot). Entries that are damaged or cut off are
recovered from the slots' header pages, one 4 KiB read each, and written back.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import PoolError, PoolFormatError
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    EPOCH_MAX,
    KEY_BYTES_MAX,
    DecodedTable,
    SlotHeader,
    Stamp,
    Superblock,
    decode_table,
    encode_entry,
    parse_header,
    read_superblock,
    sync_directory,
    write_superblock,
)
from vllm_nvmeof_offload.pool.ownership import PoolSpec
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import AdoptedEntries, SlotIdentity, place_of
from vllm_nvmeof_offload.units import HEADER_BYTES, format_bytes

#: Called with (header pages read, header pages to read) while a table is rebuilt.
Progress = Callable[[int, int], None]

_SCAN_THREADS = 16
_SCAN_BATCH = 1024
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Found:
    """Intact entries of one target, by rows. keys: of one length, each an opaque value."""

    places: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.void]


def adopt_entries(
    slabs: Sequence[Slab],
    counts: Sequence[int],
    superblock: Superblock,
    on_progress: Progress | None = None,
) -> AdoptedEntries:
    """Return the chunks that can be looked up again, in ascending order of places.

    counts: by target, the slots that an earlier process can have written and that still exist.
    superblock: of any target; a slot whose header names another place is not adopted. Skipped:
    entries of another epoch, not adoptable ones, and ones that cannot be recovered. A key may be
    in several places.
    """
    parts: list[_Found] = []
    for target, (slab, count) in enumerate(zip(slabs, counts, strict=True)):
        pool_slots = np.arange(count, dtype=np.int64) * len(slabs) + target
        raw = read_table(slab.table_fd, min(count, slab.table_slots_found))
        whole = raw.size // ENTRY_BYTES
        table = decode_table(raw, pool_slots[:whole])
        parts.append(_intact(target, table, superblock.epoch))
        lost = np.concatenate([np.flatnonzero(table.damaged), np.arange(whole, count)])
        if lost.size:
            logger.warning("rebuilding %d of %d table entries from slots", lost.size, count)
            found = _recover(slab, lost, pool_slots, superblock, on_progress)
            parts.append(_recovered(target, found))
    return _merge(parts)


def read_table(fd: int, slots: int) -> npt.NDArray[np.uint8]:
    """Read up to `slots` entries; fewer if the file is shorter or cannot be read."""
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


def _intact(target: int, table: DecodedTable, epoch: int) -> _Found:
    """The table's entries that are adopted."""
    rows = np.flatnonzero(table.valid & table.adoptable & (table.epochs == epoch))
    lengths = table.key_bytes[rows]
    length = _common(lengths)
    if (lengths != length).any():
        rows = rows[lengths == length]
    keys = table.keys[:, :length].view(f"V{length}")[:, 0]
    return _Found(place_of(target, 0) | rows, table.generations[rows], keys[rows])


def _recovered(target: int, found: Sequence[tuple[int, SlotIdentity]]) -> _Found:
    """found: slots of this target, with what they hold."""
    length = _common(np.array([len(identity.key) for _, identity in found], np.uint8))
    same = [(slot, identity) for slot, identity in found if len(identity.key) == length]
    return _Found(
        np.array([place_of(target, slot) for slot, _ in same], np.int64),
        np.array([identity.generation for _, identity in same], np.uint64),
        np.array([identity.key for _, identity in same], f"V{length}"),
    )


def _common(lengths: npt.NDArray[np.uint8]) -> int:
    """The length of keys that most have: a keyspace has only one."""
    return int(np.bincount(lengths).argmax()) if len(lengths) else KEY_BYTES_MAX


def _merge(parts: Sequence[_Found]) -> AdoptedEntries:
    length = max(parts, key=lambda part: len(part.places)).keys.itemsize
    parts = [part for part in parts if part.keys.itemsize == length]
    places = np.concatenate([part.places for part in parts])
    generations = np.concatenate([part.generations for part in parts])
    keys = np.concatenate([part.keys for part in parts])
    if (np.diff(places) < 0).any():
        order = np.argsort(places)
        places, generations, keys = places[order], generations[order], keys[order]
    return AdoptedEntries(places, generations, keys.tobytes())


def _recover(
    slab: Slab,
    indices: npt.NDArray[np.int64],
    pool_slots: npt.NDArray[np.int64],
    superblock: Superblock,
    on_progress: Progress | None,
) -> list[tuple[int, SlotIdentity]]:
    """Read the header pages of the slots `indices`; repair the table as well.

    Returns the slots whose chunks are adopted.
    """
    found: list[tuple[int, SlotIdentity]] = []
    done = 0
    for batch, headers in scan_headers(slab.buffered_fd, indices, superblock.slot_bytes):
        for index, header in zip(batch, headers, strict=True):
            pool_slot = int(pool_slots[index])
            entry = bytes(ENTRY_BYTES)
            if (
                header is not None
                and header.payload_bytes == superblock.payload_bytes
                and header.place == superblock.place(pool_slot)
            ):
                entry = encode_entry(pool_slot, header.identity, header.stamp)
                if header.stamp.adoptable and header.stamp.epoch == superblock.epoch:
                    found.append((index, header.identity))
            if any(entry) or index < slab.table_slots_found:
                try:
                    os.pwrite(slab.table_fd, entry, index * ENTRY_BYTES)
                except OSError as error:
                    logger.debug("cannot repair table entry %d: %s", index, error)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(indices))
    return found


def scan_headers(
    fd: int, indices: npt.NDArray[np.int64], slot_bytes: int
) -> Iterator[tuple[list[int], list[SlotHeader | None]]]:
    """Yield batches of slot indices with their headers (None: not intact)."""

    def read(index: int) -> SlotHeader | None:
        try:
            return parse_header(os.pread(fd, HEADER_BYTES, index * slot_bytes))
        except OSError as error:
            logger.debug("cannot read the header of slot %d: %s", index, error)
            return None

    present = set(written_slots(fd, indices, slot_bytes).tolist())
    with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="pool-scan") as threads:
        for start in range(0, len(indices), _SCAN_BATCH):
            batch = indices[start : start + _SCAN_BATCH].tolist()
            written = [index for index in batch if index in present]
            headers = dict(zip(written, threads.map(read, written), strict=True))
            yield batch, [headers.get(index) for index in batch]


def written_slots(
    fd: int, indices: npt.NDArray[np.int64], slot_bytes: int
) -> npt.NDArray[np.int64]:
    """Drop slots that were never written, as the file system's holes show without any read."""
    size = os.fstat(fd).st_size
    bounds: list[int] = []  # first and end slot of each stretch of data, ascending
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            return indices
        first = max(start // slot_bytes, bounds[-1] if bounds else 0)
        bounds += [first, max(first, -(-position // slot_bytes))]
    # Inside a stretch an odd number of bounds lies at or below the index.
    below = np.searchsorted(np.array(bounds, np.int64), indices, side="right")
    kept: npt.NDArray[np.int64] = indices[below % 2 == 1]
    return kept


def next_epoch(epoch: int) -> int:
    """Return the epoch after `epoch`. Epochs are compared for equality, and wrap at 32 bits."""
    return epoch + 1 if epoch < EPOCH_MAX else 1


def prepare(spec: PoolSpec, slabs: Sequence[Slab]) -> tuple[list[Superblock], list[int]]:
    """Wipe directories of another pool, reserve space, write the superblocks.

    Returns by target its superblock, and how many slots may hold chunks of an earlier process.
    PoolError: no space for one slot. OSError: a file cannot be read, written or resized.
    """
    kept = _keep_or_wipe(spec, slabs)
    count = _allocate(spec, slabs)
    living = [superblock for superblock in kept if superblock is not None]
    pool_uuid = living[0].uuid if living else uuid.uuid4().bytes
    # The highest epoch: a reset that reached only some of the targets has voided all.
    epoch = max((superblock.epoch for superblock in living), default=1)
    adopt_slots = [min(superblock.slots, count) if superblock else 0 for superblock in kept]
    if living and not (spec.adopt and all(superblock.adoptable for superblock in living)):
        adopt_slots = [0] * len(kept)
        epoch = next_epoch(epoch)
    stamp = Stamp(epoch, spec.adoptable)
    superblocks = [_superblock(spec, i, pool_uuid, count, stamp) for i in range(len(slabs))]
    for slab, superblock, found in zip(slabs, superblocks, kept, strict=True):
        if superblock == found:
            # A full disk has no room for a second superblock. A kill may have kept this one from
            # becoming durable.
            sync_directory(slab.directory)
        else:
            write_superblock(slab.directory, superblock)
    return superblocks, adopt_slots


def _superblock(
    spec: PoolSpec, target: int, pool_uuid: bytes, slots: int, stamp: Stamp
) -> Superblock:
    return Superblock(
        uuid=pool_uuid,
        keyspace=spec.keyspace.digest,
        slot_bytes=spec.slot_bytes,
        payload_bytes=spec.payload_bytes,
        slots=slots,
        target_index=target,
        target_count=len(spec.targets),
        rank=spec.rank,
        world_size=spec.world_size,
        epoch=stamp.epoch,
        adoptable=stamp.adoptable,
    )


def _keep_or_wipe(spec: PoolSpec, slabs: Sequence[Slab]) -> list[Superblock | None]:
    """Wipe every directory whose superblock is not of this pool; return the others'.

    The number of slots may differ (the pool was given more or less space): the slots that both
    have stay in place. Any other difference makes it another pool.
    """
    kept: list[Superblock | None] = []
    pool_uuid = b""
    for target, slab in enumerate(slabs):
        found = None
        try:
            found = read_superblock(slab.directory)
        except PoolFormatError as error:
            logger.warning("%s/superblock: %s; starting empty", slab.directory, error)
        if found is not None:
            stamp = Stamp(found.epoch, found.adoptable)
            expected = _superblock(spec, target, pool_uuid or found.uuid, found.slots, stamp)
            if found != expected:
                logger.warning("%s holds a pool of another shape: starting empty", slab.directory)
                found = None
        if found is None:
            slab.wipe()
        else:
            pool_uuid = found.uuid
        kept.append(found)
    return kept


def _allocate(spec: PoolSpec, slabs: Sequence[Slab]) -> int:
    """Reserve space on all targets; return the number of slots per target."""
    wanted = spec.slots_per_target
    counts = [slab.allocate(wanted, spec.slot_bytes) for slab in slabs]
    count = min(counts)
    full, size = slabs[counts.index(count)].directory, format_bytes(spec.slot_bytes)
    if count < 1:
        raise PoolError(
            f"{full}: no space for one slot of {size}; free some, or choose another target"
        )
    if count < wanted:
        logger.warning(
            "%s has no space for %d slots of %s: %d per target are used", full, wanted, size, count
        )
    for slab in slabs:
        slab.cut(count, spec.slot_bytes)
    return count


def choose_direct(spec: PoolSpec, slabs: Sequence[Slab]) -> tuple[str, ...]:
    """Open slabs for O_DIRECT where a probe proves it; return the fallbacks, for people.

    PoolError: it does not work and the specification says "on".
    """
    fallbacks: list[str] = []
    for slab in slabs if spec.o_direct != "off" else ():
        try:
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
