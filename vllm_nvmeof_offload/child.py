# SPDX-License-Identifier: Apache-2.0
"""Processes that run a module of this package, and companions, which are kept running.

In a vLLM that has this package in its tree, `python -m` would import the packages above this one
first. vLLM's imports torch: seconds and hundreds of MB, for a process that needs neither.

A companion leaves the work to a child of its own and ends. vLLM ends an engine by killing all
processes below it one by one, and its API server hangs for ever if a listed process ends before
its turn (psutil raises `NoSuchProcess`), as a child would that ends when its worker does. It has
a session of its own, because Ctrl-C reaches the whole process group of a console, and the work must
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
#: Arguments: the packages above, dotted; their last one's directory; the module; the module's own.
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
    """The start of a command line that runs `module`, named within this package: `pool.keeper`."""
    name = f"{_PACKAGE}.{module}"
    if not _ABOVE:
        return [sys.executable, "-m", name]
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-c", _RUN_BELOW_EMPTY_PACKAGES, _ABOVE, directory, name]


#: How long a stop waits for the end; what hangs in the kernel ends later.
_END_S_MAX = 0.5
#: More than `_END_S_MAX`. Only what cannot start (Python's own files hang) takes longer.
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

        what: for the log. command: `fd`, of memory, is added as its last argument; the caller may
        close its own at any time. lines: sent to its input at first, and each `lines_s`; None: only
        at first. Of what does not fit into the pipe nothing is sent.
        """
        self._what, self._command, self._restart_s = what, command, restart_s
        self._lines, self._lines_s, self._first_s = lines, lines_s, first_s
        self._fd = os.dup(fd)  # a successor must not be given what has the number by then
        self._stop = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"nvmeof-{what}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and start none any more. What hangs ends when the kernel lets it."""
        if self._stop.is_set():
            return
        self._stop.set()  # first: a thread that wakes sooner would start the process
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
                logged = why  # once, however often it ends
            self._wait(None, self._restart_s)
        os.close(self._fd)

    def _accompany(self) -> None:
        """Start the process, and wait for its end or for a stop. OSError: it cannot be started."""
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
            child.wait()  # it leaves the work to a child of its own
            os.set_blocking(child.stdin.fileno(), False)
            ended = False
            while not (ended or self._stop.is_set()):
                ended = not self._send(child.stdin) or self._wait(child.stdout, self._lines_s)
            child.stdin.close()
            if not ended:
                _poll([child.stdout.fileno()], _END_S_MAX)

    def _send(self, pipe: IO[bytes]) -> bool:
        """Send what there is; False: the process has ended."""
        for line in self._lines():
            try:
                os.write(pipe.fileno(), line)  # less than PIPE_BUF is written whole or not at all
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return False
        return True

    def _wait(self, output: IO[bytes] | None, seconds: float | None) -> bool:
        """Wait for a stop, and no longer than given; return whether the output has ended."""
        fds = [] if output is None else [output.fileno()]
        return not {*fds}.isdisjoint(_poll([*fds, self._wake_fd], seconds))


def _poll(fds: Iterable[int], seconds: float | None) -> set[int]:
    poller = select.poll()  # `select.select` refuses descriptors from 1024 on
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if seconds is None else seconds * 1000)}
