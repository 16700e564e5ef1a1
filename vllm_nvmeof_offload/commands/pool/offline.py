# SPDX-License-Identifier: Apache-2.0
"""One rank directory opened without an engine: its table, its slots, and what became of them.

Reads only, unless it was opened `writable`, for which the caller holds the directory's lock.
Beside a live server a slot that is being written looks damaged for a moment, so every suspect
is judged again, alone, from its entry of now.
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
    SlotHeader,
    SlotPlace,
    Stamp,
    decode_table,
    encode_entry,
    parse_header,
)
from vllm_nvmeof_offload.pool.lock import LockState, give_to_owner, hold
from vllm_nvmeof_offload.pool.recovery import read_table
from vllm_nvmeof_offload.pool.slab import open_private
from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed, read_facts, survey
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

if TYPE_CHECKING:
    from vllm_nvmeof_offload.pool.format import Superblock

__all__ = [
    "Entry",
    "Judgement",
    "OfflineRank",
    "Progress",
    "Table",
    "held_survey",
    "let_writes_end",
    "open_rank",
]

#: Called with (directory, done, total); what is counted depends on the work.
Progress = Callable[[RankDirectory, int, int], None]

#: How long a write and its table entry may reasonably be apart.
_WRITE_S = 1.0


def let_writes_end() -> None:
    """Wait until what a live server was writing a moment ago has its table entry."""
    time.sleep(_WRITE_S)


@contextlib.contextmanager
def held_survey(directories: Sequence[RankDirectory], writable: bool) -> Iterator[list[Surveyed]]:
    """Survey `directories`, with all their locks held meanwhile if `writable`.

    All are held from before the first is looked at until the last is done, so that no server
    starts on a part of a pool that is being repaired.

    Raises:
        PoolLockedError: `writable`, and a live process holds one of them.
        PoolError: one cannot be read or locked.
    """
    with contextlib.ExitStack() as stack:
        if writable:
            stack.enter_context(hold([directory.path for directory in directories]))
        found = survey(directories)
        # Who holds them now is this process: not what "live" is about.
        yield [replace(one, lock=LockState("none")) for one in found] if writable else found


@dataclass(frozen=True)
class Table:
    """The table as it was read: one state a slot of this target, by its index there.

    live: bool[n], adoptable at the next start. void: bool[n], intact, but of a past epoch or
    not adoptable. damaged: bool[n]. missing: bool[n], beyond the file's end. What is none of
    these was never written. generations: uint64[n], keys: uint8[n, 46], key_bytes: uint8[n]
    mean something only where `live`.
    """

    live: npt.NDArray[np.bool_]
    void: npt.NDArray[np.bool_]
    damaged: npt.NDArray[np.bool_]
    missing: npt.NDArray[np.bool_]
    generations: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint8]
    key_bytes: npt.NDArray[np.uint8]

    def identity(self, index: int) -> SlotIdentity:
        length = int(self.key_bytes[index])
        return SlotIdentity(self.keys[index, :length].tobytes(), int(self.generations[index]))


@dataclass(frozen=True, slots=True)
class Entry:
    """One table entry. state: "live", "void", "damaged", "missing" or "empty"."""

    state: str
    identity: SlotIdentity | None = None
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is wrong with a slot.

    kind: for people, and stable for programs. replacement: the 64 bytes that a repair writes
    in the entry's place. worth_listing: False where nothing that was stored is affected.
    """

    kind: str
    replacement: bytes
    worth_listing: bool = True


@dataclass(frozen=True)
class OfflineRank:
    """Use `open_rank`. table_fd is -1 where there is no table.

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
        """What the header of the slot at `index` must name."""
        if not self.names_places:
            return NOWHERE
        return SlotPlace(self.superblock.uuid, self.superblock.rank, self.pool_slot(index))

    @property
    def slab_slots(self) -> int:
        """Whole slots that the slab file has: fewer than the superblock says is damage."""
        return os.fstat(self.slab_fd).st_size // self.superblock.slot_bytes

    def table(self) -> Table:
        """Read and decode the whole table (64 bytes a slot)."""
        count = self.superblock.slots
        raw = np.zeros(0, np.uint8)
        if self.table_fd >= 0:
            raw = read_table(self.table_fd, count)
        whole = raw.size // ENTRY_BYTES
        missing = np.arange(count) >= whole
        raw = np.concatenate([raw, np.zeros((count - whole) * ENTRY_BYTES, np.uint8)])
        decoded = decode_table(raw, self._pool_slots())
        live = decoded.valid & decoded.adoptable & (decoded.epochs == self.surveyed.epoch)
        if not self.surveyed.adoptable:
            live[:] = False
        return Table(
            live=live,
            void=decoded.valid & ~live,
            damaged=decoded.damaged,
            missing=missing,
            generations=decoded.generations,
            keys=decoded.keys,
            key_bytes=decoded.key_bytes,
        )

    def _pool_slots(self) -> npt.NDArray[np.int64]:
        block = self.superblock
        return np.arange(block.slots, dtype=np.int64) * block.target_count + block.target_index

    def entry(self, index: int) -> Entry:
        """Read one table entry, as it is now.

        Raises:
            PoolError: it cannot be read.
        """
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
        key = one.keys[0, : int(one.key_bytes[0])].tobytes()
        return Entry(
            "live" if self.adopts(stamp) else "void",
            SlotIdentity(key, int(one.generations[0])),
            stamp,
        )

    def adopts(self, stamp: Stamp) -> bool:
        """Would the next start adopt what is marked with `stamp`?"""
        return self.surveyed.adoptable and stamp == Stamp(self.surveyed.epoch, adoptable=True)

    def header(self, index: int) -> SlotHeader | Outcome | None:
        """Read one slot's header page: the header, the I/O error, or None if it is not intact.

        Raises:
            PoolError: the whole target does not answer.
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
        """Read one slot's entry and header again, and say what is wrong, if anything is.

        seen: what the entry said when the slot became a suspect (None: nothing intact). If it
        says something else now, a server has written the slot since: nothing is wrong.
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
            holds = isinstance(header, SlotHeader) and self.adopts(header.stamp)
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
    """Open the slab (for reading) and the table (made, if it is lost and `writable`).

    Raises:
        PoolError: no usable superblock, or a file cannot be opened.
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
