# SPDX-License-Identifier: Apache-2.0
"""One rank's pool: its slabs and tables on all targets, claimed, preallocated and adopted.

Pool slot p is slot `p // target_count` of the region on target `p % target_count`. On disk, a slot
has only its number within the region. All targets have the same number of slots, as many as fit on
the fullest target.

A reset must become durable on the targets that answer even if another target hangs, so superblocks
are written in the background, one per directory at a time. While a write hangs, only the newest
superblock waits, so an older superblock never follows a newer one. Nothing waits for the writing
thread; `on_end` reports the outcome. The thread also waits for the write permit of the region's
lease (`lease`).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import CANCELLED, OK, Outcome, PoolError, io_error
from vllm_nvmeof_offload.pool.folder import Folder, open_private
from vllm_nvmeof_offload.pool.format import (
    SESSIONS_FILE,
    SlotPlace,
    Stamp,
    replace_file,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lease import DirectoryLock
from vllm_nvmeof_offload.pool.log import LogFile, next_sequence
from vllm_nvmeof_offload.pool.ownership import Claim, PoolSpec
from vllm_nvmeof_offload.pool.recovery import (
    Progress,
    adopt_entries,
    choose_direct,
    new_epoch,
    prepare,
)
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import AdoptedEntries, slot_of, target_of
from vllm_nvmeof_offload.units import format_bytes

__all__ = ["Background", "Pool", "PoolSpec"]


class Background:
    """A fixed number of threads for calls that may block forever, such as on a lost target's files.
    Calls in one lane run in order, one at a time, so a hung lane occupies only one thread. A call
    waits until a thread is free; the caller bounds the number of waiting calls. All threads start
    with the object, so a limit on threads can make a start fail, but not a running server."""

    def __init__(self, name: str, threads: int) -> None:
        """Start the threads. Raises RuntimeError if the system allows no more."""
        self._changed = threading.Condition()
        self._waiting: list[tuple[Hashable, Callable[[], None]]] = []
        self._running: set[Hashable] = set()
        self._ended = False
        try:
            for _ in range(threads):
                threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            self.end()
            raise

    def run(self, lane: Hashable, call: Callable[[], None]) -> None:
        """Run `call` on one of the threads. Never blocks."""
        with self._changed:
            self._waiting.append((lane, call))
            self._changed.notify()

    def end(self) -> None:
        """End the threads after the last waiting call. Returns at once."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            lane, call = job
            try:
                call()
            except Exception:  # noqa: BLE001 - a bug; the other calls continue
                logger.exception("a background call failed")
            finally:
                with self._changed:
                    self._running.discard(lane)

    def _take(self) -> tuple[Hashable, Callable[[], None]] | None:
        """Wait for a call whose lane is free. Return None if there are no more calls."""
        with self._changed:
            while True:
                for at, job in enumerate(self._waiting):
                    if job[0] not in self._running:
                        del self._waiting[at]
                        self._running.add(job[0])
                        return job
                if self._ended:  # a busy lane's thread also runs the lane's waiting calls
                    return None
                self._changed.wait()


#: The threads per target: one each for its superblock, its log, its sessions and closing files, and
#: one more in case a superblock write from the last attachment hangs.
_BACKGROUND_THREADS = 5
_SESSIONS_BYTES_MAX = 1 << 28  # a longer sessions file is ignored
Replace = Callable[[Path], None]  # replaces a file in this directory; can raise OSError
#: A function called once, with OK, CANCELLED or an I/O error, on any thread, even the caller's.
OnEnd = Callable[[Outcome], None]


@dataclass(eq=False)
class _FileWriter:
    """A writer that replaces one directory's superblock or sessions. `busy` states whether a thread
    is writing or hung; `changed` is notified when this ends."""

    folder: Folder | None  # None if the target is lost; nothing is written then
    changed: threading.Condition
    #: Waits until the region may be written. False if it never may be, or the write is unwanted.
    await_permit: Callable[[Callable[[], bool]], bool]
    background: Background
    busy: bool = False
    _next: tuple[Replace, OnEnd] | None = None

    def write(self, replace_one: Replace, on_end: OnEnd) -> None:
        with self.changed:
            replaced, self._next = self._next, (replace_one, on_end)
            idle, self.busy = not self.busy, True
        if replaced is not None:
            replaced[1](CANCELLED)
        if idle:
            self.background.run(self, self._run)

    def withdraw(self) -> None:
        """Cancel the write that waits behind a hung one."""
        with self.changed:
            waiting, self._next = self._next, None
        if waiting is not None:
            waiting[1](CANCELLED)

    def _run(self) -> None:
        try:
            while (job := self._take()) is not None:
                replace_one, on_end = job
                # An exception other than OSError is a bug, but the write must end even then.
                outcome = io_error(errno.EIO)
                try:
                    if self.await_permit(lambda: self._next is None):
                        assert self.folder is not None
                        replace_one(self.folder.place)
                        outcome = OK
                    else:
                        outcome = CANCELLED if self._next else io_error(errno.ENODEV)
                except OSError as error:
                    outcome = io_error(error.errno or errno.EIO)
                finally:
                    on_end(outcome)
        except BaseException:
            self._end()
            raise

    def _take(self) -> tuple[Replace, OnEnd] | None:
        with self.changed:
            job, self._next = self._next, None
            if job is None:
                self._end()
            return job

    def _end(self) -> None:
        with self.changed:  # a Condition's lock is reentrant
            self.busy = False
            self.changed.notify_all()


class Pool:
    """An open pool. All calls except descriptor look-ups may block: do not make them in an engine's
    poll. `files`, `slot_place` and `stamp` are safe on any thread. Use everything else on one
    thread at a time: first on the one that opened the pool, then on the pipeline's."""

    def __init__(
        self, spec: PoolSpec, claim: Claim, slabs: list[Slab], on_progress: Progress | None
    ) -> None:
        """Use `Pool.open` instead."""
        if claim.was_of_another:
            spec = replace(spec, adopt=False)  # a takeover begins a new epoch
        superblocks, self._adopt_slots, stamp = prepare(spec, slabs, claim)
        self._claim = claim
        self._slabs = slabs
        self.permits = claim.permits  # by target: whether the region may be written now
        self.superblocks = superblocks  # by target, the superblock that the target should have now
        self.stamp = self._unnamed = stamp  # for targets that have the newest superblock
        self._named = spec.named
        self._on_progress = on_progress
        self.target_count = len(slabs)
        self.slots = superblocks[0].slots * len(slabs)  # on all targets together
        self.slot_bytes = spec.slot_bytes  # the header page and the padded payload
        self.payload_bytes = spec.payload_bytes  # of the longest group
        self.kinds = {group.group_id: group.kind for group in spec.group_table}  # by group id
        self.engine_index = claim.engine_index
        #: The server's name in its group; empty if it is in none.
        self.lease_name = spec.leasing.name if spec.leasing.in_group else ""
        self.directories = claim.directories  # this rank's, by target
        self.fallbacks = choose_direct(spec, slabs)  # what is slower than requested, and why
        for slab in slabs:
            if spec.leasing.in_group and slab.direct:
                slab.use_direct_log()
        self.is_direct = tuple(slab.direct for slab in slabs)  # by target
        self.direct = all(self.is_direct)  # buffers and offsets must then be 4 KiB aligned
        self._closed = False
        claim.has_epoch(superblocks[0].epoch)
        self._written = threading.Condition()
        self.background: list[Background] = []  # by target, for calls that may hang with it
        try:
            for target in range(self.target_count):
                self.background.append(Background(f"pool-{target}", _BACKGROUND_THREADS))
        except RuntimeError as error:
            self._end_background()
            raise PoolError(f"cannot start the threads of the pool: {error}") from error
        self._writers = [self._file_writer(target) for target in range(self.target_count)]
        self._sessions, self._sessions_failed = self._file_writer(0), False

    @classmethod
    def open(cls, spec: PoolSpec, on_progress: Progress | None = None) -> Pool:
        """Claim, check and preallocate files. `adopt` calls `on_progress` if it must read headers.
        Raises PoolLockedError, naming the owner, if a live process holds the directory, and
        PoolError if a target cannot be used or has no space for one slot."""
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

    def files(self, target: int) -> tuple[int, int, int]:
        """Return the descriptors of the target's slab, table and log, or -1 if it is lost."""
        slab = self._slabs[target]
        return slab.fd, slab.table_fd, slab.log_fd

    def log(self, target: int) -> LogFile:
        """Return the target's log. Reads all of it to find the next page. Can raise OSError."""
        fd, pages = self._slabs[target].log_fd, self.superblocks[target].log_pages
        lease_generation = self.superblocks[target].lease_generation
        return LogFile(fd, pages, next_sequence(fd, pages) if pages else 0, lease_generation)

    def keyspace(self, target: int) -> Folder:
        """Open the keyspace's directory through our region's descriptor, not by path. Safe on any
        thread. Raises OSError if the target is lost, or other users can write the directory."""
        folder = self._slabs[target].folder
        if folder is None:
            raise OSError(errno.ENODEV, "the target is lost", str(self.directories[target]))
        return Folder.open(self.directories[target].parents[1], folder.place / "../..")

    def slot_place(self, place: int) -> SlotPlace:
        """Return the place that the header of our slot must name."""
        return self.superblocks[target_of(place)].place(slot_of(place))

    def adopt(self) -> AdoptedEntries:
        """Return the chunks that an earlier process stored; none unless `spec.adopt`. Call once, at
        start. A missing or damaged table is rebuilt from the slots' headers (`on_progress`)."""
        return adopt_entries(self._slabs, self._adopt_slots, self.superblocks, self._on_progress)

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        """Draw a new epoch, which invalidates everything stored so far. Every target's superblock
        gets this epoch, the next sequence and `tag`. This does no I/O: `write_superblock` must
        follow for each target.

        Return two stamps for later writes: for targets that have the new superblock, and for the
        others. No superblock names the second stamp's epoch, so no start adopts its chunks. The
        same holds for the first stamp if `named` is False, here or when the pool was opened. A lost
        target gets its superblock before it serves again.
        """
        epoch = self._new_epoch()
        sequence = 1 + self.superblocks[0].sequence
        self._unnamed = Stamp(self._new_epoch(epoch), tag)
        self.stamp = Stamp(epoch, tag) if named and self._named else self._unnamed
        self._adopt_slots = [0] * self.target_count
        self._claim.has_epoch(epoch)
        for target, superblock in enumerate(self.superblocks):
            self.superblocks[target] = replace(superblock, epoch=epoch, sequence=sequence, tag=tag)
        return self.stamp, self._unnamed

    def write_superblock(self, target: int, on_end: OnEnd) -> None:
        """Durably replace the target's superblock with the newest one. As soon as one target has
        it, a start ignores everything stored before. `on_end` gets ENODEV if the target is lost,
        and CANCELLED if a newer superblock replaced this one while it waited for a hung write."""
        if self._slabs[target].is_open:
            superblock = self.superblocks[target]
            self._writers[target].write(lambda at: write_superblock(at, superblock), on_end)
        else:
            on_end(io_error(errno.ENODEV))

    def sessions(self) -> bytes:
        """Return the content of rank 0's sessions file; empty if it cannot be read."""
        slab = self._slabs[0]
        if self.superblocks[0].rank or not slab.is_open:
            return b""
        try:
            with open(open_private(slab.place / SESSIONS_FILE, os.O_RDONLY), "rb") as file:
                return file.read(_SESSIONS_BYTES_MAX)
        except FileNotFoundError:
            return b""
        except OSError as error:
            logger.warning("the retained sessions in %s are lost: %s", slab.directory, error)
            return b""

    def save_sessions(self, content: bytes) -> None:
        """Replace the sessions file in the background. Newer content replaces content that waits
        for a hung write. Does nothing on other ranks, or while the target is lost."""

        def on_end(outcome: Outcome) -> None:
            failed = outcome not in (OK, CANCELLED)
            if failed and not self._sessions_failed:  # or a full disk would be logged every second
                logger.warning("sessions are not saved, and will end with the server: %s", outcome)
            self._sessions_failed = failed

        if not self.superblocks[0].rank and self._slabs[0].is_open:
            self._sessions.write(lambda at: replace_file(at, SESSIONS_FILE, content), on_end)

    def _file_writer(self, target: int) -> _FileWriter:
        def await_permit(wanted: Callable[[], bool]) -> bool:
            return self.permits[target].wait(wanted)  # those of the time of writing

        folder, background = self._slabs[target].folder, self.background[target]
        return _FileWriter(folder, self._written, await_permit, background)

    def await_superblocks(self, timeout_s: float) -> bool:
        """Wait until no superblock and no sessions file is being written; False on a timeout."""
        with self._written:
            return self._written.wait_for(lambda: not self._is_writing(), timeout_s)

    def _is_writing(self) -> bool:
        return any(writer.busy for writer in (*self._writers, self._sessions))

    def _new_epoch(self, *others: int) -> int:
        """Return an epoch that no superblock and no write has, and that is not in `others`."""
        stamps = self.stamp.epoch, self._unnamed.epoch
        return new_epoch({*stamps, *(one.epoch for one in self.superblocks), *others})

    # -- targets that are lost and return -------------------------------------------------------

    def device(self, target: int) -> int | None:
        """Return st_dev of the file system on which the target is locked, or None if it is lost."""
        lock = self._claim.regions[target].lock
        return None if lock is None else lock.lease.device

    def owner(self, target: int) -> bytes:
        """Return the owner that the lease of the target's region names."""
        return self._claim.regions[target].lease.page.owner

    def exchange(
        self, target: int, slab: Slab | None, lock: DirectoryLock | None
    ) -> Callable[[], None]:
        """Serve `target` from another slab, or not at all if `slab` is None. Return a function that
        closes the old files. Call it after their last use, on a thread that nothing waits for."""
        slab = slab or Slab(self.directories[target], (-1, -1, -1, -1))
        # A thread that hangs on the old files is abandoned. The superblock that waits for it is
        # cancelled, because the prober updates the new files.
        self._writers[target].withdraw()
        old_slab, self._slabs[target] = self._slabs[target], slab
        self._writers[target] = self._file_writer(target)
        if not target:
            self._sessions.withdraw()
            self._sessions = self._file_writer(0)
        region = self._claim.regions[target]
        old_lock, region.lock = region.lock, lock

        def close() -> None:
            old_slab.close()
            if old_lock is not None:
                old_lock.abandon()

        return close

    def close(self, abandon: bool = False) -> None:
        """Close the files and release the claim. Set `abandon` if an engine's thread hangs in the
        kernel: every descriptor then stays open until the process exits, so that its number is not
        reused. A hung superblock write has the same effect: no other owner may take over before it
        ends."""
        if self._closed:
            return
        abandon = abandon or self._is_writing()
        self._closed = True
        self._end_background()
        self._claim.release(keep_descriptors=abandon)
        if not abandon:
            for slab in self._slabs:
                slab.close()

    def _end_background(self) -> None:
        for one in self.background:
            one.end()
