# SPDX-License-Identifier: Apache-2.0
"""Access to rank directories without an I/O engine: tables, slots, defects, removal and prefill.

A rank is read-only unless it is opened with `before_write`, by a caller that holds its lock.
Prefill writes zeros where a slab was never written, because the first write into preallocated space
also changes the file system's extents and runs at about half the speed of later writes. A hole
reads as zeros, so readers see no change.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import (
    CHECKSUM_MISMATCH,
    OK,
    Outcome,
    PoolError,
    Scope,
    as_pool_error,
    io_error,
)
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    FLAG_SINGLE_COPY,
    LOG_FILE,
    SESSIONS_FILE,
    SESSIONS_TEMPORARY,
    DecodedTable,
    SlotHeader,
    Superblock,
    Wanted,
    decode_table,
    is_superblock,
    parse_header,
    replace_file,
    share_tag,
    verify,
)
from vllm_nvmeof_offload.pool.ownership import give_to_owner, hold
from vllm_nvmeof_offload.pool.recovery import has_known_group, read_table, written_slots
from vllm_nvmeof_offload.pool.survey import FACTS_FILE, RankDirectory, Surveyed, disk_bytes, survey
from vllm_nvmeof_offload.protocol import SavedSessions, SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, MIB, PAGE_BYTES, slot_stride_bytes

#: Called with (directory, done, total); the unit depends on the operation.
Progress = Callable[[RankDirectory, int, int], None]
#: Called before each change in a held directory (`pool.ownership.hold`).
BeforeWrite = Callable[[], None]

#: The files in order of removal: first the superblock, without which a directory counts as empty.
#: Lease and lock are removed last, and only together with the directory.
_SUPERBLOCKS = ("superblock", "superblock.new")
_FILES = (*_SUPERBLOCKS, "table", "log", "slab", "probe", SESSIONS_FILE, SESSIONS_TEMPORARY)
_CLAIMS = ("lease", "lock")
_THREADS_MAX = 8
_BUFFER_BYTES_MAX = 256 * MIB
_WRITE_BYTES = 4 * MIB
#: The number of threads that read headers, and the number of headers per batch.
_READ_THREADS, _BATCH = 16, 1024


#: The states of a table entry: never written; adopted by the next start; intact, but from another
#: epoch; not intact, or for a group that the superblock lacks; beyond the end of the file.
STATES = ("empty", "live", "void", "damaged", "missing")
EMPTY, LIVE, VOID, DAMAGED, MISSING = range(len(STATES))


@dataclass(frozen=True, slots=True)
class Entry:
    """A table entry. `state` is one of `STATES`; `identity` and `epoch` are set if it is intact.
    With `single_copy`, no other rank of the set stores the chunk."""

    state: str
    identity: SlotIdentity | None = None
    epoch: int = 0
    single_copy: bool = False


@dataclass(frozen=True)
class Table:
    """The content of a table. `states` is uint8[n]: for each slot, an index into `STATES`."""

    states: npt.NDArray[np.uint8]
    entries: DecodedTable

    def identity(self, index: int) -> SlotIdentity:
        key = self.entries.keys[index, : int(self.entries.key_bytes[index])].tobytes()
        return SlotIdentity(key, int(self.entries.generations[index]))


@dataclass(frozen=True, slots=True)
class Judgement:
    """A defect in a slot.

    Programs may rely on the wording of `kind`. `replacement` is the 64-byte entry that a repair
    writes. `worth_listing` is False if no stored chunk is affected.
    """

    kind: str
    replacement: bytes
    worth_listing: bool = True


@dataclass(frozen=True)
class OfflineRank:
    """An opened rank directory, created by `open_rank`. Slots are numbered within it.

    `before_write` is None if the rank is read-only. At most `threads` threads may call `check`; 0
    means that payloads are not read. `direct_fd` is the slab opened with O_DIRECT; None if that
    failed. Each of `buffers` has room for a slot.
    """

    surveyed: Surveyed
    superblock: Superblock
    slab_fd: int
    table_fd: int
    before_write: BeforeWrite | None
    threads: int
    direct_fd: int | None
    buffers: queue.SimpleQueue[mmap.mmap]

    @property
    def tag(self) -> bytes:
        """Return the share tag of the chunks that the next start adopts."""
        return share_tag(self.superblock.keyspace)

    def wanted(self, index: int, identity: SlotIdentity, tag: bytes | None = None) -> Wanted:
        """Return what slot `index` must prove for `identity`; `tag` defaults to `self.tag`."""
        # For a key of an unknown group, use a length that no chunk has.
        length, place = self.superblock.length_of(identity.key), self.superblock.place(index)
        return identity, -1 if length is None else length, place, tag or self.tag

    def mismatch(
        self, index: int, header: SlotHeader, identity: SlotIdentity, tag: bytes | None = None
    ) -> str:
        """Return why the header does not prove `identity`, or "". `tag` is as in `wanted`."""
        _, length, place, tag = self.wanted(index, identity, tag)
        differences = {
            "holds a chunk of another slot": header.place != place,
            "holds another key": header.identity.key != identity.key,
            "holds another generation": header.identity.generation != identity.generation,
            "holds a chunk of other weights": header.stamp.tag != tag,
            "holds another length": header.payload_bytes != length,
        }
        return next((defect for defect, is_found in differences.items() if is_found), "")

    @property
    def slab_slots(self) -> int:
        return os.fstat(self.slab_fd).st_size // self.superblock.slot_bytes

    def table(self) -> Table:
        count = self.superblock.slots
        return self._decode(read_table(self.table_fd, count), 0, count)

    def entry(self, index: int) -> Entry:
        """Read the table entry of slot `index`. Raises PoolError if the read fails."""
        with as_pool_error(f"cannot read {self.surveyed.path / 'table'}"):
            raw = os.pread(self.table_fd, ENTRY_BYTES, index * ENTRY_BYTES)
        table = self._decode(np.frombuffer(raw, np.uint8), index, 1)
        state = STATES[table.states[0]]
        if not table.entries.valid[0]:
            return Entry(state)
        is_single = bool(table.entries.flags[0] & FLAG_SINGLE_COPY)
        return Entry(state, table.identity(0), int(table.entries.epochs[0]), is_single)

    def _decode(self, raw: npt.NDArray[np.uint8], first: int, count: int) -> Table:
        whole = raw.size // ENTRY_BYTES
        raw = np.pad(raw[: whole * ENTRY_BYTES], (0, (count - whole) * ENTRY_BYTES))
        decoded = decode_table(raw, np.arange(first, first + count, dtype=np.int64))
        strange = np.zeros(count, np.bool_)  # intact, but for a group that the superblock lacks
        for length in np.unique(decoded.key_bytes[decoded.valid]).tolist():
            rows = np.flatnonzero(decoded.valid & (decoded.key_bytes == length))
            strange[rows] = ~has_known_group(decoded.keys[rows, :length], self.superblock)
        live = decoded.valid & (decoded.epochs == self.surveyed.epoch) & self.surveyed.adopts
        of = [np.arange(count) >= whole, decoded.damaged | strange, live, decoded.valid]
        states = np.select(of, [MISSING, DAMAGED, LIVE, VOID], EMPTY).astype(np.uint8)
        return Table(states, decoded)

    def header(self, index: int) -> SlotHeader | Outcome | None:
        """Read a slot's header. Return an Outcome if the read fails, None if it is not intact."""
        try:
            page = os.pread(self.slab_fd, HEADER_BYTES, index * self.superblock.slot_bytes)
        except OSError as error:
            return self.read_error(error)
        return parse_header(page)

    def read_error(self, error: OSError) -> Outcome:
        """Classify a failed slot read. Raises PoolError if the whole target is affected."""
        outcome = io_error(error.errno or errno.EIO)
        if outcome.scope is Scope.TARGET:
            raise PoolError(f"cannot read {self.surveyed.path / 'slab'}: {error}") from error
        return outcome

    def bytes_of(self, identity: SlotIdentity) -> int:
        """Return the bytes that `check` reads for `identity`: header page and padded payload."""
        return slot_stride_bytes(self.superblock.length_of(identity.key) or 0)

    def check(self, index: int, identity: SlotIdentity, tag: bytes | None = None) -> Outcome:
        """Read slot `index` in full and verify that it holds `identity`; `tag` is as in `wanted`.
        Raises PoolError if the whole target is affected."""
        buffer = self.buffers.get()
        try:
            with memoryview(buffer) as whole, whole[: self.bytes_of(identity)] as view:
                try:
                    if not self._read(view, index * len(whole)):
                        return CHECKSUM_MISMATCH
                except OSError as error:
                    return self.read_error(error)
                return verify(view, *self.wanted(index, identity, tag))
        finally:
            self.buffers.put(buffer)

    def _read(self, view: memoryview, offset: int) -> bool:
        fd = self.slab_fd if self.direct_fd is None else self.direct_fd
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if done + count < len(view):
                count -= (done + count) % PAGE_BYTES
            if count <= 0:
                return False
            done += count
        if self.direct_fd is None:
            os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)
        return True

    def judge(self, index: int, seen: SlotIdentity | None) -> Judgement | None:
        """Read a slot's entry and header again, and its payload if `threads` is not 0. Return the
        slot's defect, or None.

        `seen` is the identity that the entry had when the slot became a suspect, or None if the
        entry was not intact. A changed identity is no defect: a server has written the slot since.
        """
        entry = self.entry(index)
        if entry.state in ("empty", "void") or (seen is not None and entry.identity != seen):
            return None
        header = self.header(index)
        replacement, adopted, defect = bytes(ENTRY_BYTES), False, "has no intact header"
        if isinstance(header, Outcome):
            defect = f"cannot be read: {header}"
        elif header is not None:
            epoch, tag = header.stamp.epoch, header.stamp.tag
            adopted = self.surveyed.adopts and (epoch, tag) == (self.surveyed.epoch, self.tag)
            # An entry with the adopted epoch must not list KV from other weights.
            truthful = adopted or epoch != self.surveyed.epoch
            if truthful and not self.mismatch(index, header, header.identity, tag):
                replacement = header.entry()
            if entry.state == "live":
                assert entry.identity is not None
                defect = self.mismatch(index, header, entry.identity)
                if not defect:
                    outcome = self.check(index, entry.identity) if self.threads else OK
                    if outcome.ok:
                        return None
                    defect, replacement = f"is damaged: {outcome}", bytes(ENTRY_BYTES)
        if entry.state in ("missing", "damaged"):
            listed = entry.state == "damaged" or (adopted and any(replacement))
            strange = entry.state == "damaged" and entry.identity is not None
            what = "has an unknown group" if strange else entry.state
            return Judgement(f"table entry {what}", replacement, listed)
        return Judgement(f"slot {defect}", replacement)


def _open_or_empty(path: Path) -> int:
    """Open a file for reading or, if it does not exist, an empty file, which proves no entry."""
    try:
        return open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return os.memfd_create(f"lost-{path.name}", os.MFD_CLOEXEC)


@contextlib.contextmanager
def open_rank(
    surveyed: Surveyed, before_write: BeforeWrite | None = None, deep: bool = False
) -> Iterator[OfflineRank]:
    """Open a rank directory for reading. With `before_write`, also open its table for writing, or
    create it. With `deep`, payloads can be read too.

    Raises PoolError if the superblock is unusable or a file cannot be opened.
    """
    path, superblock = surveyed.path, surveyed.superblock
    if superblock is None:
        raise PoolError(f"{path / 'superblock'}: {surveyed.problem}")
    threads, direct_fd, buffers = 0, None, queue.SimpleQueue[mmap.mmap]()
    with contextlib.ExitStack() as stack:
        with as_pool_error(f"cannot open the pool in {path}"):
            slab_fd = _open_or_empty(path / "slab")
            stack.callback(os.close, slab_fd)
            os.posix_fadvise(slab_fd, 0, 0, os.POSIX_FADV_RANDOM)
            if before_write is None:
                table_fd = _open_or_empty(path / "table")
                stack.callback(os.close, table_fd)
            else:
                before_write()
                table_fd = open_private(path / "table", os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, table_fd)
                give_to_owner(path / "table")
        if deep:
            threads = max(1, min(_THREADS_MAX, _BUFFER_BYTES_MAX // superblock.slot_bytes))
            for _ in range(threads):
                buffers.put(mmap.mmap(-1, superblock.slot_bytes))
            direct_fd = _open_direct(path / "slab", os.O_RDONLY)
            if direct_fd is not None:
                stack.callback(os.close, direct_fd)
        files = slab_fd, table_fd, before_write
        yield OfflineRank(surveyed, superblock, *files, threads, direct_fd, buffers)


def open_log(surveyed: Surveyed) -> BinaryIO:
    path = surveyed.path / LOG_FILE
    with as_pool_error(f"cannot open {path}"):
        return open(_open_or_empty(path), "rb")


def _open_direct(slab: Path, flags: int) -> int | None:
    """Open `slab` with O_DIRECT; return None if opening or a first read fails."""
    with contextlib.suppress(OSError):
        fd = open_private(slab, flags | os.O_DIRECT)
        try:
            os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
            return fd
        except OSError:
            os.close(fd)
    return None


@dataclass(frozen=True, slots=True)
class Removed:
    directory: str
    freed_bytes: int
    left: tuple[str, ...]


def check_ours(paths: Iterable[Path]) -> None:
    """Raise PoolError if a rank directory has files but no superblock, not even a damaged one."""
    for path in paths:
        with as_pool_error(f"cannot read {path / 'superblock'}"):
            proven = any(is_superblock(path / name) for name in _SUPERBLOCKS)
        files = [path / name for name in _FILES if os.path.lexists(path / name)]
        if not proven and any(os.lstat(file).st_size for file in files):
            raise PoolError(
                f"{path} has no superblock of this program, so nothing proves that its files are "
                f"ours: inspect them and delete the directory by hand"
            )


def remove(directories: Sequence[RankDirectory]) -> list[Removed]:
    """Delete `directories` and parent directories that become empty.

    Before deleting anything, raises PoolError unless all are ours, and PoolLockedError if a live
    process holds one. Also raises PoolError if a file cannot be deleted.
    """
    paths = [directory.path for directory in directories]
    check_ours(paths)  # before creating a lock file in a foreign directory
    removed = []
    with hold(paths) as before_write:
        for path in paths:
            with as_pool_error(f"cannot remove {path}"):
                freed = disk_bytes(path, _FILES.__contains__)
                for file in filter(_is_file, (path / name for name in _FILES)):
                    before_write()
                    file.unlink()
                left = sorted(set(os.listdir(path)) - set(_CLAIMS))
                if not left:
                    before_write()
                    # We hold the lock. A process that has just opened the lock file will notice
                    # its removal.
                    for name in _CLAIMS:
                        (path / name).unlink(missing_ok=True)
                    path.rmdir()
            removed.append(Removed(str(path), freed, tuple(left)))
    for path in paths:
        engine, facts = path.parent, path.parents[1] / FACTS_FILE
        with contextlib.suppress(OSError):
            engine.rmdir()
        with contextlib.suppress(OSError):
            # Remove the keyspace's directory if it contains only our file.
            if os.listdir(facts.parent) == [FACTS_FILE] and _is_file(facts):
                facts.unlink()
            facts.parent.rmdir()
    return removed


@dataclass(frozen=True, slots=True)
class RemovedClient:
    """The result for one directory: the number of overwritten slots, and the number of remaining
    slots with chunks from unknown clients."""

    directory: str
    removed: int
    unknown: int


def remove_client(
    directories: Sequence[RankDirectory], client: int, on_progress: Progress = lambda *_: None
) -> list[RemovedClient]:
    """Overwrite a client's chunks from any epoch in `directories`, and their table entries, with
    zeros; forget the client's sessions. `client` is a result of `pool.format.client_of`.

    After an interruption, a second call finds the rest, because entries are overwritten after
    slots. `on_progress` counts bytes. Raises PoolLockedError if a live process holds a directory,
    and PoolError if one has no usable superblock or cannot be read or written.
    """
    removed = []
    with hold([directory.path for directory in directories]) as before_write:
        for surveyed in survey(directories):
            path = surveyed.path
            with open_rank(surveyed, before_write) as rank, as_pool_error(f"cannot empty {path}"):
                ours, unknown = _slots_of(rank, client)
                _fill(rank, ours[ours < rank.slab_slots].tolist(), before_write, on_progress)
                # Zeros beyond the end of a truncated table would look like entries never written.
                for index in ours[ours < os.fstat(rank.table_fd).st_size // ENTRY_BYTES].tolist():
                    before_write()
                    os.pwrite(rank.table_fd, bytes(ENTRY_BYTES), index * ENTRY_BYTES)
                os.fsync(rank.table_fd)
                _forget_sessions(path, client, before_write)
            removed.append(RemovedClient(str(path), len(ours), unknown))
    return removed


def _slots_of(rank: OfflineRank, client: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return int64[n], the slots whose header or entry is the client's, and the number of other
    slots with chunks from unknown clients."""

    def in_header(index: int) -> int:  # -1: never written
        try:
            page = os.pread(rank.slab_fd, HEADER_BYTES, index * rank.superblock.slot_bytes)
        except OSError as error:
            rank.read_error(error)
            return 0
        header = parse_header(page) if any(page) else None
        if header is None:
            return 0 if any(page) else -1
        return header.client

    slots = rank.superblock.slots
    table, in_slab = rank.table(), np.full(slots, -1, np.int64)
    indices = np.arange(min(slots, rank.slab_slots))
    written = written_slots(rank.slab_fd, indices, rank.superblock.slot_bytes)
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="pool-rm") as threads:
        for batch in np.array_split(written, -(-len(written) // _BATCH) or 1):
            in_slab[batch] = list(threads.map(in_header, batch.tolist()))
    has_entry = np.isin(table.states, (LIVE, VOID, DAMAGED))
    in_table = np.where(has_entry, table.entries.clients().astype(np.int64), -1)
    ours = (in_slab == client) | (in_table == client)
    unknown = ~ours & ((in_slab == 0) | ((in_slab == -1) & (in_table == 0)))
    return np.flatnonzero(ours), int(unknown.sum())


def _forget_sessions(directory: Path, client: int, before_write: BeforeWrite) -> None:
    path = directory / SESSIONS_FILE
    with open(_open_or_empty(path), "rb") as file:
        saved = SavedSessions.decode(file.read())
    others = saved.sessions["client"] != client
    if not others.all():
        left = saved.generations[np.repeat(others, saved.sessions["chunks"])]
        before_write()
        replace_file(directory, SESSIONS_FILE, SavedSessions(saved.sessions[others], left).encode())
        give_to_owner(path)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


@dataclass(frozen=True, slots=True)
class Prefilled:
    directory: str
    slots: int
    filled: int
    written_bytes: int


def prefill(
    directories: Sequence[RankDirectory], on_progress: Progress = lambda *_: None
) -> list[Prefilled]:
    """Write zeros into the slots of `directories` that were never written; `on_progress` counts
    bytes. Raises the same errors as `remove_client`."""
    filled = []
    with hold([directory.path for directory in directories]) as before_write:
        for surveyed in survey(directories):
            with open_rank(surveyed) as rank:
                slot_bytes = rank.superblock.slot_bytes
                indices = np.arange(min(rank.superblock.slots, rank.slab_slots))
                written = written_slots(rank.slab_fd, indices, slot_bytes)
                holes = np.setdiff1d(indices, written).tolist()
                with as_pool_error(f"cannot fill {surveyed.path / 'slab'}"):
                    _fill(rank, holes, before_write, on_progress)
            path, count = str(surveyed.path), len(holes)
            filled.append(Prefilled(path, len(indices), count, count * slot_bytes))
    return filled


def _fill(
    rank: OfflineRank, holes: Sequence[int], before_write: BeforeWrite, on_progress: Progress
) -> None:
    slot_bytes, slab = rank.superblock.slot_bytes, rank.surveyed.path / "slab"
    zeros = memoryview(mmap.mmap(-1, min(slot_bytes, _WRITE_BYTES)))
    fd = _open_direct(slab, os.O_RDWR)
    if fd is None:
        fd = open_private(slab, os.O_WRONLY)
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
