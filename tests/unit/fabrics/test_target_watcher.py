# SPDX-License-Identifier: Apache-2.0
"""The thread that searches for lost targets survives every answer of a prober."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.descriptors import numbers_from
from tests.wait import wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.targets.health import PathStates
from vllm_nvmeof_offload.targets.prober import ProbeAnswer, ProbeRequest
from vllm_nvmeof_offload.targets.reattach import Attachments, TargetWatcher

PROBER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[2])) as channel:
    channel.recv(1 << 16)
    channel.send(sys.argv[1].encode())
"""


class _Away(Attachments):
    """Always searches for its one target."""

    def __init__(self, directory: Path) -> None:
        self._wanted = ProbeRequest(str(directory), "", False, 0, None)

    def update(self, states: Sequence[PathStates]) -> list[ProbeRequest | None]:
        return [self._wanted]

    def attach(
        self, target: int, request: ProbeRequest, answer: ProbeAnswer, fds: list[int]
    ) -> str:
        raise AssertionError("there was nothing to attach")


def log_of(answer: str, directory: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return the server's log line for this answer of a prober; its thread must survive."""
    with caplog.at_level(logging.WARNING, LOGGER_NAME):
        watcher = TargetWatcher(
            _Away(directory),
            [str(directory)],
            lambda call: call(),
            command=[sys.executable, "-c", PROBER, answer],
        )
        try:
            wait_until("the prober's answer", lambda: bool(caplog.messages), limit_s=30.0)
        finally:
            watcher.stop()
    return caplog.messages[0]


def test_a_server_with_many_descriptors_finds_its_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = ProbeAnswer("no pool is there").encode().decode()
    with numbers_from(1024):
        logged = log_of(answer, tmp_path, caplog)
    assert logged == f"target {tmp_path} is not back: no pool is there"


@pytest.mark.parametrize(
    "answer",
    [
        "not JSON",
        "[" * 10_000,
        "[1]",
        "{}x",
        '{"failure": "", "device": 1, "inode": 2, "later": 3}',
        '{"failure": "", "device": "1", "inode": 2}',
        '{"failure": null}',
    ],
    ids=["text", "deep", "list", "garbled", "later version", "no number", "no reason"],
)
def test_an_invalid_answer_is_a_failure(
    answer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "another version of this package" in log_of(answer, tmp_path, caplog)
