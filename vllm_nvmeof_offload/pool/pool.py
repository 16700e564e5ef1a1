# SPDX-License-Identifier: Apache-2.0
"""One rank's pool: its slabs and tables over all targets, claimed, preallocated, adopted.

Pool slot p lies on target `p % target_count`, at index `p // target_count` of its slab. All
targets have equally many slots: the fullest one decides.

Superblocks of several directories, each written by a thread of its own for as long as it takes.

A reset must become durable on the targets that answer although another one hangs. A directory
has one thread at a time: while that hangs, the newest superblock waits for it, and replaces one
that has waited longer. So an older superblock never follows a newer one.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    SlotPlace,
    Stamp,
    Superblock,
    encode_entry,
    write_superblock,
)
from vllm_nvmeof_offload.pool.ownership import Claim, PoolSpec
from vllm_nvmeof_offload.pool.recovery import (
    Progress,
    RankFiles,
    adopt_entries,
    choose_direct,
    next_epoch,
    prepare,
)
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_nvmeof_offload.pool.format import Superblock
    from vllm_nvmeof_offload.pool.keyspace import Keyspace
    from vllm_nvmeof_offload.pool.lock import DirectoryLock
    from vllm_nvmeof_offload.protocol import AdoptedEntries, SlotIdentity

__all__ = [
    "PATIENCE_S",
    "Pool",
    "PoolSpec",
    "SuperblockWriter",
    "first_failure",
]


logger = logging.getLogger(LOGGER_NAME)

#: How long a reset waits for a directory that does not answer while another one does.
PATIENCE_S = 2.0


def start_thread(run: Callable[[], None]) -> None:
    """Tests that want one order of events replace it by a plain call."""
    threading.Thread(target=run, name="io-superblock", daemon=True).start()


class SuperblockWriter:
    """One directory. `changed` is shared by all whose ends are waited for together."""

    def __init__(
        self, directory: Path, durable: Superblock | None, changed: threading.Condition
    ) -> None:
        """durable: what is there now; None: not known."""
        self.directory = directory
        self.durable = durable
        #: Why the last write failed; None if it did not.
        self.failure: OSError | None = None
        #: A thread writes, or hangs.
        self.busy = False
        self._next: Superblock | None = None
        self._changed = changed

    def write(self, superblock: Superblock) -> None:
        """Begin to replace the directory's superblock."""
        with self._changed:
            self._next, self.failure = superblock, None
            idle, self.busy = not self.busy, True
        if idle:
            try:
                start_thread(self._run)
            except RuntimeError:  # no thread can be started: this one waits for the disk instead
                self._run()

    def _run(self) -> None:
        try:
            while (superblock := self._take()) is not None:
                failure = None
                try:
                    write_superblock(self.directory, superblock)
                except OSError as error:
                    failure = error
                self._ended(superblock, failure)
        except BaseException:
            with self._changed:
                self.busy = False
                self._changed.notify_all()
            raise

    def _take(self) -> Superblock | None:
        with self._changed:
            superblock, self._next = self._next, None
            if superblock is None:
                self.busy = False
                self._changed.notify_all()
            return superblock

    def _ended(self, superblock: Superblock, failure: OSError | None) -> None:
        with self._changed:
            if failure is None:
                self.durable = superblock
            if self._next is None:
                self.failure = failure


def first_failure(
    writers: Sequence[SuperblockWriter], changed: threading.Condition
) -> OSError | None:
    """Wait for writes that have begun; return why one failed, or None.

    After `PATIENCE_S` those that hang are left to their threads, if any other has ended.
    """
    with changed:
        if not changed.wait_for(lambda: not any(writer.busy for writer in writers), PATIENCE_S):
            changed.wait_for(lambda: not all(writer.busy for writer in writers))
            for writer in writers:
                if writer.busy:
                    logger.warning(
                        "%s does not take its superblock: the reset goes on without it, and what "
                        "it holds stays void by the other targets' superblocks",
                        writer.directory,
                    )
        failures = (writer.failure for writer in writers if not writer.busy)
        return next((failure for failure in failures if failure is not None), None)


class Pool:
    """An open pool. Everything but the fd look-ups may block: keep it off the engine's poll.

    `reset` is called on an I/O thread; `slab_fd`, `table_fd`, `place`, `encode_entry` and `stamp`
    from any thread. The rest belongs to the thread that opened it.
    """

    def __init__(
        self,
        spec: PoolSpec,
        claim: Claim,
        slabs: list[Slab],
        on_progress: Progress | None = None,
    ) -> None:
        """Use `Pool.open`."""
        prepared = prepare(spec, claim, slabs)
        self._spec = spec
        self._claim = claim
        self._slabs = slabs
        self._superblocks = prepared.superblocks
        self._uuid = prepared.superblocks[0].uuid  # of all of them, and it stays
        self._slots_per_target = prepared.slots_per_target
        self._adopt_slots = prepared.adopt_slots
        self._stamp = Stamp(prepared.superblocks[0].epoch, spec.adoptable)
        self._fallbacks = choose_direct(spec, slabs)
        self._on_progress = on_progress
        self._direct = tuple(slab.direct for slab in slabs)
        self._written = threading.Condition()
        self._writers = [
            SuperblockWriter(slab.directory, superblock, self._written)
            for slab, superblock in zip(slabs, prepared.superblocks, strict=True)
        ]
        self._closed = False

    @classmethod
    def open(cls, spec: PoolSpec, on_progress: Progress | None = None) -> Pool:
        """Claim, check, preallocate. `on_progress` is for `adopt`, if it must read headers.

        Raises:
            PoolLockedError: another live owner (named) holds the directory.
            PoolError: a target cannot be used, or has no space for one slot.
        """
        if spec.slots_per_target < 1:
            raise PoolError(
                f"pool_bytes is {format_bytes(spec.pool_bytes)} for this rank: less than one slot "
                f"of {format_bytes(spec.slot_bytes)} on each of {len(spec.targets)} targets"
            )
        claim = Claim.make(spec)
        slabs: list[Slab] = []
        try:
            slabs.extend(map(Slab, claim.directories))
            return cls(spec, claim, slabs, on_progress)
        except BaseException as error:
            for slab in slabs:
                slab.close()
            claim.release()
            if isinstance(error, OSError):
                places = ", ".join(map(str, claim.directories))
                raise PoolError(f"cannot use the pool in {places}: {error}") from error
            raise

    @property
    def slots(self) -> int:
        """Pool slots over all targets."""
        return self._slots_per_target * len(self._slabs)

    @property
    def target_count(self) -> int:
        return len(self._slabs)

    @property
    def slot_bytes(self) -> int:
        """Header page and padded payload."""
        return self._spec.slot_bytes

    @property
    def payload_bytes(self) -> int:
        return self._spec.payload_bytes

    @property
    def engine_index(self) -> int:
        return self._claim.engine_index

    @property
    def keyspace(self) -> Keyspace:
        return self._spec.keyspace

    @property
    def directories(self) -> tuple[Path, ...]:
        """This rank's directories, one a target."""
        return self._claim.directories

    @property
    def stamp(self) -> Stamp:
        """What a write submitted now is marked with."""
        return self._stamp

    @property
    def epoch(self) -> int:
        return self._stamp.epoch

    @property
    def shrunk_from(self) -> int | None:
        """The slots asked for, if there was no space for them; else None."""
        wanted = self._spec.slots_per_target
        return wanted * len(self._slabs) if self._slots_per_target < wanted else None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What runs slower than asked, and why, for people."""
        return self._fallbacks

    @property
    def direct(self) -> bool:
        """True if every slab is open for O_DIRECT (buffers and offsets then 4 KiB aligned)."""
        return all(self._direct)

    def slab_fd(self, pool_slot: int) -> tuple[int, int]:
        """Return (descriptor, byte offset) of a pool slot's header page."""
        index, target = divmod(pool_slot, len(self._slabs))
        assert 0 <= index < self._slots_per_target
        return self._slabs[target].fd, index * self._spec.slot_bytes

    def table_fd(self, pool_slot: int) -> tuple[int, int]:
        """Return (descriptor, byte offset) of a pool slot's table entry (buffered)."""
        index, target = divmod(pool_slot, len(self._slabs))
        assert 0 <= index < self._slots_per_target
        return self._slabs[target].table_fd, index * ENTRY_BYTES

    def place(self, pool_slot: int) -> SlotPlace:
        """What the header of this pool slot must name."""
        return SlotPlace(self._uuid, self._spec.rank, pool_slot)

    def encode_entry(
        self, pool_slot: int, identity: SlotIdentity, stamp: Stamp | None = None
    ) -> bytes:
        """Return the table entry to write once the slot's data is written.

        stamp: the one the slot was sealed with, taken when the write was submitted: a write
        that a reset overtakes must not be marked with the new epoch.
        """
        return encode_entry(pool_slot, identity, stamp or self._stamp)

    def adopt(self) -> AdoptedEntries:
        """Return what an earlier process stored and this one may use; call it once, at start.

        Empty unless `spec.adopt`. A table that is missing, cut short or damaged is rebuilt
        from the slots' headers (`on_progress`). Where a key is found twice, the lower pool
        slot is kept.
        """
        files = [
            RankFiles(
                slab.header_fd, slab.table_fd, target, count, slab.table_slots_found, self.place
            )
            for target, (slab, count) in enumerate(zip(self._slabs, self._adopt_slots, strict=True))
        ]
        return adopt_entries(
            files,
            epoch=self._stamp.epoch,
            slot_bytes=self.slot_bytes,
            payload_bytes=self.payload_bytes,
            on_progress=self._on_progress,
        )

    def reset(self, adoptable: bool) -> None:
        """Void everything stored so far, on disk too; blocks until that is durable.

        Writes submitted from now on are marked with `adoptable`. Even when it fails, what this
        process writes later is marked with the new epoch, and then never adoptable: a later
        start may not know of that epoch, and give its number to another reset. A target that is
        away gets its superblock before it serves again, one that hangs when it answers; until
        then the others' epoch voids what it holds.

        Raises:
            OSError: a superblock could not be written: what was stored before could be adopted
                at a later start. ENODEV: all targets are away.
        """
        epoch = next_epoch(self._stamp.epoch)
        self._stamp = Stamp(epoch, adoptable)
        self._adopt_slots = [0] * len(self._slabs)
        writers: list[SuperblockWriter] = []
        for index, slab in enumerate(self._slabs):
            superblock = replace(self._superblocks[index], epoch=epoch, adoptable=adoptable)
            self._superblocks[index] = superblock
            if slab.is_open:
                writers.append(self._writers[index])
                writers[-1].write(superblock)
        failure: OSError | None = OSError(errno.ENODEV, "every target is gone")
        if writers:
            failure = first_failure(writers, self._written)
        if failure is not None:
            self._stamp = Stamp(epoch, adoptable=False)
            raise failure

    # -- targets that go and come back ------------------------------------------------------

    def superblock(self, target: int) -> Superblock:
        """What the target's superblock must be now."""
        return self._superblocks[target]

    @property
    def reset_is_durable(self) -> bool:
        """Has the last reset reached every target by now, if not at once?"""
        pairs = zip(self._writers, self._superblocks, strict=True)
        return all(writer.durable == superblock for writer, superblock in pairs)

    def is_direct(self, target: int) -> bool:
        """Whether its slab is to be open for O_DIRECT."""
        return self._direct[target]

    def device(self, target: int) -> int | None:
        """st_dev of the file system that it is on; None: it is away."""
        return self._claim.device(target)

    def exchange(self, target: int, slab: Slab, lock: DirectoryLock | None) -> Callable[[], None]:
        """Serve `target` from another slab from now on, or, with a closed one, not at all.

        Returns what closes the old files; call it when no operation uses them any more, on a
        thread that nobody waits for.
        """
        durable = self._writers[target].durable
        if lock is not None:
            durable = self._superblocks[target]  # it was brought up to date
        # A thread that hangs in the old files is left behind.
        self._writers[target] = SuperblockWriter(slab.directory, durable, self._written)
        old_slab, self._slabs[target] = self._slabs[target], slab
        old_lock = self._claim.exchange_lock(target, lock)

        def close() -> None:
            old_slab.close()
            if old_lock is not None:
                old_lock.abandon()

        return close

    def close(self, abandon: bool = False) -> None:
        """Close the files and give up the claim.

        abandon: an engine's thread still hangs in the kernel; keep every descriptor, so that
        their numbers are not given to other files. The process's end closes them. The same where
        a superblock's write hangs: another owner must not come between.
        """
        if self._closed:
            return
        abandon = abandon or any(writer.busy for writer in self._writers)
        self._closed = True
        self._claim.release(keep_descriptors=abandon)
        if not abandon:
            for slab in self._slabs:
                slab.close()
