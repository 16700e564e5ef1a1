# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_nvmeof_offload.errors import PoolError

from .rig import ENGINES, Rig


@pytest.fixture(params=sorted(ENGINES))
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make a rig of each kind of engine; close everything, and check that it closes, at the end."""
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        try:
            rigs.append(ENGINES[request.param](tmp_path, **options))
        except PoolError as error:
            if "O_DIRECT" in str(error):
                pytest.skip(f"no O_DIRECT here: {error}")
            raise
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.gate.open_all()
        assert rig.engine.close(20.0)
        rig.pool.close()
