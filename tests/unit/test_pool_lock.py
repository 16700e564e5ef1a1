# SPDX-License-Identifier: Apache-2.0
"""Ownership of a pool directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.elsewhere import living_elsewhere
from tests.wait import wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.lock import (
    DirectoryLock,
    Heartbeat,
    Holder,
    probe_lock,
    read_holder,
)
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.pool.silence import Silence

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


def _held_by(pid: int) -> str:
    return rf"engine-0.*pid {pid} on host {Holder.myself().host} \(heartbeat \d+ s old\)"


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
    holder = read_holder(pool.directories[0] / "lock")
    assert holder is not None
    assert holder.pid == os.getpid()
    pool.close()


def test_a_closed_pool_names_no_holder(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path))
    pool.close()
    pool.close()
    assert read_holder(pool.directories[0] / "lock") is None


def leave_lock(tmp_path: Path, age_s: float, **changes: object) -> Path:
    """Leave a lock file as another host would."""
    pool = Pool.open(make_spec(tmp_path))
    lock = pool.directories[0] / "lock"
    pool.close()
    record = {
        "host": "elsewhere",
        "pid": 4711,
        "boot_id": "another-kernel",
        "heartbeat": time.time() - age_s,
        **changes,
    }
    lock.write_text(json.dumps(record))
    return lock


@pytest.mark.parametrize("engine_index", [None, 0])
@pytest.mark.parametrize(
    "ahead_s", [0, -31, -5 * 3600, 3600], ids=["in step", "behind", "hours behind", "ahead"]
)
def test_a_live_owner_on_another_host_is_refused_by_name(
    tmp_path: Path, engine_index: int | None, ahead_s: float
) -> None:
    """Whatever its clock says: its record changes while it is watched."""
    lock = leave_lock(tmp_path, 0)
    with living_elsewhere(lock, ahead_s), pytest.raises(PoolLockedError) as refusal:
        Pool.open(make_spec(tmp_path, engine_index))
    message = str(refusal.value)
    assert str(lock) in message
    assert "4711" in message
    assert "elsewhere" in message
    assert "delete" in message


@pytest.mark.parametrize(
    ("age_s", "changes"),
    [
        (31, {}),
        (-3600, {}),
        (3, {"boot_id": Holder.myself().boot_id}),
        (31, {"host": Holder.myself().host}),
        (3, {"heartbeat": "garbage"}),
    ],
    ids=[
        "dead host",
        "dead, clock ahead",
        "another container, same kernel",
        "same host, rebooted",
        "garbage",
    ],
)
def test_a_dead_owner_is_taken_over(
    tmp_path: Path,
    age_s: float,
    changes: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ownership, "Silence", partial(Silence, 0.01))
    leave_lock(tmp_path, age_s, **changes)
    pool = Pool.open(make_spec(tmp_path, engine_index=0))
    assert pool.engine_index == 0
    pool.close()


def test_a_live_holder_with_a_boot_id_of_its_own_is_no_other_host(
    tmp_path: Path, other_process: subprocess.Popen[str]
) -> None:
    """A container may have one. Its flock is refused, so it lives here."""
    directory = tmp_path / Keyspace.of({"m": 1}).digest / "engine-0" / "rank-0"
    holder = read_holder(directory / "lock")
    assert holder is not None
    (directory / "lock").write_bytes(replace(holder, boot_id="the container's").record())
    assert probe_lock(directory).kind == "live"
    other_process.kill()
    other_process.wait()
    assert probe_lock(directory).kind == "foreign"


def test_a_repair_renews_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "Heartbeat", partial(Heartbeat, period_s=0.05))
    with ownership.hold([tmp_path]):
        first = read_holder(tmp_path / "lock")
        assert first is not None and first.pid == os.getpid()
        wait_until("a heartbeat", lambda: read_holder(tmp_path / "lock") != first)
    assert read_holder(tmp_path / "lock") is None, "no heartbeat follows the release"


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
    lock = DirectoryLock.claim(tmp_path / "lock")
    assert lock is not None
    of_the_prober = os.dup(lock.fd)
    lock.release()
    again = DirectoryLock.claim(tmp_path / "lock")
    os.close(of_the_prober)
    assert again is not None
    again.release()


def test_closing_on_a_target_that_does_not_answer_logs_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that ends with a lost target logs nothing that an operator must act on."""
    lock = DirectoryLock.claim(tmp_path / "lock")
    assert lock is not None
    ours = logging.getLogger(LOGGER_NAME)
    monkeypatch.setattr(ours, "propagate", False)
    caplog.set_level(logging.INFO, LOGGER_NAME)
    ours.addHandler(caplog.handler)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        lock.release()
    ours.removeHandler(caplog.handler)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "left as it is (EIO): the next start takes it over" in record.getMessage()
    taken_over = DirectoryLock.claim(tmp_path / "lock")
    assert taken_over is not None, "and it does"
    taken_over.release()
