# SPDX-License-Identifier: Apache-2.0
"""The check for a dead holder on another host does not depend on that host's clock."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.lock import (
    HEARTBEAT_PERIOD_S,
    DirectoryLock,
    Holder,
    watch_locks,
)
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.silence import POLL_S, TAKEOVER_S, Silence

from .kit import make_spec


class Elsewhere:
    """Another host, and the time that passes while we wait. A live host renews its heartbeat
    meanwhile.
    """

    def __init__(self, paths: list[Path], behind_s: float, *, lives: bool) -> None:
        self.now_s = 0.0
        self._paths, self._behind_s, self._lives = paths, behind_s, lives
        self._beaten_s = 0.0
        self.beat()

    def beat(self) -> None:
        heartbeat = time.time() + self.now_s - self._behind_s
        for path in self._paths:
            path.touch(0o600)
            path.write_bytes(Holder("elsewhere", 4711, "another-kernel", heartbeat).record())
        self._beaten_s = self.now_s

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self._lives and self.now_s - self._beaten_s >= HEARTBEAT_PERIOD_S:
            self.beat()

    def claim(self, path: Path) -> DirectoryLock | None:
        watch = Silence(clock=self.clock, wait=self.wait)
        watch_locks(watch, self._paths)
        return watch.settled(partial(DirectoryLock.claim, path, None))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    ours = logging.getLogger(LOGGER_NAME)
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)


@pytest.mark.parametrize("behind_s", [0, 31, 5 * 3600, -3600])
def test_a_live_holder_is_refused_whatever_its_clock_says(tmp_path: Path, behind_s: float) -> None:
    elsewhere = Elsewhere([tmp_path / "lock"], behind_s, lives=True)
    with pytest.raises(PoolLockedError, match="pid 4711 on host elsewhere"):
        elsewhere.claim(tmp_path / "lock")
    assert elsewhere.now_s <= HEARTBEAT_PERIOD_S + 2 * POLL_S, "at its first sign of life"


def test_a_dead_holder_is_taken_over_after_one_wait_for_all_its_directories(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / "lock", tmp_path / "other"]
    elsewhere = Elsewhere(paths, 31, lives=False)
    watch = Silence(clock=elsewhere.clock, wait=elsewhere.wait)
    watch_locks(watch, paths)
    for path in paths:
        lock = watch.settled(partial(DirectoryLock.claim, path, None))
        assert lock is not None
        lock.release()
    assert TAKEOVER_S <= elsewhere.now_s < TAKEOVER_S + 2 * POLL_S
    warnings = {record.getMessage() for record in log.records}
    assert len(warnings) == 1, warnings
    assert "pid 4711 on host elsewhere" in warnings.pop()


def test_a_holder_on_this_host_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    elsewhere = Elsewhere([], 0, lives=False)
    mine = Holder.myself()
    path.write_bytes(Holder(mine.host, mine.pid, mine.boot_id, mine.heartbeat - 1e6).record())
    lock = elsewhere.claim(path)
    assert lock is not None
    lock.release()
    assert elsewhere.now_s == 0


@pytest.mark.parametrize("behind_s", [31, 3, -3600])
def test_a_record_that_was_not_watched_is_not_taken_over(tmp_path: Path, behind_s: float) -> None:
    Elsewhere([tmp_path / "lock"], behind_s, lives=False)
    with pytest.raises(PoolLockedError, match="elsewhere"):
        DirectoryLock.claim(tmp_path / "lock")


def test_a_beat_is_seen_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's write reaches the device, while this kernel still shows its cached page."""
    path = tmp_path / "lock"
    elsewhere = Elsewhere([path], 31, lives=False)
    real = os.posix_fadvise

    def forget(fd: int, offset: int, length: int, advice: int) -> None:
        real(fd, offset, length, advice)
        if advice == os.POSIX_FADV_DONTNEED and elsewhere.now_s >= HEARTBEAT_PERIOD_S:
            elsewhere.beat()

    monkeypatch.setattr(os, "posix_fadvise", forget)
    with pytest.raises(PoolLockedError, match="elsewhere"):
        elsewhere.claim(path)


@pytest.mark.parametrize("engine", ["", "b"])
def test_a_pool_of_a_host_whose_clock_is_behind_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Rank 0 meets a record in its own directory, or in that of another rank."""
    pools = [Pool.open(make_spec(tmp_path, engine="a", rank=rank)) for rank in (0, 1)]
    paths = [pool.directories[0] / "lock" for pool in pools]
    for pool in pools:
        pool.close()
    elsewhere = Elsewhere(paths, 31, lives=True)
    looks = iter(range(2))

    def watch(watched: Silence, paths: Iterable[Path]) -> None:
        watch_locks(watched, paths)
        if next(looks, None) == 1:  # a heartbeat between the second look and the claim
            elsewhere.beat()

    monkeypatch.setattr(ownership, "watch_locks", watch)
    with pytest.raises(PoolLockedError, match="pid 4711 on host elsewhere"):
        Pool.open(make_spec(tmp_path, engine=engine, rank=0))


def test_a_dead_hosts_pool_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "Silence", partial(Silence, 0.01))
    pools = [Pool.open(make_spec(tmp_path, engine="a", rank=rank)) for rank in (0, 1)]
    paths = [pool.directories[0] / "lock" for pool in pools]
    for pool in pools:
        pool.close()
    Elsewhere(paths, 31, lives=False)
    pool = Pool.open(make_spec(tmp_path, engine="b", rank=0))
    assert pool.directories[0] == paths[0].parent
    pool.close()
