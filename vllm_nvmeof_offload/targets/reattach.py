# SPDX-License-Identifier: Apache-2.0
"""Watches targets from a thread that nobody waits for, and has those that are away looked for.

The thread reads sysfs and the mount table, and starts `prober`s; it touches no target. What it
finds it posts to the pipeline's thread, which alone knows and changes verdicts and descriptors
(`worker.attachments`). See `health` for the rules.
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
from typing import Protocol

from vllm_nvmeof_offload.fabric.mounts import MOUNTINFO
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.targets.health import PathStates
from vllm_nvmeof_offload.targets.prober import MESSAGE_BYTES_MAX, OPENED, ProbeAnswer, ProbeJob
from vllm_nvmeof_offload.targets.watch import TargetWatch

__all__ = ["PROBE_S_MAX", "PROBE_S_MIN", "Caretaker", "Sites", "Wanted"]

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
