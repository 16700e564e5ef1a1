# SPDX-License-Identifier: Apache-2.0
"""Two processes read the slots that a third one writes again and again: no wrong word is accepted.

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
from pathlib import Path

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

Start = Callable[..., subprocess.Popen[str]]


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


def race(start: Start, target: Path, by: str, reads: int, limit_s: float) -> None:
    print(f"VLLM_NVMEOF_SEED={SEED}")
    owner = start(role="owner", target=str(target), seed=SEED)
    assert owner.stdout is not None
    ready = select.select([owner.stdout], [], [], READY_S)[0]
    assert ready, "the owner does not fill its pool"
    where = json.loads(owner.stdout.readline() or owner.communicate()[1])
    readers = [
        start(
            role="reader",
            target=str(target),
            owner=where,
            seed=SEED + 1 + number,
            by=by,
            reads=reads // READERS,
        )
        for number in range(READERS)
    ]
    counts: Counter[str] = Counter()
    for reader in readers:
        found = result(reader, limit_s)
        print(found)
        counts.update(found)
    assert owner.poll() is None, owner.communicate()[1]
    written = result(owner, READY_S)
    print(written)
    assert set(written) == {"ok"}
    assert counts["reads"] >= reads
    assert counts["wrong"] == 0
    assert counts["ok"] > WRONG_MIN
    assert counts["stale"] > WRONG_MIN, "no slot was written while it was known by its old chunk"
    for control in CONTROLS:
        assert counts[f"wrong without {control}"] >= WRONG_MIN, control
    if by == "log":
        assert counts["polls"] - counts["overruns"] > WRONG_MIN, "nearly all was found by scans"


@pytest.mark.parametrize("by", ["table", "log"])
def test_no_wrong_word_is_accepted(start: Start, tmp_path: Path, by: str) -> None:
    race(start, tmp_path, by, reads=100_000, limit_s=110)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 2 * READY_S)
@pytest.mark.parametrize("by", ["table", "log"])
def test_no_wrong_word_is_accepted_for_long(start: Start, tmp_path: Path, by: str) -> None:
    race(start, tmp_path, by, reads=5_000_000, limit_s=SOAK_S)
