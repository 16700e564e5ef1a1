# SPDX-License-Identifier: Apache-2.0
"""A server that starts while its killed predecessor still holds its locks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wait import wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.pool import Pool

from .kit import make_spec

#: Its first thread ends on request; another one stays, as one does that waits in
#: the kernel for a device, and with it the locks.
CHILD = """
import sys, pathlib
from tests.unit.first_thread import end_first_thread
from tests.unit.pool.kit import make_spec
from vllm_nvmeof_offload.pool.pool import Pool
pool = Pool.open(make_spec(pathlib.Path(sys.argv[1]), engine=sys.argv[2], rank=int(sys.argv[3])))
print(pool.engine_index, flush=True)
sys.stdin.readline()
end_first_thread()
"""


class Other:
    """A server that holds engine 0, and can be made to end slowly."""

    def __init__(self, target: Path, engine: str, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(target), engine, str(rank)],
            cwd=Path(__file__).resolve().parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "0\n"

    def begin_to_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        wait_until("its first thread's end", lambda: ownership.is_ending(self.process.pid))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=[("", 0), ("a", 1)], ids=["the same rank", "another rank"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Other]:
    server = Other(tmp_path, *request.param)
    yield server
    server.end()


class _Ender(logging.Handler):
    """Ends the other server once ours logs that it waits."""

    def __init__(self, other: Other) -> None:
        super().__init__()
        self._other = other

    def emit(self, record: logging.LogRecord) -> None:
        assert "waiting" in record.getMessage()
        self._other.end()


def test_the_pool_of_a_server_that_is_ending_is_waited_for(tmp_path: Path, other: Other) -> None:
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
    other: Other,
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
    tmp_path: Path, other: Other, caplog: pytest.LogCaptureFixture
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
