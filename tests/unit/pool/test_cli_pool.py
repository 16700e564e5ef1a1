# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof pool …`, from the command line down to real pools."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.owners import living_elsewhere
from tests.process import wait_until
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands import FAILED
from vllm_nvmeof_offload.commands.doctor.host import check_regions
from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool import lease, ownership
from vllm_nvmeof_offload.pool.format import (
    FORMAT_VERSION,
    Keyspace,
    client_of,
    read_superblock,
    share_tag,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lease import (
    NOBODY,
    LeasePage,
    Leasing,
    PageFile,
    lease_of,
    read_lease,
)
from vllm_nvmeof_offload.pool.ownership import hold
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.takeover import Takeover
from vllm_nvmeof_offload.units import format_bytes

from .kit import (
    KEYSPACE,
    SLOT_BYTES,
    STORED,
    adopted,
    flip_payload,
    make_spec,
    server,
    snapshot,
    write_pool,
)

runner = CliRunner()


def run(*words: object, code: int = 0, **options: Any) -> Any:
    result = runner.invoke(app, ["pool", *map(str, words)], env={"COLUMNS": "240"}, **options)
    assert result.exit_code == code, result.output
    return result


def run_json(*words: object, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code).stdout)


def refused(*words: object) -> str:
    message: str = run(*words, code=FAILED).stderr
    assert message.startswith("vllm-nvmeof: ")
    assert message.count("\n") == 1
    return message


def test_ls_shows_one_row_per_pool(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_pool(a, b)
    Pool.open(make_spec(a, keyspace=Keyspace.of({"model": "[red]other[/]"}))).close()
    rows = run_json("ls", "--target", a, "--target", b)["pools"]
    by_model = {row["model"]: row for row in rows}
    mine = by_model["tiny-model"]
    assert len(rows) == 2
    assert (mine["keyspace"], mine["engine"], mine["rank"]) == (KEYSPACE.digest, 0, 0)
    assert (mine["entries"], mine["slots"]) == (len(STORED), 16)
    assert mine["disk_bytes"] >= 16 * SLOT_BYTES
    assert abs(mine["last_use_s"] - time.time()) < 600
    assert mine["lease"]["kind"] == "free"
    assert len(mine["regions"]) == 2
    shown = run("ls", "--target", a, "--target", b).stdout
    assert KEYSPACE.digest[:12] in shown
    assert "6 of 16" in shown
    assert "[red]other[/]" in shown, "a name from disk is no markup"


def test_the_configured_targets_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NVMEOF_TARGETS", str(tmp_path / "t"))
    assert run_json("ls") == {"targets": [], "pools": []}
    assert f"no pools: {tmp_path / 't'} does not exist; name the targets" in run("ls").stdout
    write_pool(tmp_path / "t")
    assert len(run_json("ls")["pools"]) == 1
    assert len(run_json("ls", "--target", tmp_path / "t", "--target", f"{tmp_path}/t/.")["pools"])
    assert "is not a directory" in refused("ls", "--target", tmp_path / "absent")


def test_ls_and_inspect_name_owner_tag_and_readers(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path)
    block = read_superblock(directory)
    assert block is not None
    with server(tmp_path) as child, (directory / "slab").open("rb"):
        (pool,) = run_json("ls", "--target", tmp_path)["pools"]
        (region,) = pool["regions"]
        shown = run("ls", "--regions", "--target", tmp_path).stdout
        (rank,) = run_json("inspect", directory)["directories"]
    assert (region["directory"], region["owner"]) == (str(directory), block.uuid.hex())
    assert (region["lease"]["kind"], region["lease"]["page"]["pid"]) == ("live", child.pid)
    for row in (pool, region):
        assert row["tag"] == share_tag(KEYSPACE.digest).hex() == block.tag.hex()
        assert row["adopts"]
    assert pool["readers"] == region["readers"] == rank["readers"] == [os.getpid()]
    assert shown.count(f"pid {os.getpid()}") == 2
    assert shown.count(block.tag.hex()[:8]) == 2
    assert block.uuid.hex()[:8] in shown


def test_weights_that_only_their_server_knows_are_shown_as_such(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path, keyspace=KEYSPACE))
    (ranked,) = pool.directories
    pool.close()
    block = read_superblock(ranked)
    assert block is not None
    write_superblock(ranked, replace(block, tag=bytes(range(16)), sequence=block.sequence + 1))
    (row,) = run_json("ls", "--target", tmp_path)["pools"]
    assert (row["tag"], row["adopts"], row["readers"]) == (bytes(range(16)).hex(), False, [])
    assert "00010203, unnamed" in run("ls", "--target", tmp_path).stdout


def test_ls_shows_bytes_by_keyspace_and_pools_of_other_formats(
    tmp_path: Path,
) -> None:
    write_pool(tmp_path)
    other = Pool.open(make_spec(tmp_path, keyspace=Keyspace.of({"model": "other"})))
    other.close()
    make_it_of_another_version(other.directories[0])
    found = run_json("ls", "--target", tmp_path)
    by_model = {pool["model"]: pool for pool in found["pools"]}
    (mine,), (theirs,) = by_model["tiny-model"]["regions"], by_model["other"]["regions"]
    assert mine["problem"] == ""
    assert mine["disk_bytes"] >= 16 * SLOT_BYTES
    assert "format version 9" in theirs["problem"]
    (target,) = found["targets"]
    assert target["target"] == str(tmp_path)
    assert target["keyspaces"] == {pool["keyspace"]: pool["disk_bytes"] for pool in found["pools"]}
    assert target["free_bytes"] > 0
    shown = run("ls", "--target", tmp_path).stdout
    assert f"{theirs['directory']}: superblock: format version 9" in shown
    assert f"{tmp_path}: " in shown
    assert f"{KEYSPACE.digest[:12]} {format_bytes(mine['disk_bytes'])}" in shown
    assert " free" in shown
    # Of another format, but ours: it can be removed.
    run("rm", other.directories[0], "--yes")
    assert [row["model"] for row in run_json("ls", "--target", tmp_path)["pools"]] == ["tiny-model"]


def test_a_table_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path)
    (directory / "table").rename(tmp_path / "elsewhere")
    (directory / "table").symlink_to(tmp_path / "elsewhere")
    (pool,) = run_json("ls", "--target", tmp_path)["pools"]
    assert (pool["model"], pool["entries"]) == ("tiny-model", 0)
    assert "cannot open the pool" in pool["regions"][0]["problem"]
    assert "cannot open the pool" in run("ls", "--target", tmp_path).stdout


def make_it_of_another_version(directory: Path) -> None:
    from crc32c import crc32c

    page = bytearray((directory / "superblock").read_bytes())
    assert int.from_bytes(page[8:12], "little") == FORMAT_VERSION
    page[8:12] = (9).to_bytes(4, "little")
    page[-4:] = crc32c(page[:-4]).to_bytes(4, "little")
    (directory / "superblock").write_bytes(page)


def test_inspect_takes_a_keyspace_its_start_or_a_directory(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path)
    for which in (KEYSPACE.digest, KEYSPACE.digest[:4], directory, directory.parents[1]):
        found = run_json("inspect", which, "--target", tmp_path, "--slot", 7)
        assert found["facts"] == json.loads(KEYSPACE.canonical)
        (one,) = found["directories"]
        assert one["superblock"]["slots"] == 16
        assert one["superblock"]["slot_bytes"] == SLOT_BYTES
        assert one["occupancy"] == {"live": 6, "void": 0, "damaged": 0, "missing": 0, "empty": 10}
        assert found["slot"]["verdict"] == "whole"
    shown = run("inspect", directory, "--slot", 7).stdout
    for word in ("tiny-model", "payload_bytes: 5000", "live: 6", STORED[7].key.hex(), "whole"):
        assert word in shown
    (directory.parents[1] / "keyspace.json").write_text('{"model": "a lie"}')
    assert run_json("inspect", directory)["facts"] is None
    assert "facts: keyspace.json is missing or belongs to" in run("inspect", directory).stdout


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("abc", "'abc' names no keyspace on"),
        ("ffffffff", "'ffffffff' names no keyspace on"),
        ("./x", "is not the directory of a keyspace, engine or rank"),
        ("/", "is not the directory of a keyspace, engine or rank"),
    ],
)
def test_a_name_of_no_pool_is_refused(tmp_path: Path, which: str, message: str) -> None:
    write_pool(tmp_path)
    for command in (["inspect"], ["rm", "--yes"], ["check"]):
        assert message in refused(*command, which, "--target", tmp_path)


@pytest.mark.parametrize("verb", [["ls"], ["check"], ["check", "--repair"], ["prefill"]])
def test_a_target_without_pools_is_no_error(tmp_path: Path, verb: list[str]) -> None:
    shown = run(*verb, "--target", tmp_path).stdout
    assert (f"no pools on {tmp_path}" if verb == ["ls"] else "no pools") in shown


def test_one_slot_of_several_pools_is_refused(tmp_path: Path) -> None:
    write_pool(tmp_path, rank=0, world_size=2)
    write_pool(tmp_path, rank=1, world_size=2)
    message = refused("inspect", KEYSPACE.digest, "--target", tmp_path, "--slot", 1)
    assert "holds 2 directories with separate slots" in message
    assert "engine-0/rank-1" in message
    assert "slots 0 to 15" in refused(
        "inspect", tmp_path / KEYSPACE.digest / "engine-0" / "rank-1", "--slot", 99
    )


def test_checks_report_and_exit_by_the_worst_finding(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path)
    assert "whole, 6 entries checked" in run("check", "--target", tmp_path).stdout
    assert "MiB/s" in run("check", "--deep", "--target", tmp_path).stdout
    flip_payload(directory, 3)
    shown = run("check", "--deep", directory, code=4).stdout
    assert "slot is damaged: checksum_mismatch: 1, slots 3" in shown
    assert "--repair" in shown
    (report,) = run_json("check", "--deep", directory, code=4)["reports"]
    assert report["findings"] == [
        {"kind": "slot is damaged: checksum_mismatch", "severity": "damage", "slot": 3}
    ]
    assert report["read_bytes"] == 6 * SLOT_BYTES
    shown = run("check", "--deep", directory, "--repair", code=1).stdout
    assert "repaired" in shown
    assert "in use" not in shown, "the lock is this command's own"
    (directory / "table").unlink()
    (report,) = run_json("check", directory, "--repair", code=1)["reports"]
    assert (report["verdict"], report["counts"]["table entry missing"]) == ("repaired", 6)
    (directory / "superblock").unlink()
    shown = run("check", directory, code=8).stdout
    assert f"vllm-nvmeof pool rm {directory}" not in shown, "rm would refuse it"
    assert "by hand" in shown


def test_a_live_server_is_named_and_its_pool_not_touched(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path)
    with server(tmp_path) as child:
        before = snapshot(tmp_path)
        holder = f"pid {child.pid} on host {os.uname().nodename}"
        for command in (["rm", "--yes"], ["rm"], ["prefill"]):
            assert holder in refused(*command, directory)
        for more in ([], ["--deep"]):
            assert holder in refused("check", "--repair", *more, directory)
        assert "read only" in run("check", directory).stdout
        assert "read only" in run("check", "--deep", directory).stdout
        assert f"pid {child.pid} on host" in run("ls", "--target", tmp_path).stdout
        assert run_json("inspect", directory)["directories"][0]["lease"]["kind"] == "live"
        assert snapshot(tmp_path) == before
    run("rm", "--yes", directory)
    assert list(tmp_path.iterdir()) == []


def test_a_live_server_on_another_host_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory,) = write_pool(tmp_path)
    with living_elsewhere(directory / "lease"):
        assert "pid 4711 on host elsewhere" in refused("rm", "--yes", directory)
        (rank,) = run_json("inspect", directory)["directories"]
        assert rank["lease"]["kind"] == "live"
        shown = run("ls", "--target", tmp_path).stdout
        assert "pid 4711 on host elsewhere" in shown
    monkeypatch.setattr(ownership, "Takeover", partial(Takeover, 0.01))
    run("rm", "--yes", directory)


def test_rm_asks_and_stops_on_no(tmp_path: Path) -> None:
    write_pool(tmp_path)
    for answer in ("n\n", ""):
        result = run("rm", KEYSPACE.digest, "--target", tmp_path, code=1, input=answer)
        assert "tiny-model" in result.stderr
    assert adopted(tmp_path) == STORED
    assert "--yes" in refused("rm", KEYSPACE.digest, "--target", tmp_path, "--json")
    assert "removed" in run("rm", KEYSPACE.digest, "--target", tmp_path, input="y\n").stdout
    assert list(tmp_path.iterdir()) == []


def test_rm_takes_all_targets_ranks_and_engines_of_one_keyspace_only(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    write_pool(*places, rank=0, world_size=2)
    write_pool(*places, rank=1, world_size=2)
    write_pool(*places, engine_index=3)
    other = Pool.open(make_spec(places[0], keyspace=Keyspace.of({"model": "other"})))
    other.close()
    words = ["--target", places[0], "--target", places[1]]
    removed = run_json("rm", KEYSPACE.digest, "--yes", *words)["removed"]
    assert len(removed) == 6
    assert sum(one["freed_bytes"] for one in removed) >= 3 * 16 * SLOT_BYTES
    assert [row["model"] for row in run_json("ls", *words)["pools"]] == ["other"]
    assert list(places[1].iterdir()) == []


def test_rm_with_a_salt_takes_one_tenants_chunks_and_counts_those_of_unknown_salt(
    tmp_path: Path,
) -> None:
    clients = dict.fromkeys(STORED, client_of("other")) | {2: client_of("tenant")}
    (directory,) = write_pool(tmp_path, clients=clients)
    words = ["rm", directory, "--salt"]
    assert "Remove the chunks of this salt" in run(*words, "tenant", code=1, input="n\n").stderr
    assert adopted(tmp_path) == STORED
    assert "--salt is empty" in refused(*words, "", "--yes")
    with server(tmp_path):
        assert "stop that server first" in refused(*words, "tenant", "--yes")
    result = run(*words, "-", "--yes", input="tenant\n")
    assert "overwrote 1 slots" in result.stdout
    left = {slot: identity for slot, identity in STORED.items() if slot != 2}
    assert adopted(tmp_path) == left
    (again,) = run_json(*words, "tenant", "--yes")["removed"]
    assert again == {"directory": str(directory), "removed": 0, "unknown": 0}
    write_pool(tmp_path, stored={2: STORED[2]})  # as an earlier release does
    result = run(*words, "tenant", "--yes", code=1)
    assert result.stderr.startswith("1 other slots hold chunks with an unknown salt")
    assert run_json(*words, "tenant", "--yes", code=1)["unknown"] == 1
    assert adopted(tmp_path) == STORED


def age(directory: Path, days: float) -> None:
    """Make the directory look as if no server had used it for `days`."""
    then_s = time.time() - days * 86400
    os.utime(directory / "lease", (then_s, then_s))


OLD = {"model": "old-model", "vllm": "0.31.2"}


def write_old_pool(*targets: Path) -> tuple[Path, ...]:
    """Create a pool of another keyspace that was used 20 days ago."""
    pool = Pool.open(make_spec(*targets, keyspace=Keyspace.of(OLD)))
    pool.close()
    for directory in pool.directories:
        age(directory, 20)
    return pool.directories


def test_ls_and_doctor_name_keyspaces_that_no_server_uses(tmp_path: Path) -> None:
    write_pool(tmp_path)
    (directory,) = write_old_pool(tmp_path)
    keyspace = directory.parents[1].name[:12]
    old, new = sorted(run_json("ls", "--target", tmp_path)["pools"], key=lambda one: one["model"])
    assert (old["unused_s"] // 86400, new["unused_s"] // 86400) == (20, 0)
    shown = run("ls", "--target", tmp_path).stdout
    assert shown.count("20 days ago") == 1
    assert "old-model, vLLM 0.31.2" in shown
    assert (old["vllm"], new["vllm"]) == ("0.31.2", None)
    assert shown.count(" days ago") == 1
    assert f"1 of the keyspaces, {format_bytes(old['disk_bytes'])}, unused for 14 days" in shown
    assert f"pool rm --unused-for 14d --target {tmp_path}" in shown
    *_, finding = check_regions(str(tmp_path))
    assert (finding.check, finding.severity.name) == ("unused_pools", "WARNING")
    assert keyspace in finding.evidence
    assert f"pool rm --unused-for 14d --target {tmp_path}" in finding.remedy
    with (directory / "slab").open("rb"):
        used = {
            one["model"]: one["unused_s"] for one in run_json("ls", "--target", tmp_path)["pools"]
        }
        assert used["old-model"] is None, "a process reads it"
        assert all(one.check == "region" for one in check_regions(str(tmp_path)))


def test_a_pool_cannot_control_the_terminal(tmp_path: Path) -> None:
    keyspace = Keyspace.of({**OLD, "model": "a\x1b[2J"})
    pool = Pool.open(make_spec(tmp_path, keyspace=keyspace))
    pool.close()
    for words in (["ls"], ["inspect", str(pool.directories[0])]):
        shown = run(*words, "--target", tmp_path).stdout
        assert "\x1b" not in shown and "a\\x1b[2J" in shown


def test_rm_removes_only_what_was_unused_for_so_long(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_pool(a, b)
    old = write_old_pool(a, b)
    words = ["--target", a, "--target", b]
    assert "nothing to remove" in run("rm", "--unused-for", "21d", *words).stdout
    assert run_json("rm", "--unused-for", "21d", *words) == {"removed": []}
    assert "--yes" in refused("rm", "--unused-for", "14d", *words, "--json")
    result = run("rm", "--unused-for", "14d", *words, code=1, input="n\n")
    assert "old-model" in result.stderr
    assert "tiny-model" not in result.stderr
    assert "Remove these 2 directories?" in result.stderr
    assert all(map(Path.exists, old))
    removed = run_json("rm", "--unused-for", "14d", "--yes", *words)["removed"]
    assert [one["directory"] for one in removed] == list(map(str, old))
    assert [one["model"] for one in run_json("ls", *words)["pools"]] == ["tiny-model"]
    assert adopted(a, b) == STORED


def test_a_keyspace_with_one_part_in_use_is_not_removed_as_unused(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    first, _ = write_old_pool(a, b)
    words = ["--unused-for", "14d", "--yes", "--target", a, "--target", b]
    age(first, 1)
    assert run_json("rm", *words) == {"removed": []}
    age(first, 20)
    with (first / "slab").open("rb"):
        assert run_json("rm", *words) == {"removed": []}
    write_pool(a)
    with server(a) as child:
        (held,) = (one for one in a.rglob("lease") if KEYSPACE.digest in str(one))
        age(held.parent, 20)
        removed = run_json("rm", *words)["removed"]
        assert all(KEYSPACE.digest not in one["directory"] for one in removed)
        assert child.poll() is None
    assert adopted(a) == STORED


def test_rm_leaves_what_is_not_proven_ours(tmp_path: Path) -> None:
    (directory,) = write_old_pool(tmp_path)
    write_pool(tmp_path)
    (other,) = (one.parent for one in tmp_path.rglob("lease") if KEYSPACE.digest in str(one))
    age(other, 20)
    (directory / "superblock").write_bytes(b"something else")
    result = run("rm", "--unused-for", "14d", "--yes", "--target", tmp_path)
    assert f"left: {directory} has no superblock of this program" in result.stderr
    assert [one.name for one in tmp_path.iterdir()] == [directory.parents[1].name]


@pytest.mark.parametrize("text", ["14", "-1d", "0d", "two weeks"])
def test_rm_refuses_what_is_no_duration(tmp_path: Path, text: str) -> None:
    write_old_pool(tmp_path)
    assert "--unused-for" in refused("rm", f"--unused-for={text}", "--target", tmp_path, "--yes")
    assert list(tmp_path.iterdir())


def test_rm_needs_a_pool_or_a_time_but_not_both(tmp_path: Path) -> None:
    write_old_pool(tmp_path)
    assert "--unused-for" in refused("rm", "--target", tmp_path, "--yes")
    for more in (KEYSPACE.digest, "--salt=a"):
        words = ("rm", more, "--unused-for", "14d", "--target", tmp_path, "--yes")
        assert "without" in refused(*words)
    assert list(tmp_path.iterdir())


def test_rm_deletes_only_our_files(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / "notes.txt").write_text("mine")
    (directory / "superblock.new").symlink_to(victim)
    result = run("rm", "--yes", directory)
    assert "notes.txt" in result.stderr
    assert sorted(os.listdir(directory)) == ["lease", "lock", "notes.txt", "superblock.new"]
    assert victim.read_text() == "precious"


def test_prefill_reports_filled_slots(tmp_path: Path) -> None:
    (directory,) = write_pool(tmp_path)
    (row,) = run_json("prefill", directory)["prefilled"]
    assert (row["directory"], row["slots"]) == (str(directory), 16)
    assert "filled 0 of 16 slots" in run("prefill", "--target", tmp_path).stdout


def test_a_refused_claim_releases_every_directory(tmp_path: Path) -> None:
    """All or none: a refusal at the second directory gives the first one back."""
    first, second = write_pool(tmp_path / "a")[0], write_pool(tmp_path / "b")[0]
    with hold([second]):
        message = refused("check", "--repair", "--target", tmp_path / "a", "--target",
                          tmp_path / "b")  # fmt: skip
        assert f"pid {os.getpid()} " in message
        assert Takeover().look(first).kind == "free"


@pytest.mark.parametrize("recreated", [False, True])
def test_a_server_that_comes_while_its_pool_is_removed_starts_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recreated: bool
) -> None:
    """It has opened the lock file; before it locks it, the file loses its name."""
    spec = make_spec(tmp_path)
    pool = Pool.open(spec)
    pool.close()
    directory = pool.directories[0]
    real = lease.fcntl.flock

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        (directory / "lock").rename(tmp_path / "removed")
        if recreated:
            (directory / "lock").touch()

    monkeypatch.setattr(lease.fcntl, "flock", flock)
    with pytest.raises(PoolError, match="cannot lock"):
        Pool.open(spec)


PAGE = LeasePage(NOBODY, 0, 0, 0, 0, "", 0, "")


def test_ls_inspect_and_doctor_show_a_lease_as_this_process_sees_it(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path, keyspace=KEYSPACE, leasing=Leasing("a", 15.0, 0.01)))
    (directory,) = pool.directories
    wait_until("a renewal", lambda: (read_lease(lease_of(directory)) or PAGE).beat > 0)
    (rank,) = run_json("inspect", directory)["directories"]
    lease, page = rank["lease"], rank["lease"]["page"]
    assert (lease["kind"], page["name"], page["generation"]) == ("live", "a", 1)
    assert page["epoch"] == pool.superblocks[0].epoch
    assert f"live: a, pid {os.getpid()} on host" in run("inspect", directory).stdout
    assert f"live: a, pid {os.getpid()}" in run("ls", "--regions", "--target", tmp_path).stdout
    (finding,) = check_regions(str(tmp_path))
    assert "generation 1" in finding.evidence
    page = read_lease(lease_of(directory))
    pool.close()
    assert "lease: free; generation 1" in run("inspect", directory).stdout
    assert page is not None
    PageFile(directory / "lease").write(replace(page, beat_ms=20).encode())
    (region,) = run_json("ls", "--target", tmp_path)["pools"][0]["regions"]
    assert region["lease"]["kind"] == "silent"
    assert 0.03 <= region["lease"]["unchanged_s"] < 30, "as long as it was watched"
    PageFile(directory / "lease").write(replace(page, owner=NOBODY).encode())
    run("rm", "--yes", directory)
    assert list(tmp_path.iterdir()) == []
