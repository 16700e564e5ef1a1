# SPDX-License-Identifier: Apache-2.0
"""The check for a dead holder on another host does not depend on that host's clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.elsewhere import page_elsewhere, put_page
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.keeper import Region
from vllm_nvmeof_offload.pool.lease import POLL_S, TAKEOVER_S, PageFile, Permits, Takeover, boot_id
from vllm_nvmeof_offload.pool.ownership import LOCAL
from vllm_nvmeof_offload.pool.pool import Pool

from .kit import make_spec


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
