# SPDX-License-Identifier: Apache-2.0
"""Takes a target's files out of service when it is gone, and puts new ones in when it is back.

On the pipeline's thread alone. Files are closed on threads of their own, when no operation
uses them any more: a close may block, and a number that is closed is soon another file's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_nvmeof_offload.io.base import IoEngine
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.lock import DirectoryLock, LockFile
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.pool.table import ENTRY_BYTES
from vllm_nvmeof_offload.targets.health import PathStates, TargetHealth, Verdict
from vllm_nvmeof_offload.targets.prober import ProbeAnswer, ProbeJob
from vllm_nvmeof_offload.targets.reattach import Wanted

__all__ = ["Attachments"]

logger = logging.getLogger(LOGGER_NAME)

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
