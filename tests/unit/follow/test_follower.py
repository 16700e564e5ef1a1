# SPDX-License-Identifier: Apache-2.0
"""The follower's process: it has no parent, ends with its server, and survives a hanging target."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process import wait_until
from tests.unit.follow.kit import COMPLETE, DEAD, KEYSPACE, NONE, OURS, row
from tests.unit.pool.kit import name, put
from vllm_nvmeof_offload.follow.follower import Scope, start_follower
from vllm_nvmeof_offload.native import ForeignReader
from vllm_nvmeof_offload.pool.pool import Pool

OpenEngine = Callable[..., Pool]


@pytest.fixture
def start(file: int) -> Iterator[Callable[..., ForeignReader]]:
    """Start a follower of these targets; it ends with the test."""
    with contextlib.ExitStack() as running:

        def start_one(*targets: Path) -> ForeignReader:
            follower = start_follower(Scope(targets, KEYSPACE, OURS, 1), file, follow_ms=20)
            running.callback(follower.stop)
            return ForeignReader(file)

        yield start_one


def followers_of(target: Path) -> list[int]:
    """The processes that follow this target, and that have left their parent."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if b"follow.follower\0" in command and bytes(target) in command:
                found += [(int(process.name), parent)]
    pids = [pid for pid, _ in found]
    return [pid for pid, parent in found if parent not in (os.getpid(), *pids)]


def test_a_chunk_is_seen_and_its_server_s_end_too(
    start: Callable[..., ForeignReader], engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    put(pool, 3, name(1, 5))
    reader = start(tmp_path)
    wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
    assert reader.rows_of(name(1).key) == [row(1, 3, 5)]
    put(pool, 4, name(2, 6))
    wait_until("its chunk", lambda: reader.rows_of(name(2).key) == [row(1, 4, 6)])
    scanned = reader.scanned_ns
    wait_until("a scan", lambda: scanned < reader.scanned_ns <= time.monotonic_ns())
    pool.close()
    wait_until("its end", lambda: reader.owner(1).state == DEAD)


def test_a_table_can_be_read_before_the_follower_has_begun(file: int) -> None:
    follower = start_follower(Scope((Path("/nowhere"),), KEYSPACE, OURS, 1), file)
    reader = ForeignReader(file)
    assert (reader.rows, reader.owner(1).state) == (0, NONE)
    follower.stop()


def test_a_killed_follower_has_a_successor(
    file: int, engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_nvmeof_offload.follow.follower._RESTART_S", 0.05)
    pool = engine(1, tmp_path)
    put(pool, 3, name(1, 5))
    follower = start_follower(Scope((tmp_path,), KEYSPACE, OURS, 1), file)
    reader = ForeignReader(file)
    wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
    (first,) = followers_of(tmp_path)
    os.kill(first, signal.SIGKILL)
    put(pool, 4, name(2, 6))
    wait_until("its successor", lambda: followers_of(tmp_path) not in ([], [first]))
    # It goes on with the table and with the owner's number, and finds no chunk twice.
    wait_until("its successor's row", lambda: reader.rows_of(name(2).key) == [row(1, 4, 6)])
    # An owner is complete after its rows are there.
    wait_until("its record", lambda: reader.owner(1).state == COMPLETE)
    assert reader.rows_of(name(1).key) == [row(1, 3, 5)]
    assert reader.owner(2).state == NONE
    follower.stop()
    wait_until("its end", lambda: followers_of(tmp_path) == [])


def test_a_stop_while_it_starts_leaves_no_follower(file: int, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    start_follower(Scope((tmp_path,), KEYSPACE, OURS, 1), file).stop()
    wait_until("its end", lambda: set(threading.enumerate()) <= before)
    assert followers_of(tmp_path) == []


#: A server that follows a target; prints a line when it has found an owner.
SERVER = """
import os, sys
from pathlib import Path
from tests.unit.follow.kit import COMPLETE, KEYSPACE, OURS
from tests.process import wait_until
from vllm_nvmeof_offload.follow.follower import Scope, start_follower
from vllm_nvmeof_offload.native import ForeignReader
fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
follower = start_follower(Scope((Path(sys.argv[1]),), KEYSPACE, OURS, 1), fd)
reader = ForeignReader(fd)
wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
print("followed", flush=True)
sys.stdin.read()
"""


def test_the_follower_is_not_a_child_of_the_server_and_ends_with_it(
    engine: OpenEngine, tmp_path: Path
) -> None:
    """vLLM kills all descendants of an engine, and hangs if one has gone before its turn."""
    engine(1, tmp_path)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"followed\n"
    assert len(followers_of(tmp_path)) == 1
    children = Path(f"/proc/{server.pid}/task").glob("*/children")
    assert "".join(one.read_text() for one in children) == ""
    server.kill()
    server.communicate()
    wait_until("its end", lambda: followers_of(tmp_path) == [])


def test_it_opens_nothing_for_writing(
    start: Callable[..., ForeignReader], engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    reader = start(tmp_path)
    wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
    (follower,) = followers_of(tmp_path)
    table = pool.directories[0] / "table"
    wait_until("its table", lambda: table in opened_by(follower))
    for path, flags in opened_by(follower).items():
        if path.is_relative_to(tmp_path):
            assert flags & os.O_ACCMODE == os.O_RDONLY, path


def opened_by(pid: int) -> dict[Path, int]:
    """The flags of a process's open files."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            facts = (Path(f"/proc/{pid}/fdinfo") / link.name).read_text()
            found[link.readlink()] = int(facts.split("flags:")[1].split()[0], 8)
    return found
