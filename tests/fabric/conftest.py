# SPDX-License-Identifier: Apache-2.0
"""Boots the guests once per session, plays every scenario in them, and writes the report."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from .report import render
from .rig.guest import Guest, GuestFailedError
from .rig.packages import RigUnavailableError
from .scenarios import BOOTS, IN_REAL_TIME
from .scenarios.peers import LIBRARIES

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
REPORT = BUILD / "fabric-report.md"
#: Time limit of a boot. A boot takes 160 s on two idle cores, and more than 600 s during two other
#: runs of all tests.
BOOT_S_MAX = 1800.0
#: Set this variable if a skip would hide that no scenario was tested.
REQUIRED = "VLLM_NVMEOF_FABRIC_REQUIRED"

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def guest() -> Guest:
    """A guest that is ready to boot; skips with the reason and the remedy if there is none."""
    try:
        return Guest.prepare()
    except RigUnavailableError as error:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def played(guest: Guest, request: pytest.FixtureRequest) -> Results:
    """The result of every scenario that a selected test needs, by NAME:ENGINE."""
    wanted = {
        item.callspec.params["scenario"]
        for item in request.session.items
        if "scenario" in getattr(getattr(item, "callspec", None), "params", {})
    }
    results: Results = {}
    boots = [each for each in enumerate(BOOTS) if not wanted or wanted & set(each[1])]
    processors = threading.Semaphore(os.cpu_count() or 1)

    def play_boot(number: int, boot: list[str]) -> None:
        with processors:
            results.update(play(guest, boot, number))

    for in_real_time in (False, True):
        # Daemons: an interrupt does not wait for the guests, which die with this process.
        threads = [
            threading.Thread(
                target=play_boot,
                args=(number, [each for each in boot if each in wanted or not wanted]),
                daemon=True,
            )
            for number, boot in boots
            if in_real_time is not IN_REAL_TIME.isdisjoint(boot)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results = {name: results[name] for boot in BOOTS for name in boot if name in results}
    kernel = next(iter(results.values()))["kernel"]
    REPORT.write_text(render(results, kernel))
    return results


def play(guest: Guest, scenarios: list[str], number: int) -> Results:
    """Play scenarios in one boot; scenarios it does not reach have failed."""
    job = BUILD / "fabric" / f"boot-{number}"
    python = shlex.quote(sys.executable)
    names = shlex.join(scenarios)
    script = (
        f"cd {shlex.quote(str(ROOT))} && mkdir {LIBRARIES} && export LD_LIBRARY_PATH={LIBRARIES} "
        f"OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 "
        f"&& exec {python} -m tests.fabric.run /run/job/result.json {names}\n"
    )
    result = job / "result.json"
    result.unlink(missing_ok=True)
    try:
        virtual = not IN_REAL_TIME.intersection(scenarios)
        ended = guest.run(job, script, BOOT_S_MAX, virtual=virtual)
        failure = f"the guest did not reach this scenario; the end of its console:\n{ended.tail}"
    except GuestFailedError as error:
        failure = str(error)
    found: Results = json.loads(result.read_text()) if result.exists() else {}
    unplayed = {
        "about": "not played",
        "ok": False,
        "failure": failure,
        "seconds": 0.0,
        "timeline": [],
        "counts": {},
        "worst_s": {},
        "verdicts": [],
        "kernel": "unknown",
    }
    return {name: found.get(name, unplayed) for name in scenarios}
