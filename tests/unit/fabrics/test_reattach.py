# SPDX-License-Identifier: Apache-2.0
"""How a target that is away is looked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.wait import wait_until
from vllm_nvmeof_offload.targets.health import PathStates
from vllm_nvmeof_offload.targets.prober import ProbeAnswer, ProbeJob
from vllm_nvmeof_offload.targets.reattach import Caretaker, TargetWatch, Wanted

#: Leaves its session's number in a file that appears whole.
PROBER = """
import os, sys
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getsid(0)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


class Away:
    """One target that is looked for."""

    def look(self, states: Sequence[PathStates]) -> list[Wanted | None]:
        return [Wanted(ProbeJob("", "", False, 0, 0, os.getpid(), None), patient=False)]

    def attach(self, target: int, job: ProbeJob, answer: ProbeAnswer, fds: list[int]) -> str:
        return "not wanted"


def at_once(call: Callable[[], None]) -> None:
    call()


def test_a_prober_is_out_of_reach_of_ctrl_c(tmp_path: Path) -> None:
    """The console's SIGINT to the server's process group gives no traceback of a prober."""
    told = tmp_path / "session"
    command = [sys.executable, "-c", PROBER, str(told)]
    caretaker = Caretaker(Away(), [TargetWatch(str(tmp_path))], at_once, command=command)
    wait_until("a prober", told.exists)
    caretaker.stop()
    assert int(told.read_text()) != os.getsid(0)
