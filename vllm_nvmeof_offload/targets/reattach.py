# SPDX-License-Identifier: Apache-2.0
"""Closes the files of a target that is gone, and serves the target again when it returns.

`TargetWatcher` is a thread that reads sysfs and the mount table and starts `prober`s, short-lived
child processes, because a target's path can hang the thread that touches it. The watcher posts its
findings to the pipeline's thread, which runs `Attachments`, the only code that changes verdicts
(`health`) and descriptors.

When the kernel has released all operations of a target that is gone, the target's descriptors and
lock are closed, so that the file system can be unmounted: a dead xfs cannot be mounted again while
a process holds the old mount. A prober starts immediately when the mount table changes, otherwise
after `PROBE_S_MIN` seconds; each failure doubles the interval, up to `PROBE_S_MAX`. The prober
claims the rank directory, compares the superblock (uuid, geometry, epoch), reads a page of the
slab, updates a superblock that missed a reset, and passes on its descriptors. Later operations
belong to a new *attachment*; outcomes of older attachments no longer count. A suspect target is
probed in the same way, but is reattached only if a different file system is mounted there than the
hung one.

Files are closed on separate threads, because a close can block, and only when no operation uses
them, because a closed descriptor's number is soon reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.child import child_command, start_child
from vllm_nvmeof_offload.fabric import ABSENT, TargetFabric, discover, read_states
from vllm_nvmeof_offload.io.base import IoEngine, Waker
from vllm_nvmeof_offload.mounts import MOUNTINFO
from vllm_nvmeof_offload.pool.folder import Folder
from vllm_nvmeof_offload.pool.lease import DirectoryLock, FileId
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import Verdict
from vllm_nvmeof_offload.targets.health import PathStates, TargetHealth
from vllm_nvmeof_offload.targets.prober import (
    DESCRIPTORS,
    MESSAGE_BYTES_MAX,
    ProbeAnswer,
    ProbeRequest,
)

PROBE_S_MIN = 1.0
PROBE_S_MAX = 60.0
#: A prober that has not answered after this time counts as hung and is abandoned.
_ANSWER_S_MAX = 10.0
#: The maximum number of abandoned probers per target; another starts only after one of these exits.
_ABANDONED_MAX = 4
_LOOK_S = 1.0
#: The minimum time after a logged verdict before another that is no worse is logged.
_LOG_S_MIN = 10.0
_COMMAND = tuple(child_command("targets.prober"))


@dataclass
class TargetPaths:
    """Reads the state of one target's device and controllers from sysfs, at little cost.

    `target` is absolute, without links. The observed file system is the one that is mounted there
    at the first call to `states` or the first after `renew`. A later mount over it is ignored,
    because the server does not have that one open.
    """

    target: str
    sysfs: str = "/sys"
    mountinfo: str = MOUNTINFO
    _attachment: int = 0
    _fabric: TargetFabric | None = None
    _fabric_of: int = 0  # the attachment that `_fabric` belongs to
    _known: int = 0  # the maximum number of controllers seen at a time
    _device: str = ""  # the device's directory in sysfs, or empty

    def renew(self) -> None:
        """Make the next call to `states` look up the file system again; callable on any thread."""
        self._attachment += 1

    def states(self) -> PathStates:
        fabric, attachment = self._fabric, self._attachment
        if fabric is None or self._fabric_of != attachment:
            fabric = self._fabric = discover(self.target, self.sysfs, self.mountinfo)
            self._fabric_of, self._known = attachment, 0
            self._device = ""
            if fabric.mount is not None:
                device = os.path.join(self.sysfs, "dev/block", fabric.mount.device)
                self._device = device if os.path.isdir(device) else ""
        states = read_states(fabric)
        if any(one.state == ABSENT for one in states.values()):
            # Reconnected controllers can have different names.
            renamed = discover(self.target, self.sysfs, self.mountinfo)
            if renamed.mount == fabric.mount and renamed.namespaces:
                self._fabric = renamed
                states = read_states(renamed)
        # A lost controller disappears after ctrl_loss_tmo, but its path still counts as missing.
        self._known = max(self._known, len(states))
        return PathStates(
            known=self._known,
            carrying=sum(one.carries_io for one in states.values()),
            best=sum(one.is_best for one in states.values()),
            device=not self._device or os.path.isdir(self._device),
            attachment=attachment,
        )


class Attachments:
    """Opens and closes targets in the pool; every method runs on the pipeline's thread."""

    def __init__(self, pool: Pool, engine: IoEngine, health: Sequence[TargetHealth]) -> None:
        self._pool = pool
        self._engine = engine
        self._health = health
        #: (target, attachment, close) for replaced files that operations may still use.
        self._retired: list[tuple[int, int, Callable[[], None]]] = []
        self._logged = [(Verdict.OK, float("-inf")) for _ in health]

    def update(self, states: Sequence[PathStates]) -> list[ProbeRequest | None]:
        """Apply the states of all targets; return what to probe for, by target."""
        requests: list[ProbeRequest | None] = []
        for target, (health, paths) in enumerate(zip(self._health, states, strict=True)):
            health.watched(paths)
            is_open = self._pool.permits[target].is_open
            health.writes(is_open, "its lease could not be renewed in time")
            if self._has_lost(target):
                health.lost("another server holds its lease")
            is_gone = health.verdict is Verdict.GONE
            is_open = self._pool.device(target) is not None
            if is_gone and is_open and not health.busy(health.attachment):
                self._replace(target, None, None)
            self._log_change(target)
            away = is_gone or health.verdict is Verdict.SUSPECT
            away = away and not self._has_lost(target)  # unless lost for good
            requests.append(self._request(target) if away else None)
        kept = []
        for target, attachment, close in self._retired:
            if self._health[target].busy(attachment):
                kept.append((target, attachment, close))
            else:
                self._pool.background[target].run("close", close)
        self._retired = kept
        return requests

    def attach(
        self, target: int, request: ProbeRequest, answer: ProbeAnswer, fds: list[int]
    ) -> str:
        """Serve `target` from these descriptors, or close them and return why not."""
        slab_fd, buffered_fd, table_fd, log_fd, lock_fd, folder_fd = fds
        files, directory = (slab_fd, buffered_fd, table_fd, log_fd), Path(request.directory)
        slab = Slab(directory, files, request.direct, Folder(folder_fd, directory))
        lock = DirectoryLock(lock_fd, directory, FileId(answer.device, answer.inode))
        health = self._health[target]
        if request != self._request(target) or health.verdict.usable:
            for close in (slab.close, lock.abandon):
                self._pool.background[target].run("close", close)
            return "its state changed while it was probed"
        self._replace(target, slab, lock)
        health.attached()
        self._log_change(target)
        return ""

    def _has_lost(self, target: int) -> bool:
        return self._pool.permits[target].is_lost

    def _replace(self, target: int, slab: Slab | None, lock: DirectoryLock | None) -> None:
        """Serve the target from new files. The old files are closed when no operation uses them."""
        close = self._pool.exchange(target, slab, lock)
        self._engine.replace_target(target)
        self._retired.append((target, self._health[target].attachment, close))

    def _request(self, target: int) -> ProbeRequest:
        pool = self._pool
        return ProbeRequest(
            directory=str(pool.directories[target]),
            superblock=pool.superblocks[target].encode().hex(),
            direct=pool.is_direct[target],
            owner=pool.owner(target).hex(),
            device=pool.device(target),
            in_group=pool.permits[target].is_limited,
        )

    def _log_change(self, target: int) -> None:
        health, now_s = self._health[target], time.monotonic()
        (logged, when_s), verdict = self._logged[target], health.verdict
        if verdict is logged or not (verdict > logged or now_s - when_s >= _LOG_S_MIN):
            return
        self._logged[target] = verdict, now_s
        path = self._pool.directories[target].parents[2]
        if verdict is Verdict.OK:
            logger.info("target %s is ok again", path)
        else:
            logger.warning("target %s is %s: %s", path, verdict, health.reason)


class _Probe:
    def __init__(self, request: ProbeRequest, command: Sequence[str], now_s: float) -> None:
        self.request = request
        self.late_s = now_s + _ANSWER_S_MAX
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.channel.send(json.dumps(asdict(request)).encode())
            with theirs:
                self.child = start_child(command, theirs.fileno())
        except BaseException:
            self.channel.close()
            raise

    def answer(self) -> tuple[ProbeAnswer, list[int]]:
        """Receive the answer from a readable channel. A failure has no descriptors."""
        try:
            message, fds, *_ = socket.recv_fds(
                self.channel, MESSAGE_BYTES_MAX, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            return ProbeAnswer(f"cannot receive the prober's answer: {error}"), []
        if not message:
            return ProbeAnswer("the prober exited without an answer"), []
        answer = ProbeAnswer.decode(message)
        if not answer.failure and len(fds) == DESCRIPTORS:
            return answer, fds
        for fd in fds:
            os.close(fd)
        too_many = "this process has run out of descriptors (ulimit -n)"
        return ProbeAnswer(answer.failure or too_many), []

    def end(self) -> bool:
        """Close the channel; return whether the child has exited. A hung child is killed."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(0.2)
            return True
        self.child.kill()
        return self.child.poll() is not None


@dataclass(slots=True)
class _Search:
    """The search for a lost target. The pipeline's thread sets `request` while it is lost."""

    paths: TargetPaths
    request: ProbeRequest | None = None
    probe: _Probe | None = None
    changed: bool = False  # the mount table changed since the last probe began
    wait_s: float = PROBE_S_MIN
    next_s: float = 0.0
    attached_s: float = float("-inf")
    logged: str = ""
    abandoned: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def failed(self, reason: str) -> None:
        self.wait_s = min(2 * self.wait_s, PROBE_S_MAX)
        self.next_s = time.monotonic() + self.wait_s
        if reason != self.logged:  # log it once, not at each attempt
            logger.warning("target %s is still unavailable: %s", self.paths.target, reason)
        self.logged = reason

    def succeeded(self) -> None:
        # A target that is lost repeatedly is probed less and less often.
        now_s = time.monotonic()
        flaps = now_s - self.attached_s < PROBE_S_MAX
        self.wait_s = min(2 * self.wait_s, PROBE_S_MAX) if flaps else PROBE_S_MIN
        self.next_s = now_s + self.wait_s
        self.attached_s, self.logged = now_s, ""
        self.paths.renew()

    def end_probe(self) -> None:
        if self.probe is not None and not self.probe.end():
            self.abandoned.append(self.probe.child)
        self.probe = None


class TargetWatcher:
    """The thread that watches all targets and searches for lost ones."""

    def __init__(
        self,
        attachments: Attachments,
        targets: Sequence[str],
        post: Callable[[Callable[[], None]], None],
        *,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        """Watch `targets` (see `TargetPaths`). `post` runs calls in order on the pipeline's
        thread."""
        self._attachments = attachments
        self._post = post
        self._command = command
        self._searches = [_Search(TargetPaths(target)) for target in targets]
        self._update_is_posted = False
        self._waker = Waker()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nvmeof-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Hung probers are abandoned."""
        self._stopping = True
        self._waker.wake()
        self._thread.join(timeout=2.0)

    # -- on the watcher's thread ------------------------------------------------------

    def _run(self) -> None:
        with open(MOUNTINFO, encoding="utf-8") as mounts:
            while not self._stopping:
                ready = self._wait(mounts.fileno())
                for target, search in enumerate(self._searches):
                    search.changed |= mounts.fileno() in ready
                    self._advance(target, search, ready)
                states = [search.paths.states() for search in self._searches]
                if not self._update_is_posted:
                    self._update_is_posted = True
                    self._post(lambda states=states: self._update(states))  # type: ignore[misc]
        for search in self._searches:
            search.end_probe()
            for child in search.abandoned:
                child.returncode = child.poll() or -9  # else Popen warns of an unreaped child

    def _wait(self, mounts_fd: int) -> set[int]:
        """Wait for an event, at most `_LOOK_S`; return the ready descriptors."""
        poller = select.poll()  # `select.select` refuses descriptors from 1024 on
        poller.register(mounts_fd, select.POLLPRI)
        poller.register(self._waker.fd, select.POLLIN)
        for search in self._searches:
            if search.probe is not None:
                poller.register(search.probe.channel, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(_LOOK_S * 1000)}
        self._waker.clear()
        return ready

    def _advance(self, target: int, search: _Search, ready: set[int]) -> None:
        """Take a prober's answer, abandon a hung prober, or start one that is due."""
        now_s = time.monotonic()
        search.abandoned = [child for child in search.abandoned if child.poll() is None]
        probe, request = search.probe, search.request
        if probe is not None:
            if probe.channel.fileno() in ready:
                self._answered(target, search, probe)
            elif now_s >= probe.late_s:
                search.end_probe()
                search.failed("opening it hangs")
            return
        if request is None or len(search.abandoned) >= _ABANDONED_MAX:
            return
        # While one prober hangs, another one would hang too, unless the mount has changed.
        if not search.changed and (search.abandoned or now_s < search.next_s):
            return
        search.changed, search.next_s = False, now_s + search.wait_s
        try:
            search.probe = _Probe(request, self._command, now_s)
        except OSError as error:
            search.failed(f"cannot start a prober: {error}")

    def _answered(self, target: int, search: _Search, probe: _Probe) -> None:
        answer, fds = probe.answer()
        search.end_probe()
        if answer.failure:
            search.failed(answer.failure)
            return
        # Probe nothing until the pipeline's thread has set the next request.
        search.request = None
        self._post(lambda: self._attach(target, probe.request, answer, fds))

    # -- on the pipeline's thread -----------------------------------------------------

    def _update(self, states: list[PathStates]) -> None:
        requests = self._attachments.update(states)
        self._update_is_posted = False
        if requests != [search.request for search in self._searches]:
            for search, request in zip(self._searches, requests, strict=True):
                search.request = request
            self._waker.wake()

    def _attach(
        self, target: int, request: ProbeRequest, answer: ProbeAnswer, fds: list[int]
    ) -> None:
        reason = self._attachments.attach(target, request, answer, fds)
        if reason:
            self._searches[target].failed(reason)
        else:
            self._searches[target].succeeded()
