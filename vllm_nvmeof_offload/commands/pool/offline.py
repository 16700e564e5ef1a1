# SPDX-License-Identifier: Apache-2.0
"""One rank directory opened without an I/O engine: its table, its slots, and their defects.

Reads only, unless it was opened `writable`, for which the caller holds the directory's lock.
Beside a live server a slot that is being written looks damaged for a moment, so every suspect
is judged a second time, by itself, from its entry as it is then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import Outcome, PoolError, Scope, io_error
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    NOWHERE,
    DecodedTable,
    SlotHeader,
    SlotPlace,
    Stamp,
    decode_table,
    encode_entry,
    parse_header,
)
from vllm_nvmeof_offload.pool.lock import LockState
from vllm_nvmeof_offload.pool.ownership import give_to_owner, hold
from vllm_nvmeof_offload.pool.recovery import read_table
from vllm_nvmeof_offload.pool.slab import open_private
from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed, read_facts, survey
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

if TYPE_CHECKING:
    from vllm_nvmeof_offload.pool.format import Superblock

#: Called with (directory, done, total); what is counted depends on the work.
Progress = Callable[[RankDirectory, int, int], None]

#: How long a write and its table entry may reasonably be apart.
_WRITE_S = 1.0


def let_writes_end() -> None:
    """Wait until the slots that a live server was writing have their table entries."""
    time.sleep(_WRITE_S)


@contextlib.contextmanager
def held_survey(directories: Sequence[RankDirectory], writable: bool) -> Iterator[list[Surveyed]]:
    """Survey `directories`; if `writable`, hold all their locks until the block ends.

    All are held from before the first survey until the last repair, so that no server starts
    on a part of a pool that is being repaired.

    Raises:
        PoolLockedError: `writable`, and a live process holds one of them.
        PoolError: one cannot be read or locked.
    """
    with contextlib.ExitStack() as stack:
        if writable:
            stack.enter_context(hold([directory.path for directory in directories]))
        found = survey(directories)
        # This process holds them: that is not what "live" means to a reader.
        yield [replace(one, lock=LockState("none")) for one in found] if writable else found


@dataclass(frozen=True)
class Table:
    """The table as it was read: one state per slot of this target, by its index there.

    live: bool[n], adoptable at the next start. void: bool[n], intact, but of a past epoch or
    not adoptable. damaged: bool[n]. missing: bool[n], beyond the file's end. A slot that is
    none of these was never written. entries: the keys and generations of the live ones.
    """

    live: npt.NDArray[np.bool_]
    void: npt.NDArray[np.bool_]
    damaged: npt.NDArray[np.bool_]
    missing: npt.NDArray[np.bool_]
    entries: DecodedTable

    def identity(self, index: int) -> SlotIdentity:
        return _identity(self.entries, index)


def _identity(entries: DecodedTable, index: int) -> SlotIdentity:
    key = entries.keys[index, : int(entries.key_bytes[index])].tobytes()
    return SlotIdentity(key, int(entries.generations[index]))


@dataclass(frozen=True, slots=True)
class Entry:
    """One table entry. state: "live", "void", "damaged", "missing" or "empty"."""

    state: str
    identity: SlotIdentity | None = None
    stamp: Stamp | None = None


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
    """One opened rank directory; made by `open_rank`. table_fd is -1 if there is no table.

    names_places: False in a pool of a release whose headers did not name their place.
    """

    surveyed: Surveyed
    superblock: Superblock
    slab_fd: int
    table_fd: int
    names_places: bool

    def pool_slot(self, index: int) -> int:
        """The pool slot at `index` of this target."""
        return index * self.superblock.target_count + self.superblock.target_index

    def place(self, index: int) -> SlotPlace:
        """The place that the header of the slot at `index` must name."""
        if not self.names_places:
            return NOWHERE
        return SlotPlace(self.superblock.uuid, self.superblock.rank, self.pool_slot(index))

    @property
    def slab_slots(self) -> int:
        """Whole slots that the slab file has: fewer than in the superblock is damage."""
        return os.fstat(self.slab_fd).st_size // self.superblock.slot_bytes

    def table(self) -> Table:
        """Read and decode the whole table (64 bytes per slot)."""
        block, count = self.superblock, self.superblock.slots
        raw = np.zeros(0, np.uint8)
        if self.table_fd >= 0:
            raw = read_table(self.table_fd, count)
        whole = raw.size // ENTRY_BYTES
        missing = np.arange(count) >= whole
        raw = np.concatenate([raw, np.zeros((count - whole) * ENTRY_BYTES, np.uint8)])
        pool_slots = np.arange(count, dtype=np.int64) * block.target_count + block.target_index
        decoded = decode_table(raw, pool_slots)
        live = decoded.valid & decoded.adoptable & (decoded.epochs == self.surveyed.epoch)
        if not self.surveyed.adoptable:
            live[:] = False
        return Table(live, decoded.valid & ~live, decoded.damaged, missing, decoded)

    def entry(self, index: int) -> Entry:
        """Read one table entry, as it is now; PoolError if it cannot be read."""
        raw = b""
        if self.table_fd >= 0:
            try:
                raw = os.pread(self.table_fd, ENTRY_BYTES, index * ENTRY_BYTES)
            except OSError as error:
                raise PoolError(f"cannot read {self.surveyed.path / 'table'}: {error}") from error
        if len(raw) < ENTRY_BYTES:
            return Entry("missing")
        one = decode_table(
            np.frombuffer(raw, np.uint8), np.array([self.pool_slot(index)], np.int64)
        )
        if not one.valid[0]:
            return Entry("damaged" if one.damaged[0] else "empty")
        stamp = Stamp(int(one.epochs[0]), bool(one.adoptable[0]))
        return Entry("live" if self._adopts(stamp) else "void", _identity(one, 0), stamp)

    def _adopts(self, stamp: Stamp) -> bool:
        """Would the next start adopt a slot that is marked with `stamp`?"""
        return self.surveyed.adoptable and stamp == Stamp(self.surveyed.epoch, adoptable=True)

    def header(self, index: int) -> SlotHeader | Outcome | None:
        """Read one slot's header page: the header, the I/O error, or None if it is not intact.

        PoolError if the whole target does not answer.
        """
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

    def judge(self, index: int, seen: SlotIdentity | None) -> Judgement | None:
        """Read one slot's entry and header again; return its defect, None if it has none.

        seen: the entry's identity when the slot became a suspect (None: no intact entry). If
        it is another one now, a server has written the slot since: nothing is wrong.
        """
        entry = self.entry(index)
        if entry.state in ("empty", "void") or (seen is not None and entry.identity != seen):
            return None
        header = self.header(index)
        replacement = bytes(ENTRY_BYTES)
        if isinstance(header, SlotHeader):
            fits = header.payload_bytes == self.superblock.payload_bytes
            if fits and header.place == self.place(index):
                replacement = encode_entry(self.pool_slot(index), header.identity, header.stamp)
            if entry.state == "live" and header.identity == entry.identity and any(replacement):
                return None
        if entry.state in ("missing", "damaged"):
            holds = isinstance(header, SlotHeader) and self._adopts(header.stamp)
            listed = entry.state == "damaged" or (holds and any(replacement))
            return Judgement(f"table entry {entry.state}", replacement, listed)
        return Judgement(self._mismatch(index, entry, header), replacement)

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
        return "slot holds another length"

    def write_entry(self, index: int, entry: bytes) -> None:
        """Replace one table entry. OSError if it cannot be written."""
        if os.pwrite(self.table_fd, entry, index * ENTRY_BYTES) != len(entry):
            raise OSError(errno.ENOSPC, "short write", str(self.surveyed.path / "table"))


@contextlib.contextmanager
def open_rank(surveyed: Surveyed, writable: bool = False) -> Iterator[OfflineRank]:
    """Open the slab (for reading) and the table (created if it is lost and `writable`).

    PoolError if there is no usable superblock, or a file cannot be opened.
    """
    if surveyed.superblock is None:
        raise PoolError(f"{surveyed.path / 'superblock'}: {surveyed.problem}")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.ExitStack() as stack:
        try:
            try:
                slab_fd = os.open(surveyed.path / "slab", flags)
            except FileNotFoundError:
                # Like a slab cut to nothing: no entry is proven by it.
                slab_fd = os.memfd_create("lost-slab", os.MFD_CLOEXEC)
            stack.callback(os.close, slab_fd)
            os.posix_fadvise(slab_fd, 0, 0, os.POSIX_FADV_RANDOM)
            table_fd = -1
            with contextlib.suppress(FileNotFoundError):
                table = surveyed.path / "table"
                table_fd = open_private(table, os.O_RDWR) if writable else os.open(table, flags)
                stack.callback(os.close, table_fd)
                if writable:
                    give_to_owner(table)
        except OSError as error:
            raise PoolError(f"cannot open the pool in {surveyed.path}: {error}") from error
        facts = read_facts(surveyed.path.parents[1])
        named = facts is None or "slot_layout" in facts
        yield OfflineRank(surveyed, surveyed.superblock, slab_fd, table_fd, named)
