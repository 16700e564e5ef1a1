# SPDX-License-Identifier: Apache-2.0
"""A server's locks are renewed by a child: a hang there does not affect the server."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.descriptors import numbers_from
from tests.wait import wait_until
from vllm_nvmeof_offload.pool.lock import (
    DirectoryLock,
    Heartbeat,
    Holder,
    read_holder,
    write_record,
)

WAIT_S = 120.0
NOBODY = Holder("", 0, "", 0)


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
    beating = Heartbeat(lambda: [lock], period_s=0.05)

    def renewed() -> bool:
        holder = read_holder(lock.path)
        return holder is not None and holder.heartbeat > before

    wait_until("a heartbeat", renewed)
    holder = read_holder(lock.path)
    assert holder is not None
    assert holder.pid == os.getpid(), "not the child's"
    beating.stop()


def test_a_record_that_names_another_process_is_left_alone(lock: DirectoryLock) -> None:
    """Another host's server, which flock does not reach, has taken the directory over."""
    write_record(lock.file, os.getpid())
    ours = read_holder(lock.path)
    assert ours is not None
    for theirs in (replace(ours, boot_id="another-kernel"), replace(ours, pid=ours.pid + 1)):
        lock.path.write_bytes(theirs.record())
        with pytest.raises(OSError, match=f"{theirs} has taken it over") as refusal:
            write_record(lock.file, os.getpid())
        assert refusal.value.errno == errno.EBUSY
        assert read_holder(lock.path) == theirs
    lock.path.write_bytes(b"\0" * 512)  # a write was torn: nobody is named
    write_record(lock.file, os.getpid())
    holder = read_holder(lock.path)
    assert holder is not None and holder.pid == ours.pid


def test_a_release_leaves_another_hosts_name(lock: DirectoryLock) -> None:
    theirs = Holder("elsewhere", 1, "another-kernel", 0.0)
    lock.path.write_bytes(theirs.record())
    lock.release()
    assert read_holder(lock.path) == theirs


def beating_for(pid: int) -> list[int]:
    """The processes that renew the locks of `pid`; their parent has ended."""
    command = b"-m\0vllm_nvmeof_offload.pool.lock\0%d\0" % pid
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().endswith(command):
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(process.name)] if parent not in (pid, *found) else []
    return found


def test_a_killed_renewer_has_a_successor(lock: DirectoryLock) -> None:
    beating = Heartbeat(lambda: [lock], period_s=0.05)
    wait_until(
        "a heartbeat",
        lambda: read_holder(lock.path) is not None and len(beating_for(os.getpid())) == 1,
    )
    (first,) = beating_for(os.getpid())
    os.kill(first, signal.SIGKILL)
    wait_until("a heartbeat", lambda: beating_for(os.getpid()) not in ([], [first]))
    before = grow_old(lock.path)
    wait_until("a heartbeat", lambda: (read_holder(lock.path) or NOBODY).heartbeat > before)
    beating.stop()


def test_a_killed_renewer_has_a_successor_in_a_server_with_many_descriptors(
    lock: DirectoryLock,
) -> None:
    with numbers_from(1024):
        test_a_killed_renewer_has_a_successor(lock)
    wait_until("a heartbeat", lambda: beating_for(os.getpid()) == [])


#: A server whose lock is renewed; prints a line when it has been.
SERVER = """
import sys
from pathlib import Path
from tests.wait import wait_until
from vllm_nvmeof_offload.pool.lock import Heartbeat
from vllm_nvmeof_offload.pool.lock import DirectoryLock, read_holder
lock = DirectoryLock.claim(Path(sys.argv[1]))
first = read_holder(lock.path)
beating = Heartbeat(lambda: [lock], period_s=0.01)
while read_holder(lock.path) == first:
    pass
print("renewed", flush=True)
sys.stdin.read()
"""


def test_the_renewer_is_not_a_child_of_the_server_and_ends_with_it(tmp_path: Path) -> None:
    """vLLM kills all descendants of an engine, and hangs if one has gone before its turn."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"renewed\n"
    assert len(beating_for(server.pid)) == 1
    children = Path(f"/proc/{server.pid}/task").glob("*/children")
    assert "".join(one.read_text() for one in children) == ""
    server.kill()
    server.communicate()
    wait_until("a heartbeat", lambda: beating_for(server.pid) == [])


def test_a_replaced_file_at_the_path_is_not_written(lock: DirectoryLock, tmp_path: Path) -> None:
    """Another file system may be mounted there, with another owner."""
    lock.path.rename(tmp_path / "ours")
    lock.path.write_bytes(b"theirs")
    with pytest.raises(OSError, match="another lock file"):
        write_record(lock.file, os.getpid())
    assert lock.path.read_bytes() == b"theirs"


#: Continues after Ctrl-C, as vLLM does while it drains; stops on request.
DRAINING = (
    SERVER.replace(
        "import sys", "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: None)"
    )
    + "beating.stop()\n"
)


def test_ctrl_c_does_not_end_the_renewer_before_its_server(tmp_path: Path) -> None:
    """The console sends SIGINT to all of a server's process group; the server drains first."""
    path = tmp_path / "lock"
    server = subprocess.Popen(
        [sys.executable, "-c", DRAINING, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"renewed\n"
    beating = beating_for(server.pid)
    os.killpg(server.pid, signal.SIGINT)
    before = grow_old(path)
    wait_until("a heartbeat", lambda: (read_holder(path) or NOBODY).heartbeat > before)
    assert beating_for(server.pid) == beating, "the same one, not a successor"
    assert server.communicate() == (b"", b"")
    assert server.returncode == 0
    wait_until("its end", lambda: beating_for(server.pid) == [])


def test_a_stop_does_not_wait_for_a_child_that_cannot_start(
    lock: DirectoryLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python is on a mount that hangs: the server ends without the child."""
    starting, started = threading.Event(), threading.Event()

    class Hanging(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            starting.set()
            started.wait()
            return super().wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Hanging)
        beating = Heartbeat(lambda: [lock], period_s=0.01)
        assert starting.wait(WAIT_S)
        stopping = threading.Thread(target=beating.stop)
        stopping.start()
        stopping.join(WAIT_S)
        stopped = not stopping.is_alive()
        before = grow_old(lock.path)
        started.set()
    assert stopped
    wait_until("its end", lambda: beating_for(os.getpid()) == [])
    holder = read_holder(lock.path)
    assert holder is not None
    assert holder.heartbeat == before, "nothing is written after the stop"
