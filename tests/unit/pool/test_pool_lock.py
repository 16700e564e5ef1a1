# SPDX-License-Identifier: Apache-2.0
"""Ownership of a pool directory, and the child that renews a server's leases."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.owners import living_elsewhere, page_elsewhere, put_page
from tests.process import numbers_from, wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.child import Companion
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.keeper import Keeper, Region, keep
from vllm_nvmeof_offload.pool.lease import (
    DirectoryLock,
    Lease,
    LeasePage,
    PageFile,
    Permits,
    boot_id,
    lease_of,
    read_lease,
)
from vllm_nvmeof_offload.pool.ownership import LOCAL
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.pool.takeover import Takeover

CHILD = """
import sys, pathlib
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
pool = Pool.open(PoolSpec((pathlib.Path(sys.argv[1]),), 1 << 20, 5000, Keyspace.of({"m": 1})))
print(pool.engine_index, flush=True)
sys.stdin.read()
"""


def make_spec(target: Path, engine_index: int | None = None) -> PoolSpec:
    return PoolSpec(
        (target,), 1 << 20, 5000, Keyspace.of({"m": 1}), engine_index=engine_index, o_direct="off"
    )


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A live process that holds engine 0."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "0\n"
    yield child
    child.kill()
    child.communicate()


def test_a_second_engine_takes_the_next_index(
    tmp_path: Path, other_process: subprocess.Popen[str]
) -> None:
    pool = Pool.open(make_spec(tmp_path))
    third = Pool.open(make_spec(tmp_path))
    assert (pool.engine_index, third.engine_index) == (1, 2)
    third.close()
    pool.close()


def page_in(directory: Path) -> LeasePage:
    page = read_lease(lease_of(directory))
    assert page is not None
    return page


def _held_by(pid: int) -> str:
    return rf"engine-0.*pid {pid} on host {socket.gethostname()} \(renewed \d+ s ago\)"


def test_an_index_that_is_held_is_refused_by_name(
    tmp_path: Path, other_process: subprocess.Popen[str]
) -> None:
    with pytest.raises(PoolLockedError, match=_held_by(other_process.pid)):
        Pool.open(make_spec(tmp_path, engine_index=0))


def test_a_lock_left_by_sigkill_is_taken_over_at_once(
    tmp_path: Path, other_process: subprocess.Popen[str]
) -> None:
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    pool = Pool.open(make_spec(tmp_path, engine_index=0))
    assert page_in(pool.directories[0]).pid == os.getpid()
    pool.close()


def test_a_closed_pool_names_no_owner(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path))
    pool.close()
    pool.close()
    assert page_in(pool.directories[0]).is_free
    assert (pool.directories[0] / "lock").stat().st_size == 0


def leave_lease(tmp_path: Path, **changes: object) -> Path:
    """Leave a lease as another host would."""
    pool = Pool.open(make_spec(tmp_path))
    pool.close()
    lease = pool.directories[0] / "lease"
    put_page(lease, page_elsewhere(**changes))
    return lease


@pytest.mark.parametrize("engine_index", [None, 0])
def test_a_live_owner_on_another_host_is_refused_by_name(
    tmp_path: Path, engine_index: int | None
) -> None:
    lease = leave_lease(tmp_path)
    with living_elsewhere(lease), pytest.raises(PoolLockedError) as refusal:
        Pool.open(make_spec(tmp_path, engine_index))
    message = str(refusal.value)
    assert str(lease) in message
    assert "4711" in message
    assert "elsewhere" in message
    assert "delete" in message


@pytest.mark.parametrize(
    "changes",
    [{}, {"boot": boot_id()}, {"host": socket.gethostname()}, {"generation": 0}],
    ids=["dead host", "another container, same kernel", "same host, rebooted", "damaged"],
)
def test_a_dead_owner_is_taken_over(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def takeover(_: float) -> Takeover:
        return Takeover(0.01, wait=waited.append)

    monkeypatch.setattr(ownership, "Takeover", takeover)
    lease = leave_lease(tmp_path)
    page = replace(page_elsewhere(), **changes)  # type: ignore[arg-type]
    lease.write_bytes(page.encode() if page.is_intact else b"garbage")
    pool = Pool.open(make_spec(tmp_path, engine_index=0))
    assert pool.engine_index == 0
    pool.close()


def test_a_dead_owner_of_this_kernel_is_not_waited_for(tmp_path: Path) -> None:
    """Its flock has ended: a wait would take 30 s."""
    leave_lease(tmp_path, boot=boot_id())
    pool = Pool.open(make_spec(tmp_path, engine_index=0))
    assert page_in(pool.directories[0]).generation == page_elsewhere().generation + 1
    pool.close()


def test_a_live_owner_with_a_boot_id_of_its_own_is_no_other_host(
    tmp_path: Path, other_process: subprocess.Popen[str]
) -> None:
    """A container may have one. Its flock is refused, so it lives here."""
    directory = tmp_path / Keyspace.of({"m": 1}).digest / "engine-0" / "rank-0"
    put_page(directory / "lease", replace(page_in(directory), boot=b"the container's."))
    assert Takeover().look(directory).kind == "live"
    other_process.kill()
    other_process.wait()
    assert Takeover().look(directory).kind == "silent"


def test_a_repair_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LOCAL", replace(LOCAL, takeover_s=0.3))
    with ownership.hold([tmp_path]):
        first = page_in(tmp_path)
        assert first.pid == os.getpid()
        wait_until("a renewal", lambda: page_in(tmp_path) != first)
    assert page_in(tmp_path).is_free, "no renewal follows the release"


def test_a_failed_open_leaves_no_lock(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path))
    slab = pool.directories[0] / "slab"
    pool.close()
    slab.unlink()
    slab.mkdir()
    for _ in range(2):
        with pytest.raises(Exception, match="slab"):
            Pool.open(make_spec(tmp_path, engine_index=0))
    slab.rmdir()
    Pool.open(make_spec(tmp_path, engine_index=0)).close()


def test_a_released_directory_is_free_although_a_prober_has_the_descriptor(tmp_path: Path) -> None:
    """One that is just being started has all of them, and one that is ending that of its answer."""
    lock = DirectoryLock.claim(tmp_path)
    assert lock is not None
    of_the_prober = os.dup(lock.fd)
    lock.release()
    again = DirectoryLock.claim(tmp_path)
    os.close(of_the_prober)
    assert again is not None
    again.release()


def test_closing_on_a_target_that_does_not_answer_logs_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that ends with a lost target logs nothing that an operator must act on."""
    lock = DirectoryLock.claim(tmp_path)
    assert lock is not None
    lease = Lease.claim_in(tmp_path, LOCAL, Permits.new(1), 0)
    ours = logging.getLogger(LOGGER_NAME)
    monkeypatch.setattr(ours, "propagate", False)
    caplog.set_level(logging.INFO, LOGGER_NAME)
    ours.addHandler(caplog.handler)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails)
        lease.release(lock.lease)
    ours.removeHandler(caplog.handler)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "(EIO): the next start takes it over" in record.getMessage()
    lock.release()
    taken_over = DirectoryLock.claim(tmp_path)
    assert taken_over is not None, "and it does"
    taken_over.release()


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
from tests.unit.pool.test_pool_lock import Held
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
    with pytest.raises(OSError, match="a different file"):
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
