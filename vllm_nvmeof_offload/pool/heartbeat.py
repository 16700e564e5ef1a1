# SPDX-License-Identifier: Apache-2.0
"""Renews a process's locks in another process: `python -m …pool.heartbeat PID`.

A write or an fdatasync on a lost path waits in the kernel and cannot be killed; a server with a
thread in such a call could not be stopped. So the server sends the names of its lock files to a
child through a pipe, and never waits for the child, which has a thread per file: one that hangs
holds up no other. The child opens a file for each heartbeat, and writes only if it is the file
that was locked, because another file system with another owner may be mounted there by then.
The child holds no flock, which must end with the server.

The child leaves the work to a child of its own and ends. vLLM ends an engine by killing all
processes below it one by one, and its API server hangs for ever if a listed process ends before
its turn (psutil raises `NoSuchProcess`), as ours would, which ends when its worker does. It has
a session of its own, because Ctrl-C reaches the whole process group of a console, and heartbeats
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

logger = logging.getLogger(LOGGER_NAME)

_END_S_MAX = 0.5
#: More than `_END_S_MAX`. Only a child that cannot start (Python's own files hang) takes longer.
_STOP_S_MAX = 2.0
_COMMAND = [sys.executable, "-m", "vllm_nvmeof_offload.pool.heartbeat"]


class Heartbeat:
    """The lock owner's side: a daemon thread that touches no target.

    The child starts at the first heartbeat, so a lock that is held for a moment needs none.
    """

    def __init__(
        self, locks: Callable[[], Iterable[DirectoryLock]], period_s: float = HEARTBEAT_PERIOD_S
    ) -> None:
        """locks: called for each heartbeat."""
        self._locks = locks
        self._period_s = period_s
        self._stop = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="pool-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; a write that hangs ends when the kernel lets it, and no other follows."""
        self._stop.set()
        self._thread.join(_STOP_S_MAX)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._beat()
            except OSError as error:
                # The flocks still hold; only other hosts see an older heartbeat.
                logger.warning("heartbeat of the pool's directories failed: %s", error)
        self._end_child()

    def _beat(self) -> None:
        if self._child is None:
            # cwd="/": a working directory could hang, or keep a target from being unmounted.
            command, pipe = [*_COMMAND, str(os.getpid())], subprocess.PIPE
            self._child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, cwd="/", bufsize=0, start_new_session=True
            )
            self._child.wait()  # it leaves the work to a child of its own
            if self._stop.is_set():  # while it started; the locks may be released by now
                return
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        # At most one pipe's content waits; less than PIPE_BUF is written whole or not at all.
        for file in [lock.file for lock in self._locks()]:
            line = json.dumps((file.path, file.device, file.inode)).encode() + b"\n"
            try:
                os.write(self._child.stdin.fileno(), line)
            except BlockingIOError:
                continue
            except BrokenPipeError:  # the child was killed; the next heartbeat starts another
                self._end_child()
                return

    def _end_child(self) -> None:
        """Close the child's input, at the end of which it ends; wait a moment for that."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            ended = select.poll()  # `select.select` refuses descriptors from 1024 on
            ended.register(child.stdout, select.POLLIN)
            ended.poll(_END_S_MAX * 1000)
            child.stdout.close()


def _renew(file: LockFile, pid: int, due: threading.Event) -> None:
    """Renew one lock file whenever it is due; runs on a thread of the child."""
    failing = False
    while True:
        due.wait()
        due.clear()
        try:
            write_record(file, pid)
            failing = False
        except OSError as error:
            if not failing:  # logged once, until it works again
                print(f"heartbeat of {file.path} failed: {error}", file=sys.stderr)
            failing = True


def main(pid: int) -> None:
    """Renew each lock file that a line on stdin names, for process `pid`, which holds it."""
    if os.fork():
        os._exit(0)
    due: dict[LockFile, threading.Event] = {}
    for line in sys.stdin.buffer:
        file = LockFile(*json.loads(line))
        if file not in due:
            due[file] = threading.Event()
            threading.Thread(target=_renew, args=(file, pid, due[file]), daemon=True).start()
        due[file].set()
    os._exit(0)  # does not wait for threads that hang


if __name__ == "__main__":
    main(int(sys.argv[1]))
