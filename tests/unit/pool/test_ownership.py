# SPDX-License-Identifier: Apache-2.0
"""Several servers and their ranks on one target, and servers that are dead or ending."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.owners import living_elsewhere, page_elsewhere, put_page
from tests.process import companions, numbers_from, wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.child import Companion
from vllm_nvmeof_offload.commands.pool.offline import remove
from vllm_nvmeof_offload.config import parse_config, resolve_pool_bytes
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.keeper import Keeper, Region, keep
from vllm_nvmeof_offload.pool.lease import (
    TAKEOVER_S,
    DirectoryLock,
    Lease,
    LeasePage,
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

#: Opens a pool at each line, says which engine it got, and holds it to the end of its input. At an
#: empty job its first thread ends. Another one stays, as one does that waits in the kernel for a
#: device, and with it the locks.
CHILD = """
import json, sys
from pathlib import Path
from tests.unit.first_thread import end_first_thread
from tests.unit.pool.kit import fill, make_spec
from vllm_nvmeof_offload.pool.pool import Pool
print("ready", flush=True)
for line in sys.stdin:
    if not (job := json.loads(line)):
        end_first_thread()
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

    def begin_to_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("{}\n")
        self.process.stdin.flush()
        wait_until("its first thread's end", lambda: ownership.is_ending(self.process.pid))

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


@pytest.fixture
def holder(ranks: list[Rank], tmp_path: Path) -> Rank:
    """Return a live process that holds engine 0."""
    return holding(ranks, Rank(tmp_path, rank=0, engine=""))


def holding(ranks: list[Rank], one: Rank) -> Rank:
    ranks.append(one)
    ready([one])
    assert one.open() == 0
    return one


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


@pytest.fixture(params=[("", 0), ("a", 1)], ids=["the same rank", "another rank"])
def other(request: pytest.FixtureRequest, ranks: list[Rank], tmp_path: Path) -> Rank:
    engine, rank = request.param
    return holding(ranks, Rank(tmp_path, rank=rank, engine=engine))


class _Ender(logging.Handler):
    """Ends the other server once ours logs that it waits."""

    def __init__(self, other: Rank) -> None:
        super().__init__()
        self._other = other

    def emit(self, record: logging.LogRecord) -> None:
        assert "waiting" in record.getMessage()
        self._other.kill()


def test_the_pool_of_a_server_that_is_ending_is_waited_for(tmp_path: Path, other: Rank) -> None:
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
    other: Rank,
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
    tmp_path: Path, other: Rank, caplog: pytest.LogCaptureFixture
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


def test_a_dead_hosts_pool_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [Pool.open(make_spec(tmp_path, engine="a", rank=rank)) for rank in (0, 1)]
    places = [pool.directories[0] for pool in pools]
    for pool in pools:
        pool.close()
    Elsewhere(places, lives=False)
    monkeypatch.setattr(ownership, "Takeover", lambda _: Takeover(0.3))
    pool = Pool.open(make_spec(tmp_path, engine="b", rank=0))
    assert pool.directories[0] == places[0]
    pool.close()


# Ownership of a pool directory, and the child that renews a server's leases.


def page_in(directory: Path) -> LeasePage:
    page = read_lease(lease_of(directory))
    assert page is not None
    return page


def _held_by(pid: int) -> str:
    return rf"engine-0.*pid {pid} on host {socket.gethostname()} \(renewed \d+ s ago\)"


def test_an_index_that_is_held_is_refused_by_name(tmp_path: Path, holder: Rank) -> None:
    with pytest.raises(PoolLockedError, match=_held_by(holder.process.pid)):
        Pool.open(make_spec(tmp_path, engine_index=0))


def test_a_closed_pool_names_no_owner(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path))
    pool.close()
    pool.close()
    assert page_in(pool.directories[0]).is_free
    assert (pool.directories[0] / "lock").stat().st_size == 0


def leave_lease(tmp_path: Path, **changes: object) -> Path:
    """Leave a lease as another host would."""
    pool = Pool.open(make_spec(tmp_path))
    pool.close()
    lease = pool.directories[0] / "lease"
    put_page(lease, page_elsewhere(**changes))
    return lease


@pytest.mark.parametrize("engine_index", [None, 0])
def test_a_live_owner_on_another_host_is_refused_by_name(
    tmp_path: Path, engine_index: int | None
) -> None:
    lease = leave_lease(tmp_path)
    with living_elsewhere(lease), pytest.raises(PoolLockedError) as refusal:
        Pool.open(make_spec(tmp_path, engine_index=engine_index))
    message = str(refusal.value)
    assert str(lease) in message
    assert "4711" in message
    assert "elsewhere" in message
    assert "delete" in message


@pytest.mark.parametrize(
    "changes",
    [{}, {"boot": boot_id()}, {"host": socket.gethostname()}, {"generation": 0}],
    ids=["dead host", "another container, same kernel", "same host, rebooted", "damaged"],
)
def test_a_dead_owner_is_taken_over(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def takeover(_: float) -> Takeover:
        return Takeover(0.01, wait=waited.append)

    monkeypatch.setattr(ownership, "Takeover", takeover)
    lease = leave_lease(tmp_path)
    page = replace(page_elsewhere(), **changes)  # type: ignore[arg-type]
    lease.write_bytes(page.encode() if page.is_intact else b"garbage")
    pool = Pool.open(make_spec(tmp_path, engine_index=0))
    assert pool.engine_index == 0
    pool.close()


def test_a_live_owner_with_a_boot_id_of_its_own_is_no_other_host(
    tmp_path: Path, holder: Rank
) -> None:
    """A container may have one. Its flock is refused, so it lives here."""
    (directory,) = tmp_path.glob("*/engine-0/rank-0")
    put_page(directory / "lease", replace(page_in(directory), boot=b"the container's."))
    assert Takeover().look(directory).kind == "live"
    holder.kill()
    assert Takeover().look(directory).kind == "silent"


def test_a_repair_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LOCAL", replace(LOCAL, takeover_s=0.3))
    with ownership.hold([tmp_path]):
        first = page_in(tmp_path)
        assert first.pid == os.getpid()
        wait_until("a renewal", lambda: page_in(tmp_path) != first)
    assert page_in(tmp_path).is_free, "no renewal follows the release"


def test_a_failed_open_leaves_no_lock(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path))
    slab = pool.directories[0] / "slab"
    pool.close()
    slab.unlink()
    slab.mkdir()
    for _ in range(2):
        with pytest.raises(Exception, match="slab"):
            Pool.open(make_spec(tmp_path, engine_index=0))
    slab.rmdir()
    Pool.open(make_spec(tmp_path, engine_index=0)).close()


def test_a_released_directory_is_free_although_a_prober_has_the_descriptor(tmp_path: Path) -> None:
    """One that is just being started has all of them, and one that is ending that of its answer."""
    lock = DirectoryLock.claim(tmp_path)
    assert lock is not None
    of_the_prober = os.dup(lock.fd)
    lock.release()
    again = DirectoryLock.claim(tmp_path)
    os.close(of_the_prober)
    assert again is not None
    again.release()


def test_closing_on_a_target_that_does_not_answer_logs_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that ends with a lost target logs nothing that an operator must act on."""
    lock = DirectoryLock.claim(tmp_path)
    assert lock is not None
    lease = Lease.claim_in(tmp_path, LOCAL, Permits.new(1), 0)
    ours = logging.getLogger(LOGGER_NAME)
    monkeypatch.setattr(ours, "propagate", False)
    caplog.set_level(logging.INFO, LOGGER_NAME)
    ours.addHandler(caplog.handler)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails)
        lease.release(lock.lease)
    ours.removeHandler(caplog.handler)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "(EIO): the next start takes it over" in record.getMessage()
    lock.release()
    taken_over = DirectoryLock.claim(tmp_path)
    assert taken_over is not None, "and it does"
    taken_over.release()


WAIT_S = 120.0
#: Renewed every 50 ms.
OFTEN = replace(LOCAL, takeover_s=0.3)


class Held:
    """A region that is claimed, and kept from `keep` on."""

    def __init__(self, directory: Path, permits: Permits | None = None, number: int = 0) -> None:
        """number: of its permit."""
        lock = DirectoryLock.claim(directory)
        assert lock is not None
        self.lock, self.permits, self.directory = lock, permits or Permits.new(1), directory
        self.region = Region(lock, Lease.claim_in(directory, OFTEN, self.permits, number))
        assert self.region.lease.is_ours()

    def keep(self) -> Companion:
        return keep([self.region], self.permits)

    @property
    def page(self) -> LeasePage:
        page = read_lease(lease_of(self.directory))
        assert page is not None
        return page

    def await_beat(self) -> None:
        before = self.page.beat
        wait_until("a renewal", lambda: self.page.beat > before)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path)
    yield held
    held.region.release()


def test_the_servers_name_is_renewed(held: Held) -> None:
    keeping = held.keep()
    held.await_beat()
    assert held.page.pid == os.getpid(), "not the child's"
    keeping.stop()


def test_a_page_that_names_another_owner_is_left_alone(held: Held) -> None:
    """Another host's server, which flock does not reach, has taken the region over."""
    keeping = held.keep()
    held.await_beat()
    theirs = replace(held.page, owner=b"another server's", generation=9)
    wait_until("the loss", lambda: _put(held, theirs) or held.region.lease.permit.is_lost)
    assert held.page == theirs
    keeping.stop()
    held.region.release()
    assert held.page == theirs


def _put(held: Held, page: LeasePage) -> None:
    """A renewal that was under way may replace it."""
    lease_of(held.directory).write(page.encode())


def test_a_torn_page_is_written_again(held: Held) -> None:
    keeping = held.keep()
    held.await_beat()
    (held.directory / "lease").write_bytes(b"\1" * 512)
    wait_until("a renewal", lambda: held.page.is_intact)
    assert held.page.owner == held.region.lease.page.owner
    assert not held.region.lease.permit.is_lost
    keeping.stop()


def beating_for(pid: int) -> list[int]:
    """The processes that renew the leases of `pid`."""
    return companions(b"-m\0vllm_nvmeof_offload.pool.keeper\0%d\0" % pid, server=pid)


def test_a_killed_renewer_has_a_successor(held: Held) -> None:
    with numbers_from(1024):  # in a server with many descriptors
        keeping = held.keep()
        held.await_beat()
        (first,) = beating_for(os.getpid())
        os.kill(first, signal.SIGKILL)
        wait_until("a successor", lambda: beating_for(os.getpid()) not in ([], [first]))
        held.await_beat()
        keeping.stop()
    wait_until("its end", lambda: beating_for(os.getpid()) == [])


#: A server whose lease is renewed; prints a line when it has been.
SERVER = """
import sys
from pathlib import Path
from tests.unit.pool.test_ownership import Held
held = Held(Path(sys.argv[1]))
keeping = held.keep()
held.await_beat()
print("renewed", flush=True)
sys.stdin.read()
"""


def test_the_renewer_is_not_a_child_of_the_server_and_ends_with_it(tmp_path: Path) -> None:
    """vLLM kills all descendants of an engine, and hangs if one has gone before its turn."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"renewed\n"
    assert len(beating_for(server.pid)) == 1
    children = Path(f"/proc/{server.pid}/task").glob("*/children")
    assert "".join(one.read_text() for one in children) == ""
    server.kill()
    server.communicate()
    wait_until("its end", lambda: beating_for(server.pid) == [])


def test_a_replaced_file_at_the_path_is_not_written(held: Held, tmp_path: Path) -> None:
    """Another file system may be mounted there, with another owner."""
    path, lease = tmp_path / "lease", held.region.lease
    path.rename(tmp_path / "ours")
    path.write_bytes(b"theirs")
    path.chmod(0o600)
    keeper = Keeper(lease.page.owner, 30.0, lease.permit)
    with pytest.raises(OSError, match="a different file"):
        keeper.renew(PageFile(path, held.lock.lease), epoch=1)
    held.region.release()
    assert path.read_bytes() == b"theirs"


def test_the_lease_of_a_target_that_is_away_is_left_alone(held: Held) -> None:
    """Its path is not touched, and another server may have the region meanwhile."""
    held.region.lock, lock = None, held.region.lock
    assert held.region.order() is None
    before = held.page
    held.region.release()
    assert held.page == before
    assert held.region.lease.permit.is_lost
    held.region.lock = lock


#: Continues after Ctrl-C, as vLLM does while it drains; stops on request.
DRAINING = (
    SERVER.replace(
        "import sys", "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: None)"
    )
    + "keeping.stop()\n"
)


def test_ctrl_c_does_not_end_the_renewer_before_its_server(tmp_path: Path) -> None:
    """The console sends SIGINT to all of a server's process group; the server drains first."""
    server = subprocess.Popen(
        [sys.executable, "-c", DRAINING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"renewed\n"
    beating = beating_for(server.pid)
    os.killpg(server.pid, signal.SIGINT)
    pages = map(read_lease, itertools.repeat(lease_of(tmp_path)))
    first = next(pages)
    wait_until("a renewal", lambda: next(pages) != first)
    assert beating_for(server.pid) == beating, "the same one, not a successor"
    assert server.communicate() == (b"", b"")
    assert server.returncode == 0
    wait_until("its end", lambda: beating_for(server.pid) == [])


def test_a_stop_does_not_wait_for_a_child_that_cannot_start(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python is on a mount that hangs: the server ends without the child."""
    starting, started = threading.Event(), threading.Event()

    class Hanging(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            starting.set()
            started.wait()
            return super().wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Hanging)
        keeping = held.keep()
        assert starting.wait(WAIT_S)
        stopping = threading.Thread(target=keeping.stop)
        stopping.start()
        stopping.join(WAIT_S)
        stopped = not stopping.is_alive()
        before = held.page
        started.set()
    assert stopped
    wait_until("its end", lambda: beating_for(os.getpid()) == [])
    assert held.page == before, "nothing is written after the stop"
