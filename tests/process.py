# SPDX-License-Identifier: Apache-2.0
"""Waiting for other processes, and this one's resources: descriptors with high numbers, listening
ports, and locked memory."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_ROOM = 256


@contextlib.contextmanager
def numbers_from(first: int) -> Iterator[None]:
    """What is opened meanwhile gets a number of at least `first`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] < first + _ROOM:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + _ROOM, limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        while taken[-1] < first - 1:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def companions(*words: bytes, server: int | None = None) -> list[int]:
    """The processes with these words in their commands that have left their parent. server: whose
    they are; None: this process's."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if all(word in command for word in words):
                status = (process / "stat").read_text().rpartition(")")[2]
                parents[int(process.name)] = int(status.split()[1])
    return [pid for pid, up in parents.items() if up not in (server or os.getpid(), *parents)]


_LISTEN = "0A"


def listening(pid: int | str = "self") -> list[int]:
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, place, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and f"socket:[{inode}]" in inodes:
                ports.append(int(place.rpartition(":")[2], 16))
    return ports


_IS_BOUND = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY

#: The limit is for all processes of a user together, so that tests side by side run into it.
needs_locked_memory = pytest.mark.skipif(
    os.geteuid() != 0 and _IS_BOUND,
    reason="this user's locked memory is limited: ulimit -l unlimited, or run as root",
)


def wait_until(what: str, condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Poll `condition`, leaving the processor to those it waits for."""
    deadline, never = time.monotonic() + limit_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {limit_s:.0f} s"
        never.wait(0.02)
