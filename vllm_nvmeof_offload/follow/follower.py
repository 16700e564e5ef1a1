# SPDX-License-Identifier: Apache-2.0
"""The follower: a process that fills the foreign table, `python -m …follow.follower SETTINGS FD`.

It is a separate process so that its work does not compete with the scheduler's, and because a
thread stuck on a lost target cannot be ended. It only reads. A child process does the work and
exits when the server closes its input; see `child` for the reasons.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from vllm_nvmeof_offload.child import Companion, child_command
from vllm_nvmeof_offload.follow.owners import BYTES_PER_SLOT, ROWS_MIN, SLOTS_MAX, Owners
from vllm_nvmeof_offload.follow.scan import Scope, TargetScan
from vllm_nvmeof_offload.limits import memory_bytes
from vllm_nvmeof_offload.native import ForeignWriter

#: A killed follower is replaced after this time.
_RESTART_S = 5.0
#: The interval of scans, in milliseconds. The median delay until a write is seen is half of it.
#: Polls of ten idle regions then take 0.34 % of a core (docs/benchmarks.md). A follower with slower
#: polls waits longer, so that polls take at most 2 %.
FOLLOW_MS = 100.0
#: Followed regions use at most 1/32 of memory, so eight engines per host use at most a quarter.
_MEMORY_PART = 32
#: Scans of all targets together take at most this share of a core.
_CPU_SHARE_MAX = 0.02


def start_follower(
    targets: Sequence[Path],
    keyspace: str,
    engine_index: int,
    ranks_followed: int,
    fd: int,
    follow_ms: float = FOLLOW_MS,
) -> Companion:
    """Follow the other engines of a keyspace on our targets.

    `targets` are ours, ordered by their numbers. `keyspace` is a digest. `engine_index` is ours.
    `ranks_followed` is the size of the largest set of our ranks, or 1 without sets. `fd` is an
    empty memfd, which holds a table on return, so that a reader can be opened; the caller may close
    it at any time. `follow_ms` is the interval of scans.
    """
    ForeignWriter(fd, ROWS_MIN)
    settings = {
        "targets": [str(target) for target in targets],
        "keyspace": keyspace,
        "engine_index": engine_index,
        "ranks": ranks_followed,
        "follow_ms": follow_ms,
        "slots_max": min(SLOTS_MAX, memory_bytes() // _MEMORY_PART // BYTES_PER_SLOT),
    }
    command = [*child_command("follow.follower"), json.dumps(settings)]
    return Companion("follower of shared pools", command, fd, _RESTART_S)


def _run(scan: TargetScan, follow_s: float, share: float) -> None:
    """Scan one target until the process exits. `share` is this target's share of a core."""
    never = threading.Event()
    try:
        while True:
            never.wait(max(follow_s, scan.scan() / share))
    finally:
        # Without these scans the table would silently become outdated. A new follower starts.
        traceback.print_exc()
        os._exit(1)


def main(settings: str, fd: int) -> None:
    """Run the follower. `settings` is JSON from `start_follower`; `fd` is the table's memory."""
    if os.fork():
        os._exit(0)
    found = json.loads(settings)
    targets = tuple(map(Path, found["targets"]))
    scope = Scope(targets, found["keyspace"], found["engine_index"], found["ranks"])
    table = ForeignWriter(fd, ROWS_MIN)
    owners = Owners(table, scope.ranks, time.monotonic, found["slots_max"])
    for target in range(len(targets)):
        of_target = TargetScan(scope, target, table, owners)
        pace = found["follow_ms"] / 1000, _CPU_SHARE_MAX / len(targets)
        threading.Thread(target=_run, args=(of_target, *pace), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # do not wait for threads that hang


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
