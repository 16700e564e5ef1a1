# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the pool's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_disk import tmpfs
from vllm_nvmeof_offload.pool.pool import Pool

from .kit import (
    OpenPool,
    make_spec,
)


@pytest.fixture
def open_pool(tmp_path: Path) -> Iterator[OpenPool]:
    """Open a pool in `tmp_path/t0`, `t1`, …; it closes the one opened before."""
    pools: list[Pool] = []

    def close() -> None:
        while pools:
            pools.pop().close()

    def open_one(count: int = 1, on_progress: object = None, **changes: object) -> Pool:
        close()
        spec = make_spec(*(tmp_path / f"t{i}" for i in range(count)), **changes)  # type: ignore[arg-type]
        pools.append(Pool.open(spec, on_progress))  # type: ignore[arg-type]
        return pools[-1]

    yield open_one
    close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    with tmpfs(path, 1024 * 1024):
        yield path
