# SPDX-License-Identifier: Apache-2.0
"""A reset while one of two targets hangs is durable on the other, which stays writable.

Pool slots with even numbers are on the target that hangs, the others on a healthy one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wait import wait_until
from vllm_nvmeof_offload.errors import DEADLINE, OK
from vllm_nvmeof_offload.pool.format import read_superblock
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
