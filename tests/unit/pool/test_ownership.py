# SPDX-License-Identifier: Apache-2.0
"""Several servers and their ranks on one target, and servers that are dead or ending."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.owners import living_elsewhere, page_elsewhere, put_page
from tests.process import wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.commands.pool.offline import remove
from vllm_nvmeof_offload.config import parse_config, resolve_pool_bytes
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.keeper import Region
from vllm_nvmeof_offload.pool.lease import (
    TAKEOVER_S,
    PageFile,
    Permits,
    boot_id,
    lease_of,
    read_lease,
)
from vllm_nvmeof_offload.pool.ownership import LOCAL
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import disk_bytes, find
from vllm_nvmeof_offload.pool.takeover import POLL_S, Takeover

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


# -- a server that starts while its killed predecessor still holds its locks ----------

#: Its first thread ends on request; another one stays, as one does that waits in
#: the kernel for a device, and with it the locks.
ENDING_CHILD = """
import sys, pathlib
from tests.unit.first_thread import end_first_thread
from tests.unit.pool.kit import make_spec
from vllm_nvmeof_offload.pool.pool import Pool
pool = Pool.open(make_spec(pathlib.Path(sys.argv[1]), engine=sys.argv[2], rank=int(sys.argv[3])))
print(pool.engine_index, flush=True)
sys.stdin.readline()
end_first_thread()
"""


class Other:
    """A server that holds engine 0, and can be made to end slowly."""

    def __init__(self, target: Path, engine: str, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENDING_CHILD, str(target), engine, str(rank)],
            cwd=Path(__file__).resolve().parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "0\n"

    def begin_to_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        wait_until("its first thread's end", lambda: ownership.is_ending(self.process.pid))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=[("", 0), ("a", 1)], ids=["the same rank", "another rank"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Other]:
    server = Other(tmp_path, *request.param)
    yield server
    server.end()


class _Ender(logging.Handler):
    """Ends the other server once ours logs that it waits."""

    def __init__(self, other: Other) -> None:
        super().__init__()
        self._other = other

    def emit(self, record: logging.LogRecord) -> None:
        assert "waiting" in record.getMessage()
        self._other.end()


def test_the_pool_of_a_server_that_is_ending_is_waited_for(tmp_path: Path, other: Other) -> None:
    other.begin_to_end()
    ender = _Ender(other)
    ours = logging.getLogger(LOGGER_NAME)
    ours.addHandler(ender)
    try:
        pool = Pool.open(make_spec(tmp_path, engine="b"))
    finally:
        ours.removeHandler(ender)
    assert other.process.returncode is not None, "it ended because ours waited"
    assert pool.engine_index == 0
    pool.close()


def test_the_wait_for_an_ending_server_is_bounded(
    tmp_path: Path,
    other: Other,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ownership, "ENDING_WAIT_S_MAX", 0.3)
    other.begin_to_end()
    with caplog.at_level(logging.WARNING, LOGGER_NAME):
        pool = Pool.open(make_spec(tmp_path, engine="b"))
    assert pool.engine_index == 1
    pool.close()
    waits = [r for r in caplog.messages if "was killed and has not exited yet; waiting" in r]
    assert len(waits) == 1


def test_a_server_that_lives_is_not_waited_for(
    tmp_path: Path, other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER_NAME):
        pool = Pool.open(make_spec(tmp_path, engine="b"))
    assert pool.engine_index == 1
    pool.close()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("State:\tS (sleeping)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n", False),
        ("State:\tD (disk sleep)\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n", True),
        ("State:\tD (disk sleep)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n", True),
        ("State:\tD (disk sleep)\nSigPnd:\t0000000000004000\nShdPnd:\t0000000000000000\n", False),
        ("State:\tZ (zombie)\n", True),
        ("nothing that is known\n", False),
    ],
    ids=["lives", "killed", "killed as a whole", "asked to end", "no first thread", "unknown"],
)
def test_the_kernels_state_of_a_process_is_read(
    tmp_path: Path, status: str, expected: bool
) -> None:
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711" / "status").write_text(status)
    assert ownership.is_ending(4711, tmp_path) is expected
    assert not ownership.is_ending(4712, tmp_path), "gone"
    assert not ownership.is_ending(os.getpid()), "we live"


def test_the_name_of_a_process_need_not_be_text(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_bytes(b"Name:\t\xff\xfe\nState:\tZ (zombie)\n")
    assert ownership.is_ending(7, tmp_path)


# -- a dead holder on another host, whatever that host's clock says -------------------


class Elsewhere:
    """Another host, and the time that passes while we wait. A live host renews its leases
    meanwhile.
    """

    def __init__(self, directories: list[Path], *, lives: bool) -> None:
        self.now_s = 0.0
        self._paths, self._lives = [one / "lease" for one in directories], lives
        self.takeover = Takeover(clock=lambda: self.now_s, wait=self.wait)
        self.beat()

    def beat(self) -> None:
        self._beaten_s = self.now_s
        for path in self._paths:
            put_page(path, page_elsewhere(round(1000 * self.now_s)))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self._lives and self.now_s - self._beaten_s >= LOCAL.beat_s:
            self.beat()

    def claim(self, *directories: Path) -> list[Region]:
        self.takeover.watch(directories)
        leasings, permits = [LOCAL] * len(directories), Permits.new(len(directories))
        claim = partial(ownership._claim_all, directories, leasings, self.takeover, permits)
        found = self.takeover.settled(claim)
        assert not isinstance(found, Path)
        return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    ours = logging.getLogger(LOGGER_NAME)
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)


def test_a_live_owner_is_refused(tmp_path: Path) -> None:
    elsewhere = Elsewhere([tmp_path], lives=True)
    with pytest.raises(PoolLockedError, match="pid 4711 on host elsewhere"):
        elsewhere.claim(tmp_path)
    assert elsewhere.now_s <= LOCAL.beat_s + 2 * POLL_S, "at its first sign of life"


def test_a_dead_owner_is_taken_over_after_one_wait_for_all_its_directories(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    places = [tmp_path / "one", tmp_path / "other"]
    for place in places:
        place.mkdir(0o700)
    elsewhere = Elsewhere(places, lives=False)
    for region in elsewhere.claim(*places):
        region.release()
    assert TAKEOVER_S <= elsewhere.now_s < TAKEOVER_S + 2 * POLL_S
    warnings = {record.getMessage() for record in log.records}
    assert len(warnings) == 1, warnings
    assert "pid 4711 on host elsewhere" in warnings.pop()


def test_an_owner_on_this_host_is_not_waited_for(tmp_path: Path) -> None:
    elsewhere = Elsewhere([], lives=False)
    put_page(tmp_path / "lease", page_elsewhere(boot=boot_id()))
    for region in elsewhere.claim(tmp_path):
        region.release()
    assert elsewhere.now_s == 0


def test_a_beat_is_seen_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's write reaches the device, while this kernel still shows its cached page."""
    elsewhere = Elsewhere([tmp_path], lives=False)
    real = PageFile.read

    def read(self: PageFile) -> bytes:
        if elsewhere.now_s >= LOCAL.beat_s:
            elsewhere.beat()
        return real(self)

    monkeypatch.setattr(PageFile, "read", read)
    with pytest.raises(PoolLockedError, match="elsewhere"):
        elsewhere.claim(tmp_path)


@pytest.mark.parametrize("engine", ["", "b"])
def test_a_pool_of_a_host_that_lives_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Rank 0 meets a lease in its own directory, or in that of another rank."""
    pools = [Pool.open(make_spec(tmp_path, engine="a", rank=rank)) for rank in (0, 1)]
    for pool in pools:
        pool.close()
    elsewhere = Elsewhere([pool.directories[0] for pool in pools], lives=True)
    monkeypatch.setattr(ownership, "Takeover", lambda _: elsewhere.takeover)
    monkeypatch.setattr(ownership.time, "sleep", elsewhere.wait)
    with pytest.raises(PoolLockedError, match="pid 4711 on host elsewhere"):
        Pool.open(make_spec(tmp_path, engine=engine, rank=0))


def test_a_dead_hosts_pool_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [Pool.open(make_spec(tmp_path, engine="a", rank=rank)) for rank in (0, 1)]
    places = [pool.directories[0] for pool in pools]
    for pool in pools:
        pool.close()
    Elsewhere(places, lives=False)
    monkeypatch.setattr(ownership, "Takeover", lambda _: Takeover(0.01))
    pool = Pool.open(make_spec(tmp_path, engine="b", rank=0))
    assert pool.directories[0] == places[0]
    pool.close()
