# SPDX-License-Identifier: Apache-2.0
"""Renews a server's locks, from a process of its own: `python -m …pool.heartbeat PID`.

A write or an fdatasync on a path that is lost sits in the kernel and cannot be killed; a server
with a thread in it could not be stopped. So the server tells a child what to write, by a pipe,
and never waits for it. The child has a thread for each lock: one that hangs holds up no other.
It opens the file anew each time, and writes only if that is the very file that was locked: by
then another file system may be mounted there, with an owner of its own. It holds no flock, which
must end with the server.

It is nobody's child once it runs. vLLM ends an engine by listing all processes below it and
killing one after the other, and its API server hangs for ever if one that was listed has gone
before its turn (psutil raises `NoSuchProcess`), as ours would, which ends when its worker does.
It has a session of its own: Ctrl-C reaches the whole process group of a console, and the beat
must go on while the server drains.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.lock import HEARTBEAT_PERIOD_S, DirectoryLock, LockFile, write_record

__all__ = ["ServerHeartbeat"]

logger = logging.getLogger(LOGGER_NAME)

_END_S_MAX = 0.5
#: More than `_END_S_MAX`. What takes longer is a child that cannot start: Python's files hang.
_STOP_S_MAX = 2.0
_COMMAND = [sys.executable, "-m", "vllm_nvmeof_offload.pool.heartbeat"]


class ServerHeartbeat:
    """The server's side: a daemon thread that touches no target.

    The process that beats starts at the first beat: who holds a pool for a moment needs none.
    """

    def __init__(
        self, locks: Callable[[], Iterable[DirectoryLock]], period_s: float = HEARTBEAT_PERIOD_S
    ) -> None:
        """locks: asked at each beat."""
        self._locks = locks
        self._period_s = period_s
        self._stop = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="pool-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; what hangs ends when the kernel lets it, and writes no more then."""
        self._stop.set()
        self._thread.join(_STOP_S_MAX)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._beat()
            except OSError as error:
                # The flocks still hold; only foreign hosts see less of us.
                logger.warning("heartbeat of the pool's directories failed: %s", error)
        self._part()

    def _beat(self) -> None:
        if self._child is None:
            # Its working directory must not be one that hangs, nor keep one from being unmounted.
            command = [*_COMMAND, str(os.getpid())]
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, cwd="/", bufsize=0, start_new_session=True
            )
            self._child.wait()  # it leaves the beating to a child of its own
            if self._stop.is_set():  # while it started; the locks may be released by now
                return
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        files = [(str(f.path), f.device, f.inode) for f in (x.file for x in self._locks())]
        # At most one pipe's content waits; less than PIPE_BUF is written whole or not at all.
        for file in files:
            try:
                os.write(self._child.stdin.fileno(), json.dumps(file).encode() + b"\n")
            except BlockingIOError:
                continue
            except BrokenPipeError:  # somebody has killed it; the next beat starts another
                self._part()
                return

    def _part(self) -> None:
        """Let it end, as it does at the end of its input; wait for that, but not for long."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            ended = select.poll()  # `select.select` refuses descriptors from 1024 on
            ended.register(child.stdout, select.POLLIN)
            ended.poll(_END_S_MAX * 1000)
            child.stdout.close()


class _Beater:
    """The child's thread for one lock file."""

    def __init__(self, file: LockFile, pid: int) -> None:
        self._file = file
        self._pid = pid
        self._due = threading.Event()
        self._failing = False
        threading.Thread(target=self._run, daemon=True).start()

    def beat(self) -> None:
        self._due.set()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            try:
                write_record(self._file, self._pid)
                self._failing = False
            except OSError as error:
                if not self._failing:  # said once, until it works again
                    print(f"heartbeat of {self._file.path} failed: {error}", file=sys.stderr)
                self._failing = True


def main(server: int) -> None:
    """Lines on stdin: [path, device, inode] of a lock file whose time has come.

    server: process id of who holds the locks.
    """
    if os.fork():
        os._exit(0)
    beaters: dict[LockFile, _Beater] = {}
    for line in sys.stdin.buffer:
        file = LockFile(*json.loads(line))
        if file not in beaters:
            beaters[file] = _Beater(file, server)
        beaters[file].beat()
    os._exit(0)  # not after threads that hang


if __name__ == "__main__":
    main(int(sys.argv[1]))
