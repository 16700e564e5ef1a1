# SPDX-License-Identifier: Apache-2.0
"""Four processes on one lease page of a real file, with late reads and writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.lease_child import LEASING

CLAIMANTS = 4
#: Two that could write at once end within the takeover's time; a busy machine looks late.
SPARE_S = 1.0


def play(directory: Path, stall_s: float) -> list[list[tuple[int, int]]]:
    """By process, when it could write: begin and end, ns."""
    command = [sys.executable, "-m", "tests.faults.lease_child", str(directory)]
    children = [
        subprocess.Popen(
            [*command, str(seed), str(stall_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(CLAIMANTS)
    ]
    found = []
    for child in children:
        lines = child.communicate(timeout=100)[0].splitlines()
        assert child.returncode == 0
        found.append([(int(begin), int(end)) for begin, end in map(str.split, lines)])
    return found


def doubles_s(spans: list[list[tuple[int, int]]]) -> list[float]:
    """For each stretch of time in which several could write, its seconds."""
    changes = sorted(
        (at, by)
        for of_one in spans
        for begin, end in joined(of_one)
        for at, by in ((begin, 1), (end, -1))
    )
    found, holders, since = [], 0, 0
    for at, by in changes:
        before, holders = holders, holders + by
        if before == 1 and holders == 2:
            since = at
        elif before == 2 and holders == 1:
            found.append((at - since) / 1e9)
    return found


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same without overlaps: a renewal begins before the last permit ends."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


@pytest.mark.slow  # leases run out and are taken over in real time
@pytest.mark.parametrize("stall_s", [0.0, 4.0])
def test_one_owner_at_a_time(tmp_path: Path, stall_s: float) -> None:
    spans = play(tmp_path, stall_s)
    doubles = doubles_s(spans)
    held = sum(len(joined(one)) for one in spans)
    print(f"held {held} times by {sum(map(bool, spans))} processes, doubles {doubles}")
    assert held >= 2
    if not stall_s:
        assert doubles == []
    assert all(seconds <= LEASING.takeover_s + SPARE_S for seconds in doubles)


def test_two_that_write_at_once_are_noticed() -> None:
    assert doubles_s([[(0, 10**9), (5 * 10**8, 2 * 10**9)], [(15 * 10**8, 3 * 10**9)]]) == [0.5]
