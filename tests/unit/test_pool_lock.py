# SPDX-License-Identifier: Apache-2.0
"""Ownership of a pool directory."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.elsewhere import living_elsewhere, page_elsewhere, put_page
from tests.wait import wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.lease import (
    DirectoryLock,
    Lease,
    LeasePage,
    Permits,
    Takeover,
    boot_id,
    lease_of,
    read_lease,
)
from vllm_nvmeof_offload.pool.ownership import LOCAL
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec

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
