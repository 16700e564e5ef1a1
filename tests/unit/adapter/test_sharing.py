# SPDX-License-Identifier: Apache-2.0
"""The servers that share with others on their host, and the follower that they start."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.process import wait_until
from tests.unit.manager.bench import TAG, hello
from tests.unit.pool.kit import KEYSPACE, STORED, write_pool
from vllm_nvmeof_offload.fabric import TargetFabric, discover
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.protocol import RankHello

pytest.importorskip("vllm", reason="the adapter needs vLLM")

from vllm_nvmeof_offload.vllm_adapter import sharing
from vllm_nvmeof_offload.vllm_adapter.sharing import ShareSettings, start_sharing, why_not

SETTINGS = ShareSettings()
MOUNTED = "1 0 0:1 / / rw - ext4 /dev/x rw\n2 1 {device} / {point} rw - {kind} server:/export rw\n"


def hellos(target: Path, **changes: object) -> list[RankHello]:
    shape: dict[str, object] = {"targets": (str(target),), "keyspace": "0" * 32, **changes}
    pool = shape.pop("pool_slots", 8)
    assert isinstance(pool, int)
    return [hello(rank, 4, pool, (), **shape) for rank in (0, 1)]


def reason(ranks: list[RankHello], settings: ShareSettings = SETTINGS) -> str:
    return why_not(ranks, agree(ranks), settings)


def test_servers_with_a_pool_and_named_weights_share(tmp_path: Path) -> None:
    assert reason(hellos(tmp_path)) == ""


def test_whoever_cannot_share_says_why(tmp_path: Path) -> None:
    assert reason(hellos(tmp_path, pool_slots=0)) == "there is no pool"
    assert "several hosts" in reason(hellos(tmp_path), replace(SETTINGS, one_host=False))
    assert "no name that other servers know" in reason(hellos(tmp_path, tag=b""))
    one, other = hellos(tmp_path)
    assert "no name" in reason([one, replace(other, tag=TAG[::-1])]), "ranks of other weights"


@pytest.mark.parametrize(
    ("kind", "device", "shares"),
    [
        ("nfs4", "0:40", False),
        ("fuse.juicefs", "0:40", False),
        ("xfs", "259:1", True),
        ("overlay", "0:40", True),
    ],
)
def test_only_a_group_shares_over_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, device: str, shares: bool
) -> None:
    """Its hosts do not see one another's writes at once."""
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTED.format(point=tmp_path, kind=kind, device=device))

    def discovered(target: str) -> TargetFabric:
        return discover(target, str(tmp_path / "no-sysfs"), str(table))

    monkeypatch.setattr(sharing, "discover", discovered)
    why = reason(hellos(tmp_path))
    assert (why == "") is shares
    assert shares or why.startswith(f"{tmp_path} may be on a network file system")
    assert shares or 'share: "team-a"' in why, "the remedy"
    assert reason(hellos(tmp_path), replace(SETTINGS, group="team-a")) == ""


def followers_of(target: Path) -> list[str]:
    """The processes whose command line names the target."""
    named = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if str(target).encode() in command.read_bytes():
                named.append(command.parent.name)
    return named


def test_what_another_engine_has_is_found_until_the_end(tmp_path: Path) -> None:
    write_pool(tmp_path)
    ranks = hellos(tmp_path, engine_index=3, keyspace=KEYSPACE.digest)
    foreign, follower = start_sharing(ranks, agree(ranks))
    try:
        wait_until("the other chunks", lambda: foreign.rows == len(STORED))
        assert followers_of(tmp_path)
    finally:
        follower.stop()
    wait_until("the end of the follower", lambda: not followers_of(tmp_path))
    follower.stop()
    assert foreign.rows == len(STORED), "it can still be read"
