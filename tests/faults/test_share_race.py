# SPDX-License-Identifier: Apache-2.0
"""Two processes read slots that a third rewrites all the time: no wrong word is accepted.

They know what is in the slots from the owner's table or from its log. `race_child` says what they
do. Replay the choices with VLLM_NVMEOF_SEED; the kernel's scheduler decides the rest.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("VLLM_NVMEOF_SEED", "0")) or random.SystemRandom().getrandbits(31)
READERS = 2
READY_S = 60.0
#: Five million reads take five minutes on two free cores.
SOAK_S = 4 * 3600.0
#: Each control is given so many wrong chunks at least, or it would not show what its check does.
WRONG_MIN = 10
CONTROLS = ("payload_crc", "generation", "refresh")

Child = subprocess.Popen[str]
Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def make(**job: object) -> subprocess.Popen[str]:
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.faults.race_child", json.dumps(job)],
                cwd=ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return children[-1]

    yield make
    for child in children:
        child.kill()
        child.communicate()


def result(child: subprocess.Popen[str], limit_s: float) -> dict[str, int]:
    out, errors = child.communicate(timeout=limit_s)
    assert child.returncode == 0, errors
    counts: dict[str, int] = json.loads(out.splitlines()[-1])
    return counts


def first_line(child: Child) -> Any:
    """What a child prints when it is ready."""
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], READY_S)[0], "it does not get ready"
    return json.loads(child.stdout.readline() or child.communicate()[1])


def started_owner(start: Start, target: Path, seed: int) -> tuple[Child, dict[str, Any]]:
    """An owner that has filled its pool, and where that is."""
    owner = start(role="owner", target=str(target), seed=seed)
    return owner, first_line(owner)


def started_readers(
    start: Start, target: Path, owner: dict[str, Any], by: str, reads: int
) -> list[Child]:
    shared = {"role": "reader", "target": str(target), "owner": owner, "by": by}
    every = {**shared, "reads": reads // READERS}
    readers = [start(**every, engine=1 + one, seed=SEED + 1 + one) for one in range(READERS)]
    assert [first_line(one) for one in readers] == ["reads"] * READERS
    return readers


def counted(readers: list[Child], limit_s: float) -> Counter[str]:
    """What they have counted, when they have read enough: nothing wrong, and right ones too."""
    counts: Counter[str] = Counter()
    for reader in readers:
        found = result(reader, limit_s)
        print(found)
        counts.update(found)
    assert counts["wrong"] == 0
    assert counts["ok"] > WRONG_MIN
    assert counts["stale"] > WRONG_MIN, "no slot was written while it was known by its old chunk"
    assert sum(counts[f"wrong without {control}"] for control in CONTROLS) >= WRONG_MIN
    return counts


def race(start: Start, target: Path, by: str, reads: int, limit_s: float) -> None:
    print(f"VLLM_NVMEOF_SEED={SEED}")
    owner, where = started_owner(start, target, SEED)
    counts = counted(started_readers(start, target, where, by, reads), limit_s)
    assert owner.poll() is None, owner.communicate()[1]
    written = result(owner, READY_S)
    print(written)
    assert set(written) == {"ok"}
    assert counts["reads"] >= reads
    for control in CONTROLS:
        assert counts[f"wrong without {control}"] >= WRONG_MIN, control
    if by == "log":
        assert counts["polls"] - counts["overruns"] > WRONG_MIN, "nearly all was found by scans"


@pytest.mark.parametrize("by", ["table", "log"])
def test_no_wrong_word_is_accepted(start: Start, tmp_path: Path, by: str) -> None:
    race(start, tmp_path, by, reads=100_000, limit_s=110)


def kill_owners(start: Start, target: Path, by: str, kills: int, every_s: float) -> None:
    """Each leaves what it had under way, and has a successor that takes the directory back."""
    print(f"VLLM_NVMEOF_SEED={SEED}")
    owner, where = started_owner(start, target, SEED)
    readers = started_readers(start, target, where, by, reads=0)
    for number in range(1, kills + 1):
        with pytest.raises(subprocess.TimeoutExpired):
            owner.wait(every_s)
        owner.kill()
        owner.wait()
        owner, place = started_owner(start, target, SEED + 10 * number)
        assert place == where
    counts = counted(readers, READY_S)
    if by == "log":
        assert counts["overruns"] >= kills, "each successor goes on a lap later"


def own_twice(start: Start, target: Path, by: str, reads: int, limit_s: float) -> None:
    """As after a lock or a lease that has failed: both write every slot, and the table."""
    print(f"VLLM_NVMEOF_SEED={SEED}")
    one, where = started_owner(start, target, SEED)
    Path(where["directory"], "lock").unlink()
    two, place = started_owner(start, target, SEED + 10)
    assert place == where
    counted(started_readers(start, target, where, by, reads), limit_s)
    for owner in (one, two):
        assert owner.poll() is None, owner.communicate()[1]


@pytest.mark.parametrize("by", ["table", "log"])
def test_no_wrong_word_is_accepted_while_owners_are_killed(
    start: Start, tmp_path: Path, by: str
) -> None:
    kill_owners(start, tmp_path, by, kills=4, every_s=1.0)


@pytest.mark.parametrize("by", ["table", "log"])
def test_no_wrong_word_is_accepted_from_a_region_with_two_owners(
    start: Start, tmp_path: Path, by: str
) -> None:
    own_twice(start, tmp_path, by, reads=20_000, limit_s=READY_S)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 2 * READY_S)
@pytest.mark.parametrize("by", ["table", "log"])
@pytest.mark.parametrize(
    "play",
    [
        partial(race, reads=5_000_000, limit_s=SOAK_S),
        partial(kill_owners, kills=60, every_s=2.0),
        partial(own_twice, reads=1_000_000, limit_s=SOAK_S),
    ],
    ids=["one owner", "killed owners", "two owners"],
)
def test_no_wrong_word_is_accepted_for_long(
    start: Start, tmp_path: Path, by: str, play: Callable[[Start, Path, str], None]
) -> None:
    play(start, tmp_path, by)
