# SPDX-License-Identifier: Apache-2.0
"""Plays scenarios in the guest: `python -m tests.fabric.run RESULT.json NAME:ENGINE...`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.fabric.nvmet import Fabric
from tests.fabric.scenarios import SCENARIOS
from tests.fabric.stage import Stage


def main() -> None:
    """Play the scenarios in order; the result file is rewritten after each."""
    result, *wanted = sys.argv[1:]
    found: dict[str, Any] = {}
    fabric = Fabric()
    for each in wanted:
        print(f"=== {each}", flush=True)
        found[each] = play(fabric, each)
        Path(result).write_text(json.dumps(found))


def play(fabric: Fabric, each: str) -> dict[str, Any]:
    """Play NAME:ENGINE; return its entry of the report."""
    name, _, engine = each.partition(":")
    stage = Stage(fabric, engine or "uring")
    failure = ""
    try:
        SCENARIOS[name](stage)
    except Exception:  # noqa: BLE001 - whatever it was, the next scenario shall be played
        failure = traceback.format_exc()
        stage.record(f"FAILED: {failure.splitlines()[-1]}")
        print(failure, flush=True)
    seconds = stage.now_s
    began_s = time.monotonic()
    stage.strike()
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


if __name__ == "__main__":
    main()
