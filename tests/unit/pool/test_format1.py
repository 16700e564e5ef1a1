# SPDX-License-Identifier: Apache-2.0
"""The offline tools read pools of format 1, which no server opens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_nvmeof_offload.commands.pool.check import exit_code, fsck, scrub
from vllm_nvmeof_offload.commands.pool.offline import remove
from vllm_nvmeof_offload.commands.pool.show import inspect_rank, inspect_slot, occupancy, summaries
from vllm_nvmeof_offload.pool.format import Keyspace, UnknownFormatError, read_superblock
from vllm_nvmeof_offload.pool.format1 import NO_TAG, decode_superblock
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import find, survey

from .kit import SLOT_BYTES, STORED, entries, fill, make_spec
from .offline_kit import flip, flip_payload, snapshot
from .old_pools import UUID, OldPool, entry

FIRST = OldPool(Keyspace.exactly({"model": "old"}), names_places=False)


@pytest.mark.parametrize("old", [OldPool(), FIRST], ids=["places", "no places"])
@pytest.mark.parametrize("targets", [1, 2])
def test_an_intact_pool_has_no_findings_and_does_not_change(
    tmp_path: Path, targets: int, old: OldPool
) -> None:
    places = [tmp_path / f"t{i}" for i in range(targets)]
    old.write(*places)
    before = snapshot(tmp_path)
    for check in (fsck, scrub):
        for repair in (False, True):
            reports = check(find(places), repair)
            assert [report.counts for report in reports] == [{}] * targets
            assert sum(report.checked for report in reports) == len(STORED)
    assert snapshot(tmp_path) == before
    (row,) = summaries(survey(find(places)))
    assert (row["entries"], row["slots"], row["model"]) == (len(STORED), 16, "old")


def test_its_damage_is_found_and_repaired(tmp_path: Path) -> None:
    places = [tmp_path / "t0", tmp_path / "t1"]
    directories = OldPool().write(*places)
    flip(directories[1] / "table", 3 * 64 + 9)  # 7 is slot 3 there
    flip(directories[0] / "slab", 6 * SLOT_BYTES + 40)  # the header of 12
    flip_payload(directories[1], 1)  # of 3
    whole = (directories[1] / "table").read_bytes()
    found = {
        (report.surveyed.path, one["kind"], one["slot"])
        for check in (fsck, scrub)
        for report in check(find(places))
        for one in report.findings
    }
    assert found == {
        (directories[0], "slot has no intact header", 6),
        (directories[0], "slot is damaged: checksum_mismatch", 6),
        (directories[1], "table entry damaged", 3),
        (directories[1], "slot is damaged: checksum_mismatch", 1),
    }
    assert exit_code(fsck(find(places), repair=True)) == 1
    assert exit_code(fsck(find(places))) == 0
    restored = (directories[1] / "table").read_bytes()
    assert restored[3 * 64 :][:64] == entry(7, STORED[7], 3, 1) != whole[3 * 64 :][:64]


def test_a_lost_table_is_rebuilt(tmp_path: Path) -> None:
    (directory,) = OldPool().write(tmp_path)
    whole = (directory / "table").read_bytes()
    os.truncate(directory / "table", 0)
    assert exit_code(fsck(find([tmp_path]), repair=True)) == 1
    assert (directory / "table").read_bytes() == whole


@pytest.mark.parametrize("adoptable", [True, False])
def test_what_could_not_be_adopted_is_void(tmp_path: Path, adoptable: bool) -> None:
    OldPool(adoptable=adoptable).write(tmp_path)
    (one,) = survey(find([tmp_path]))
    assert one.adopts is adoptable
    assert occupancy(one)["live" if adoptable else "void"] == len(STORED)
    shown = inspect_rank(one)["superblock"]
    assert (shown["version"], shown["uuid"], shown["groups"]) == (1, UUID.hex(), ())
    assert (shown["tag"] == NO_TAG.hex()) is not adoptable
    found = inspect_slot(one, 7)
    assert found["header"]["slot"] == 7
    assert found["payload"] == "ok"
    assert found["verdict"] == ("whole" if adoptable else "nothing stored: entry void")


def test_entries_of_an_earlier_epoch_are_void(tmp_path: Path) -> None:
    (directory,) = OldPool().write(tmp_path)
    with (directory / "table").open("r+b") as table:
        table.seek(3 * 64)
        table.write(entry(3, STORED[3], 2, 1))
        table.write(bytes(2 * 64))
    assert occupancy(survey(find([tmp_path]))[0])["void"] == 1


def test_a_pool_of_the_first_release_needs_its_facts(tmp_path: Path) -> None:
    (directory,) = FIRST.write(tmp_path)
    (directory.parents[1] / "keyspace.json").unlink()
    (report,) = fsck(find([tmp_path]))
    assert report.counts == {"slot holds what belongs in another place": len(STORED)}


def test_no_server_opens_it_and_it_can_be_removed(tmp_path: Path) -> None:
    old = OldPool()
    (directory,) = old.write(tmp_path)
    page = (directory / "superblock").read_bytes()
    assert decode_superblock(page).sequence == 3
    with pytest.raises(UnknownFormatError, match="format version 1"):
        read_superblock(directory)
    # The same facts are another keyspace with another format.
    pool = Pool.open(make_spec(tmp_path, keyspace=Keyspace.of({"model": "old"})))
    assert entries(pool) == {}
    stored = fill(pool)
    pool.close()
    assert pool.directories[0].parents[1].name != old.keyspace.digest
    assert exit_code(scrub(find([tmp_path]))) == 0
    remove([one for one in find([tmp_path]) if one.path == directory])
    assert not directory.parents[1].exists()
    pool = Pool.open(make_spec(tmp_path, keyspace=Keyspace.of({"model": "old"})))
    assert entries(pool) == stored
    pool.close()
