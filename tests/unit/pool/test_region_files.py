# SPDX-License-Identifier: Apache-2.0
"""Opening another engine's regions beside our pool."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.wait import wait_until
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import AttachCommand
from vllm_nvmeof_offload.worker.regions import OpenRegions, RegionFiles

from .kit import make_spec

RANKS = 2


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[list[Pool]]]:
    """By engine, the pools of its ranks, each opened as in a process of its own."""
    with ExitStack() as pools:

        def pool(engine: int, rank: int) -> Pool:
            shape = {"engine": str(engine), "rank": rank, "world_size": RANKS}
            opened = Pool.open(make_spec(tmp_path, engine_index=engine, **shape))
            pools.callback(opened.close)
            return opened

        yield [[pool(engine, rank) for rank in range(RANKS)] for engine in range(2)]


def attach(ours: Pool, command: AttachCommand) -> OpenRegions:
    answered = threading.Event()
    files = RegionFiles(ours, answered.set)
    files.open(command, [0])
    assert answered.wait(120)
    (answer,) = files.take()
    files.end()
    return answer


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_finds_the_pool_of_its_own_rank(engines: list[list[Pool]], rank: int) -> None:
    """Ranks do not know one another's pools when they make theirs: each has another uuid."""
    ours, theirs = engines
    command = AttachCommand(1, 1, 1, theirs[0].superblocks[0].uuid)
    answer = attach(ours[rank], command)
    assert not answer.error
    place = theirs[rank].superblocks[0].place(0)
    (region,) = answer.by_target.values()
    assert (region.uuid, region.rank) == (place.region_uuid, place.rank)


def test_a_leased_region_is_read_past_the_page_cache(tmp_path: Path) -> None:
    """Its owner may be on another host, whatever this one could do with its own files."""
    shape = {"leasing": Leasing("a", settle_s=0.01), "engine": "a"}
    ours = Pool.open(make_spec(tmp_path, engine_index=0))
    theirs = Pool.open(make_spec(tmp_path, engine_index=1, **shape))
    assert not ours.is_direct[0]
    files = RegionFiles(ours, lambda: None)
    files.open(AttachCommand(1, 1, 1, theirs.superblocks[0].uuid), [0])
    (answer,) = wait_for_answers(files)
    (region,) = answer.by_target.values()
    assert fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_DIRECT
    files.end()
    theirs.close()
    ours.close()


def wait_for_answers(files: RegionFiles) -> list[OpenRegions]:
    found: list[OpenRegions] = []

    def has_answered() -> bool:
        found.extend(files.take())
        return bool(found)

    wait_until("an answer", has_answered)
    return found


def test_the_first_rank_finds_no_other_pool_than_the_follower_did(
    engines: list[list[Pool]],
) -> None:
    answer = attach(engines[0][0], AttachCommand(1, 1, 1, bytes(16)))
    assert answer.error == errno.ENOENT
