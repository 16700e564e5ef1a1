# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of peers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.rig import Rig
from vllm_nvmeof_offload.errors import PoolError

from .kit import TRANSPORTS, Puller, Serving, make_store
from .stand_in import install

#: Make a serving process and its puller: the keys of `serving.py`.
MakePair = Callable[..., tuple[Serving, Puller]]


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of each transport."""
    name: str = request.param
    if name == "pulls":
        monkeypatch.setitem(sys.modules, "nixl", sys)  # which is taken back
        install()
    return name


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Rig]:
    """A pool on two targets with chunk n in slot n, to 15."""
    try:
        rig = make_store(tmp_path / "p", targets=2)
    except PoolError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    yield rig
    assert rig.engine.close(20.0)
    rig.pool.close()


@pytest.fixture
def make_pair(store: Rig, tmp_path: Path, transport: str) -> Iterator[MakePair]:
    """Both end, and leak nothing."""
    made: list[tuple[Serving, Puller]] = []

    def make(**more: object) -> tuple[Serving, Puller]:
        serving = Serving(store, tmp_path / f"d{len(made)}", transport, **more)
        made.append((serving, Puller(store, serving.address, by_nixl=TRANSPORTS[transport])))
        return made[-1]

    yield make
    for serving, puller in made:
        puller.close()
        puller.at_rest()
        assert serving.close()["closed"]
