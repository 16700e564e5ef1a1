# SPDX-License-Identifier: Apache-2.0
"""Child processes that run a module of this package, and companions, which are kept running.

In a vLLM that has this package in its tree, `python -m` would import the packages above this one
first. vLLM's imports torch, which costs seconds and hundreds of MB, without need.

A companion leaves the work to a grandchild and ends. vLLM ends an engine by killing all
processes below it one by one, and its API server hangs for ever if a listed process ends before
its turn (psutil raises `NoSuchProcess`), as a child would that ends when its worker does. It has
a separate session, because Ctrl-C reaches the whole process group of a console, and the work must
go on while the server drains. It ends when its input does, with its server.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO

from vllm_nvmeof_offload import logger

_PACKAGE = __name__.rpartition(".")[0]
_ABOVE = _PACKAGE.rpartition(".")[0]
#: Arguments: the packages above, dotted; the last one's directory; the module; its arguments.
_RUN_BELOW_EMPTY_PACKAGES = """\
import runpy, sys, types
above, directory, module = sys.argv[1:4]
del sys.argv[1:4]
names = above.split(".")
for end in range(1, len(names) + 1):
    package = types.ModuleType(".".join(names[:end]))
    package.__path__ = [directory] if end == len(names) else []
    sys.modules[package.__name__] = package
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def child_command(module: str) -> list[str]:
    """Return the start of a command line for a module of this package, as `pool.keeper`."""
    name = f"{_PACKAGE}.{module}"
    if not _ABOVE:
        return [sys.executable, "-m", name]
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-c", _RUN_BELOW_EMPTY_PACKAGES, _ABOVE, directory, name]


#: The time that a stop waits for the end; a process that hangs in the kernel ends later.
_END_S_MAX = 0.5
#: More than `_END_S_MAX`. Only a process that cannot start (Python's files hang) takes longer.
_STOP_S_MAX = 2.0


class Companion:
    """A process of this server that is started again when it ends.

    A daemon thread waits for it, and touches no target.
    """

    def __init__(
        self,
        what: str,
        command: Iterable[str],
        fd: int,
        restart_s: float,
        lines: Callable[[], Iterable[bytes]] = lambda: (),
        lines_s: float | None = None,
        first_s: float = 0.0,
    ) -> None:
        """Start it after `first_s`, and again `restart_s` after its end.

        `what` is for the log. `fd`, of memory, is added to `command` as its last argument; the
        caller may close its own at any time. `lines` are sent to its input at first, and every
        `lines_s`; None for only at first. If the lines do not fit into the pipe, none is sent.
        """
        self._what, self._command, self._restart_s = what, command, restart_s
        self._lines, self._lines_s, self._first_s = lines, lines_s, first_s
        self._fd = os.dup(fd)  # for successors: the caller's number may be reused
        self._stop = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"nvmeof-{what}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and start none any more. A hanging process ends when the kernel lets it."""
        if self._stop.is_set():
            return
        self._stop.set()  # first: a thread that wakes before would start the process
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_STOP_S_MAX)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _run(self) -> None:
        logged = ""
        self._wait(None, self._first_s)
        while not self._stop.is_set():
            why = "it was killed, or failed as it says above"
            try:
                self._accompany()
            except OSError as error:
                why = str(error)
            if not self._stop.is_set() and why != logged:
                logger.warning("the %s has ended: %s; starting another", self._what, why)
                logged = why  # log once, however often it ends
            self._wait(None, self._restart_s)
        os.close(self._fd)

    def _accompany(self) -> None:
        """Start the process, and wait for its end or a stop. OSError: it cannot be started."""
        # cwd="/": a working directory could hang, or keep a target from being unmounted.
        child = subprocess.Popen(
            [*self._command, str(self._fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            bufsize=0,
            start_new_session=True,
            pass_fds=(self._fd,),
        )
        assert child.stdin and child.stdout
        with child.stdin, child.stdout:
            child.wait()  # it leaves the work to a grandchild
            os.set_blocking(child.stdin.fileno(), False)
            ended = False
            while not (ended or self._stop.is_set()):
                ended = not self._send(child.stdin) or self._wait(child.stdout, self._lines_s)
            child.stdin.close()
            if not ended:
                _poll([child.stdout.fileno()], _END_S_MAX)

    def _send(self, pipe: IO[bytes]) -> bool:
        """Send the lines that there are. Returns False if the process has ended."""
        for line in self._lines():
            try:
                os.write(pipe.fileno(), line)  # less than PIPE_BUF is written whole or not at all
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return False
        return True

    def _wait(self, output: IO[bytes] | None, seconds: float | None) -> bool:
        """Wait for a stop, at most `seconds`. Return whether the output has ended."""
        fds = [] if output is None else [output.fileno()]
        return not {*fds}.isdisjoint(_poll([*fds, self._wake_fd], seconds))


def _poll(fds: Iterable[int], seconds: float | None) -> set[int]:
    poller = select.poll()  # `select.select` refuses descriptors from 1024 on
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if seconds is None else seconds * 1000)}
