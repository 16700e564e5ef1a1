# SPDX-License-Identifier: Apache-2.0
"""A process that has imported vLLM, and forks servers.

Importing vLLM takes 12 s on one core, but a tiny model's engine starts in 3 s. All servers share
this process's environment, except for variables that they first read when they start.

From stdin, this process reads a line per server to start (JSON: arguments, log, variables). To
stdout it writes a line per started server (process ID) and per exited server (ID, exit status).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.05
#: Modules that every engine imports.
IMPORTED_ONCE = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm_nvmeof_offload.connector",
    "transformers",
)
#: Further modules that only the API server imports.
_SERVER_TOO = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
)


def main() -> None:
    _die_with_the_parent(signal.SIGKILL)
    from vllm_nvmeof_bench.servers.forking import fork_engines

    fork_engines()
    for module in (*IMPORTED_ONCE, *_SERVER_TOO):
        importlib.import_module(module)
    arguments = _serve_forks()
    if arguments is not None:
        sys.argv = ["vllm", *arguments]
        from vllm.entrypoints.cli.main import main as vllm

        vllm()


def _serve_forks() -> list[str] | None:
    """Fork a server per line of stdin; return its arguments in the fork, and None at the end."""
    pending = b""
    while True:
        _report_ended()
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        read = os.read(0, 1 << 16)
        if not read:
            return None
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _be_a_server(order["log"])
                os.environ.update(order["variables"])
                arguments: list[str] = order["arguments"]
                return arguments
            print(json.dumps({"started": pid}), flush=True)


def _report_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        ended = {"ended": pid, "status": os.waitstatus_to_exitcode(status)}
        print(json.dumps(ended), flush=True)


def _be_a_server(log: str) -> None:
    os.setpgid(0, 0)
    _die_with_the_parent(signal.SIGTERM)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (0, 1, 2):
        os.dup2(output if stream else os.open(os.devnull, os.O_RDONLY), stream)
    os.close(output)


def _die_with_the_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    main()
