# SPDX-License-Identifier: Apache-2.0
"""Misplaced slots are found offline and never adopted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.slots import table_at
from vllm_nvmeof_offload.commands.pool.check import check, exit_code
from vllm_nvmeof_offload.commands.pool.show import inspect_slot
from vllm_nvmeof_offload.pool.format import encode_entry
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import find, survey
from vllm_nvmeof_offload.protocol import place_of

from .kit import SLOT_BYTES, STORED, OpenPool, entries, fill, get, make_spec, name, put
from .offline_kit import KEYSPACE, adopted, write_pool

ELSEWHERE = "slot holds what belongs in another place"


def swap(one: Path, other: Path) -> None:
    """Exchange two files' bytes."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def two_pools(place: Path, kind: str) -> list[Path]:
    """Directories of two ranks of an engine, or of one rank of two; both hold `STORED`."""
    if kind == "rank":
        changes = [{"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}]
    else:
        changes = [{"engine_index": 0}, {"engine_index": 1}]
    return [write_pool(place, **change)[0] for change in changes]


@pytest.mark.parametrize("kind", ["rank", "engine"])
def test_exchanged_slabs_are_found_by_checks_and_inspection(tmp_path: Path, kind: str) -> None:
    one, other = two_pools(tmp_path, kind)
    assert exit_code(check(find([tmp_path]), deep=True)) == 0
    swap(one / "slab", other / "slab")
    for deep in (False, True):
        for report in check(find([tmp_path]), deep=deep):
            assert report.counts == {ELSEWHERE: len(STORED)}
    (part,) = [part for part in survey(find([tmp_path])) if part.path == one]
    found = inspect_slot(part, 7)
    assert (found["payload"], found["verdict"]) == ("stale", ELSEWHERE)
    assert found["header"]["place"]["slot"] == 7
    assert found["header"]["place"]["rank"] == (1 if kind == "rank" else 0)
    assert part.superblock is not None
    assert found["header"]["place"]["region_uuid"] != part.superblock.place(7).region_uuid.hex()
    swap(one / "slab", other / "slab")
    assert exit_code(check(find([tmp_path]))) == 0, "nothing was written"
    swap(one / "slab", other / "slab")
    assert exit_code(check(find([tmp_path]), repair=True)) == 1
    assert exit_code(check(find([tmp_path]))) == 0
    assert adopted(tmp_path) == {}


@pytest.mark.parametrize("left", [0, 3 * 64])
def test_a_table_is_not_rebuilt_from_slots_that_belong_elsewhere(
    open_pool: OpenPool, left: int
) -> None:
    pool = open_pool()
    fill(pool)
    directory = pool.directories[0]
    data = (directory / "slab").read_bytes()
    with (directory / "slab").open("r+b") as slab:  # 7's bytes, also where nothing was written
        for at in (3, 5, 15):
            slab.seek(at * SLOT_BYTES)
            slab.write(data[7 * SLOT_BYTES : 8 * SLOT_BYTES])
    os.truncate(directory / "table", left)
    wanted = {slot: identity for slot, identity in STORED.items() if slot != 3}
    assert entries(open_pool()) == wanted
    assert entries(open_pool()) == wanted, "nor at the start after that"


def test_the_slab_of_another_rank_is_not_adopted_from(tmp_path: Path) -> None:
    one, other = two_pools(tmp_path, "rank")
    swap(one / "slab", other / "slab")
    for directory in (one, other):
        (directory / "table").unlink()
    pool = Pool.open(make_spec(tmp_path, keyspace=KEYSPACE, world_size=2))
    assert (pool.directories, entries(pool)) == ((one,), {})
    pool.close()


def test_a_wrong_key_in_a_table_is_distinguished_from_a_wrong_place(open_pool: OpenPool) -> None:
    pool = open_pool()
    put(pool, 3, name(3))
    fd, offset = table_at(pool, place_of(0, 3))
    os.pwrite(fd, encode_entry(3, name(4), pool.stamp.epoch), offset)
    pool.close()
    assert check(find([pool.directories[0].parents[2]]))[0].counts == {"slot holds another key": 1}


def test_a_whole_target_that_was_copied_or_moved_is_served(tmp_path: Path) -> None:
    """Superblock, table and slab go together, so a moved target keeps its places."""
    places = [tmp_path / "a", tmp_path / "b"]
    write_pool(*places)
    copies = [tmp_path / "copy-a", tmp_path / "copy-b"]
    for place, copy in zip(places, copies, strict=True):
        shutil.copytree(place, copy)
    assert exit_code(check(find(copies), deep=True)) == 0
    pool = Pool.open(make_spec(*copies, keyspace=KEYSPACE))
    assert entries(pool) == STORED
    assert get(pool, 7, STORED[7]) is not None
    pool.close()


@pytest.mark.parametrize("slot", [2, 3])
def test_a_slot_of_another_target_is_not_taken_for_the_one_with_its_number(
    tmp_path: Path, slot: int
) -> None:
    """Slots are numbered within a target, whose region proves them."""
    one, other = write_pool(tmp_path / "a", tmp_path / "b", stored={2: name(1), 3: name(1)})
    swap(one / "slab", other / "slab")
    for report in check(find([tmp_path / "a", tmp_path / "b"])):
        assert report.counts == {ELSEWHERE: 1}
    pool = Pool.open(make_spec(tmp_path / "a", tmp_path / "b", keyspace=KEYSPACE))
    assert get(pool, slot, name(1)) is None
    pool.close()
