# SPDX-License-Identifier: Apache-2.0
"""After a SIGSTOP longer than every deadline and a SIGCONT, no outcome is wrong or repeated."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool.lease import TAKEOVER_S, lease_of, read_lease
from vllm_nvmeof_offload.pool.pool import Pool

from .fuse_mount import FaultyMount
from .kit import WAIT_S, make_spec

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("VLLM_NVMEOF_SEED", "0")) or random.SystemRandom().getrandbits(32)
_PYTHON = (sys.executable, "-W", "error", "-X", "faulthandler")
STOPS = 6
DEADLINE_S = 0.1

StartChild = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    """Start the child of `stop_child` and wait until its operations run."""
    children: list[subprocess.Popen[str]] = []

    def start(engine: str, *targets: Path) -> subprocess.Popen[str]:
        print(f"VLLM_NVMEOF_SEED={SEED}")
        job = {"engine": engine, "seed": SEED, "deadline_s": DEADLINE_S}
        job["targets"] = list(map(str, targets))
        child = subprocess.Popen(
            [*_PYTHON, "-m", "tests.faults.stop_child", json.dumps(job)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        wait_line(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def wait_line(child: subprocess.Popen[str]) -> None:
    """Wait until the child prints a line, which shows that it is working."""
    assert child.stdout is not None
    if not select.select([child.stdout], [], [], WAIT_S)[0]:
        child.send_signal(signal.SIGABRT)  # makes it print its stacks
        raise AssertionError(f"the child prints nothing\n{child.communicate()[1]}")
    line = child.stdout.readline()
    assert line, child.communicate()[1]


def stop(child: subprocess.Popen[str]) -> None:
    """Stop the child, and wait until all of its threads have stopped."""
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)


def end(child: subprocess.Popen[str]) -> dict[str, int]:
    """Let the child finish; return its counts."""
    out, err = child.communicate("\n", timeout=WAIT_S)
    assert child.returncode == 0, err
    counts = json.loads(out.splitlines()[-1])
    assert isinstance(counts, dict)
    return counts


def keep_stopped(seconds: float) -> None:
    """Sleep: the test is about the passing of time."""
    time.sleep(seconds)


def test_operations_in_flight_survive_a_stop(
    engine_name: str, start_child: StartChild, tmp_path: Path
) -> None:
    child = start_child(engine_name, tmp_path / "a", tmp_path / "b")
    for _ in range(STOPS):
        stop(child)
        keep_stopped(2 * DEADLINE_S)
        child.send_signal(signal.SIGCONT)
        wait_line(child)
        wait_line(child)
    counts = end(child)
    print(engine_name, counts)
    assert counts["ok"] > 50


def test_a_slow_target_and_a_stop_only_miss_deadlines(
    engine_name: str, start_child: StartChild, tmp_path: Path, faulty_mount: FaultyMount
) -> None:
    """The kernel answers while the process is stopped, before or after the deadline."""
    child = start_child(engine_name, faulty_mount.place / "t", tmp_path / "healthy")
    faulty_mount.rules(
        {"name": "reads", "op": "read", "do": "delay", "value": 0.03},
        {"name": "writes", "op": "write", "do": "delay", "value": 0.03},
        {"name": "entries", "op": "write", "path": "table", "do": "delay", "value": 0.15},
    )
    for number in range(10 * STOPS):
        # By chance, no read may have been sent to the slow target yet.
        if number >= STOPS and faulty_mount.fired("reads") and faulty_mount.fired("writes"):
            break
        wait_line(child)
        stop(child)
        keep_stopped(2 * DEADLINE_S)
        child.send_signal(signal.SIGCONT)
    faulty_mount.rules()
    counts = end(child)
    print(engine_name, counts)
    assert faulty_mount.fired("reads") > 0
    assert faulty_mount.fired("writes") > 0
    assert counts["deadline"] > 0


def test_a_stopped_owner_keeps_its_directory(start_child: StartChild, tmp_path: Path) -> None:
    """The lease grows old while the owner lives: on one kernel only the flock decides."""
    child = start_child("threads", tmp_path)
    spec = make_spec(tmp_path, engine_index=0)
    (directory,) = tmp_path.glob("*/engine-0/rank-0")
    stop(child)
    page = read_lease(lease_of(directory))
    assert page is not None
    assert page.pid == child.pid
    # After a long stop.
    old_s = (directory / "lease").stat().st_mtime - 100 * TAKEOVER_S
    os.utime(directory / "lease", (old_s, old_s))
    with pytest.raises(PoolLockedError, match=f"pid {child.pid} "):
        Pool.open(spec)
    # A start that does not request this directory gets the next one.
    other = Pool.open(make_spec(tmp_path))
    assert other.engine_index == 1
    other.close()
    child.send_signal(signal.SIGCONT)
    for _ in range(4):  # earlier operations may have missed their deadlines; new ones do not
        wait_line(child)
    assert end(child)["ok"] > 0
    pool = Pool.open(spec)
    assert pool.engine_index == 0
    assert len(pool.adopt()) > 0
    pool.close()
