# SPDX-License-Identifier: Apache-2.0
"""An engine's process does not outlive its parent, even if it ignores SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

#: Makes a process as vLLM makes its engine, and stays until it is killed.
_PARENT = """
import multiprocessing, signal, sys, threading
from vllm_nvmeof_offload.vllm_adapter import new_weights

def engine(deaf):
    new_weights._GRACE_S = 0.2
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    new_weights.end_with_parent()
    new_weights.end_with_parent()
    print(multiprocessing.current_process().pid, threading.active_count(), flush=True)
    threading.Event().wait(60)

if __name__ == "__main__":
    new_weights.end_with_parent()  # not a child of a vLLM process: no thread
    assert threading.active_count() == 1
    method, manner, name = sys.argv[1:]
    context = multiprocessing.get_context(method)
    child = context.Process(target=engine, args=(manner == "deaf",), name=name)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("method", "manner", "name"),
    [("fork", "plain", "EngineCore"), ("spawn", "deaf", "EngineCore_DP1")],
)
def test_a_killed_parent_takes_its_engine_with_it(
    tmp_path: Path, method: str, manner: str, name: str
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    command = [sys.executable, str(script), method, manner, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, threads = map(int, parent.stdout.readline().split())
        assert threads == 2, "one watch, however often it is asked for"
        assert _alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline, never = time.monotonic() + 120, threading.Event()
        while _alive(pid):
            assert time.monotonic() < deadline, "it outlives its parent"
            never.wait(0.02)


def test_a_process_of_the_user_is_not_touched(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    command = [sys.executable, str(script), "fork", "plain", "Process-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, threads = map(int, parent.stdout.readline().split())
        os.kill(pid, signal.SIGKILL)
    assert threads == 1, "no thread watches"


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
