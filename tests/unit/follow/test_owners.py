# SPDX-License-Identifier: Apache-2.0
"""Owners with several targets and ranks, requested versions, and owner numbers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.owners import reset
from tests.unit.follow.kit import (
    COMPLETE,
    DEAD,
    NONE,
    SCANNING,
    Following,
    row,
)
from tests.unit.pool.kit import OTHER_TAG, PAYLOAD_BYTES, TAG, name, put
from vllm_nvmeof_offload.follow.follower import YOUNG_S
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.pool.format import write_superblock
from vllm_nvmeof_offload.pool.pool import Pool

OpenEngine = Callable[..., Pool]


def test_an_owner_with_a_target_that_is_not_ours_is_left_out(
    file: int, engine: OpenEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    following = Following(file, [a])
    both, ours = engine(1, a, b), engine(2, a)
    put(both, 0, name(1))
    put(ours, 0, name(2))
    for _ in range(4):
        following.scan()
    assert capfd.readouterr().err == ""
    for _ in range(4):
        following.scan()
    line = "share: engine-1 is not read: its pool is on 2 targets, and 1 of them are ours\n"
    assert capfd.readouterr().err == line
    assert following.owner(1).engine_index == 2
    assert following.state(2) == NONE
    assert following.reader.rows == 1


def test_a_reset_that_reached_one_target_voids_all(
    file: int, engine: OpenEngine, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    following = Following(file, [a, b])
    pool = engine(1, a, b)
    put(pool, 0, name(1))
    put(pool, 1, name(2))
    following.scan()
    assert following.reader.rows == 2
    before = (pool.directories[1] / "superblock").read_bytes()
    reset(pool, TAG, named=True)
    (pool.directories[1] / "superblock").write_bytes(before)
    put(pool, 3, name(3, 7))
    following.scan(0.1)
    assert following.state(1) == COMPLETE
    assert following.reader.rows == 1
    assert following.rows(name(3).key) == {row(1, 1, 7, target=1)}


def test_an_owner_is_complete_when_all_its_targets_were_scanned(
    file: int, engine: OpenEngine, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    following = Following(file, [a, b])
    put(engine(1, a, b), 0, name(1))
    first, second = following.scans
    first.scan()
    assert following.state(1) == NONE
    second.scan()
    assert following.state(1) == SCANNING
    first.scan()
    assert following.state(1) == COMPLETE


def groups(set_size: int) -> tuple[RankGroup, ...]:
    """Groups 5 and 6; set_size: of the first one."""
    return tuple(
        RankGroup(Group(group_id, GroupKind.FULL, 16), PAYLOAD_BYTES, size)
        for group_id, size in ((5, set_size), (6, 1))
    )


def test_with_several_ranks_an_entry_is_offered_when_it_is_not_young(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path, world_size=2)
    following.scan()
    put(pool, 1, name(1, 5))
    put(pool, 2, name(2, 5))
    following.scan(0.01)
    assert following.reader.rows == 0
    put(pool, 2, name(3, 6))
    following.scan(YOUNG_S - 0.001)
    assert following.reader.rows == 0
    following.scan(0.001)
    assert following.rows(name(1).key) == {row(1, 1, 5)}
    assert following.reader.rows == 1
    following.scan(YOUNG_S)
    assert following.rows(name(3).key) == {row(1, 2, 6)}
    assert following.reader.rows == 2


def test_ranks_in_the_middle_of_a_reset_have_no_tag(
    file: int, engine: OpenEngine, tmp_path: Path
) -> None:
    following = Following(file, [tmp_path], ranks=2)
    shape = {"world_size": 2, "engine": "them"}
    pools = [engine(1, tmp_path, rank=rank, **shape) for rank in range(2)]
    following.scan()
    assert following.owner(1).tag == TAG
    reset(pools[1], OTHER_TAG, named=True)
    following.scan(0.1)
    assert following.owner(1).tag == bytes(16)
    reset(pools[0], OTHER_TAG, named=True)
    following.scan(0.1)
    assert (following.state(1), following.owner(1).tag) == (COMPLETE, OTHER_TAG)


def test_all_is_offered_where_all_is_asked_for(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    """Also what was left out before, and what pools have that come later."""
    one = engine(1, tmp_path)
    put(one, 0, name(0, 5))
    following.scan()
    following.reader.ask_anew()
    put(one, 1, name(1, 6))  # it may be from before
    following.scan(0.1)
    put(one, 2, name(2, 7))
    following.scan(0.1)
    assert following.reader.rows == 1
    version = following.reader.ask_anew(from_now=False)
    following.scan(0.1)
    assert (following.owner(1).version, following.state(1)) == (version, COMPLETE)
    assert [following.rows(name(n).key) for n in range(3)] == [{row(1, n, 5 + n)} for n in range(3)]
    two = engine(2, tmp_path)
    put(two, 3, name(3, 8))
    following.scan()
    following.scan(0.1)
    assert following.reader.rows == 4
    reset(one, TAG, named=True)
    put(one, 3, name(3, 9))
    following.scan(0.1)
    assert following.reader.rows == 2
    following.reader.ask_anew(from_now=False)
    version = following.reader.ask_anew()  # before the follower has seen the former
    following.scan(0.1)
    assert (following.owner(1).version, following.reader.rows) == (version, 0)


def test_a_successor_takes_over_the_table_and_the_numbers(
    file: int, following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    put(pool, 1, name(1, 5))
    following.scan()
    reader = following.reader
    assert reader.rows_of(name(1).key) == [row(1, 1, 5)]
    successor = Following(file, [tmp_path])
    assert (reader.owner(1).state, reader.rows) == (NONE, 0)
    assert reader.rows_of(name(1).key) == []
    pool.close()
    successor.scan()
    assert (reader.owner(1).state, reader.owner(2).state) == (DEAD, NONE)
    assert reader.rows_of(name(1).key) == [row(1, 1, 5)]


def test_followers_that_end_again_and_again_take_no_more_of_the_table(
    file: int, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    put(pool, 1, name(1, 5))
    sizes = set()
    for _ in range(4):
        follower = Following(file, [tmp_path])
        follower.scan()
        assert follower.reader.rows_of(name(1).key) == [row(1, 1, 5)]
        sizes.add((os.fstat(file).st_size, os.fstat(file).st_blocks))
    assert len(sizes) == 1


def test_an_engine_with_more_slots_than_may_be_followed_is_left_out(
    file: int, engine: OpenEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = engine(1, tmp_path), engine(2, tmp_path)
    put(one, 0, name(1))
    put(two, 0, name(2))
    following = Following(file, [tmp_path], slots_max=one.slots + two.slots - 1)
    for _ in range(8):
        following.scan()
    assert {following.state(1), following.state(2)} == {COMPLETE, NONE}
    assert following.reader.rows == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "is not read: following its slots may take" in line
    first = following.owner(1).engine_index
    shutil.rmtree((one, two)[first - 1].directories[0].parent)
    following.scan()
    following.scan()
    assert following.owner(2).engine_index == 3 - first
    assert following.state(2) == COMPLETE, "there is room now"


@pytest.mark.parametrize("slots", [1 << 20, (1 << 32) - 1])
def test_a_superblock_with_more_slots_than_its_slab_takes_no_memory(
    file: int, engine: OpenEngine, tmp_path: Path, slots: int
) -> None:
    pool = engine(1, tmp_path)
    following = Following(file, [tmp_path])
    directory = pool.directories[0]
    write_superblock(directory, replace(pool.superblocks[0], slots=slots))
    before = os.fstat(file).st_blocks
    following.scan()
    assert following.state(1) == NONE
    assert os.fstat(file).st_blocks == before
