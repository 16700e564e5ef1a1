# SPDX-License-Identifier: Apache-2.0
"""The search for a lost target."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.wait import wait_until
from vllm_nvmeof_offload.targets.health import PathStates
from vllm_nvmeof_offload.targets.prober import ProbeAnswer, ProbeRequest
from vllm_nvmeof_offload.targets.reattach import Attachments, TargetWatcher

#: Leaves its session's number in a file that appears whole.
PROBER = """
import os, sys
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getsid(0)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


class Away(Attachments):
    """The search for one target."""

    def __init__(self) -> None:
        """The target has no pool."""

    def update(self, states: Sequence[PathStates]) -> list[ProbeRequest | None]:
        return [ProbeRequest("", "", False, os.getpid(), None)]

    def attach(
        self, target: int, request: ProbeRequest, answer: ProbeAnswer, fds: list[int]
    ) -> str:
        return "not wanted"


def at_once(call: Callable[[], None]) -> None:
    call()


def test_ctrl_c_does_not_reach_a_prober(tmp_path: Path) -> None:
    """The console's SIGINT to the server's process group gives no traceback of a prober."""
    session_file = tmp_path / "session"
    command = [sys.executable, "-c", PROBER, str(session_file)]
    watcher = TargetWatcher(Away(), [str(tmp_path)], at_once, command=command)
    wait_until("a prober", session_file.exists)
    watcher.stop()
    assert int(session_file.read_text()) != os.getsid(0)
