# SPDX-License-Identifier: Apache-2.0
"""Rank directories without an I/O engine: tables, slots, their defects; removal and prefill.

A rank is only read unless it was opened `writable`, for which the caller holds its lock.
Removal deletes only files of ours. Prefill writes zeros where a slab was never written, because
the first write into preallocated space also changes the file system's extents and runs at about
half the speed of later ones. A hole reads as zeros, so no readable byte changes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, Outcome, PoolError, Scope, io_error
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    FLAG_SINGLE_COPY,
    LOG_FILE,
    DecodedTable,
    SlotHeader,
    SlotPlace,
    Stamp,
    Superblock,
    Wanted,
    decode_table,
    encode_entry,
    is_superblock,
    parse_header,
    share_tag,
    verify,
)
from vllm_nvmeof_offload.pool.lease import OwnerState
from vllm_nvmeof_offload.pool.ownership import give_to_owner, hold
from vllm_nvmeof_offload.pool.recovery import has_known_group, read_table, written_slots
from vllm_nvmeof_offload.pool.survey import (
    FACTS_FILE,
    RankDirectory,
    Surveyed,
    disk_bytes,
    survey,
)
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, MIB, PAGE_BYTES, slot_stride_bytes

#: Called with (directory, done, total); what is counted depends on the work.
Progress = Callable[[RankDirectory, int, int], None]
#: Called before each change to what is held: see `pool.ownership.hold`.
BeforeWrite = Callable[[], None]

#: In the order of removal: without its superblock a directory is empty to the next start. The
#: lease and the lock are removed last, and only with the directory.
_FILES = ("superblock", "superblock.new", "table", "log", "slab", "probe")
_CLAIMS = ("lease", "lock")
_THREADS_MAX = 8
_BUFFER_BYTES_MAX = 256 * MIB
_WRITE_BYTES = 4 * MIB


@contextlib.contextmanager
def held_survey(
    directories: Sequence[RankDirectory], writable: bool
) -> Iterator[tuple[list[Surveyed], BeforeWrite | None]]:
    """Survey `directories`; if `writable`, hold all their locks until the block ends.

    All are held from before the first survey until the last repair, so that no server starts
    on a part of a pool that is being repaired. PoolLockedError names a live process that holds
    one of them, PoolError one that cannot be read or locked.
    """
    if not writable:
        yield survey(directories), None
        return
    with hold([directory.path for directory in directories]) as before_write:
        # This process holds them: that is not what "live" means to a reader.
        free = OwnerState("free")
        yield [replace(one, owner=free) for one in survey(directories)], before_write


#: States of a table's entry: never written; adopted by the next start; intact, but of another
#: epoch; not intact, or of a group that the superblock does not have; beyond the file's end.
STATES = ("empty", "live", "void", "damaged", "missing")
EMPTY, LIVE, VOID, DAMAGED, MISSING = range(len(STATES))


@dataclass(frozen=True, slots=True)
class Entry:
    """One table entry. state: one of `STATES`. identity, epoch: of an intact one.

    single_copy: no other rank of its set has the chunk.
    """

    state: str
    identity: SlotIdentity | None = None
    epoch: int = 0
    single_copy: bool = False


@dataclass(frozen=True)
class Table:
    """The table as it was read. states: uint8[n], by slot of this target, numbers of `STATES`."""

    states: npt.NDArray[np.uint8]
    entries: DecodedTable

    def identity(self, index: int) -> SlotIdentity:
        key = self.entries.keys[index, : int(self.entries.key_bytes[index])].tobytes()
        return SlotIdentity(key, int(self.entries.generations[index]))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The defect of a slot.

    kind: for people, and stable for programs. replacement: the 64 bytes that a repair writes
    in the entry's place. worth_listing: False if nothing that was stored is affected.
    """

    kind: str
    replacement: bytes
    worth_listing: bool = True


@dataclass(frozen=True)
class OfflineRank:
    """One opened rank directory; made by `open_rank`. Slots are numbered within it.

    table_fd: -1 if there is no table. before_write: None: opened for reading only.
    """

    surveyed: Surveyed
    superblock: Superblock
    slab_fd: int
    table_fd: int
    before_write: BeforeWrite | None = None

    @property
    def tag(self) -> bytes:
        """The share tag of what a start adopts."""
        return share_tag(self.superblock.keyspace)

    def place(self, index: int) -> SlotPlace:
        """The place that the header of the slot at `index` must name."""
        return self.superblock.place(index)

    def wanted(self, index: int, identity: SlotIdentity, tag: bytes | None = None) -> Wanted:
        """What the slot must hold. tag: None: that of what a start adopts."""
        # A length that no chunk has, for a key of an unknown group.
        length = self.superblock.length_of(identity.key)
        return identity, -1 if length is None else length, self.place(index), tag or self.tag

    def proves(
        self,
        index: int,
        header: SlotHeader,
        identity: SlotIdentity | None,
        tag: bytes | None = None,
    ) -> bool:
        """Whether this header proves that its slot holds `identity`. tag: as in `wanted`."""
        found = header.identity, header.payload_bytes, header.place, header.stamp.tag
        return identity is not None and found == self.wanted(index, identity, tag)

    @property
    def slab_slots(self) -> int:
        """Whole slots that the slab file has: fewer than in the superblock is damage."""
        return os.fstat(self.slab_fd).st_size // self.superblock.slot_bytes

    def table(self) -> Table:
        """Read and decode the whole table (64 bytes per slot)."""
        count = self.superblock.slots
        raw = read_table(self.table_fd, count) if self.table_fd >= 0 else np.zeros(0, np.uint8)
        return self._decode(raw, 0, count)

    def entry(self, index: int) -> Entry:
        """Read one table entry, as it is now; PoolError if it cannot be read."""
        raw = b""
        if self.table_fd >= 0:
            try:
                raw = os.pread(self.table_fd, ENTRY_BYTES, index * ENTRY_BYTES)
            except OSError as error:
                raise PoolError(f"cannot read {self.surveyed.path / 'table'}: {error}") from error
        table = self._decode(np.frombuffer(raw, np.uint8), index, 1)
        state = STATES[table.states[0]]
        if not table.entries.valid[0]:
            return Entry(state)
        is_single = bool(table.entries.flags[0] & FLAG_SINGLE_COPY)
        return Entry(state, table.identity(0), int(table.entries.epochs[0]), is_single)

    def _decode(self, raw: npt.NDArray[np.uint8], first: int, count: int) -> Table:
        """Decode `count` entries from index `first` on; those that `raw` lacks are missing."""
        whole = raw.size // ENTRY_BYTES
        missing = np.arange(count) >= whole
        raw = np.pad(raw[: whole * ENTRY_BYTES], (0, (count - whole) * ENTRY_BYTES))
        indices = np.arange(first, first + count, dtype=np.int64)
        decoded = decode_table(raw, indices)
        strange = self._strange(decoded)
        live = decoded.valid & (decoded.epochs == self.surveyed.epoch) & self.surveyed.adopts
        of = [missing, decoded.damaged | strange, live, decoded.valid]
        states = np.select(of, [MISSING, DAMAGED, LIVE, VOID], EMPTY).astype(np.uint8)
        return Table(states, decoded)

    def _strange(self, decoded: DecodedTable) -> npt.NDArray[np.bool_]:
        """bool[n]: intact entries whose group the superblock does not have."""
        strange = np.zeros(len(decoded.valid), np.bool_)
        for length in np.unique(decoded.key_bytes[decoded.valid]).tolist():
            rows = np.flatnonzero(decoded.valid & (decoded.key_bytes == length))
            strange[rows] = ~has_known_group(decoded.keys[rows, :length], self.superblock)
        return strange

    def header(self, index: int) -> SlotHeader | Outcome | None:
        """Read one slot's header: an Outcome if that fails, None if the header is not intact."""
        try:
            page = os.pread(self.slab_fd, HEADER_BYTES, index * self.superblock.slot_bytes)
        except OSError as error:
            return self.read_error(error)
        return parse_header(page)

    def read_error(self, error: OSError) -> Outcome:
        """Classify a failed read of a slot; PoolError if it reaches further than the slot."""
        outcome = io_error(error.errno or errno.EIO)
        if outcome.scope is Scope.TARGET:
            raise PoolError(f"cannot read {self.surveyed.path / 'slab'}: {error}") from error
        return outcome

    def judge(
        self, index: int, seen: SlotIdentity | None, reader: SlotReader | None
    ) -> Judgement | None:
        """Read one slot's entry and header again; return its defect, None if it has none.

        seen: the entry's identity when the slot became a suspect (None: no intact entry). If
        it is another one now, a server has written the slot since: nothing is wrong. reader: None:
        the payload is not read.
        """
        entry = self.entry(index)
        if entry.state in ("empty", "void") or (seen is not None and entry.identity != seen):
            return None
        header = self.header(index)
        replacement, adopted = bytes(ENTRY_BYTES), False
        if isinstance(header, SlotHeader):
            stamp = Stamp(self.surveyed.epoch, self.tag)
            adopted = self.surveyed.adopts and header.stamp == stamp
            # An entry with the epoch of what is adopted must not stand for other weights.
            truthful = adopted or header.stamp.epoch != self.surveyed.epoch
            if truthful and self.proves(index, header, header.identity, header.stamp.tag):
                replacement = self._entry_of(index, header)
            if entry.state == "live" and self.proves(index, header, entry.identity):
                assert entry.identity is not None
                outcome = reader.check(index, entry.identity) if reader else OK
                damaged = Judgement(f"slot is damaged: {outcome}", bytes(ENTRY_BYTES))
                return None if outcome.ok else damaged
        if entry.state in ("missing", "damaged"):
            listed = entry.state == "damaged" or (adopted and any(replacement))
            strange = entry.state == "damaged" and entry.identity is not None
            what = "has an unknown group" if strange else entry.state
            return Judgement(f"table entry {what}", replacement, listed)
        return Judgement(self._mismatch(index, entry, header), replacement)

    def _entry_of(self, index: int, header: SlotHeader) -> bytes:
        """The table entry of an intact slot."""
        epoch, single = header.stamp.epoch, header.single_copy
        return encode_entry(index, header.identity, epoch, single_copy=single)

    def _mismatch(self, index: int, entry: Entry, header: SlotHeader | Outcome | None) -> str:
        assert entry.identity is not None
        if header is None:
            return "slot has no intact header"
        if isinstance(header, Outcome):
            return f"slot cannot be read: {header}"
        if header.place != self.place(index):
            return "slot holds what belongs in another place"
        if header.identity.key != entry.identity.key:
            return "slot holds another key"
        if header.identity.generation != entry.identity.generation:
            return "slot holds another generation"
        if header.stamp.tag != self.tag:
            return "slot holds what other weights have computed"
        return "slot holds another length"

    def write_entry(self, index: int, entry: bytes) -> None:
        """Replace one table entry. OSError if it cannot be written; also as `hold`."""
        assert self.before_write is not None
        self.before_write()
        if os.pwrite(self.table_fd, entry, index * ENTRY_BYTES) != len(entry):
            raise OSError(errno.ENOSPC, "short write", str(self.surveyed.path / "table"))


@contextlib.contextmanager
def open_rank(surveyed: Surveyed, before_write: BeforeWrite | None = None) -> Iterator[OfflineRank]:
    """Open the slab (for reading) and the table (for reading if there is no `before_write`, else
    for writing, and created if it is lost).

    PoolError if there is no usable superblock, or a file cannot be opened.
    """
    if surveyed.superblock is None:
        raise PoolError(f"{surveyed.path / 'superblock'}: {surveyed.problem}")
    with contextlib.ExitStack() as stack:
        try:
            try:
                slab_fd = open_private(surveyed.path / "slab", os.O_RDONLY)
            except FileNotFoundError:
                # Like a slab cut to nothing: no entry is proven by it.
                slab_fd = os.memfd_create("lost-slab", os.MFD_CLOEXEC)
            stack.callback(os.close, slab_fd)
            os.posix_fadvise(slab_fd, 0, 0, os.POSIX_FADV_RANDOM)
            table_fd = -1
            with contextlib.suppress(FileNotFoundError):
                table = surveyed.path / "table"
                if before_write is None:
                    table_fd = open_private(table, os.O_RDONLY)
                else:
                    before_write()
                    table_fd = open_private(table, os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, table_fd)
                if before_write is not None:
                    give_to_owner(table)
        except OSError as error:
            raise PoolError(f"cannot open the pool in {surveyed.path}: {error}") from error
        yield OfflineRank(surveyed, surveyed.superblock, slab_fd, table_fd, before_write)


@contextlib.contextmanager
def open_log(surveyed: Surveyed) -> Iterator[int]:
    """Open the log for reading; an empty file if it is lost. PoolError if it cannot be opened."""
    path = surveyed.path / LOG_FILE
    try:
        fd = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        fd = os.memfd_create("lost-log", os.MFD_CLOEXEC)
    except OSError as error:
        raise PoolError(f"cannot open {path}: {error}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _open_direct(rank: OfflineRank, flags: int) -> int | None:
    """Open the slab with O_DIRECT; None if that, or a read with it, does not work."""
    with contextlib.suppress(OSError):
        fd = open_private(rank.surveyed.path / "slab", flags | os.O_DIRECT)
        try:
            os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
            return fd
        except OSError:
            os.close(fd)
    return None


class SlotReader:
    """Reads whole slots of one rank directory into memory of its own, on several threads."""

    def __init__(self, rank: OfflineRank) -> None:
        self._rank = rank
        slot_bytes = rank.superblock.slot_bytes
        self.threads = max(1, min(_THREADS_MAX, _BUFFER_BYTES_MAX // slot_bytes))
        self._buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(self.threads):
            self._buffers.put(mmap.mmap(-1, slot_bytes))
        fd = _open_direct(rank, os.O_RDONLY)
        self.direct, self._fd = fd is not None, rank.slab_fd if fd is None else fd

    def close(self) -> None:
        if self.direct:
            os.close(self._fd)

    def bytes_of(self, identity: SlotIdentity) -> int:
        """The bytes that `check` reads: header page and the payload of the key's group, padded."""
        return slot_stride_bytes(self._rank.superblock.length_of(identity.key) or 0)

    def check(self, index: int, identity: SlotIdentity, tag: bytes | None = None) -> Outcome:
        """Verify that one slot holds `identity`; PoolError if the whole target does not answer.

        tag: as in `OfflineRank.wanted`.
        """
        buffer = self._buffers.get()
        try:
            with memoryview(buffer) as whole, whole[: self.bytes_of(identity)] as view:
                try:
                    if not self._read(view, index * len(whole)):
                        return CHECKSUM_MISMATCH
                except OSError as error:
                    return self._rank.read_error(error)
                return verify(view, *self._rank.wanted(index, identity, tag))
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


@dataclass(frozen=True, slots=True)
class Removed:
    """freed_bytes: allocated by the deleted files. left: names of files that are not ours."""

    directory: str
    freed_bytes: int
    left: tuple[str, ...]


def check_ours(paths: Iterable[Path]) -> None:
    """Raise PoolError for a rank directory with files but no superblock, intact or damaged."""
    for path in paths:
        try:
            proven = is_superblock(path / "superblock") or is_superblock(path / "superblock.new")
        except OSError as error:
            raise PoolError(f"cannot read {path / 'superblock'}: {error}") from error
        files = [path / name for name in _FILES if os.path.lexists(path / name)]
        if not proven and any(os.lstat(file).st_size for file in files):
            raise PoolError(
                f"{path} has no superblock of this program, so nothing proves that its files are "
                f"ours: look at them, and delete the directory by hand"
            )


def remove(directories: Sequence[RankDirectory]) -> list[Removed]:
    """Delete `directories`, and the directories above that are empty afterwards.

    Nothing is deleted unless all are ours (PoolError) and none is held by a live process
    (PoolLockedError). PoolError also if a file cannot be deleted.
    """
    paths = [directory.path for directory in directories]
    check_ours(paths)  # before a lock file is made where it should not be
    removed = []
    with hold(paths) as before_write:
        for path in paths:
            try:
                freed = disk_bytes(path, _FILES.__contains__)
                for file in filter(_is_file, (path / name for name in _FILES)):
                    before_write()
                    file.unlink()
                left = sorted(set(os.listdir(path)) - set(_CLAIMS))
                if not left:
                    before_write()
                    # We hold the lock; a process that opened it just now sees that it has lost
                    # its name.
                    for name in _CLAIMS:
                        (path / name).unlink(missing_ok=True)
                    path.rmdir()
            except OSError as error:
                raise PoolError(f"cannot remove {path}: {error}") from error
            removed.append(Removed(str(path), freed, tuple(left)))
    for path in paths:
        engine, space = path.parents[:2]
        with contextlib.suppress(OSError):
            engine.rmdir()
        _remove_folder(space, FACTS_FILE)
    return removed


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _remove_folder(path: Path, own_file: str) -> None:
    """Delete the directory of a keyspace if at most our own file is in it."""
    with contextlib.suppress(OSError):
        if os.listdir(path) == [own_file] and _is_file(path / own_file):
            (path / own_file).unlink()
        path.rmdir()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """slots: of this directory. filled: how many of them this command wrote with zeros."""

    directory: str
    slots: int
    filled: int
    written_bytes: int


def prefill(
    directories: Sequence[RankDirectory], on_progress: Progress = lambda *_: None
) -> list[Prefilled]:
    """Fill the never-written slots of `directories`; on_progress counts bytes.

    PoolLockedError if a live process holds one of them, PoolError if one has no usable
    superblock or cannot be written.
    """
    filled = []
    with held_survey(directories, writable=True) as (all_surveyed, before_write):
        for surveyed in all_surveyed:
            assert before_write is not None
            with open_rank(surveyed) as rank:
                slot_bytes = rank.superblock.slot_bytes
                indices = np.arange(min(rank.superblock.slots, rank.slab_slots))
                written = written_slots(rank.slab_fd, indices, slot_bytes)
                holes = np.setdiff1d(indices, written).tolist()
                try:
                    _fill(rank, holes, before_write, on_progress)
                except OSError as error:
                    raise PoolError(f"cannot fill {surveyed.path / 'slab'}: {error}") from error
            path, count = str(surveyed.path), len(holes)
            filled.append(Prefilled(path, len(indices), count, count * slot_bytes))
    return filled


def _fill(
    rank: OfflineRank, holes: Sequence[int], before_write: BeforeWrite, on_progress: Progress
) -> None:
    slot_bytes = rank.superblock.slot_bytes
    zeros = memoryview(mmap.mmap(-1, min(slot_bytes, _WRITE_BYTES)))
    fd = _open_direct(rank, os.O_RDWR)
    if fd is None:
        fd = open_private(rank.surveyed.path / "slab", os.O_WRONLY)
    try:
        for done, index in enumerate(holes, 1):
            position, end = index * slot_bytes, (index + 1) * slot_bytes
            while position < end:
                before_write()
                count = os.pwritev(fd, [zeros[: end - position]], position)
                if count == 0:
                    raise OSError(errno.EIO, "no progress")
                position += count
            on_progress(rank.surveyed.directory, done * slot_bytes, len(holes) * slot_bytes)
        if holes:
            os.fsync(fd)
    finally:
        os.close(fd)
