# SPDX-License-Identifier: Apache-2.0
"""A server's locks are renewed by a child: whatever hangs there, the server has no part in it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_nvmeof_offload.pool import heartbeat
from vllm_nvmeof_offload.pool.heartbeat import ServerHeartbeat
from vllm_nvmeof_offload.pool.lock import DirectoryLock, Holder, read_holder, write_record

WAIT_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        os.sched_yield()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[DirectoryLock]:
    lock = DirectoryLock.claim(tmp_path / "lock")
    assert lock is not None
    yield lock
    lock.release()


def grow_old(path: Path) -> float:
    holder = read_holder(path)
    assert holder is not None
    old = Holder(holder.host, holder.pid, holder.boot_id, holder.heartbeat - 1000)
    path.write_bytes(old.record())
    return old.heartbeat


def test_the_servers_name_is_renewed(lock: DirectoryLock) -> None:
    before = grow_old(lock.path)
    beating = ServerHeartbeat(lambda: [lock], period_s=0.05)

    def renewed() -> bool:
        holder = read_holder(lock.path)
        return holder is not None and holder.heartbeat > before

    wait_until(renewed)
    holder = read_holder(lock.path)
    assert holder is not None
    assert holder.pid == os.getpid(), "not the child's"
    beating.stop()


def test_a_child_that_is_killed_has_a_successor(
    lock: DirectoryLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: object, **more: object) -> subprocess.Popen[bytes]:
        children.append(real(*args, **more))  # type: ignore[call-overload]
        return children[-1]

    monkeypatch.setattr(heartbeat.subprocess, "Popen", popen)
    beating = ServerHeartbeat(lambda: [lock], period_s=0.05)
    wait_until(lambda: len(children) == 1)
    children[0].kill()
    wait_until(lambda: len(children) == 2)
    beating.stop()
    assert all(child.returncode is not None for child in children)


def test_another_file_at_the_path_is_not_written(lock: DirectoryLock, tmp_path: Path) -> None:
    """Another file system may be mounted there, with an owner of its own."""
    lock.path.rename(tmp_path / "ours")
    lock.path.write_bytes(b"theirs")
    with pytest.raises(OSError, match="another lock file"):
        write_record(lock.file, os.getpid())
    assert lock.path.read_bytes() == b"theirs"


def test_a_file_that_hangs_holds_up_no_other_and_no_server(
    lock: DirectoryLock, tmp_path: Path
) -> None:
    # Opening a FIFO for writing waits for a reader, as a path that is lost makes it wait.
    hung = tmp_path / "hung"
    os.mkfifo(hung)
    status = hung.stat()
    other = DirectoryLock(-1, type(lock.file)(str(hung), status.st_dev, status.st_ino))
    beating = ServerHeartbeat(lambda: [other, lock], period_s=0.05)
    for _ in range(3):
        before = grow_old(lock.path)
        wait_until(
            lambda before=before: (
                (read_holder(lock.path) or Holder("", 0, "", 0)).heartbeat  # type: ignore[misc]
                > before
            )
        )
    begun_s = time.monotonic()
    beating.stop()
    assert time.monotonic() - begun_s < 5
    assert "pool-heartbeat" not in [thread.name for thread in threading.enumerate()]
