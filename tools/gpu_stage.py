# SPDX-License-Identifier: Apache-2.0
"""Run a command within a time limit, save its output, and kill the processes that it leaves."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TAIL_LINES = 14
#: The maximum wait for a killed process, which the driver can block in the kernel, before the next
#: stage starts.
_KILL_S_MAX = 10.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Ended:
    """The result of a command. `code` is the exit status, or minus the signal; `tail` the last
    lines."""

    code: int
    seconds: float
    timed_out: bool
    tail: str


def run_stage(
    command: Sequence[str],
    limit_s: float,
    env: Mapping[str, str],
    log: Path,
    live: Path | None,
    directory: Path,
) -> Ended:
    """Run `command` in `directory`; write its output to `log`, and append it to `live` if given.

    At most 15 s, or a tenth of the limit, before its end the command receives SIGINT, so that
    pytest can write its results. At the end all remaining processes are killed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for path in filter(None, (log, live)):
        path.parent.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with contextlib.ExitStack() as files:
        copies = [files.enter_context(log.open("w"))]
        if live is not None:
            copies.append(files.enter_context(live.open("a")))
        process = subprocess.Popen(
            # A shell's background job and its children ignore SIGINT.
            ["env", "--default-signal=INT", *command],
            cwd=directory,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_keep, args=(process.stdout, copies, tail), daemon=True)
        reader.start()
        grace_s = min(15.0, limit_s / 10)
        try:
            timed_out = not _ends(process, limit_s - grace_s)
            if timed_out:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
                _ends(process, grace_s)
        finally:
            _kill_all(process)
            reader.join(_KILL_S_MAX)
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return Ended(code, time.monotonic() - began_s, timed_out, "".join(tail))


def pack(directories: Sequence[Path], archive: Path) -> None:
    """Write the directories to a tar.gz, which replaces the old one when it is complete."""
    fresh = archive.with_name(archive.name + ".part")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fresh, "w:gz") as tar:
        for directory in directories:
            if directory.is_dir():
                tar.add(directory, arcname=directory.name)
    os.replace(fresh, archive)


def _keep(stream: IO[str], copies: Sequence[IO[str]], tail: deque[str]) -> None:
    """Save the output until every process that holds the pipe open has exited."""
    for line in stream:
        tail.append(line)
        for copy in copies:
            with contextlib.suppress(ValueError):  # closed, because the command outlived its stage
                copy.write(line)
                copy.flush()


def _ends(process: subprocess.Popen[str], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Kill the command's process and all its descendants, which become this process's children when
    their parents die. Servers run in separate sessions, so killing a process group would miss
    them."""
    process.kill()
    _ends(process, _KILL_S_MAX)
    deadline_s = time.monotonic() + _KILL_S_MAX
    while (orphans := _children()) and time.monotonic() < deadline_s:
        for number in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(number, os.WNOHANG)
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has exited
        if int(after_name[1]) == os.getpid():
            found.append(int(stat.parent.name))
    return found
