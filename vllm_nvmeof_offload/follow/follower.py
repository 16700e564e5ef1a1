# SPDX-License-Identifier: Apache-2.0
"""The follower: a process that fills the foreign table, `python -m …follow.follower SETTINGS FD`.

It is a process of its own because its work must not take turns with the scheduler's, and because
a thread that waits for a lost target cannot be ended. It only reads. It leaves the work to a child
of its own and ends when its input does, with its server: `child` has the reasons.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from vllm_nvmeof_offload.follow.owners import ROWS_MIN, Owners
from vllm_nvmeof_offload.follow.scan import Scope, TargetScan
from vllm_nvmeof_offload.native import ForeignWriter

#: Scans of all targets together take at most this share of a core.
_CPU_SHARE_MAX = 0.02


def _run(scan: TargetScan, follow_s: float, share: float) -> None:
    """Scan one target until the process ends; share: of a core, for this target."""
    never = threading.Event()
    try:
        while True:
            never.wait(max(follow_s, scan.scan() / share))
    finally:
        # Without this target's scans the table would grow old unnoticed; a successor starts.
        traceback.print_exc()
        os._exit(1)


def main(settings: str, fd: int) -> None:
    """settings: JSON, as `follow.start` makes it. fd: of the table's memory."""
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
    os._exit(0)  # does not wait for threads that hang


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
