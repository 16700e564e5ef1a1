# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the follower's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.follow.kit import Following, open_engine
from vllm_nvmeof_offload.pool.pool import Pool


@pytest.fixture
def following(file: int, tmp_path: Path) -> Following:
    """A server on one target, `tmp_path`."""
    return Following(file, [tmp_path])


@pytest.fixture
def engine() -> Iterator[Callable[..., Pool]]:
    """`open_engine`; the pools are closed at the end."""
    with ExitStack() as pools:

        def open_one(*arguments: object, **changes: object) -> Pool:
            pool = open_engine(*arguments, **changes)  # type: ignore[arg-type]
            pools.callback(pool.close)
            return pool

        yield open_one
