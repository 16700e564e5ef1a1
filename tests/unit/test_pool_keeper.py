# SPDX-License-Identifier: Apache-2.0
"""A server's leases are renewed by a child: a hang there does not affect the server."""

from __future__ import annotations

import contextlib
import itertools
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
from vllm_nvmeof_offload.child import Companion
from vllm_nvmeof_offload.pool.keeper import Keeper, Region, keep
from vllm_nvmeof_offload.pool.lease import (
    DirectoryLock,
    Lease,
    LeasePage,
    PageFile,
    Permits,
    lease_of,
    read_lease,
)
from vllm_nvmeof_offload.pool.ownership import LOCAL

WAIT_S = 120.0
#: Renewed every 50 ms.
OFTEN = replace(LOCAL, takeover_s=0.3)


class Held:
    """A region that is claimed, and kept from `keep` on."""

    def __init__(self, directory: Path, permits: Permits | None = None, number: int = 0) -> None:
        """number: of its permit."""
        lock = DirectoryLock.claim(directory)
        assert lock is not None
        self.lock, self.permits, self.directory = lock, permits or Permits.new(1), directory
        self.region = Region(lock, Lease.claim_in(directory, OFTEN, self.permits, number))
        assert self.region.lease.is_ours()

    def keep(self) -> Companion:
        return keep([self.region], self.permits)

    @property
    def page(self) -> LeasePage:
        page = read_lease(lease_of(self.directory))
        assert page is not None
        return page

    def await_beat(self) -> None:
        before = self.page.beat
        wait_until("a renewal", lambda: self.page.beat > before)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path)
    yield held
    held.region.release()


def test_the_servers_name_is_renewed(held: Held) -> None:
    keeping = held.keep()
    held.await_beat()
    assert held.page.pid == os.getpid(), "not the child's"
    keeping.stop()


def test_a_page_that_names_another_owner_is_left_alone(held: Held) -> None:
    """Another host's server, which flock does not reach, has taken the region over."""
    keeping = held.keep()
    held.await_beat()
    theirs = replace(held.page, owner=b"another server's", generation=9)
    wait_until("the loss", lambda: _put(held, theirs) or held.region.lease.permit.is_lost)
    assert held.page == theirs
    keeping.stop()
    held.region.release()
    assert held.page == theirs


def _put(held: Held, page: LeasePage) -> None:
    """A renewal that was under way may replace it."""
    lease_of(held.directory).write(page.encode())


def test_a_torn_page_is_written_again(held: Held) -> None:
    keeping = held.keep()
    held.await_beat()
    (held.directory / "lease").write_bytes(b"\1" * 512)
    wait_until("a renewal", lambda: held.page.is_intact)
    assert held.page.owner == held.region.lease.page.owner
    assert not held.region.lease.permit.is_lost
    keeping.stop()


def beating_for(pid: int) -> list[int]:
    """The processes that renew the leases of `pid`; their parent has ended."""
    command = b"-m\0vllm_nvmeof_offload.pool.keeper\0%d\0" % pid
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if command in (process / "cmdline").read_bytes():
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(process.name)] if parent not in (pid, *found) else []
    return found


def test_a_killed_renewer_has_a_successor(held: Held) -> None:
    keeping = held.keep()
    held.await_beat()
    (first,) = beating_for(os.getpid())
    os.kill(first, signal.SIGKILL)
    wait_until("a successor", lambda: beating_for(os.getpid()) not in ([], [first]))
    held.await_beat()
    keeping.stop()


def test_a_killed_renewer_has_a_successor_in_a_server_with_many_descriptors(
    held: Held,
) -> None:
    with numbers_from(1024):
        test_a_killed_renewer_has_a_successor(held)
    wait_until("its end", lambda: beating_for(os.getpid()) == [])


#: A server whose lease is renewed; prints a line when it has been.
SERVER = """
import sys
from pathlib import Path
from tests.unit.test_pool_keeper import Held
held = Held(Path(sys.argv[1]))
keeping = held.keep()
held.await_beat()
print("renewed", flush=True)
sys.stdin.read()
"""


def test_the_renewer_is_not_a_child_of_the_server_and_ends_with_it(tmp_path: Path) -> None:
    """vLLM kills all descendants of an engine, and hangs if one has gone before its turn."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)],
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
    wait_until("its end", lambda: beating_for(server.pid) == [])


def test_a_replaced_file_at_the_path_is_not_written(held: Held, tmp_path: Path) -> None:
    """Another file system may be mounted there, with another owner."""
    path, lease = tmp_path / "lease", held.region.lease
    path.rename(tmp_path / "ours")
    path.write_bytes(b"theirs")
    path.chmod(0o600)
    keeper = Keeper(lease.page.owner, 30.0, lease.permit)
    with pytest.raises(OSError, match="another file"):
        keeper.renew(PageFile(path, held.lock.lease), epoch=1)
    held.region.release()
    assert path.read_bytes() == b"theirs"


def test_the_lease_of_a_target_that_is_away_is_left_alone(held: Held) -> None:
    """Its path is not touched, and another server may have the region meanwhile."""
    held.region.lock, lock = None, held.region.lock
    assert held.region.order() is None
    before = held.page
    held.region.release()
    assert held.page == before
    assert held.region.lease.permit.is_lost
    held.region.lock = lock


#: Continues after Ctrl-C, as vLLM does while it drains; stops on request.
DRAINING = (
    SERVER.replace(
        "import sys", "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: None)"
    )
    + "keeping.stop()\n"
)


def test_ctrl_c_does_not_end_the_renewer_before_its_server(tmp_path: Path) -> None:
    """The console sends SIGINT to all of a server's process group; the server drains first."""
    server = subprocess.Popen(
        [sys.executable, "-c", DRAINING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"renewed\n"
    beating = beating_for(server.pid)
    os.killpg(server.pid, signal.SIGINT)
    pages = map(read_lease, itertools.repeat(lease_of(tmp_path)))
    first = next(pages)
    wait_until("a renewal", lambda: next(pages) != first)
    assert beating_for(server.pid) == beating, "the same one, not a successor"
    assert server.communicate() == (b"", b"")
    assert server.returncode == 0
    wait_until("its end", lambda: beating_for(server.pid) == [])


def test_a_stop_does_not_wait_for_a_child_that_cannot_start(
    held: Held, monkeypatch: pytest.MonkeyPatch
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
        keeping = held.keep()
        assert starting.wait(WAIT_S)
        stopping = threading.Thread(target=keeping.stop)
        stopping.start()
        stopping.join(WAIT_S)
        stopped = not stopping.is_alive()
        before = held.page
        started.set()
    assert stopped
    wait_until("its end", lambda: beating_for(os.getpid()) == [])
    assert held.page == before, "nothing is written after the stop"
