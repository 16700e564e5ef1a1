# SPDX-License-Identifier: Apache-2.0
"""Watches targets from a thread that nobody waits for, and has those that are away looked for.

The thread reads sysfs and the mount table, and starts `prober`s; it touches no target. What it
finds it posts to the pipeline's thread, which alone knows and changes verdicts and descriptors
(`worker.attachments`). See `health` for the rules.

What sysfs shows of one target's device and controllers, again and again, at little cost.

Takes a target's files out of service when it is gone, and puts new ones in when it is back.

On the pipeline's thread alone. Files are closed on threads of their own, when no operation
uses them any more: a close may block, and a number that is closed is soon another file's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vllm_nvmeof_offload.fabric.discover import MOUNTINFO, discover, read_states
from vllm_nvmeof_offload.fabric.topology import ABSENT, TargetFabric
from vllm_nvmeof_offload.io.base import IoEngine
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.pool.lock import DirectoryLock, LockFile
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.targets.health import PathStates, TargetHealth, Verdict
from vllm_nvmeof_offload.targets.prober import MESSAGE_BYTES_MAX, OPENED, ProbeAnswer, ProbeJob

__all__ = [
    "PROBE_S_MAX",
    "PROBE_S_MIN",
    "Attachments",
    "Caretaker",
    "Sites",
    "TargetWatch",
    "Wanted",
]


class TargetWatch:
    """Of the file system that is mounted at `target` when it is first asked, or after `renew`.

    What is mounted over it later is not what the server has open, and says nothing of it.
    """

    def __init__(self, target: str, sysfs: str = "/sys", mountinfo: str = MOUNTINFO) -> None:
        """target: absolute, without links."""
        self.target = target
        self._sysfs = sysfs
        self._mountinfo = mountinfo
        self._attachment = 0
        self._fabric: TargetFabric | None = None
        self._fabric_of = 0  # the attachment that it is of
        self._most = 0  # controllers that were there at a time
        self._device = ""  # its directory in sysfs; "": there is none to watch

    def renew(self) -> None:
        """Another file system serves from now on. On any thread; the rest is the watcher's."""
        self._attachment += 1

    def states(self) -> PathStates:
        fabric, attachment = self._fabric, self._attachment
        if fabric is None or self._fabric_of != attachment:
            fabric = self._fabric = discover(self.target, self._sysfs, self._mountinfo)
            self._fabric_of, self._most = attachment, 0
            self._device = self._device_of(fabric)
        states = read_states(fabric)
        if any(one.state == ABSENT for one in states.values()):
            # Reconnected, controllers have other names.
            again = discover(self.target, self._sysfs, self._mountinfo)
            if again.mount == fabric.mount and again.namespaces:
                self._fabric = again
                states = read_states(again)
        # One that is lost is removed after ctrl_loss_tmo: its path is missing all the same.
        self._most = max(self._most, len(states))
        return PathStates(
            known=self._most,
            carrying=sum(one.carries_io for one in states.values()),
            best=sum(one.is_best for one in states.values()),
            device=not self._device or os.path.isdir(self._device),
            attachment=attachment,
        )

    def _device_of(self, fabric: TargetFabric) -> str:
        if fabric.mount is None:
            return ""
        place = os.path.join(self._sysfs, "dev/block", fabric.mount.device)
        return place if os.path.isdir(place) else ""


logger = logging.getLogger(LOGGER_NAME)

PROBE_S_MIN = 1.0
PROBE_S_MAX = 60.0
#: A prober that has not answered by then hangs: it is left behind.
_ANSWER_S_MAX = 10.0
#: Probers of one target that hang; beyond that no more are started until one has ended.
_LEFT_MAX = 4
_LOOK_S = 1.0
_COMMAND = (sys.executable, "-m", "vllm_nvmeof_offload.targets.prober")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look for. patient: only where the mount table changes, or rarely."""

    job: ProbeJob
    patient: bool


class Sites(Protocol):
    """The pipeline's side; called on its thread alone."""

    def look(self, states: Sequence[PathStates]) -> list[Wanted | None]:
        """Take in what sysfs shows; say what to look for, by target."""

    def attach(self, target: int, job: ProbeJob, answer: ProbeAnswer, fds: list[int]) -> str:
        """Take the descriptors over; returns why not, and then they are closed."""


class _Probe:
    """One child under way."""

    def __init__(self, job: ProbeJob, command: Sequence[str], now_s: float) -> None:
        """OSError: it cannot be started."""
        self.job = job
        self.late_s = now_s + _ANSWER_S_MAX
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.channel.send(job.encode())
            with theirs:
                # "/": no working directory that hangs, or that keeps one from being unmounted.
                # A session of its own: Ctrl-C is for the server, which ends its probers.
                self.child = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            self.channel.close()
            raise

    @property
    def has_answered(self) -> bool:
        """Or has ended."""
        poller = select.poll()  # `select.select` refuses descriptors from 1024 on
        poller.register(self.channel, select.POLLIN)
        return bool(poller.poll(0))

    def answer(self) -> tuple[ProbeAnswer, list[int]]:
        """Of a channel that is readable."""
        try:
            message, fds, *_ = socket.recv_fds(
                self.channel, MESSAGE_BYTES_MAX, len(OPENED), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            return ProbeAnswer(f"the prober cannot be heard: {error}"), []
        if not message:
            return ProbeAnswer("the prober ended without an answer"), []
        try:
            answer = ProbeAnswer.decode(message)
        except ValueError:
            answer = ProbeAnswer("its prober is of another version of this package: start anew")
        if not answer.failure and len(fds) == len(OPENED):
            return answer, fds
        for fd in fds:
            os.close(fd)
        why = answer.failure or "this process may have no more descriptors (ulimit -n)"
        return ProbeAnswer(why), []

    def end(self) -> bool:
        """True: the child has ended. False: it hangs; its kill takes effect when that ends."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(0.2)
            return True
        self.child.kill()
        return self.child.poll() is not None


@dataclass(slots=True)
class _Search:
    """For one target."""

    probe: _Probe | None = None
    changed: bool = False  # the mount table, since the last probe began
    wait_s: float = PROBE_S_MIN
    next_s: float = 0.0
    attached_s: float = float("-inf")
    said: str = ""
    left: list[subprocess.Popen[bytes]] = field(default_factory=list)


class Caretaker:
    """The thread. `post` runs a call on the pipeline's thread, soon, in order."""

    def __init__(
        self,
        sites: Sites,
        watches: Sequence[TargetWatch],
        post: Callable[[Callable[[], None]], None],
        *,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._sites = sites
        self._watches = watches
        self._post = post
        self._command = command
        self._wanted: list[Wanted | None] = [None] * len(watches)
        self._searches = [_Search() for _ in watches]
        self._looking = threading.Lock()  # held while a look is posted and has not run
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nvmeof-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; probers that hang are left behind."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=2.0)

    # -- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        with open(MOUNTINFO, encoding="utf-8") as mounts:
            while not self._stopping:
                changed = self._wait(mounts.fileno())
                for target, search in enumerate(self._searches):
                    self._tend(target, search, changed)
                states = [watch.states() for watch in self._watches]
                if self._looking.acquire(blocking=False):
                    self._post(lambda states=states: self._look(states))  # type: ignore[misc]
        for search in self._searches:
            if search.probe is not None:
                self._end(search, search.probe)
            for child in search.left:
                child.returncode = child.poll() or -9  # nobody waits; Popen would warn of that
        os.close(self._wake_fd)

    def _wait(self, mounts_fd: int) -> bool:
        """Until something happens, `_LOOK_S` at most; True: the mount table has changed."""
        poller = select.poll()
        poller.register(mounts_fd, select.POLLPRI)
        poller.register(self._wake_fd, select.POLLIN)
        for search in self._searches:
            if search.probe is not None:
                poller.register(search.probe.channel, select.POLLIN)
        ready = poller.poll(_LOOK_S * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return any(fd == mounts_fd for fd, _ in ready)

    def _tend(self, target: int, search: _Search, changed: bool) -> None:
        now_s = time.monotonic()
        search.left = [child for child in search.left if child.poll() is None]
        search.changed = search.changed or changed
        probe, wanted = search.probe, self._wanted[target]
        if probe is not None:
            if probe.has_answered:
                self._answered(target, search, probe)
            elif now_s >= probe.late_s:
                self._end(search, probe)
                self._failed(target, search, "opening it hangs")
            return
        if wanted is None or len(search.left) >= _LEFT_MAX:
            return
        # Where a prober hangs another one would hang, unless something else is mounted there.
        if not search.changed and (search.left or now_s < search.next_s):
            return
        search.changed = False
        search.next_s = now_s + (PROBE_S_MAX if wanted.patient else search.wait_s)
        try:
            search.probe = _Probe(wanted.job, self._command, now_s)
        except OSError as error:
            self._failed(target, search, f"no prober can be started: {error}")

    def _answered(self, target: int, search: _Search, probe: _Probe) -> None:
        answer, fds = probe.answer()
        self._end(search, probe)
        if answer.failure:
            self._failed(target, search, answer.failure)
            return
        # Until the pipeline has said what it wants now, nothing else is looked for.
        self._wanted[target] = None
        self._post(lambda: self._attach(target, probe.job, answer, fds))

    def _end(self, search: _Search, probe: _Probe) -> None:
        if not probe.end():
            search.left.append(probe.child)
        search.probe = None

    def _failed(self, target: int, search: _Search, why: str) -> None:
        search.wait_s = min(2 * search.wait_s, PROBE_S_MAX)
        search.next_s = time.monotonic() + search.wait_s
        if why != search.said:  # once, not at each attempt
            logger.warning("target %s is not back: %s", self._watches[target].target, why)
        search.said = why

    # -- on the pipeline's thread -----------------------------------------------------

    def _look(self, states: list[PathStates]) -> None:
        wanted = self._sites.look(states)
        self._looking.release()
        if wanted != self._wanted:
            self._wanted = wanted
            os.eventfd_write(self._wake_fd, 1)

    def _attach(self, target: int, job: ProbeJob, answer: ProbeAnswer, fds: list[int]) -> None:
        search = self._searches[target]
        why = self._sites.attach(target, job, answer, fds)
        now_s = time.monotonic()
        if why:
            self._failed(target, search, why)
            return
        # What comes and goes is looked for less and less often.
        flaps = now_s - search.attached_s < PROBE_S_MAX
        search.wait_s = min(2 * search.wait_s, PROBE_S_MAX) if flaps else PROBE_S_MIN
        search.next_s = now_s + search.wait_s
        search.attached_s, search.said = now_s, ""
        self._watches[target].renew()


#: A verdict that is no worse than the last one that was said is said at most this often.
_SAY_S_MIN = 10.0
_WORSE = list(Verdict)


@dataclass(frozen=True, slots=True)
class _Retired:
    """Files of an attachment whose operations are not all released."""

    target: int
    attachment: int
    close: Callable[[], None]


class Attachments:
    """Implements `fabric.reattach.Sites`."""

    def __init__(
        self,
        pool: Pool,
        engine: IoEngine,
        health: Sequence[TargetHealth],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._health = health
        self._clock = clock
        self._retired: list[_Retired] = []
        self._said = [(Verdict.OK, float("-inf")) for _ in health]

    def look(self, states: Sequence[PathStates]) -> list[Wanted | None]:
        wanted: list[Wanted | None] = []
        for target, (health, paths) in enumerate(zip(self._health, states, strict=True)):
            health.watched(paths)
            gone = health.verdict is Verdict.GONE
            in_service = self._pool.device(target) is not None
            if gone and in_service and not health.busy(health.attachment):
                self._detach(target)
            self._say(target, health)
            away = gone or health.verdict is Verdict.SUSPECT
            wanted.append(Wanted(self._job(target), not gone) if away else None)
        kept = [one for one in self._retired if self._health[one.target].busy(one.attachment)]
        for one in self._retired:
            if one not in kept:
                _close_aside(one.close)
        self._retired = kept
        return wanted

    def attach(self, target: int, job: ProbeJob, answer: ProbeAnswer, fds: list[int]) -> str:
        slab_fd, buffered_fd, table_fd, lock_fd = fds
        slab = Slab(Path(job.directory), (buffered_fd, table_fd))
        slab.fd, slab.direct = slab_fd, job.direct
        path = os.path.join(job.directory, "lock")
        lock = DirectoryLock(lock_fd, LockFile(path, answer.device, answer.inode))
        health = self._health[target]
        if job != self._job(target) or health.verdict.usable:

            def give_up() -> None:
                slab.close()
                lock.abandon()

            _close_aside(give_up)
            return "it has changed while it was looked at"
        self._retire(target, self._pool.exchange(target, slab, lock))
        health.attached()
        self._say(target, health)
        return ""

    def _detach(self, target: int) -> None:
        closed = Slab(self._pool.directories[target], (-1, -1))
        self._retire(target, self._pool.exchange(target, closed, None))

    def _retire(self, target: int, close: Callable[[], None]) -> None:
        """New files serve the target: the old ones go when nobody uses them."""
        self._engine.replace_target(target)
        self._retired.append(_Retired(target, self._health[target].attachment, close))

    def _job(self, target: int) -> ProbeJob:
        pool = self._pool
        slots = pool.slots // pool.target_count
        return ProbeJob(
            directory=str(pool.directories[target]),
            superblock=pool.superblock(target).encode().hex(),
            direct=pool.is_direct(target),
            slab_bytes=slots * pool.slot_bytes,
            table_bytes=slots * ENTRY_BYTES,
            pid=os.getpid(),
            device=pool.device(target),
        )

    def _say(self, target: int, health: TargetHealth) -> None:
        said, when_s = self._said[target]
        verdict, now_s = health.verdict, self._clock()
        worse = _WORSE.index(verdict) > _WORSE.index(said)
        if verdict is said or not (worse or now_s - when_s >= _SAY_S_MIN):
            return
        self._said[target] = verdict, now_s
        path = self._pool.directories[target].parents[2]
        if verdict is Verdict.OK:
            logger.info("target %s is ok again", path)
        else:
            logger.warning("target %s is %s: %s", path, verdict.value, health.reason)


def _close_aside(close: Callable[[], None]) -> None:
    threading.Thread(target=close, name="nvmeof-close", daemon=True).start()
