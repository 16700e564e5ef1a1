# SPDX-License-Identifier: Apache-2.0
"""The start of a pool: the claimed directories are prepared, and earlier chunks adopted.

Preparation decides what to keep, how much space to use and which epoch to begin. A directory that
starts empty loses its superblock first and gets a new one last, so that a crash in between leaves
either the old pool or an empty directory. The epoch is that of the superblock with the highest
sequence on any target, if it has this start's share tag; otherwise a new epoch begins.

Adoption reads the table first (64 bytes per slot). Damaged or truncated entries are recovered from
the slots' header pages, with one 4 KiB read each, and written back.
"""

from __future__ import annotations

import errno
import os
import secrets
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import PoolError, PoolFormatError, UnknownFormatError
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    EPOCH_MAX,
    FLAG_SINGLE_COPY,
    KEY_BYTES_MAX,
    LEASED,
    DecodedTable,
    SlotHeader,
    Stamp,
    Superblock,
    decode_table,
    newest_of,
    parse_header,
    read_superblock,
    share_tag,
    sync_directory,
    write_superblock,
)
from vllm_nvmeof_offload.pool.ownership import Claim, PoolSpec
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    TAG_BYTES,
    AdoptedEntries,
    place_of,
    places_of,
)
from vllm_nvmeof_offload.units import HEADER_BYTES, format_bytes

Progress = Callable[[int, int], None]  # (header pages read, header pages to read)

_SCAN_THREADS = 16
_SCAN_BATCH = 1024
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Found:
    """The intact entries of one target, as columns. All `keys` have equal lengths and are
    opaque."""

    places: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.void]


def adopt_entries(
    slabs: Sequence[Slab],
    counts: Sequence[int],
    superblocks: Sequence[Superblock],
    on_progress: Progress | None = None,
) -> AdoptedEntries:
    """Return the chunks that can be looked up again, in ascending order of places. By target,
    `counts` is the number of slots that an earlier process may have written and that still exist.
    Entries are skipped if they cannot be recovered, or if they belong to another epoch or to a
    group that the superblock lacks. A key can be in several places."""
    parts: list[_Found] = []
    for slab, count, superblock in zip(slabs, counts, superblocks, strict=True):
        raw = read_table(slab.table_fd, min(count, slab.table_slots_found))
        whole = raw.size // ENTRY_BYTES
        table = decode_table(raw, np.arange(whole))
        lost = np.concatenate([np.flatnonzero(table.damaged), np.arange(whole, count)])
        if lost.size:
            logger.warning("rebuilding %d of %d table entries from slots", lost.size, count)
            raw = np.concatenate([raw, np.zeros((count - whole) * ENTRY_BYTES, np.uint8)])
            _recover(raw, slab, lost, superblock, on_progress)
            table = decode_table(raw, np.arange(count))
        parts.append(_intact(table, superblock))
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


def _intact(table: DecodedTable, superblock: Superblock) -> _Found:
    # Copy a whole column only if needed, because a pool has millions of entries.
    adopted = table.valid & (table.epochs == superblock.epoch)
    length = _common(table.key_bytes[adopted])
    adopted &= table.key_bytes == length
    keys = table.keys[:, :length]
    adopted &= has_known_group(keys, superblock)
    rows = np.flatnonzero(adopted)
    members = _members(keys, rows, table.flags, superblock)
    if members is not None and (members < 0).any():
        rows, members = rows[members >= 0], members[members >= 0]
    whole_keys = keys.view(f"V{length}")[:, 0]
    if members is None:
        places = place_of(superblock.target_index, 0) | rows
    else:
        places = places_of(superblock.target_index, rows, members)
    return _Found(places, table.generations[rows], whole_keys[rows])


def _group_ids(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return uint32[n], a view of the group ids in `keys` (uint8[n, length])."""
    ids: npt.NDArray[np.uint32] = keys[:, -GROUP_ID_BYTES:].view(">u4")[:, 0]
    return ids


def has_known_group(keys: npt.NDArray[np.uint8], superblock: Superblock) -> npt.NDArray[np.bool_]:
    """Return bool[n]: whether each key's group is in the superblock. `keys` is uint8[n, length]."""
    ids = [group.group_id for group in superblock.groups]
    known: npt.NDArray[np.bool_] = np.isin(_group_ids(keys), np.array(ids, np.uint32))
    return known


def _members(
    keys: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    flags: npt.NDArray[np.uint8],
    superblock: Superblock,
) -> npt.NDArray[np.int64] | None:
    """Return int64[n], the member in each row's place: for a single copy, this rank's number in its
    set, or -1 if each rank now has its own copies of the group; otherwise `EVERY_MEMBER`. Return
    None if no row has a member. `keys` is uint8[rows, length], `flags` is uint8[rows]."""
    single = np.flatnonzero(flags[rows] & FLAG_SINGLE_COPY)
    if not single.size:
        return None
    members = np.full(len(rows), EVERY_MEMBER, np.int64)
    members[single] = -1
    ids = _group_ids(keys[rows[single]])
    for group in superblock.groups:
        if group.set_size > 1:
            members[single[ids == group.group_id]] = superblock.rank % group.set_size
    return members


def _common(lengths: npt.NDArray[np.uint8]) -> int:
    """Return the most common length. All keys in a keyspace should have the same length."""
    return int(np.bincount(lengths).argmax()) if len(lengths) else KEY_BYTES_MAX


def _merge(parts: Sequence[_Found]) -> AdoptedEntries:
    length = max(parts, key=lambda part: len(part.places)).keys.itemsize
    parts = [part for part in parts if part.keys.itemsize == length]
    places = np.concatenate([part.places for part in parts])
    generations = np.concatenate([part.generations for part in parts])
    if (places[1:] >= places[:-1]).all():
        return AdoptedEntries(places, generations, b"".join(part.keys.data for part in parts))
    order = np.argsort(places)
    keys = np.concatenate([part.keys for part in parts])
    return AdoptedEntries(places[order], generations[order], keys[order].tobytes())


def _recover(
    raw: npt.NDArray[np.uint8],
    slab: Slab,
    indices: npt.NDArray[np.int64],
    superblock: Superblock,
    on_progress: Progress | None,
) -> None:
    """Read the header pages of the slots `indices`, and repair the table. In `raw` (uint8[slots *
    64], the table as read), these slots get the entries of chunks to adopt, or zeros."""
    rows = raw.reshape(-1, ENTRY_BYTES)
    rows[indices] = 0
    done = 0
    newest = Stamp(superblock.epoch, superblock.tag)
    for batch, headers in scan_headers(slab.buffered_fd, indices, superblock.slot_bytes):
        for index, header in zip(batch, headers, strict=True):
            entry = bytes(ENTRY_BYTES)
            if (
                header is not None
                and header.payload_bytes == superblock.length_of(header.identity.key)
                and header.place == superblock.place(index)
            ):
                entry = header.entry()
                if header.stamp == newest:
                    rows[index] = np.frombuffer(entry, np.uint8)
            if any(entry) or index < slab.table_slots_found:
                try:
                    os.pwrite(slab.table_fd, entry, index * ENTRY_BYTES)
                except OSError as error:
                    logger.debug("cannot repair table entry %d: %s", index, error)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(indices))


def scan_headers(
    fd: int, indices: npt.NDArray[np.int64], slot_bytes: int
) -> Iterator[tuple[list[int], list[SlotHeader | None]]]:
    """Yield batches of slot indices with their headers (None if not intact)."""

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
    """Return `indices` without the slots in holes of the file, which were never written."""
    size = os.fstat(fd).st_size
    bounds: list[int] = []  # first and end slot of each data segment, ascending
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole remains
                break
            return indices
        first = max(start // slot_bytes, bounds[-1] if bounds else 0)
        bounds += [first, max(first, -(-position // slot_bytes))]
    # An odd number of bounds are at or below an index that is inside a data segment.
    below = np.searchsorted(np.array(bounds, np.int64), indices, side="right")
    kept: npt.NDArray[np.int64] = indices[below % 2 == 1]
    return kept


def new_epoch(used: Container[int]) -> int:
    """Return a random epoch that is not in `used`: no start knows all epochs ever used."""
    while True:
        epoch = 1 + secrets.randbelow(EPOCH_MAX)
        if epoch not in used:
            return epoch


def prepare(
    spec: PoolSpec, slabs: Sequence[Slab], claim: Claim
) -> tuple[list[Superblock], list[int], Stamp]:
    """Wipe directories of other pools, reserve space, and write the superblocks.

    Return, by target, the superblock that is on disk, and the number of slots that may hold an
    earlier process's chunks; then the stamp for later writes. Raises PoolError if there is no space
    for one slot, a pool has an unknown format, or a lease was lost, and OSError if a file cannot be
    read, written or resized.
    """
    claim.await_permits()
    kept = _keep_or_wipe(spec, slabs)
    logs = [slab.allocate_log(spec.log_pages_per_target) for slab in slabs]
    count = _allocate(spec, slabs)
    living = [superblock for superblock in kept if superblock is not None]
    tag = share_tag(spec.keyspace.digest) if spec.named else secrets.token_bytes(TAG_BYTES)
    newest = newest_of(living)
    if newest is not None and spec.adopt and newest.tag == tag:
        # A reset that reached only some targets invalidated the chunks on all targets.
        adopt_slots = [min(superblock.slots, count) if superblock else 0 for superblock in kept]
        epoch, sequence = newest.epoch, newest.sequence
    else:
        adopt_slots = [0] * len(kept)
        epoch = new_epoch([one.epoch for one in living])
        sequence = 1 + max((one.sequence for one in living), default=0)
    pool_uuid = living[0].uuid if living else uuid.uuid4().bytes
    shape = _superblock(spec, 0, pool_uuid, count)
    shape = replace(shape, epoch=epoch, tag=tag, sequence=sequence)
    superblocks = [
        replace(shape, target_index=target, log_pages=pages, lease_generation=generation)
        for target, (pages, generation) in enumerate(
            zip(logs, claim.lease_generations, strict=True)
        )
    ]
    claim.await_permits()  # reserving space may have taken long
    for slab, superblock, found in zip(slabs, superblocks, kept, strict=True):
        if superblock == found:
            # Do not rewrite it, because a full disk has no room for a second superblock. But its
            # writer may have been killed before it was durable.
            sync_directory(slab.place)
        else:
            write_superblock(slab.place, superblock)
    written = epoch if spec.named else new_epoch([epoch, *(one.epoch for one in living)])
    return superblocks, adopt_slots, Stamp(written, tag)


def _superblock(spec: PoolSpec, target: int, pool_uuid: bytes, slots: int) -> Superblock:
    """Return the shape of the pool on one target, without epoch, tag and sequence."""
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
        epoch=0,
        tag=bytes(TAG_BYTES),
        sequence=0,
        groups=spec.group_table,
        shared=LEASED if spec.leasing.in_group else 0,
    )


def _keep_or_wipe(spec: PoolSpec, slabs: Sequence[Slab]) -> list[Superblock | None]:
    """Wipe every directory with another pool's superblock, and return the others' superblocks.

    The number of slots may differ if the pool was resized: slots within both sizes stay in place.
    Set sizes may differ if ranks shared copies only in the earlier run or only in this one, and the
    log's length may differ. Any other difference makes it a different pool. Raises PoolError, and
    wipes nothing, if a pool has an unknown format.
    """
    pages: list[Superblock | None] = []
    for slab in slabs:
        found = None
        try:
            found = read_superblock(slab.place)
        except UnknownFormatError as error:
            raise PoolError(
                f"{slab.directory}/superblock: {error}; `vllm-nvmeof pool rm` removes that pool"
            ) from error
        except PoolFormatError as error:
            logger.warning("%s/superblock: %s; starting empty", slab.directory, error)
        pages.append(found)
    kept: list[Superblock | None] = []
    pool_uuid = b""
    for target, (slab, found) in enumerate(zip(slabs, pages, strict=True)):
        fits = False
        if found is not None:
            shape = _superblock(spec, target, pool_uuid or found.uuid, found.slots)
            fits = shape.is_alike(replace(found, epoch=0, tag=shape.tag, sequence=0))
            if fits:
                pool_uuid = found.uuid
            else:
                logger.warning(
                    "%s holds a pool of a different shape: starting empty", slab.directory
                )
        if not fits:
            slab.wipe()
        kept.append(found if fits else None)
    return kept


def _allocate(spec: PoolSpec, slabs: Sequence[Slab]) -> int:
    """Reserve space on all targets, and return the number of slots per target."""
    wanted = spec.slots_per_target
    counts = [slab.allocate(wanted, spec.slot_bytes) for slab in slabs]
    count = min(counts)
    full, size = slabs[counts.index(count)].directory, format_bytes(spec.slot_bytes)
    if count < 1:
        raise PoolError(
            f"{full}: no space for one slot of {size}; free some space, or choose another target"
        )
    if count < wanted:
        logger.warning(
            "%s has no space for %d slots of %s: using %d per target", full, wanted, size, count
        )
    for slab in slabs:
        slab.cut(count, spec.slot_bytes)
    return count


def choose_direct(spec: PoolSpec, slabs: Sequence[Slab]) -> tuple[str, ...]:
    """Open slabs for O_DIRECT if a probe succeeds, and return the fallbacks, for display. Raises
    PoolError if O_DIRECT does not work and the specification says "on"."""
    fallbacks: list[str] = []
    for slab in slabs if spec.o_direct != "off" else ():
        try:
            slab.use_direct()
        except OSError as error:
            if spec.o_direct == "on":
                raise PoolError(
                    f"{slab.directory}: O_DIRECT does not work there ({error}); {_remedy(spec)}"
                ) from error
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            fallbacks.append(f"o_direct→buffered on {slab.directory}: {name}")
            logger.warning("%s", fallbacks[-1])
    return tuple(fallbacks)


def _remedy(spec: PoolSpec) -> str:
    if not spec.leasing.in_group:
        return 'set o_direct to "auto" or "off", or use xfs or ext4'
    return (
        "a group of servers needs it, because their hosts' page caches differ: choose targets "
        'on another file system, or set share to "host" or "off"'
    )
