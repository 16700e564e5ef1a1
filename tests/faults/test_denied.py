# SPDX-License-Identifier: Apache-2.0
"""A kernel that refuses io_uring, its memory (the fallback is correct), or threads."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process import needs_locked_memory
from vllm_nvmeof_offload.units import KIB, MIB

pytest.importorskip("vllm_nvmeof_offload.io.engine", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
#: Eight staging slots of this size exceed every limit below.
PAYLOAD_BYTES = 4 * MIB


def io_uring_errno() -> int:
    """The errno of io_uring_setup for invalid arguments: EFAULT if the call is available."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(425, 1, None) < 0 else 0


needs_io_uring = pytest.mark.skipif(
    io_uring_errno() != errno.EFAULT,
    reason=f"io_uring is refused here: {os.strerror(io_uring_errno())}",
)


def run_child(target: Path, **job: object) -> dict[str, Any]:
    job = {"target": str(target), "payload_bytes": PAYLOAD_BYTES, "wanted": "auto", **job}
    command = [sys.executable, "-W", "error", "-m", "tests.faults.denied_child", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return report


@needs_io_uring
@needs_locked_memory
def test_nothing_falls_back_if_nothing_is_denied(tmp_path: Path) -> None:
    """Control: the effects in the other tests come from the denial."""
    report = run_child(tmp_path)
    assert report["ok"]
    assert "io_uring (registered" in report["name"]
    assert report["fallbacks"] == []
    assert report["log"] == []


@needs_io_uring
@pytest.mark.parametrize(
    ("denied", "number"),
    [
        (["setup", "enter", "register"], errno.EPERM),
        (["setup", "enter", "register"], errno.ENOSYS),
        (["setup"], errno.EACCES),
        pytest.param(["enter"], errno.EPERM, marks=needs_locked_memory),
    ],
)
def test_the_threads_engine_runs_without_io_uring(
    tmp_path: Path, denied: list[str], number: int
) -> None:
    report = run_child(tmp_path, deny=denied, errno=number)
    assert report["ok"]
    assert report["name"].startswith("threads")
    (line,) = report["fallbacks"]
    assert line.startswith("io_uring→threads")
    assert errno.errorcode[number] in line
    assert "io_uring_" in line
    assert [line for line in report["log"] if "io_uring" in line] == report["log"]
    assert len(report["log"]) == 1
    assert line in report["log"][0]


@needs_io_uring
def test_without_the_right_to_register_it_falls_back_and_works(tmp_path: Path) -> None:
    report = run_child(tmp_path, deny=["register"], errno=errno.EPERM)
    assert report["ok"]
    assert "unregistered" in report["name"]
    assert "EPERM" in report["fallbacks"][-1]
    assert len(report["log"]) == len(report["fallbacks"])


@needs_io_uring
@pytest.mark.parametrize("memlock_bytes", [64 * KIB, 8 * MIB])
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_memlock_limit_below_staging_leaves_it_unregistered(
    tmp_path: Path, memlock_bytes: int
) -> None:
    report = run_child(tmp_path, memlock_bytes=memlock_bytes)
    assert report["ok"]
    assert "unregistered" in report["name"]
    (line,) = report["fallbacks"]
    assert "registered→unregistered" in line
    assert "ENOMEM" in line
    assert ("8.0 MiB" if memlock_bytes == 8 * MIB else "64.0 KiB") in line
    assert len(report["log"]) == 1
    assert line in report["log"][0]


@needs_io_uring
def test_uring_requested_by_name_is_an_error_if_it_is_denied(tmp_path: Path) -> None:
    report = run_child(tmp_path, wanted="uring", deny=["setup"], errno=errno.EPERM)
    assert "EPERM" in report["error"]
    assert "io_uring" in report["error"]


def test_threads_requested_by_name_run_without_a_warning(tmp_path: Path) -> None:
    report = run_child(
        tmp_path, wanted="threads", deny=["setup", "enter", "register"], errno=errno.EPERM
    )
    assert report["ok"]
    assert report["name"].startswith("threads")
    assert report["fallbacks"] == report["log"] == []


@needs_io_uring
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 12),
    reason="rings cannot share registered memory before Linux 6.12",
)
def test_the_rings_of_several_targets_share_one_registration(tmp_path: Path) -> None:
    staging_bytes = 8 * (512 * KIB + 4 * KIB)
    limit = staging_bytes * 3 // 2  # enough for one registration, not for three
    report = run_child(tmp_path, targets=3, payload_bytes=512 * KIB, memlock_bytes=limit)
    assert report["ok"]
    assert report["fallbacks"] == []


# -- a limit that is reached after the start ends no server ---------------------------

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


def run_at_limit(path: Path, engine: str, what: str, cgroup: str) -> None:
    command = [sys.executable, "-m", "tests.faults.limits_child", str(path), engine, what, cgroup]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (child.returncode, child.stdout) == (0, "ok\n"), child.stderr


@pytest.mark.parametrize("what", ["hang", "leave"])
@pytest.mark.parametrize("engine", [NATIVE, PYTHON])
def test_no_more_threads(tmp_path: Path, cgroup: str, engine: str, what: str) -> None:
    run_at_limit(tmp_path, engine, what, cgroup)


@pytest.mark.parametrize("what", ["hang", "leave"])
@pytest.mark.parametrize("engine", [NATIVE, PYTHON])
def test_no_more_descriptors(tmp_path: Path, engine: str, what: str) -> None:
    run_at_limit(tmp_path, engine, what, "")
