# SPDX-License-Identifier: Apache-2.0
"""The threads engine: blocking `preadv`/`pwritev` on a few threads. Runs everywhere.

Seal, checksum and system calls run on the I/O threads and release the GIL. A thread whose
operation was given up counts as lost, and a spare one takes its place, so that a hung target does
not stop the others. All of them, spare ones too, are started with the engine. Logs are written in
the pool's background, where a target that hangs holds none of these threads.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_nvmeof_offload.errors import CANCELLED, OK, EngineError, Outcome, io_error
from vllm_nvmeof_offload.io.base import (
    NO_REGION,
    Completion,
    ForeignSlab,
    HintRecord,
    IoLimits,
    IoOp,
    Room,
    Waker,
    unbind_this_thread,
)
from vllm_nvmeof_offload.pool.format import (
    FLAG_SINGLE_COPY,
    Known,
    SlotPlace,
    Stamp,
    check_key,
    encode_entry,
    seal,
    verify,
)
from vllm_nvmeof_offload.pool.lease import PERMIT_POLL_S, Permit
from vllm_nvmeof_offload.pool.log import LogRecord, LogWriter
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OURS, OpKind, SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES, slot_stride_bytes


class SlotFiles(NamedTuple):
    """A pool slot with the descriptors and byte offsets of its slab and table entry.

    Take it when an operation is submitted: the target's files may be exchanged before the
    operation runs, and only those of its submission stay open until its release. region: another
    engine's, which has no table here; None: ours.
    """

    pool_slot: int
    slab_fd: int
    slab_offset: int
    table_fd: int
    table_offset: int
    region: ForeignSlab | None = None

    @staticmethod
    def of(pool: Pool, pool_slot: int) -> SlotFiles:
        """Return the files that serve `pool_slot` now."""
        return SlotFiles(pool_slot, *pool.slab_fd(pool_slot), *pool.table_fd(pool_slot))

    @staticmethod
    def of_region(pool: Pool, pool_slot: int, region: ForeignSlab) -> SlotFiles:
        offset = pool_slot // pool.target_count * pool.slot_bytes
        return SlotFiles(pool_slot, region.fd, offset, -1, 0, region)

    def place(self, pool: Pool) -> SlotPlace:
        """Return the place that the header of the slot must name."""
        if self.region is None:
            return pool.place(self.pool_slot)
        return self.region.place(self.pool_slot // pool.target_count)


class Payload(NamedTuple):
    """What is written behind a header page. crc, single_copy: as in `IoOp`."""

    size_bytes: int
    crc: int | None = None
    single_copy: bool = False


def read_slot(
    pool: Pool,
    slot: memoryview,
    files: SlotFiles,
    identity: SlotIdentity,
    tag: bytes,
    payload_bytes: int | None = None,
) -> Outcome:
    """Read the pool slot into `slot` (uint8[slot_bytes]) and verify it.

    tag: the share tag that it must have. payload_bytes: the length of this slot's payload; None:
    the pool's longest.
    """
    place = files.place(pool)
    size = pool.payload_bytes if payload_bytes is None else payload_bytes
    try:
        _transfer(os.preadv, files.slab_fd, slot[: slot_stride_bytes(size)], files.slab_offset)
    except OSError as error:
        return _failure(error)
    return verify(slot, identity, size, place, tag)


def write_slot(
    pool: Pool,
    slot: memoryview,
    files: SlotFiles,
    identity: SlotIdentity,
    stamp: Stamp,
    wanted: Callable[[], bool],
    payload: Payload | None = None,
) -> Outcome:
    """Seal `slot` (uint8[slot_bytes]), write it, and then its table entry.

    wanted: asked between the two. A write that was given up meanwhile gets no table entry,
    because its pool slot may soon hold another chunk. payload: None: it has the pool's longest
    length.
    """
    size, crc, single_copy = payload or Payload(pool.payload_bytes)
    place = pool.place(files.pool_slot)
    known = Known(crc, single_copy)
    seal(slot, identity, size, stamp, place, pool.kind_of(identity.key), known)
    flags = FLAG_SINGLE_COPY if single_copy else 0
    entry = encode_entry(place.slot, identity, stamp.epoch, flags)
    try:
        _transfer(os.pwritev, files.slab_fd, slot[: slot_stride_bytes(size)], files.slab_offset)
        if not wanted():
            return CANCELLED
        if os.pwrite(files.table_fd, entry, files.table_offset) != len(entry):
            return io_error(errno.EIO)
    except OSError as error:
        return _failure(error)
    return OK


def _failure(error: OSError) -> Outcome:
    return io_error(errno.EIO if error.errno is None else error.errno)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, slot: memoryview, offset: int
) -> None:
    """Repeat `preadv`/`pwritev` until all of `slot` is done (Python itself repeats on EINTR).

    The rest of a short transfer starts on a page boundary again, as O_DIRECT requires.

    Raises:
        OSError: the kernel's error; if a call makes no progress EIO, or 0 where it moved nothing.
    """
    done = 0
    while done < len(slot):
        count = moved = call(fd, [slot[done:]], offset + done)
        if done + count < len(slot):
            count -= (done + count) % PAGE_BYTES
        if count <= 0:
            raise OSError(errno.EIO if moved else 0, f"no progress at {done} of {len(slot)} bytes")
        done += count


#: Spare threads, for those that are lost in the kernel, as a multiple of those that work.
_SPARE_FACTOR = 3


@dataclass(slots=True, eq=False)
class _Work:
    """One operation inside the engine, with the pool's files of its submission."""

    op: IoOp
    files: SlotFiles
    #: Of a write to a region with a lease.
    permit: Permit | None = None
    #: False: it was given up, and the thread that runs it counts as lost.
    wanted: bool = True


_SYNC_S = 1.0
_ENDED = -2  # in place of a descriptor


class TableSync:
    """Brings a table's entries to its file system, for readers on other hosts.

    At most one fdatasync a second, and none while nothing is written, on a thread of its own, which
    alone uses and closes the files. An error is returned once by `take_error`: the entries that it
    lost were of writes that have ended, so the next write fails in their place.
    """

    def __init__(self, fd: int, permit: Permit) -> None:
        self._fd = os.dup(fd)  # nothing waits for a sync
        self._permit = permit
        self._changed = threading.Condition()
        self._next: list[int] = []  # files to go on in
        self._waits = False
        self._error = 0
        threading.Thread(target=self._run, name="io-sync", daemon=True).start()

    def wrote(self) -> None:
        with self._changed:
            self._waits = True
            self._changed.notify()

    def take_error(self) -> int:
        """Return the errno of a sync that has failed since the last call; 0: none has."""
        with self._changed:
            error, self._error = self._error, 0
            return error

    def replace(self, fd: int) -> None:
        """Go on in another file; fd: -1, or there are no more descriptors: in none."""
        copy, failure = -1, 0
        try:
            copy = fd if fd < 0 else os.dup(fd)
        except OSError as error:
            failure = error.errno or errno.EMFILE
        with self._changed:
            self._next.append(copy)
            self._waits, self._error = False, failure
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._next.append(_ENDED)
            self._changed.notify()

    def _run(self) -> None:
        while self._fd != _ENDED:
            with self._changed:
                self._changed.wait_for(lambda: self._waits or self._next)
                self._changed.wait_for(lambda: self._next, _SYNC_S)
                files, self._next = self._next, []
                syncs = not files and self._fd >= 0 and self._permit.is_open
                self._waits = self._waits and not syncs
            for fd in files:
                self._go_on_in(fd)
            if syncs:
                self._sync()

    def _go_on_in(self, fd: int) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = fd

    def _sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            with self._changed:
                if not self._next:
                    self._waits, self._error = True, error.errno or errno.EIO


class ThreadsIoEngine:
    """Implements `io.base.IoEngine`."""

    def __init__(self, pool: Pool, memory: memoryview, base_address: int, limits: IoLimits) -> None:
        """Start the threads. Raises: EngineError: fewer than two (one is kept for reads)."""
        if limits.threads < 2:
            raise EngineError(
                f"io_threads={limits.threads}: at least 2, one of them is kept for reads"
            )
        assert memory.format == "B"
        assert base_address % PAGE_BYTES == 0
        self.name = f"threads ({'O_DIRECT' if pool.direct else 'buffered'})"
        self._pool = pool
        self._memory = memory
        self._base_address = base_address
        self._limits = limits
        self._permits = pool.permits
        self._leased = any(permit is not None for permit in pool.permits)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queue: deque[_Work] = deque()
        self._running: dict[int, _Work] = {}
        self._regions: dict[tuple[int, int], ForeignSlab] = {}  # by owner and target
        self._logs = [
            LogWriter(pool.log(target), functools.partial(pool.background[target].run, "log"))
            for target in range(pool.target_count)
        ]
        #: By target; None: no other host reads its table.
        self._syncs = [
            None if permit is None else TableSync(pool.table_fd(target)[0], permit)
            for target, permit in enumerate(pool.permits)
        ]
        self._completions: list[Completion] = []
        self._threads_alive = limits.threads * (1 + _SPARE_FACTOR)
        self._closed = False
        self._waker = Waker()  # the threads keep it open until the last one has ended
        for number in range(self._threads_alive):
            threading.Thread(target=self._run, name=f"io-{number}", daemon=True).start()

    # ---- the caller's side ----------------------------------------------------------------

    @property
    def stamp(self) -> Stamp:
        return self._pool.stamp

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        return self._pool.begin_reset(tag, named)

    def attach(self) -> None:
        return None

    def room(self) -> Room:
        """Return room for one read per thread beyond those that run, so that no thread waits for
        the caller, and for as many writes as leave a thread to the reads.
        """
        with self._lock:
            held = [*self._queue, *(work for work in self._running.values() if work.wanted)]
            reads = sum(work.op.is_read for work in held)
            writes = len(held) - reads
            lost = sum(not work.wanted for work in self._running.values())
            working = min(self._threads_alive - lost, self._limits.threads)
            return Room(max(0, 2 * working - reads), max(0, working - 1 - writes))

    def submit(self, ops: Sequence[IoOp]) -> None:
        with self._lock:
            assert not self._closed, "submit after close"
            self._queue += [self._checked(op) for op in ops if op.kind is not OpKind.RESET]
            self._work.notify(len(ops))
        for op in ops:  # not under the lock: a superblock that cannot be written ends here
            if op.kind is OpKind.RESET:
                target = op.pool_slot % self._pool.target_count
                epoch = self._pool.superblocks[target].epoch
                end = functools.partial(self._superblock_ended, op.token, target, epoch)
                self._pool.write_superblock(target, end)

    def _checked(self, op: IoOp) -> _Work:
        offset = op.address - self._base_address
        assert offset % PAGE_BYTES == 0
        assert 0 <= offset <= len(self._memory) - self._pool.slot_bytes
        assert 0 <= op.payload_bytes <= self._pool.slot_bytes - HEADER_BYTES
        assert op.identity is not None
        assert op.stamp is not None
        check_key(op.identity.key)
        permit = None if op.is_read else self._permits[op.pool_slot % len(self._permits)]
        return _Work(op, self._files_of(op), permit)

    def _files_of(self, op: IoOp) -> SlotFiles:
        if op.owner == OURS:
            return SlotFiles.of(self._pool, op.pool_slot)
        assert op.is_read, "a write to another engine's region"
        target = op.pool_slot % self._pool.target_count
        region = self._regions.get((op.owner, target), NO_REGION)
        return SlotFiles.of_region(self._pool, op.pool_slot, region)

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        asked = set(tokens)
        with self._lock:
            withdrawn = [work.op.token for work in self._queue if work.op.token in asked]
            self._queue = deque(work for work in self._queue if work.op.token not in asked)
            for token in asked & self._running.keys():
                self._give_up(self._running[token])
        return withdrawn

    def replace_target(self, target: int) -> None:
        """An operation has the files of its submission; log and sync have their own."""
        self._logs[target].replace(self._pool.log_fd(target))
        sync = self._syncs[target]
        if sync is not None:
            sync.replace(self._pool.table_fd(target)[0])

    def hint(self, target: int, record: HintRecord) -> None:
        hint = LogRecord.hint(
            record.region_uuid, record.slot, record.generation, record.times, record.member
        )
        self._logs[target].add([hint])

    def attach_region(self, owner: int, target: int, region: ForeignSlab) -> None:
        self._regions[owner, target] = region

    def detach_region(self, owner: int, target: int) -> None:
        self._regions.pop((owner, target), None)

    def poll(self) -> list[Completion]:
        # Clear the event before looking: what completes in between signals it again.
        self._waker.clear()
        with self._lock:
            completions, self._completions = self._completions, []
            return completions

    def fileno(self) -> int:
        return self._waker.fd

    def close(self, timeout_s: float = 5.0) -> bool:
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            while self._queue:
                self._complete(Completion(self._queue.popleft().op.token, CANCELLED))
            self._work.notify_all()
            ended = self._idle.wait_for(lambda: self._threads_alive == 0, timeout_s)
        for sync in filter(None, self._syncs):
            sync.end()
        for log in self._logs:
            ended &= log.close(max(0.0, end_s - time.monotonic()))
        return self._pool.await_superblocks(max(0.0, end_s - time.monotonic())) and ended

    # ---- under the lock -------------------------------------------------------------------

    def _complete(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._waker.wake()

    def _give_up(self, work: _Work) -> None:
        if not work.wanted:
            return
        work.wanted = False
        self._work.notify()

    def _take(self) -> _Work | None:
        """Wait for work; None: this thread must end, and does not count any more."""
        while not self._closed:
            is_free = sum(one.wanted for one in self._running.values()) < self._limits.threads
            work = self._next() if is_free and self._queue else None
            if work is not None:
                self._running[work.op.token] = work
                return work
            # Whoever ends an operation looks for the next one itself.
            self._work.wait(PERMIT_POLL_S if is_free and self._queue else None)
        self._leave()
        return None

    def _next(self) -> _Work | None:
        """Take the first that may start now; cancel what waits for a lease that is lost."""
        if not self._leased or self._queue[0].permit is None:
            return self._queue.popleft()
        for work in [*self._queue]:
            if work.permit is None or work.permit.is_open:
                self._queue.remove(work)
                return work
            if work.permit.is_lost:
                self._queue.remove(work)
                self._complete(Completion(work.op.token, CANCELLED))
        return None

    def _leave(self) -> None:
        self._threads_alive -= 1
        self._work.notify()  # one that was spare takes its place
        self._idle.notify_all()

    # ---- the threads ----------------------------------------------------------------------

    def _run(self) -> None:
        unbind_this_thread()
        while True:
            with self._lock:
                work = self._take()
            if work is None:
                return
            # An exception here is a bug; the operation must end even then, and the thread too.
            outcome, ends = io_error(errno.EIO), True
            try:
                outcome = self._execute(work)
                ends = False
            finally:
                with self._lock:
                    del self._running[work.op.token]
                    self._complete(Completion(work.op.token, outcome, time.monotonic()))
                    if ends:
                        self._leave()
            if outcome.ok and not work.op.is_read:
                self._log(work.op)

    def _log(self, op: IoOp) -> None:
        """Log a write that has ended."""
        assert op.identity is not None
        assert op.stamp is not None
        slot, target = divmod(op.pool_slot, self._pool.target_count)
        record = LogRecord.put(slot, op.identity, op.stamp.epoch, single_copy=op.single_copy)
        self._logs[target].add([record])

    def _execute(self, work: _Work) -> Outcome:
        op = work.op
        assert op.identity is not None
        assert op.stamp is not None
        offset = op.address - self._base_address
        slot = self._memory[offset : offset + self._pool.slot_bytes]
        if op.is_read:
            tag, size = op.stamp.tag, op.payload_bytes
            return read_slot(self._pool, slot, work.files, op.identity, tag, size)
        wanted = lambda: work.wanted  # noqa: E731
        if work.permit is not None:
            wanted = functools.partial(work.permit.wait, wanted)
        payload = Payload(op.payload_bytes, op.payload_crc, op.single_copy)
        sync = self._syncs[op.pool_slot % len(self._syncs)]
        if sync is not None and (error := sync.take_error()):
            return io_error(error)
        outcome = write_slot(self._pool, slot, work.files, op.identity, op.stamp, wanted, payload)
        if sync is not None and outcome.ok:
            sync.wrote()
        return outcome

    def _superblock_ended(self, token: int, target: int, epoch: int, outcome: Outcome) -> None:
        if outcome.ok:
            self._logs[target].add([LogRecord.reset(epoch)])
        with self._lock:
            self._complete(Completion(token, outcome, time.monotonic()))
