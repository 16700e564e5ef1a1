# SPDX-License-Identifier: Apache-2.0
"""Several servers and their ranks on one target, each rank in a separate process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.elsewhere import living_elsewhere
from vllm_nvmeof_offload.commands.pool.offline import remove
from vllm_nvmeof_offload.config import parse_config, resolve_pool_bytes
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.lease import lease_of, read_lease
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import disk_bytes, find

from .kit import entries, fill, make_spec

#: Opens a pool at each line, says which engine it got, and holds it to the end of its input.
CHILD = """
import json, sys
from pathlib import Path
from tests.unit.pool.kit import fill, make_spec
from vllm_nvmeof_offload.pool.pool import Pool
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    pool = Pool.open(make_spec(*map(Path, job.pop("targets")), **job))
    fill(pool)
    print(pool.engine_index, flush=True)
"""
ROOT = Path(__file__).resolve().parents[3]


class Rank:
    """One rank's process."""

    def __init__(self, *targets: Path, rank: int, engine: str, **changes: Any) -> None:
        job = {"targets": [str(t) for t in targets], "rank": rank, "engine": engine, **changes}
        self._job = json.dumps(job) + "\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(self._job)
        self.process.stdin.flush()

    def open(self) -> int:
        """Open the pool; the engine's index."""
        self.start()
        return int(self.line())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Append yours; they are ended."""
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        with suppress(ProcessLookupError):
            rank.kill()


def ready(ranks: list[Rank]) -> None:
    assert [rank.line() for rank in ranks] == ["ready"] * len(ranks)


def test_two_servers_that_start_at_once_do_not_mix_their_ranks(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    """The worst order: each finds a rank's directory of the first engine free."""
    ranks += [Rank(tmp_path, rank=r, engine=e) for r, e in ((0, "a"), (1, "b"), (1, "a"), (0, "b"))]
    ready(ranks)
    assert [rank.open() for rank in ranks] == [0, 1, 0, 1]


def test_many_ranks_claim_at_the_same_moment(tmp_path: Path, ranks: list[Rank]) -> None:
    ranks += [Rank(tmp_path, rank=r, engine=e) for r in range(3) for e in "abc"]
    ready(ranks)
    for rank in ranks:
        rank.start()
    found = [int(rank.line()) for rank in ranks]
    assert found[0:3] == found[3:6] == found[6:9], "the ranks of an engine are together"
    assert sorted(found[0:3]) == [0, 1, 2]


def test_all_ranks_of_a_killed_engine_are_taken_over(tmp_path: Path, ranks: list[Rank]) -> None:
    ranks += [Rank(tmp_path, rank=r, engine=e) for e in "ab" for r in (0, 1)]
    ready(ranks)
    assert [rank.open() for rank in ranks] == [0, 0, 1, 1]
    ranks[0].kill()
    # One of its ranks is still alive: an engine of that rank and a new one would not fit.
    other = Pool.open(make_spec(tmp_path, engine="c"))
    assert other.engine_index == 2
    other.close()
    ranks[1].kill()
    for rank in (1, 0):
        pool = Pool.open(make_spec(tmp_path, engine="d", rank=rank))
        assert pool.engine_index == 0
        assert len(entries(pool)) > 0, "what the killed one stored"
        pool.close()


def test_a_rank_finds_its_siblings_despite_directories_that_became_free(
    tmp_path: Path,
) -> None:
    first = Pool.open(make_spec(tmp_path, engine="a"))
    second = Pool.open(make_spec(tmp_path, engine="b"))
    first.close()
    sibling = Pool.open(make_spec(tmp_path, engine="b", rank=1))
    assert (second.engine_index, sibling.engine_index) == (1, 1)
    sibling.close()
    second.close()


def test_targets_are_claimed_together_in_any_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    first = Pool.open(make_spec(one, engine="a"))
    both = Pool.open(make_spec(two, one, engine="b", rank=1))
    assert both.engine_index == 1, "on the other target engine 0 is free"
    sibling = Pool.open(make_spec(two, one, engine="b", rank=0))
    assert sibling.engine_index == 1
    for pool in (first, both, sibling):
        pool.close()


def test_replicas_come_back_to_their_own_directories(tmp_path: Path) -> None:
    def start(server: str) -> list[int]:
        specs = [make_spec(tmp_path, engine=f"{server}/{i}", replica=i, replicas=2) for i in (1, 0)]
        pools.extend(Pool.open(spec) for spec in specs)
        return [pool.engine_index for pool in pools[-2:]]

    pools: list[Pool] = []
    assert start("a") == [1, 0]
    assert start("b") == [3, 2], "another server on the same target"
    fill(pools[0])
    for pool in pools:
        pool.close()
    assert start("c") == [1, 0]
    assert len(entries(pools[-2])) > 0
    for pool in pools[-2:]:
        pool.close()


def test_a_live_owner_elsewhere_is_refused_even_if_it_has_only_another_rank(
    tmp_path: Path,
) -> None:
    pool = Pool.open(make_spec(tmp_path, engine="a", rank=1))
    lease = pool.directories[0] / "lease"
    pool.close()
    refused = pytest.raises(PoolLockedError, match="pid 4711 on host elsewhere")
    with living_elsewhere(lease), refused:
        Pool.open(make_spec(tmp_path, engine="b", rank=0))


def test_a_claim_that_never_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pool.open(make_spec(tmp_path)).close()
    (space,) = (path for path in tmp_path.iterdir() if path.is_dir())
    monkeypatch.setattr(ownership, "CLAIM_WAIT_S_MAX", 0.05)
    with (
        ownership.one_at_a_time([space]),
        pytest.raises(PoolError, match=r"another server has been claiming a directory in .*"),
    ):
        Pool.open(make_spec(tmp_path))


def test_space_held_by_live_servers_is_not_shared(
    tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what is free is a default for each of several servers, not for the last one."""
    assert ownership.usable_bytes([tmp_path / "not there yet"]) == 0
    ranks += [Rank(tmp_path, rank=0, engine=name) for name in ("a/0", "a/1", "b/0")]
    ready(ranks)
    assert [rank.open() for rank in ranks] == [0, 1, 2]
    sizes = [disk_bytes(one.path) for one in find([tmp_path])]
    assert min(sizes) > 0
    assert ownership.usable_bytes([tmp_path]) == 0
    assert ownership.usable_bytes([tmp_path], "a") == sizes[0] + sizes[1]
    config = parse_config({"targets": [str(tmp_path)]}, {})
    free = SimpleNamespace(total=1 << 40, used=0, free=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert resolve_pool_bytes(config, sum(sizes)) == (free.free + sum(sizes)) // 2
    ranks[2].kill()
    assert ownership.usable_bytes([tmp_path], "a") == sum(sizes)


def test_a_lease_names_its_engine_and_removal_deletes_it(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path, engine="a"))
    pool.close()
    page = read_lease(lease_of(pool.directories[0]))
    assert page is not None and page.engine == "a"
    assert os.stat(pool.directories[0] / "lease").st_mode & 0o777 == 0o600
    remove(find([tmp_path]))
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_on_a_target_are_neither_counted_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes would be given away twice: they are not free, and the pool cannot use them."""
    target = tmp_path / "data"
    assert ownership.usable_bytes([target]) == 0
    Pool.open(make_spec(target)).close()
    ours = ownership.usable_bytes([target])
    assert ours == sum(disk_bytes(one.path) for one in find([target])) > 0
    (space,) = {one.keyspace for one in find([target])}
    for folder in (".", "set", f"{space}x", f"{space}/rank-0", f"{space}/engine-0/other"):
        (target / folder).mkdir(parents=True, exist_ok=True)
        with (target / folder / "foreign").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
    listed: list[str] = []

    def listing(place: str | Path) -> object:
        listed.append(os.fspath(place))
        return scandir(place)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", listing)
    assert ownership.usable_bytes([target]) == ours
    assert {Path(place).relative_to(target).as_posix() for place in listed} == {
        ".",
        space,
        f"{space}/engine-0",
        f"{space}/engine-0/rank-0",
    }
