# SPDX-License-Identifier: Apache-2.0
"""A limit of threads or descriptors that is reached after the start ends no server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE, PYTHON = "uring-buffered", "threads-buffered"


@pytest.fixture
def cgroup() -> Iterator[str]:
    """A cgroup of its own with the controller of process numbers."""
    base = Path("/sys/fs/cgroup")
    base = base / "pids" if (base / "pids").is_dir() else base
    group = base / f"vllm-nvmeof-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / "pids.max").exists():
            pytest.skip("the controller of process numbers is not delegated here")
        yield str(group)
    finally:
        group.rmdir()


def run(path: Path, engine: str, what: str, cgroup: str) -> None:
    command = [sys.executable, "-m", "tests.faults.limits_child", str(path), engine, what, cgroup]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (child.returncode, child.stdout) == (0, "ok\n"), child.stderr


@pytest.mark.parametrize("what", ["hang", "leave"])
@pytest.mark.parametrize("engine", [NATIVE, PYTHON])
def test_no_more_threads(tmp_path: Path, cgroup: str, engine: str, what: str) -> None:
    run(tmp_path, engine, what, cgroup)


@pytest.mark.parametrize("what", ["hang", "leave"])
@pytest.mark.parametrize("engine", [NATIVE, PYTHON])
def test_no_more_descriptors(tmp_path: Path, engine: str, what: str) -> None:
    run(tmp_path, engine, what, "")
