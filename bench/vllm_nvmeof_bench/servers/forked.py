# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` that is forked from a process that has already imported vLLM (`zygote.py`).

Like every `Server`, it is a separate process with its own log. All servers of a zygote share the
seed of string hashes, so a test that restarts with a different seed must not use one.
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
from vllm_nvmeof_offload.config import EXPERIMENT

#: Prefixes of variables that a server first reads when it starts, so that they can differ per fork.
_READ_LATE = ("VLLM_SERVER_DEV_MODE", "VLLM_NIXL_", "UCX_", EXPERIMENT)
_START_S = 120.0
#: Arguments with which vLLM can start several API servers. These cannot be forked, because their
#: metrics library reads a variable when it is imported.
_MANY_SERVERS = frozenset({"--api-server-count", "--data-parallel-size"})


def can_be_forked(spec: ServerSpec) -> bool:
    """Return whether a server can be forked: not with CUDA, which does not survive a fork, or with
    a vLLM other than the installed one."""
    others_vllm = "PYTHONPATH" in spec.environment() or not has_cpu_engine()
    return not (spec.program or others_vllm or _MANY_SERVERS.intersection(spec.extra_args))


def start(spec: ServerSpec, log_path: Path) -> Server:
    """Start a server, if possible as a fork, which does not have to import vLLM."""
    return (ForkedServer if can_be_forked(spec) else Server)(spec, log_path)


def import_vllm(spec: ServerSpec) -> None:
    """Start importing vLLM for servers with this environment, if they can be forked."""
    if can_be_forked(spec):
        _zygote_of(spec)


def _zygote_of(spec: ServerSpec) -> tuple[_Zygote, dict[str, str]]:
    """Return the zygote for a server, and the variables to set in the fork."""
    # pytest writes the current test's name into a variable.
    variables = {k: v for k, v in spec.environment().items() if not k.startswith("PYTEST_")}
    late = {name: variables.pop(name) for name in [*variables] if name.startswith(_READ_LATE)}
    return _zygote(frozenset(variables.items())), late


class ForkedServer(Server):
    """A server forked from a zygote. A failed start does not affect the zygote."""

    def _launch(self) -> subprocess.Popen[bytes]:
        zygote, late = _zygote_of(self.spec)
        arguments = replace(self.spec, program=("vllm",)).command(self.port)[1:]
        self.log_path.write_bytes(b"")  # the log may be read before the server opens it
        return zygote.fork(arguments, self.log_path.resolve(), late)  # type: ignore[return-value]


class _Forked:
    """The part of `subprocess.Popen` that `Server` uses, for a process forked by the zygote."""

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
    def __init__(self, environment: frozenset[tuple[str, str]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vllm_nvmeof_bench.servers.zygote"],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)
        self._forked: dict[int, _Forked] = {}
        self._started: queue.SimpleQueue[_Forked | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, arguments: list[str], log: Path, variables: Mapping[str, str]) -> _Forked:
        assert self._process.stdin is not None
        order = {"arguments": arguments, "log": str(log), "variables": variables}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        forked = self._started.get(timeout=_START_S)
        assert forked is not None, f"the zygote exited with {self._process.wait()}"
        return forked

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):  # printed by vLLM during its import
                continue
            event: dict[str, Any] = json.loads(line)
            if "started" in event:
                forked = self._forked[event["started"]] = _Forked(event["started"])
                self._started.put(forked)
            else:
                self._forked.pop(event["ended"]).end(event["status"])
        self._started.put(None)


_zygote = functools.cache(_Zygote)
