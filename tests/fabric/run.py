# SPDX-License-Identifier: Apache-2.0
"""Plays scenarios in the guest: `python -m tests.fabric.run RESULT.json NAME:ENGINE...`.

`NAME:ENGINE:rdma` is the same scenario on NVMe/RDMA; one boot has one transport.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fabric import modules
from tests.fabric.nvmet import Fabric
from tests.fabric.scenarios import SCENARIOS
from tests.fabric.stage import Stage

#: What Linux writes to its log when a part of it has died.
KERNEL_DIED = ("kernel BUG at ", "BUG: unable to handle ", "Oops: ")
KERNEL_LOG_LINE_BYTES_MAX = 8192


def main() -> None:
    """Play the scenarios in order; the result file is rewritten after each."""
    result, *wanted = sys.argv[1:]
    found: dict[str, Any] = {}
    (transport,) = {each.split(":")[2] if each.count(":") == 2 else "tcp" for each in wanted}
    modules.serve()
    fabric = Fabric(transport)
    for each in wanted:
        print(f"=== {each}", flush=True)
        found[each] = play(fabric, each)
        Path(result).write_text(json.dumps(found))


def play(fabric: Fabric, each: str) -> dict[str, Any]:
    """Play NAME:ENGINE or NAME:ENGINE:rdma; return its entry of the report."""
    name, engine, *_ = each.split(":")
    stage = Stage(fabric, engine)
    failure = ""
    try:
        SCENARIOS[name](stage)
    except Exception:  # noqa: BLE001 - whatever it was, the next scenario shall be played
        failure = traceback.format_exc()
        stage.record(f"FAILED: {failure.splitlines()[-1]}")
        print(failure, flush=True)
    seconds = stage.now_s
    began_s = time.monotonic()
    try:
        if died := _kernel_died():
            raise AssertionError(f"the guest's kernel: {died}")
        stage.strike()
    except Exception:  # noqa: BLE001 - whatever it was, nothing can be played here any more
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for a process whose I/O never ends
    child = stage.child
    kinds = ("store", "write", "load") if child else ()
    return {
        "about": (SCENARIOS[name].__doc__ or "").strip().splitlines()[0],
        "ok": not failure,
        "failure": failure,
        "seconds": round(seconds, 2),
        "tidy_seconds": round(time.monotonic() - began_s, 2),
        "timeline": sorted(stage.timeline, key=lambda row: row[0]),
        "counts": stage.counts() if child else {},
        "worst_s": {kind: round(stage.worst_s(kind), 3) for kind in kinds},
        "verdicts": [
            [round(at_s - stage.began_s, 2), target, verdict]
            for at_s, target, verdict in (child.verdicts if child else [])
        ],
        "counters": child.counters if child else None,
        "kernel": os.uname().release,
    }


def _kernel_died() -> str:
    """The first such line of the kernel's log; empty if there is none."""
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with suppress(BlockingIOError):
            while line := os.read(fd, KERNEL_LOG_LINE_BYTES_MAX).decode(errors="replace"):
                if any(each in line for each in KERNEL_DIED):
                    return line.partition(";")[2].strip()
    finally:
        os.close(fd)
    return ""


if __name__ == "__main__":
    main()
