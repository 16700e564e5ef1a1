# SPDX-License-Identifier: Apache-2.0
"""The server's side of the follower: starts it, starts another one if it ends, stops it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.child import child_command
from vllm_nvmeof_offload.follow.owners import BYTES_PER_SLOT, ROWS_MIN, SLOTS_MAX
from vllm_nvmeof_offload.limits import memory_bytes
from vllm_nvmeof_offload.native import ForeignWriter

#: A follower that was killed has a successor after this time.
_RESTART_S = 5.0
#: The interval of scans, in milliseconds. Half of it passes in the median until a write is seen;
#: looks at ten idle regions then take 0.34 % of a core (docs/benchmarks.md). A follower whose looks
#: take longer waits longer, so that they take 2 % at most.
FOLLOW_MS = 100.0
#: What is followed takes at most this part of memory: eight engines of a host, a quarter of it.
_MEMORY_PART = 32
#: A stop waits for the end at most so long; a follower whose targets all hang may take longer.
_END_S_MAX = 0.5


class Follower:
    """A running follower. A daemon thread waits for it, and touches no target."""

    def __init__(self, command: Sequence[str], fd: int) -> None:
        """Use `start_follower`. fd: of the table; the thread closes it at its end."""
        self._command = command
        self._fd = fd
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._input: IO[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="share-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the follower, and start none any more."""
        self._stopping.set()
        self._end_input()
        self._thread.join(_END_S_MAX)

    def _run(self) -> None:
        logged = ""
        while not self._stopping.is_set():
            why = "it was killed, or failed as it says above"
            try:
                self._follow()
            except OSError as error:
                why = str(error)
            if not self._stopping.is_set() and why != logged:
                logger.warning("the follower of shared pools has ended: %s; starting another", why)
                logged = why  # once, however often it ends
            self._stopping.wait(_RESTART_S)
        os.close(self._fd)

    def _follow(self) -> None:
        """Start a follower and wait for its end. OSError: it cannot be started."""
        pipe = subprocess.PIPE
        # cwd="/": a working directory could hang, or keep a target from being unmounted.
        child = subprocess.Popen(
            self._command,
            stdin=pipe,
            stdout=pipe,
            cwd="/",
            bufsize=0,
            start_new_session=True,
            pass_fds=(self._fd,),
        )
        assert child.stdin and child.stdout
        with self._lock:
            self._input = child.stdin
        child.wait()  # it leaves the work to a child of its own
        if self._stopping.is_set():  # while it started
            self._end_input()
        with child.stdout:
            child.stdout.read()  # ends with the follower
        self._end_input()

    def _end_input(self) -> None:
        """Close the follower's input, at the end of which it ends."""
        with self._lock:
            if self._input is not None:
                with contextlib.suppress(OSError):
                    self._input.close()


def start_follower(
    targets: Sequence[Path],
    keyspace: str,
    engine_index: int,
    ranks_followed: int,
    fd: int,
    follow_ms: float = FOLLOW_MS,
) -> Follower:
    """Follow the other engines of a keyspace on our targets.

    targets: ours, in the order of our places. keyspace: its digest. engine_index: ours.
    ranks_followed: the size of the largest set of our ranks; 1: there are no sets. fd: of an empty
    memfd, which has a table at return, so that a reader can be opened; the caller may close it at
    any time. follow_ms: interval of scans.
    """
    ForeignWriter(fd, ROWS_MIN)
    own_fd = os.dup(fd)  # a successor must not be given what has the number by then
    settings = {
        "targets": [str(target) for target in targets],
        "keyspace": keyspace,
        "engine_index": engine_index,
        "ranks": ranks_followed,
        "fd": own_fd,
        "follow_ms": follow_ms,
        "slots_max": min(SLOTS_MAX, memory_bytes() // _MEMORY_PART // BYTES_PER_SLOT),
    }
    return Follower([*child_command("follow.follower"), json.dumps(settings)], own_fd)
