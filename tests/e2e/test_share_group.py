# SPDX-License-Identifier: Apache-2.0
"""Servers of one group hold their pools by lease, and load one another's chunks.

A lease works on any file system; here it is a local one. The tests go on from one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import BORROWED, FAILED, LOADED, PLACES, REFUSED, written
from vllm_nvmeof_offload.pool.format import read_superblock
from vllm_nvmeof_offload.pool.lease import LeasePage, lease_of, read_lease

GROUP = "team-a"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("share") / "pool"


def named(pool: Path, name: str) -> ServerSpec:
    return rig.spec(pool, share=GROUP, server_name=name, weights_never_change=True)


@pytest.fixture(scope="module")
def a(pool: Path) -> Iterator[Server]:
    with rig.start(named(pool, "a"), "group-a") as server:
        yield server


@pytest.fixture(scope="module")
def b(pool: Path, a: Server) -> Iterator[Server]:
    with rig.start(named(pool, "b"), "group-b") as server:
        yield server


def lease_in(pool: Path, engine: int) -> LeasePage:
    (directory,) = pool.glob(f"*/engine-{engine}/rank-0")
    page = read_lease(lease_of(directory))
    assert page is not None
    return page


def test_one_borrows_what_the_other_has_stored(
    a: Server, b: Server, pool: Path, reference: rig.Reference
) -> None:
    assert rig.same(rig.ask_and_settle(a, reference.prompts), reference.answers)
    chunks = written(a)
    before = rig.wait_for(b, "chunks of A", lambda m: m.value(PLACES) >= chunks)
    assert rig.same(rig.ask(b, reference.prompts), reference.answers)
    assert rig.grown(b, before, LOADED, source="shared") > 0
    now = rig.metrics(b)
    assert now.value(BORROWED) > 0
    assert now.value(REFUSED) == now.value(FAILED) == 0
    assert f"loads chunks stored by other servers of group {GROUP}" in b.log()


def test_each_holds_its_regions_by_a_lease_of_its_name(a: Server, b: Server, pool: Path) -> None:
    for server, engine, name in ((a, 0, "a"), (b, 1, "b")):
        page = lease_in(pool, engine)
        assert (page.name, page.is_free, page.generation) == (name, False, 1)
        assert f"holds the lease on its pool as {name};" in server.log()
        (superblock,) = map(read_superblock, pool.glob(f"*/engine-{engine}/rank-0"))
        assert superblock is not None and superblock.is_leased
        assert superblock.lease_generation == 1
    (facts,) = pool.glob("*/keyspace.json")
    assert json.loads(facts.read_text())["share"] == GROUP


def test_a_killed_server_takes_its_region_back_and_adopts_what_is_there(
    a: Server, b: Server, pool: Path, reference: rig.Reference
) -> None:
    """It waits for the time in which a living owner would have renewed the lease."""
    chunks = written(a)
    a.kill()
    few = slice(3)
    before = rig.metrics(b)
    rig.forget_gpu(b)
    assert rig.same(rig.ask(b, reference.prompts[few]), reference.answers[few]), "A is dead"
    with rig.start(named(pool, "a"), "group-a-again") as again:
        page = lease_in(pool, 0)
        assert (page.name, page.generation) == ("a", 2)
        assert f"; {chunks:.0f} chunks adopted" in again.log()
        own = rig.metrics(again)
        assert rig.same(rig.ask(again, reference.prompts[few]), reference.answers[few])
        assert rig.grown(again, own, LOADED, source="pool") > 0
        assert rig.grown(b, before, FAILED) == 0


def test_a_server_that_only_locks_its_pool_has_another_keyspace(pool: Path, b: Server) -> None:
    host = named(pool, "b")
    assert host.offload is not None
    extra = {**host.offload.extra, "share": "host"}
    with rig.start(replace(host, offload=replace(host.offload, extra=extra)), "group-host") as one:
        now = rig.wait_for(one, "figures", rig.has_figures)
        assert now.value(PLACES) == 0
        assert "holds the lease on its pool" not in one.log()
    assert len([*pool.glob("*/engine-0")]) == 2
