# SPDX-License-Identifier: Apache-2.0
"""Other engines' regions on our targets: the files from which their chunks are read.

`RegionFiles` opens and closes files in the background, because both may block. `Regions`, on the
pipeline's thread, passes them to the I/O engine and has them closed after the last read that uses
them. All files are opened read-only.

A region is usable if its superblock equals ours except for uuid, slots, targets and the fields that
a reset changes. On rank 0, its uuid must also be the one that the follower saw. Each read verifies
the rest (docs/protocol.md, rule 6).

A lost target can return with a different file system, and the old one cannot be mounted again while
files on it are open. So the files of regions on a lost target are closed, and the files of all
owners are reopened when a target returns.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import PoolFormatError
from vllm_nvmeof_offload.follow.owners import OWNERS_MAX
from vllm_nvmeof_offload.io.base import ForeignSlab, IoEngine
from vllm_nvmeof_offload.native import Machine
from vllm_nvmeof_offload.pool.folder import Folder, open_private
from vllm_nvmeof_offload.pool.format import SLAB_FILE, SlotPlace, Superblock, read_superblock
from vllm_nvmeof_offload.pool.pool import Background, Pool
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    Verdict,
    owner_of,
    slot_of,
    target_of,
)

_OPENING_MAX = 64  # the maximum number of attaches in progress; others fail with EAGAIN
_OPENERS = 8  # the number of threads that open files, and so of opens that can hang
#: Numbers for owners that only peers have named, above those that the follower assigns.
_UNNAMED_OWNERS = range(OWNERS_MAX + 1, 1 << 15)
_UNUSED_S = 60.0  # the time without a request after which such an owner's files are closed
_AGAIN_S = 0.5  # the minimum interval between two searches for regions

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class OpenRegions:
    """The answer to `command`: the regions found, by target, or an errno in `error`."""

    command: AttachCommand
    by_target: dict[int, ForeignSlab] = field(default_factory=dict)
    error: int = 0


class FoundPool(NamedTuple):
    """A pool that no command has named: the K in its `engine-K`, and its uuid on this rank."""

    engine_index: int
    pool_uuid: bytes


class Regions:
    """The regions in use, by engine (owner). All calls come from the pipeline's thread."""

    def __init__(
        self, machine: Machine, io: IoEngine, opener: RegionFiles, target_count: int
    ) -> None:
        self._machine, self._io, self._opener = machine, io, opener
        self._wanted: dict[int, AttachCommand] = {}  # the newest command, by owner
        self._used: dict[tuple[int, int], ForeignSlab] = {}  # by owner and target
        self._leaving: list[tuple[int, int, ForeignSlab]] = []
        self._usable = [True] * target_count
        self._attachments = [0] * target_count
        self._unnamed: dict[int, int] = {}  # owners that only peers have named, by engine
        self._asked_s: dict[int, float] = {}  # when such an owner was last requested
        self._missed: set[int] = set()  # targets never searched, or with possibly replaced regions

    def attach(self, command: AttachCommand) -> None:
        self._machine.attach(command.op, command.owner)
        self._open(command)

    def detach(self, owner: int) -> None:
        self._machine.detach(owner)
        self._wanted.pop(owner, None)
        self._drop_owner(owner)

    def slot_place(self, place: int) -> SlotPlace | None:
        """Return the place that the slot's header must name, or None if its region is not open."""
        region = self._used.get((owner_of(place), target_of(place)))
        return None if region is None else region.place(slot_of(place))

    def find(self, uuid: bytes) -> tuple[int, int] | None:
        """Return the owner and target of the region `uuid`. If it is not open, start a search and
        return None: an engine that loads nothing itself has opened no regions."""
        found = next((key for key, region in self._used.items() if region.uuid == uuid), None)
        if found is None:
            self._opener.look_for(uuid)
        elif found[0] in self._asked_s:
            self._asked_s[found[0]] = time.monotonic()
        return found

    def target_changed(self, target: int, verdict: Verdict, attachment: int) -> None:
        if verdict is Verdict.GONE or attachment != self._attachments[target]:
            self._missed.add(target)
            for owner, at in [key for key in self._used if key[1] == target]:
                self._drop(owner, at)
        self._attachments[target] = attachment
        self._usable[target] = verdict.usable
        if verdict.usable and target in self._missed:
            self._missed.discard(target)
            for owner, command in self._wanted.items():
                self._machine.await_files(owner)
                self._open(replace(command))  # a copy, so that older answers are ignored

    def step(self) -> None:
        """Apply the opener's answers, and close files that are no longer used."""
        for opened in self._opener.take():
            if self._wanted.get(opened.command.owner) is opened.command:
                self._take_in(opened)
            else:
                self._opener.close(opened.by_target.values())
        self._open_found()
        if self._leaving:
            busy = [one for one in self._leaving if self._machine.foreign_reads(*one[:2])]
            self._opener.close(one[2] for one in self._leaving if one not in busy)
            self._leaving = busy

    def _open_found(self) -> None:
        """Open regions that only peers have named, and close those that peers no longer request."""
        now_s = time.monotonic()
        for found in self._opener.take_found():
            index = found.engine_index
            if index not in self._unnamed and len(self._unnamed) == len(_UNNAMED_OWNERS):
                continue
            owner = self._unnamed.setdefault(index, _UNNAMED_OWNERS[len(self._unnamed)])
            self._asked_s[owner] = now_s
            self._machine.await_files(owner)
            self._open(AttachCommand(0, owner, *found))
        for owner in [one for one, asked_s in self._asked_s.items() if now_s - asked_s > _UNUSED_S]:
            del self._asked_s[owner]
            self.detach(owner)

    def _open(self, command: AttachCommand) -> None:
        self._wanted[command.owner] = command
        targets = [target for target, usable in enumerate(self._usable) if usable]
        self._missed |= set(range(len(self._usable))) - set(targets)
        self._opener.open(command, targets)

    def _take_in(self, opened: OpenRegions) -> None:
        owner = opened.command.owner
        self._drop_owner(owner)
        for target, region in opened.by_target.items():
            if target in self._missed:  # lost since then, and may be a different file system now
                self._opener.close([region])
                continue
            self._used[owner, target] = region
            self._io.attach_region(owner, target, region)
        if not self._machine.attached(owner, opened.error) or opened.error:
            self._drop_owner(owner)

    def _drop_owner(self, owner: int) -> None:
        for key in [key for key in self._used if key[0] == owner]:
            self._drop(*key)

    def _drop(self, owner: int, target: int) -> None:
        self._io.detach_region(owner, target)
        self._leaving.append((owner, target, self._used.pop((owner, target))))


class RegionFiles:
    """The files of regions in the directories next to those of our pool. Only `end` blocks."""

    def __init__(self, pool: Pool, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when `take` or `take_found` has something to return."""
        self._pool = pool
        self._wake = wake
        self._background = Background("nvmeof-attach", _OPENERS)
        self._lock = threading.Lock()
        self._answers: deque[OpenRegions] = deque()
        self._opening = 0
        self._sought: set[bytes] = set()  # regions named by peers, to search for
        self._found: deque[FoundPool] = deque()
        self._is_looking, self._look_again_s = False, 0.0
        self._open_fds: dict[int, int] = {}  # descriptors and their targets
        self._ended = False

    def open(self, command: AttachCommand, targets: Sequence[int]) -> None:
        """Open the regions of the command's owner on these targets."""
        with self._lock:
            full = self._opening >= _OPENING_MAX
            self._opening += not full
        if full:
            self._answer(OpenRegions(command, error=errno.EAGAIN))
        else:
            self._background.run(object(), partial(self._run, command, targets))

    def take(self) -> list[OpenRegions]:
        """Return the answers received since the last call. The caller must close their files."""
        return _drained(self._answers)

    def close(self, regions: Iterable[ForeignSlab]) -> None:
        """Close the files of these regions."""
        with self._lock:
            targets = self._open_fds.copy()
        for fd in [region.fd for region in regions]:
            if fd in targets:  # otherwise `end` has closed it
                background = self._pool.background[targets[fd]]
                background.run("close", partial(self._close, [fd]))

    def look_for(self, region_uuid: bytes) -> None:
        """Search our targets for this region, unless a search is already running."""
        with self._lock:
            if len(self._sought) < _OPENING_MAX:
                self._sought.add(region_uuid)
            if self._is_looking or self._ended or time.monotonic() < self._look_again_s:
                return
            self._is_looking = True
        self._background.run("look", self._look)

    def take_found(self) -> list[FoundPool]:
        """Take the pools of the regions found since the last call."""
        return _drained(self._found)

    def end(self, abandon: bool = False) -> None:
        """Close all files, including those still being opened. `abandon` is as in `Pool.close`."""
        with self._lock:
            self._ended = True
            fds = () if abandon else tuple(self._open_fds)
            self._open_fds = {}
        self._background.end()
        self._close(fds, known=True)

    def _look(self) -> None:
        """Search the pools next to ours for the wanted regions."""
        found: list[FoundPool] = []
        try:
            for target, ours in enumerate(self._pool.superblocks):
                if self._pool.device(target) is None:
                    continue  # the target is lost
                pools = self._pool.keyspace(target)
                for name in os.listdir(pools.place):
                    index = name.removeprefix("engine-")
                    if index == name or not index.isdigit():
                        continue
                    with contextlib.suppress(OSError, PoolFormatError):
                        region = _open_folder(pools, name, ours.rank)
                        theirs = read_superblock(region.place)
                        if theirs is not None and theirs.place(0).region_uuid in self._sought:
                            found.append(FoundPool(int(index), theirs.uuid))
        except OSError as failure:
            logger.warning("cannot search for the regions that peers named: %s", failure)
        finally:
            self._looked(found)

    def _looked(self, found: list[FoundPool]) -> None:
        self._found += dict.fromkeys(found)
        with self._lock:
            self._sought.clear()
            self._is_looking, self._look_again_s = False, time.monotonic() + _AGAIN_S
        if found:
            self._wake()

    def _run(self, command: AttachCommand, targets: Sequence[int]) -> None:
        # An unexpected exception is a bug, but the op must end even then.
        answer = OpenRegions(command, error=errno.EIO)
        try:
            answer = self._find(command, targets)
        finally:
            self._end(answer)

    def _end(self, answer: OpenRegions) -> None:
        with self._lock:
            self._opening -= 1
            ended = self._ended
            if not ended:
                found = answer.by_target.items()
                self._open_fds.update({region.fd: target for target, region in found})
        if ended:
            self._close([one.fd for one in answer.by_target.values()], known=True)
        else:
            self._answer(answer)

    def _answer(self, answer: OpenRegions) -> None:
        self._answers.append(answer)
        self._wake()

    def _find(self, command: AttachCommand, targets: Sequence[int]) -> OpenRegions:
        found: dict[int, ForeignSlab] = {}
        error, why = errno.ENOENT, "it is on none of our targets"
        try:
            for target in targets:
                region = self._region(command, target)
                if region is not None:
                    found[target] = region
            if found:
                return OpenRegions(command, found)
        except OSError as failure:
            error, why = failure.errno or errno.EIO, str(failure)
        except PoolFormatError as failure:
            error, why = errno.ESTALE, str(failure)
        self._close([region.fd for region in found.values()], known=True)
        logger.warning("cannot read the pool of engine %d: %s", command.engine_index, why)
        return OpenRegions(command, error=error)

    def _region(self, command: AttachCommand, target: int) -> ForeignSlab | None:
        """Open the region of the command's pool on `target`; None if it is not there. Raises
        PoolFormatError if its superblock is damaged or has a different shape, OSError if a file
        cannot be read."""
        ours = self._pool.superblocks[target]
        pools = self._pool.keyspace(target)
        try:
            region = _open_folder(pools, f"engine-{command.engine_index}", ours.rank)
            found = read_superblock(region.place)
        except (FileNotFoundError, NotADirectoryError):
            return None
        # Each rank's pool has its own uuid, and the follower knows only rank 0's. On other ranks,
        # slots are verified against the key and generation in rank 0's table.
        if found is None or (ours.rank == 0 and found.uuid != command.pool_uuid):
            return None
        if not _is_readable(found, ours):
            raise PoolFormatError(f"{region.path} has another slot layout")
        # This host's page cache may not show what another host writes.
        is_direct = found.is_leased or self._pool.is_direct[target]
        direct = os.O_DIRECT if is_direct else 0
        fd = open_private(region.place / SLAB_FILE, os.O_RDONLY | direct)
        if os.fstat(fd).st_size < found.slots * found.slot_bytes:
            os.close(fd)
            raise PoolFormatError(f"the slab in {region.path} is truncated")
        return ForeignSlab(fd, found.place(0).region_uuid, found.rank)

    def _close(self, fds: Iterable[int], known: bool = False) -> None:
        """Close these descriptors. With `known`, also close those that are not in `_open_fds`."""
        for fd in fds:
            with self._lock:
                if not known and fd not in self._open_fds:
                    continue  # already closed by `end`
                self._open_fds.pop(fd, None)
            with contextlib.suppress(OSError):
                os.close(fd)


def _drained(queue: deque[_T]) -> list[_T]:
    """Take what other threads have appended so far."""
    return [queue.popleft() for _ in range(len(queue))]


def _open_folder(pools: Folder, engine: str, rank: int) -> Folder:
    part = f"{engine}/rank-{rank}"
    return Folder.open(pools.path / part, pools.place / part)


def _is_readable(found: Superblock, ours: Superblock) -> bool:
    """Return whether the region `found` has chunks of our shape and keyspace."""
    same = {
        name: getattr(ours, name)
        for name in ("uuid", "slots", "target_index", "target_count", "epoch", "tag", "sequence")
    }
    return replace(found, **same).is_alike(ours)
