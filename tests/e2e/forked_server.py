# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` that is forked from a process which has imported vLLM (`server_zygote.py`).

It is a process of its own in a session of its own, with a log, as every `Server` is. Its hashes
of strings are seeded as those of all servers of its zygote: a restart that is to see others
starts its servers anew.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 120.0
#: vLLM makes several processes of its API server, and their metrics' library must be told
#: before it is imported.
_MANY_SERVERS = frozenset({"--api-server-count", "--data-parallel-size"})


def can_be_forked(spec: ServerSpec) -> bool:
    """CUDA does not live on in a child."""
    others_vllm = "PYTHONPATH" in spec.env or not has_cpu_engine()
    return not (spec.program or others_vllm or _MANY_SERVERS.intersection(spec.extra_args))


class ForkedServer(Server):
    """See the module's docstring. One that does not start leaves its zygote as it was."""

    def _launch(self) -> subprocess.Popen[bytes]:
        told = self.spec.environment().items()
        # pytest names the test that runs now.
        zygote = _zygote(frozenset(item for item in told if not item[0].startswith("PYTEST_")))
        arguments = replace(self.spec, program=("vllm",)).command(self.port)[1:]
        self.log_path.write_bytes(b"")  # it is looked at before the server has opened it
        return zygote.fork(arguments, self.log_path.resolve())  # type: ignore[return-value]


class _Forked:
    """What `Server` uses of `subprocess.Popen`, of a process whose parent is the zygote."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.args = ["vllm"]
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def end(self, status: int) -> None:
        self.returncode = status
        self._ended.set()


class _Zygote:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.e2e.server_zygote"],
            cwd=_ROOT,
            env={**environment, "PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)
        self._forked: dict[int, _Forked] = {}
        self._started: queue.SimpleQueue[_Forked | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, arguments: list[str], log: Path) -> _Forked:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        forked = self._started.get(timeout=_START_S)
        assert forked is not None, f"the zygote ended with {self._process.wait()}"
        return forked

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):  # vLLM's own, while it is imported
                continue
            told: dict[str, Any] = json.loads(line)
            if "started" in told:
                forked = self._forked[told["started"]] = _Forked(told["started"])
                self._started.put(forked)
            else:
                self._forked.pop(told["ended"]).end(told["status"])
        self._started.put(None)


@functools.cache
def _zygote(environment: frozenset[tuple[str, str]]) -> _Zygote:
    return _Zygote(dict(environment))
