# SPDX-License-Identifier: Apache-2.0
"""Child processes that run a module of this package; companions are restarted when they exit.

A call on a lost path can block in the kernel forever, and a process with a blocked thread cannot be
killed. Separate processes therefore renew leases, look for lost targets and find other servers'
files. The server never waits for these processes.

A companion's process forks and exits, so the grandchild, which does the work, is not a descendant
of the engine. vLLM stops an engine by listing its descendants and killing them one by one. If one
of them exits before its turn, psutil raises `NoSuchProcess` and the API server hangs forever; a
child that exits with its worker could cause that. The grandchild has its own session, so that
Ctrl-C, which reaches the console's whole process group, does not stop the work while the server
drains. The grandchild exits when the server closes its input.
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
#: A program that runs a module of this package without importing the packages above it, because
#: the package `vllm` would import torch, which takes seconds and hundreds of MB. Its arguments are
#: the parent package's dotted name and directory, the module, and the module's arguments.
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
    """Return the command that runs a module of this package, such as `pool.keeper`."""
    name = f"{_PACKAGE}.{module}"
    if not _ABOVE:
        return [sys.executable, "-m", name]
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-c", _RUN_BELOW_EMPTY_PACKAGES, _ABOVE, directory, name]


def start_child(
    command: Iterable[str], fd: int, pipes: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that inherits `fd` and gets its number as the last argument.

    The process has its own session, so Ctrl-C does not reach it. `pipes` is `subprocess.PIPE` to
    connect its input and output. Raises OSError if the process cannot be started.
    """
    return subprocess.Popen(
        [*command, str(fd)],
        stdin=pipes,
        stdout=pipes,
        cwd="/",  # the current directory could hang, or keep a target from being unmounted
        bufsize=0,
        start_new_session=True,
        pass_fds=(fd,),
    )


def accompany(work: Callable[[int], None]) -> None:
    """Fork, run `work` in the child, and exit. A `Companion` started this process. `work` gets the
    descriptor of the shared memory, and returns when standard input is closed."""
    if os.fork():
        os._exit(0)
    work(int(sys.argv[-1]))
    os._exit(0)  # do not wait for threads that hang


#: The maximum wait for a stopped process to exit. A process blocked in the kernel exits later.
_END_S_MAX = 0.5
#: The maximum wait for the thread to end, which takes longer than `_END_S_MAX` only if the start of
#: a process hangs.
_STOP_S_MAX = 2.0


class Companion:
    """A process belonging to this server, restarted by a daemon thread whenever it exits."""

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
        """Start the process after `first_s` seconds, and again `restart_s` seconds after each exit.

        `what` names the process in the log. `fd` refers to shared memory; the process gets a
        duplicate as the last argument of `command`. Its input gets the result of `lines` at start
        and every `lines_s` seconds (None: only at start), unless the pipe is full.
        """
        self._what, self._command, self._restart_s = what, command, restart_s
        self._lines, self._lines_s, self._first_s = lines, lines_s, first_s
        self._fd = os.dup(fd)  # for restarts: the caller may close `fd`
        self._stop = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"nvmeof-{what}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the process permanently. A process blocked in the kernel exits later."""
        if self._stop.is_set():
            return
        self._stop.set()  # set first, or the thread could start the process again
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_STOP_S_MAX)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _run(self) -> None:
        logged = ""
        self._wait(None, self._first_s)
        while not self._stop.is_set():
            why = "it was killed, or logged its error above"
            try:
                self._accompany()
            except OSError as error:
                why = str(error)
            if not self._stop.is_set() and why != logged:
                logger.warning("the %s exited: %s; restarting it", self._what, why)
                logged = why  # log a reason once, however often the process exits
            self._wait(None, self._restart_s)
        os.close(self._fd)

    def _accompany(self) -> None:
        """Start the process and wait until it exits or is stopped. Raises OSError."""
        child = start_child(self._command, self._fd, subprocess.PIPE)
        assert child.stdin and child.stdout
        with child.stdin, child.stdout:
            child.wait()  # the grandchild does the work
            os.set_blocking(child.stdin.fileno(), False)
            ended = False
            while not (ended or self._stop.is_set()):
                ended = not self._send(child.stdin) or self._wait(child.stdout, self._lines_s)
            child.stdin.close()
            if not ended:
                _poll([child.stdout.fileno()], _END_S_MAX)

    def _send(self, pipe: IO[bytes]) -> bool:
        """Send the current lines; return False if the process has exited."""
        for line in self._lines():
            try:
                os.write(pipe.fileno(), line)  # writes below PIPE_BUF bytes are atomic
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return False
        return True

    def _wait(self, output: IO[bytes] | None, seconds: float | None) -> bool:
        """Wait up to `seconds` for a stop; return whether the process closed its output."""
        fds = [] if output is None else [output.fileno()]
        return not {*fds}.isdisjoint(_poll([*fds, self._wake_fd], seconds))


def _poll(fds: Iterable[int], seconds: float | None) -> set[int]:
    poller = select.poll()  # `select.select` refuses descriptors above 1023
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if seconds is None else seconds * 1000)}
