# SPDX-License-Identifier: Apache-2.0
"""Checks, prefill, inspection and removal of pools, also while a server uses them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.slots import table_at, write_slot
from vllm_nvmeof_offload.commands.pool.check import check, exit_code
from vllm_nvmeof_offload.commands.pool.offline import prefill, remove, remove_client
from vllm_nvmeof_offload.commands.pool.show import inspect_rank, inspect_slot, occupancy, summaries
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.pool.format import (
    client_of,
    encode_entry,
    read_superblock,
    share_tag,
    write_superblock,
)
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import find, survey
from vllm_nvmeof_offload.protocol import SESSION, SavedSessions, SlotIdentity, place_of

from .kit import (
    KEYSPACE,
    OTHER_TAG,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    STORED,
    OpenPool,
    adopted,
    by_number,
    entries,
    fill,
    flip,
    flip_header,
    flip_payload,
    get,
    make_spec,
    name,
    put,
    server,
    snapshot,
    write_pool,
)

ENTRY = 64


def without(*slots: int) -> dict[int, object]:
    return {slot: identity for slot, identity in STORED.items() if slot not in slots}


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_an_intact_pool_has_no_findings_and_does_not_change(tmp_path: Path, targets: int) -> None:
    places = [tmp_path / f"t{i}" for i in range(targets)]
    write_pool(*places)
    before = snapshot(tmp_path)
    for deep in (False, True):
        for repair in (False, True):
            reports = check(find(places), repair, deep)
            assert [report.counts for report in reports] == [{}] * targets
            assert exit_code(reports) == 0
            assert sum(report.checked for report in reports) == len(STORED)
    assert snapshot(tmp_path) == before
    assert adopted(*places) == STORED


@pytest.mark.parametrize("deep", [False, True])
def test_a_check_finds_each_kind_of_damage_once_and_repairs_it(tmp_path: Path, deep: bool) -> None:
    (directory,) = write_pool(tmp_path / "t")
    table = directory / "table"
    flip(table, 1 * ENTRY + 9)  # recoverable: the header is intact
    flip(table, 5 * ENTRY + 9)  # never written, and not zero any more
    flip_header(directory, 2)
    flip(table, 12 * ENTRY + 20)
    slab = (directory / "slab").read_bytes()
    with (directory / "slab").open("r+b") as file:  # a misdirected write: 7's bytes over 3's
        file.seek(3 * SLOT_BYTES)
        file.write(slab[7 * SLOT_BYTES : 8 * SLOT_BYTES])
    before = snapshot(tmp_path)
    for one in (True, False):
        (report,) = check(find([tmp_path / "t"]), deep=one)
        assert {(f["kind"], f["slot"]) for f in report.findings} == {
            ("table entry damaged", 1),
            ("table entry damaged", 5),
            ("slot has no intact header", 2),
            ("slot holds a chunk of another slot", 3),
            ("table entry damaged", 12),
        }
        assert exit_code([report]) == 4
        assert snapshot(tmp_path) == before, "without --repair nothing is written"
    repaired = check(find([tmp_path / "t"]), repair=True, deep=deep)
    assert exit_code(repaired) == 1
    assert repaired[0].counts == report.counts
    assert exit_code(check(find([tmp_path / "t"]))) == 0
    assert adopted(tmp_path / "t") == without(2, 3)


@pytest.mark.parametrize("left", [None, 0, ENTRY * 3 + 17], ids=str)
@pytest.mark.parametrize("targets", [1, 2])
def test_a_lost_table_is_rebuilt(tmp_path: Path, targets: int, left: int | None) -> None:
    places = [tmp_path / f"t{i}" for i in range(targets)]
    table = write_pool(*places)[0] / "table"
    whole = table.read_bytes()
    if left is None:
        table.unlink()
    else:
        os.truncate(table, left)
    progress: list[tuple[int, int]] = []
    found = check(find(places), on_progress=lambda _, done, total: progress.append((done, total)))
    assert exit_code(found) == 4
    assert progress[-1][0] == progress[-1][1]
    assert table.exists() == (left is not None), "without --repair nothing is written"
    assert exit_code(check(find(places), repair=True)) == 1
    assert table.read_bytes() == whole
    assert table.stat().st_mode & 0o777 == 0o600
    assert exit_code(check(find(places))) == 0


@pytest.mark.parametrize(
    "damage",
    [
        *("flip", "lose", "other rank", "other keyspace", "geometry"),
        *("no longest group", "twice a group", "a group's blocks", "an empty set"),
    ],
)
def test_a_superblock_that_no_start_would_use_is_the_worst_finding(
    tmp_path: Path, damage: str
) -> None:
    (directory,) = write_pool(tmp_path / "t")
    if damage == "flip":
        flip(directory / "superblock", 50)
    elif damage == "lose":
        (directory / "superblock").unlink()
    else:
        found = read_superblock(directory)
        assert found is not None
        numbers = {
            "other rank": {"rank": 3},
            "other keyspace": {"keyspace": "0" * 32},
            "geometry": {"slot_bytes": 0},
            "no longest group": {"groups": (replace(found.groups[0], payload_bytes=9),)},
            "twice a group": {"groups": found.groups * 2},
            "a group's blocks": {"groups": (replace(found.groups[0], blocks_per_chunk=2),)},
            "an empty set": {"groups": (replace(found.groups[0], set_size=0),)},
        }
        write_superblock(directory, replace(found, **numbers[damage]))  # type: ignore[arg-type]
    for deep in (False, True):
        for repair in (False, True):
            (report,) = check(find([tmp_path / "t"]), repair, deep)
            assert exit_code([report]) == 8
            assert "superblock" in report.findings[0]["kind"]
    (row,) = summaries(survey(find([tmp_path / "t"])))
    assert (row["entries"], row["model"]) == (0, "tiny-model")
    assert row["regions"][0]["problem"].startswith("superblock: ")


def test_a_lost_or_short_slab_costs_the_entries_beyond_its_end(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path / "t")
    os.truncate(directory / "slab", 4 * SLOT_BYTES)
    (report,) = check(find([tmp_path / "t"]))
    assert report.counts["slot has no intact header"] == 2
    assert exit_code([report]) == 4
    (directory / "slab").unlink()
    assert check(find([tmp_path / "t"]))[0].counts["slot has no intact header"] == len(STORED)
    (deep,) = check(find([tmp_path / "t"]), deep=True)
    assert (deep.checked, deep.counts["slot has no intact header"]) == (6, 6)
    assert exit_code(check(find([tmp_path / "t"]), repair=True)) == 1
    assert adopted(tmp_path / "t") == {}


def test_entries_voided_by_a_reset_are_neither_checked_nor_restored(tmp_path: Path) -> None:
    places = [tmp_path / "t0", tmp_path / "t1"]
    directories = write_pool(*places)
    found = read_superblock(directories[0])
    assert found is not None
    newer = replace(found, epoch=found.epoch ^ 1, sequence=found.sequence + 1)
    write_superblock(directories[0], newer)
    # The reset reached only one of the two targets: it voids both.
    flip_header(directories[1], 0)
    reports = check(find(places))
    assert [(report.checked, report.counts) for report in reports] == [(0, {}), (0, {})]
    os.truncate(directories[1] / "table", 0)
    check(find(places), repair=True)
    assert adopted(*places) == {}
    assert [occupancy(one)["live"] for one in survey(find(places))] == [0, 0]


@pytest.mark.parametrize("targets", [1, 2])
def test_a_deep_check_reads_every_payload_and_drops_only_damaged_ones(
    tmp_path: Path, targets: int
) -> None:
    places = [tmp_path / f"t{i}" for i in range(targets)]
    directories = write_pool(*places)
    for slot in (3, 12):
        flip_payload(directories[slot % targets], slot // targets)
    assert exit_code(check(find(places))) == 0, "headers by themselves cannot show it"
    progress: list[tuple[int, int]] = []
    reports = check(find(places), deep=True, on_progress=lambda _, *counts: progress.append(counts))
    slots = [finding["slot"] for report in reports for finding in report.findings]
    assert sorted(slots) == sorted([3 // targets, 12 // targets])
    assert exit_code(reports) == 4
    assert sum(report.read_bytes for report in reports) == len(STORED) * SLOT_BYTES
    assert all(done == total > 0 for done, total in progress)
    assert adopted(*places) == STORED
    assert exit_code(check(find(places), repair=True, deep=True)) == 1
    assert exit_code(check(find(places), deep=True)) == 0
    assert adopted(*places) == without(3, 12)


def test_after_a_start_that_allows_no_adoption_nothing_is_live(tmp_path: Path) -> None:
    write_pool(tmp_path / "t")
    write_pool(tmp_path / "t", stored={}, named=False)
    (one,) = survey(find([tmp_path / "t"]))
    assert occupancy(one) == {"live": 0, "void": 6, "damaged": 0, "missing": 0, "empty": 10}
    assert adopted(tmp_path / "t") == {}


def test_a_slot_is_shown_with_entry_header_and_payload(tmp_path: Path) -> None:
    places = [tmp_path / "t0", tmp_path / "t1"]
    directories = write_pool(*places)
    (_, part) = survey(find(places))
    found = inspect_slot(part, 3)
    assert found["directory"] == str(directories[1])
    identity = {"key": STORED[7].key.hex(), "generation": STORED[7].generation}
    assert found["entry"]["identity"] == found["header"]["identity"] == identity
    assert (found["payload"], found["verdict"]) == ("ok", "whole")
    assert found["header"]["stamp"]["tag"] == share_tag(KEYSPACE.digest).hex()
    assert not found["entry"]["single_copy"] and not found["header"]["single_copy"]
    assert inspect_slot(part, 2)["verdict"] == "nothing stored: entry empty"
    flip_payload(directories[1], 3)
    assert inspect_slot(part, 3)["verdict"] == "slot is damaged: checksum_mismatch"
    flip_header(directories[1], 3)
    assert inspect_slot(part, 3)["verdict"] == "slot has no intact header"
    with pytest.raises(PoolError, match="slots 0 to 7"):
        inspect_slot(part, 8)


def test_a_chunk_of_another_group_or_other_weights_is_damage(tmp_path: Path) -> None:
    """Slot 0 is whole. 1 has another group's length, 2 no known group, 3 other weights' tag."""
    full, window = (
        RankGroup(Group(group_id, GroupKind.WINDOW, 16), size)
        for group_id, size in ((5, PAYLOAD_BYTES), (6, 600))
    )
    spec = replace(make_spec(tmp_path, groups=(full, window)), keyspace=KEYSPACE)
    pool = Pool.open(spec)
    for slot, (group_id, length) in enumerate([(6, 600), (5, 600), (7, 600), (6, 600)]):
        identity = SlotIdentity(b"k" * 32 + group_id.to_bytes(4, "big"), slot + 1)
        stamp = replace(pool.stamp, tag=OTHER_TAG) if slot == 3 else pool.stamp
        write_slot(pool, memoryview(bytearray(SLOT_BYTES)), slot, identity, stamp, length)
    pool.close()
    for deep in (False, True):
        (report,) = check(find([tmp_path]), deep=deep)
        kinds = {finding["slot"]: finding["kind"] for finding in report.findings}
        assert kinds == {
            1: "slot holds another length",
            2: "table entry has an unknown group",
            3: "slot holds a chunk of other weights",
        }
        assert report.checked == 3
    assert report.read_bytes == 2 * 8192 + SLOT_BYTES, "each group's own length"
    (part,) = survey(find([tmp_path]))
    assert occupancy(part)["damaged"] == 1
    assert {group["group_id"] for group in inspect_rank(part)["superblock"]["groups"]} == {5, 6}
    assert exit_code(check(find([tmp_path]), repair=True)) == 1
    assert exit_code(check(find([tmp_path]), deep=True)) == 0
    pool = Pool.open(spec)
    assert list(by_number(pool.adopt(), 1)) == [0]
    pool.close()


def test_prefill_writes_only_where_nothing_was_written(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path / "t", pool_bytes=64 * (SLOT_BYTES + ENTRY))
    before = snapshot(tmp_path)
    with (directory / "slab").open("rb") as slab:
        # What was just read is in the page cache, and counts as data as long as it is.
        os.posix_fadvise(slab.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if os.lseek(slab.fileno(), 0, os.SEEK_HOLE) == 64 * SLOT_BYTES:
            pytest.skip("this file system does not distinguish holes from data")
    progress: list[tuple[int, int]] = []
    (filled,) = prefill(
        find([tmp_path / "t"]), on_progress=lambda _, done, total: progress.append((done, total))
    )
    # Next to what was written the file system may have filled a few slots itself.
    assert filled.slots == 64
    assert 32 <= filled.filled <= 64 - len(STORED)
    assert progress[-1][0] == progress[-1][1] == filled.written_bytes
    assert snapshot(tmp_path) == before, "zeros where zeros were read before"
    with (directory / "slab").open("rb") as slab:
        hole = os.lseek(slab.fileno(), 0, os.SEEK_HOLE)
    assert hole == 64 * SLOT_BYTES, "no hole is left"
    assert prefill(find([tmp_path / "t"]))[0].filled == 0
    assert exit_code(check(find([tmp_path / "t"]), deep=True)) == 0


def test_the_kind_of_target_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"target .*/absent is not a directory; name one"):
        find([tmp_path / "absent"])
    write_pool(tmp_path / "t")
    (tmp_path / "linked").mkdir()
    (space,) = (tmp_path / "t").iterdir()
    (tmp_path / "linked" / space.name).symlink_to(space)
    assert find([tmp_path / "linked"]) == [], "links are not followed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can repair another user's pool")
def test_files_repaired_by_root_still_belong_to_the_server(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path / "t")
    os.chown(directory, 65534, 65534)
    (directory / "table").unlink()
    (directory / "lock").unlink()
    (directory / "lease").unlink()
    assert exit_code(check(find([tmp_path / "t"]), repair=True)) == 1
    for file in ("table", "lock", "lease"):
        assert (directory / file).stat().st_uid == 65534


def test_an_unknown_name_is_no_rank_directory(tmp_path: Path) -> None:
    """A copy beside the pool would otherwise be taken for the pool itself, twice."""
    for one in ("engine-0/rank-0", "engine-00/rank-0", "engine-0/rank-00", "engine-\u0663/rank-1"):
        (tmp_path / ("0" * 32) / one).mkdir(parents=True)
    assert [one.name for one in find([tmp_path])] == [f"{'0' * 32}/engine-0/rank-0"]


# -- while a server runs that does not know of them -----------------------------------


def test_beside_a_live_server_everything_is_read_only(tmp_path: Path) -> None:
    places = [tmp_path / "t0", tmp_path / "t1"]
    directories = write_pool(*places)
    flip_payload(directories[1], 0)
    settled: list[str] = []
    with server(*places) as child:
        before = snapshot(tmp_path)
        for deep in (False, True):
            with pytest.raises(PoolLockedError, match=rf"pid {child.pid} on host .*stop that"):
                check(find(places), repair=True, deep=deep)
        with pytest.raises(PoolLockedError, match=f"pid {child.pid} "):
            prefill(find(places))
        (one, other) = check(find(places), deep=True, settle=lambda: settled.append("waited"))
        assert (exit_code([one]), exit_code([other])) == (0, 4)
        assert settled == ["waited"]
        assert [part.owner.kind for part in survey(find(places))] == ["live", "live"]
        assert summaries(survey(find(places)))[0]["lease"]["page"]["pid"] == child.pid
        assert snapshot(tmp_path) == before
    # Killed, not stopped: its name is still there, and blocks no other server.
    assert [part.owner.kind for part in survey(find(places))] == ["dead", "dead"]
    assert exit_code(check(find(places), repair=True, deep=True)) == 1
    assert [part.owner.kind for part in survey(find(places))] == ["free", "free"]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("torn", [flip_header, flip_payload])
@pytest.mark.parametrize("ends", ["the write ends", "another key's entry comes", "never"])
def test_only_lasting_damage_beside_a_server_is_reported(
    tmp_path: Path, deep: bool, torn: Callable[[Path, int], None], ends: str
) -> None:
    """A slot that is being written looks torn, until its write and its entry are there."""
    (directory,) = write_pool(tmp_path / "t")
    newer = write_pool(tmp_path / "newer", stored={3: name(99)})[0]
    waited: list[str] = []

    def settle() -> None:
        waited.append("waited")
        if ends == "the write ends":
            torn(directory, 3)  # the same bit again
        elif ends == "another key's entry comes":
            entry = (newer / "table").read_bytes()[3 * ENTRY : 4 * ENTRY]
            with (directory / "table").open("r+b") as table:
                table.seek(3 * ENTRY)
                table.write(entry)

    torn(directory, 3)
    with server(tmp_path / "t"):
        reports = check(find([tmp_path / "t"]), deep=deep, settle=settle)
    seen = deep or torn is flip_header
    assert waited == (["waited"] if seen else [])
    assert exit_code(reports) == (4 if seen and ends == "never" else 0)


def test_removal_refuses_foreign_files_and_then_deletes_nothing(tmp_path: Path) -> None:
    write_pool(tmp_path / "a")
    (foreign,) = write_pool(tmp_path / "b")
    (foreign / "superblock").write_bytes(b"something else")
    before = snapshot(tmp_path)
    with pytest.raises(PoolError, match="by hand"):
        remove(find([tmp_path / "a", tmp_path / "b"]))
    with server(tmp_path / "a") as child, pytest.raises(PoolLockedError, match=f"{child.pid}"):
        remove(find([tmp_path / "a"]))
    assert snapshot(tmp_path).keys() == before.keys()


# -- misplaced slots are found offline and never adopted ------------------------------

ELSEWHERE = "slot holds a chunk of another slot"


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


TENANT, OTHER = client_of("tenant"), client_of("other")


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("lost", ["nothing", "table", "entry"])
def test_a_tenants_chunks_are_overwritten_and_all_others_stay(
    tmp_path: Path, targets: int, lost: str
) -> None:
    where = [tmp_path / f"t{number}" for number in range(targets)]
    for one in where:
        one.mkdir()
    mine = {2, 7}
    clients = dict.fromkeys(STORED, OTHER) | dict.fromkeys(mine, TENANT)
    directories = write_pool(*where, clients=clients)
    if lost == "table":  # the headers name the tenant as well
        for directory in directories:
            os.truncate(directory / "table", 0)
    elif lost == "entry":  # a crash after the slot was written, before its entry
        with (directories[2 % targets] / "table").open("r+b") as table:
            table.seek(2 // targets * ENTRY)
            table.write(bytes(ENTRY))
    done = remove_client(find(where), TENANT)
    assert (sum(one.removed for one in done), sum(one.unknown for one in done)) == (2, 0)
    for slot in mine:
        directory, index = directories[slot % targets], slot // targets
        raw = (directory / "slab").read_bytes()[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]
        assert not any(raw), "payload and header"
        assert not any((directory / "table").read_bytes()[index * ENTRY : (index + 1) * ENTRY])
    assert adopted(*where) == without(*mine)
    again = remove_client(find(where), TENANT)
    assert sum(one.removed for one in again) == 0


def test_chunks_of_an_unknown_tenant_stay_and_are_counted(tmp_path: Path) -> None:
    long = {4: SlotIdentity(b"k" * 45, 40)}
    clients = {0: TENANT, 1: OTHER, 4: TENANT, 7: TENANT}
    (directory,) = write_pool(tmp_path, clients=clients, stored=STORED | long)
    flip_header(directory, 7)
    # Slots 2, 3 and 12 are of an earlier release. In slot 4 the header has room for the client, in
    # slot 7 the entry is intact.
    (done,) = remove_client(find([tmp_path]), TENANT)
    assert (done.removed, done.unknown) == (3, 3)
    (done,) = remove_client(find([tmp_path]), OTHER)
    assert (done.removed, done.unknown) == (1, 3)
    flip_header(directory, 12)
    (done,) = remove_client(find([tmp_path]), OTHER)
    assert (done.removed, done.unknown) == (0, 3)


def test_a_tenants_sessions_are_forgotten_and_no_live_pool_is_touched(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path, clients=dict.fromkeys(STORED, TENANT))
    sessions = np.array([(1, TENANT, 9, 1, 50), (2, OTHER, 9, 2, 50)], SESSION)
    saved = SavedSessions(sessions, np.array([10, 11, 12], np.uint64))
    (directory / "sessions").write_bytes(saved.encode())
    with server(tmp_path):
        before = snapshot(tmp_path)
        with pytest.raises(PoolLockedError):
            remove_client(find([tmp_path]), TENANT)
        assert snapshot(tmp_path) == before
    remove_client(find([tmp_path]), TENANT)
    left = SavedSessions.decode((directory / "sessions").read_bytes())
    assert (left.sessions["id"].tolist(), left.generations.tolist()) == ([2], [11, 12])
    remove(find([tmp_path]))
    assert not directory.exists(), "the file is ours"
