# SPDX-License-Identifier: Apache-2.0
"""Follower and keeper, children of a server, while a target hangs: they delay nothing else."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.unit.follow.kit import KEYSPACE, OURS, open_engine, row
from tests.unit.follow.test_follower import followers_of
from tests.unit.pool.kit import name, put
from tests.unit.pool.test_pool_lock import Held
from tests.wait import wait_until
from vllm_nvmeof_offload.follow.follower import Scope, start_follower
from vllm_nvmeof_offload.native import ForeignReader
from vllm_nvmeof_offload.pool.keeper import keep
from vllm_nvmeof_offload.pool.lease import Permits

from .fuse_mount import FaultyMount

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("own_mount_table")]


def test_a_target_that_hangs_delays_no_other_target_and_no_stop(
    faulty_mount: FaultyMount, tmp_path: Path
) -> None:
    hung, answers = faulty_mount.place / "t", tmp_path / "answers"
    open_engine(5, hung).close()
    faulty_mount.rules({"op": "read", "path": "superblock", "do": "hang"})
    pool = open_engine(1, answers)
    put(pool, 3, name(1, 5))
    file = os.memfd_create("foreign", os.MFD_CLOEXEC)
    follower = start_follower(Scope((hung, answers), KEYSPACE, OURS, 1), file)
    reader = ForeignReader(file)
    faulty_mount.wait_hanging(1)
    wait_until("a row", lambda: reader.rows_of(name(1).key) == [row(1, 3, 5, target=1)])
    put(pool, 3, name(2, 6))
    wait_until("a row", lambda: reader.rows_of(name(2).key) == [row(1, 3, 6, target=1)])
    follower.stop()
    faulty_mount.rules()
    wait_until("its end", lambda: followers_of(hung) == [])
    pool.close()
    os.close(file)


def test_a_hung_file_delays_no_other_file_and_no_server(
    faulty_mount: FaultyMount, tmp_path: Path
) -> None:
    permits = Permits.new(2)
    other, held = Held(faulty_mount.place, permits, 0), Held(tmp_path, permits, 1)
    faulty_mount.rules({"op": "write", "path": "lease", "do": "hang"})
    before_it = set(threading.enumerate())
    keeping = keep([other.region, held.region], permits)
    faulty_mount.wait_hanging(1)
    for _ in range(3):
        held.await_beat()
    begun_s = time.monotonic()
    keeping.stop()
    assert time.monotonic() - begun_s < 5
    assert set(threading.enumerate()) <= before_it
    faulty_mount.rules()
    held.region.release()
    other.region.release()
