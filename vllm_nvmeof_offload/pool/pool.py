# SPDX-License-Identifier: Apache-2.0
"""One rank's pool: its slabs and tables on all targets, claimed, preallocated and adopted.

Pool slot p is slot `p // target_count` of the region on target `p % target_count`: on disk slots
have the latter numbers only. All targets have equally many slots; the fullest target decides the
number.

A reset must become durable on the targets that answer although another target hangs. So each
superblock is written on a thread, one per directory at a time. While that thread hangs, the
newest superblock waits for it and replaces one that has waited longer; an older superblock never
follows a newer one.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.groups import GroupKind, group_id_of
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    SlotPlace,
    Stamp,
    Superblock,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lock import DirectoryLock
from vllm_nvmeof_offload.pool.ownership import Claim, PoolSpec
from vllm_nvmeof_offload.pool.recovery import (
    Progress,
    adopt_entries,
    choose_direct,
    new_epoch,
    prepare,
)
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import AdoptedEntries
from vllm_nvmeof_offload.units import format_bytes

__all__ = ["Pool", "PoolSpec"]


#: A reset waits this long for a directory that does not answer, if another one has answered.
PATIENCE_S = 2.0


def start_thread(run: Callable[[], None]) -> None:
    """Tests that need one order of events replace it by a plain call."""
    threading.Thread(target=run, name="io-superblock", daemon=True).start()


@dataclass(eq=False)
class _SuperblockWriter:
    """Writes one directory's superblock.

    durable: the superblock on disk now; None: unknown. changed: shared by all that are awaited
    together. failure: of the last write; None if it succeeded. busy: a thread writes, or hangs.
    """

    directory: Path
    durable: Superblock | None
    changed: threading.Condition
    failure: OSError | None = None
    busy: bool = False
    _next: Superblock | None = None

    def write(self, superblock: Superblock) -> None:
        with self.changed:
            self._next = superblock
            idle, self.busy = not self.busy, True
        if idle:
            try:
                start_thread(self._run)
            except RuntimeError:  # no thread can be started: this one waits for the disk instead
                self._run()

    def _run(self) -> None:
        try:
            while (superblock := self._take()) is not None:
                try:
                    write_superblock(self.directory, superblock)
                    self.durable = superblock
                except OSError as error:
                    self.failure = error
        except BaseException:
            self._end()
            raise

    def _take(self) -> Superblock | None:
        with self.changed:
            superblock, self._next = self._next, None
            if superblock is not None:
                self.failure = None  # an older superblock's failure does not count any more
            else:
                self._end()
            return superblock

    def _end(self) -> None:
        with self.changed:  # a Condition's lock is reentrant
            self.busy = False
            self.changed.notify_all()


def _first_failure(
    writers: Sequence[_SuperblockWriter], changed: threading.Condition
) -> OSError | None:
    """Wait for writes that have begun; return the first failure, or None.

    After `PATIENCE_S` writes that hang are left to their threads, if any other has ended.
    """
    with changed:
        if not changed.wait_for(lambda: not any(writer.busy for writer in writers), PATIENCE_S):
            changed.wait_for(lambda: not all(writer.busy for writer in writers))
            for writer in writers:
                if writer.busy:
                    logger.warning(
                        "%s does not take its superblock: the reset goes on without it, and its "
                        "content stays void by the other targets' superblocks",
                        writer.directory,
                    )
        failures = (writer.failure for writer in writers if not writer.busy)
        return next((failure for failure in failures if failure is not None), None)


class Pool:
    """An open pool. Everything but the fd look-ups may block: keep it off the engine's poll.

    `reset` is called on an I/O thread; `slab_fd`, `table_fd`, `place` and `stamp` on any thread.
    The rest belongs to the thread that opened the pool.
    """

    def __init__(
        self, spec: PoolSpec, claim: Claim, slabs: list[Slab], on_progress: Progress | None
    ) -> None:
        """Use `Pool.open`."""
        prepared = prepare(spec, slabs)
        superblocks, self._adopt_slots = prepared.superblocks, prepared.adopt_slots
        self._claim = claim
        self._slabs = slabs
        #: By target, the superblock that it must have now.
        self.superblocks = superblocks
        #: The stamp of an operation that is submitted now.
        self.stamp = prepared.stamp
        self._named = spec.named
        self._on_progress = on_progress
        self.target_count = len(slabs)
        #: Pool slots over all targets.
        self.slots = superblocks[0].slots * len(slabs)
        #: Header page and padded payload.
        self.slot_bytes = spec.slot_bytes
        #: Of the longest group.
        self.payload_bytes = spec.payload_bytes
        #: By group id.
        self.kinds = {group.group_id: group.kind for group in spec.group_table}
        self.engine_index = claim.engine_index
        #: This rank's directories, one per target.
        self.directories = claim.directories
        #: What runs slower than requested, and the cause, for people.
        self.fallbacks = choose_direct(spec, slabs)
        #: By target: its slab is to be open for O_DIRECT.
        self.is_direct = tuple(slab.direct for slab in slabs)
        #: True if every slab is (buffers and offsets are then 4 KiB aligned).
        self.direct = all(self.is_direct)
        self._written = threading.Condition()
        self._writers = [
            _SuperblockWriter(slab.directory, superblock, self._written)
            for slab, superblock in zip(slabs, superblocks, strict=True)
        ]
        self._closed = False

    @classmethod
    def open(cls, spec: PoolSpec, on_progress: Progress | None = None) -> Pool:
        """Claim, check and preallocate. `on_progress` is for `adopt`, if it must read headers.

        PoolLockedError: another live owner (named) holds the directory. PoolError: a target
        cannot be used, or has no space for one slot.
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

    def slab_fd(self, pool_slot: int) -> tuple[int, int]:
        """Return (descriptor, byte offset) of a pool slot's header page."""
        slab, index = self._find(pool_slot)
        return slab.fd, index * self.slot_bytes

    def table_fd(self, pool_slot: int) -> tuple[int, int]:
        """Return (descriptor, byte offset) of a pool slot's table entry (buffered)."""
        slab, index = self._find(pool_slot)
        return slab.table_fd, index * ENTRY_BYTES

    def _find(self, pool_slot: int) -> tuple[Slab, int]:
        assert 0 <= pool_slot < self.slots
        index, target = divmod(pool_slot, self.target_count)
        return self._slabs[target], index

    def place(self, pool_slot: int) -> SlotPlace:
        """Return the place that the header of this pool slot must name."""
        slot, target = divmod(pool_slot, self.target_count)
        return self.superblocks[target].place(slot)

    def kind_of(self, key: bytes) -> GroupKind:
        """Return the kind of the key's group.

        No start adopts a chunk of a group that the pool does not have: any kind will do for it.
        """
        return self.kinds.get(group_id_of(key), GroupKind.FULL)

    def adopt(self) -> AdoptedEntries:
        """Return the chunks that an earlier process stored; call it once, at start.

        Empty unless `spec.adopt`. A table that is missing, cut short or damaged is rebuilt
        from the slots' headers (`on_progress`).
        """
        return adopt_entries(self._slabs, self._adopt_slots, self.superblocks, self._on_progress)

    def reset(self, tag: bytes, named: bool) -> None:
        """Void everything stored so far, on disk too; blocks until that is durable.

        Every superblock gets the next sequence, a new epoch and `tag`. What is written from now
        on carries `tag` and that epoch. It carries an epoch that no superblock names, so that no
        start adopts it, if not `named`, if the pool was opened so, or if the reset fails. A target
        that is away gets its superblock before it serves again, one that hangs when it answers;
        until then the other targets' sequence voids its content.

        OSError: a superblock could not be written: a later start could adopt what was stored
        before the reset. ENODEV: all targets are away.
        """
        epoch = self._new_epoch()
        sequence = 1 + self.superblocks[0].sequence
        unnamed = Stamp(self._new_epoch(epoch), tag)
        self.stamp = Stamp(epoch, tag) if named and self._named else unnamed
        self._adopt_slots = [0] * self.target_count
        writers: list[_SuperblockWriter] = []
        for index, slab in enumerate(self._slabs):
            superblock = replace(self.superblocks[index], epoch=epoch, sequence=sequence, tag=tag)
            self.superblocks[index] = superblock
            if slab.is_open:
                writers.append(self._writers[index])
                writers[-1].write(superblock)
        gone = OSError(errno.ENODEV, "every target is gone")
        failure = _first_failure(writers, self._written) if writers else gone
        if failure is not None:
            self.stamp = unnamed
            raise failure

    def _new_epoch(self, *others: int) -> int:
        """An epoch that neither superblocks nor writes have, nor is one of `others`."""
        return new_epoch({self.stamp.epoch, *(one.epoch for one in self.superblocks), *others})

    # -- targets that go and come back ------------------------------------------------------

    @property
    def reset_is_durable(self) -> bool:
        """Whether the last reset has reached every target by now, if not at once."""
        pairs = zip(self._writers, self.superblocks, strict=True)
        return all(writer.durable == superblock for writer, superblock in pairs)

    def device(self, target: int) -> int | None:
        """Return st_dev of the file system that the target is locked on; None: it is away."""
        lock = self._claim.locks[target]
        return None if lock is None else lock.file.device

    def exchange(
        self, target: int, slab: Slab | None, lock: DirectoryLock | None
    ) -> Callable[[], None]:
        """Serve `target` from another slab from now on; not at all if `slab` is None.

        Returns a function that closes the old files. Call it when no operation uses them any
        more, on a thread that nothing waits for.
        """
        slab = slab or Slab(self.directories[target], (-1, -1, -1))
        durable = self._writers[target].durable
        if lock is not None:
            durable = self.superblocks[target]  # the prober brought it up to date
        # A thread that hangs in the old files is left behind.
        self._writers[target] = _SuperblockWriter(slab.directory, durable, self._written)
        old_slab, self._slabs[target] = self._slabs[target], slab
        old_lock, self._claim.locks[target] = self._claim.locks[target], lock

        def close() -> None:
            old_slab.close()
            if old_lock is not None:
                old_lock.abandon()

        return close

    def close(self, abandon: bool = False) -> None:
        """Close the files and give up the claim.

        abandon: an engine's thread still hangs in the kernel; keep every descriptor, so that
        their numbers are not given to other files; the process's end closes them. A superblock's
        write that hangs has the same effect, because no other owner must come between.
        """
        if self._closed:
            return
        abandon = abandon or any(writer.busy for writer in self._writers)
        self._closed = True
        self._claim.release(keep_descriptors=abandon)
        if not abandon:
            for slab in self._slabs:
                slab.close()
