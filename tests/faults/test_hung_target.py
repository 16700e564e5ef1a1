# SPDX-License-Identifier: Apache-2.0
"""While one target hangs: resets are durable on the others, and children of a server delay nothing.

Pool slots with even numbers are on the target that hangs, the others on a healthy one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import wait_until
from tests.unit.follow.kit import KEYSPACE, OURS, open_engine, row
from tests.unit.follow.test_follower import followers_of
from tests.unit.pool.kit import name as pool_name
from tests.unit.pool.kit import put
from tests.unit.pool.test_ownership import Held
from vllm_nvmeof_offload.errors import DEADLINE, OK
from vllm_nvmeof_offload.follow.follower import Scope, start_follower
from vllm_nvmeof_offload.native import ForeignReader
from vllm_nvmeof_offload.pool.format import read_superblock
from vllm_nvmeof_offload.pool.keeper import keep
from vllm_nvmeof_offload.pool.lease import Permits
from vllm_nvmeof_offload.pool.pool import Pool

from .fuse_mount import FaultyMount
from .kit import WAIT_S, adopted, make_spec, name
from .survive_rig import Survivor

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("own_mount_table")]

SLOTS = 8
DATA = {"name": "data", "op": "write", "path": "slab", "do": "hang"}
SUPERBLOCK = {"name": "superblock", "op": "write", "path": "superblock.new", "do": "hang"}


@pytest.fixture
def survivor(engine_name: str, faulty_mount: FaultyMount, tmp_path: Path) -> Iterator[Survivor]:
    """All slots hold `name(slot)`."""
    spec = make_spec(faulty_mount.place / "t", tmp_path / "healthy", slots=SLOTS // 2)
    survivor = Survivor(engine_name, Pool.open(spec), SLOTS)
    yield survivor
    faulty_mount.rules()
    survivor.close()


def epoch_of(directory: Path) -> int:
    found = read_superblock(directory)
    assert found is not None
    return found.epoch


def test_a_reset_during_a_write_that_hangs(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    faulty_mount.rules(DATA)
    assert survivor.write(1, 2, name(1)) == DEADLINE
    assert survivor.reset() == OK
    assert survivor.pool.await_superblocks(WAIT_S)
    assert survivor.write(1, 3, name(1)) == OK
    assert [epoch_of(place) for place in survivor.pool.directories] == [
        survivor.pool.stamp.epoch
    ] * 2
    check_what_is_left(survivor, faulty_mount)


@pytest.mark.parametrize("rules", [[SUPERBLOCK], [SUPERBLOCK, DATA]], ids=["alone", "and data"])
def test_a_reset_whose_superblock_hangs(
    survivor: Survivor, faulty_mount: FaultyMount, rules: list[dict[str, str]]
) -> None:
    old = survivor.pool.stamp.epoch
    faulty_mount.rules(*rules)
    if DATA in rules:
        assert survivor.write(1, 2, name(1)) == DEADLINE
    for _ in range(2):  # the second reset finds the first one hanging
        assert survivor.reset() == OK
        assert not survivor.pool.await_superblocks(0)
        assert survivor.write(1, 3, name(1)) == OK
        backing, healthy = faulty_mount.backing / "t", survivor.pool.directories[1]
        (behind,) = (path.parent for path in backing.glob("*/engine-0/rank-0/superblock"))
        assert (epoch_of(behind), epoch_of(healthy)) == (old, survivor.pool.stamp.epoch)
        faulty_mount.wait_hanging(len(rules))
    check_what_is_left(survivor, faulty_mount)


def check_what_is_left(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    """End the hang: no chunk from before the reset is adopted from any target, and what is written
    to the one that hung is."""
    pool = survivor.pool
    faulty_mount.rules()
    wait_until(
        "the newest superblock of the target that hung",
        lambda: [epoch_of(place) for place in pool.directories] == [pool.stamp.epoch] * 2,
    )
    assert pool.await_superblocks(WAIT_S)
    survivor.wait_until(lambda: all(health.verdict.usable for health in survivor.health))
    assert survivor.write(3, 4, name(1)) == OK
    survivor.close()  # the watcher too: a prober has the pool's lock from its fork to its start
    targets = [directory.parents[2] for directory in pool.directories]
    again = Pool.open(make_spec(*targets, slots=SLOTS // 2))
    assert again.engine_index == pool.engine_index
    assert adopted(again) == {3: name(1), 4: name(1)}
    again.close()


# -- follower and keeper, children of a server ----------------------------------------


def test_a_target_that_hangs_delays_no_other_target_and_no_stop(
    faulty_mount: FaultyMount, tmp_path: Path
) -> None:
    hung, answers = faulty_mount.place / "t", tmp_path / "answers"
    open_engine(5, hung).close()
    faulty_mount.rules({"op": "read", "path": "superblock", "do": "hang"})
    pool = open_engine(1, answers)
    put(pool, 3, pool_name(1, 5))
    file = os.memfd_create("foreign", os.MFD_CLOEXEC)
    follower = start_follower(Scope((hung, answers), KEYSPACE, OURS, 1), file)
    reader = ForeignReader(file)
    faulty_mount.wait_hanging(1)
    wait_until("a row", lambda: reader.rows_of(pool_name(1).key) == [row(1, 3, 5, target=1)])
    put(pool, 3, pool_name(2, 6))
    wait_until("a row", lambda: reader.rows_of(pool_name(2).key) == [row(1, 3, 6, target=1)])
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
