# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fault tests."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.pool.pool import Pool

from .fuse_mount import FaultyMount
from .kit import ENGINES, Bench, make_spec

_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | 1 << 18


@pytest.fixture(scope="session")
def own_mount_table() -> None:
    """Give this process its own mount table: other processes' mounts would wake our watchers."""
    if "PYTEST_XDIST_WORKER" not in os.environ or os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None):
        error = ctypes.get_errno()
        if error == errno.EPERM:  # root in a container that may not mount file systems either
            pytest.skip("a private mount table is not permitted here")
        raise OSError(error, os.strerror(error), "unshare(CLONE_NEWNS)")


@pytest.fixture(params=list(ENGINES))
def engine_name(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of each engine that can run on this machine."""
    name = str(request.param)
    if name.startswith("uring"):
        pool = Pool.open(make_spec(tmp_path_factory.mktemp("probe"), slots=1))
        try:
            bench = Bench(name, pool)
        except EngineError as error:
            pool.close()
            pytest.skip(f"no io_uring here: {error}")
        assert bench.close()
    return name


@pytest.fixture
def faulty_mount(tmp_path: Path) -> Iterator[FaultyMount]:
    mounted = FaultyMount(tmp_path)
    yield mounted
    mounted.close()
