# SPDX-License-Identifier: Apache-2.0
"""Runs engines. Each has a separate process, forked from one that has imported vLLM.

Importing vLLM takes longer than starting an engine for a tiny model, so it is done once. Every run
is still a fresh process, so that a second run on one pool is a restart. With vLLM's GPU engine
nothing is forked, because CUDA does not survive a fork.

Reads one plan per line (JSON) from standard input, and writes one line when its process ended.
With a plan's file as its argument, it runs the engine of that plan.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.zygote import IMPORTED_ONCE

_PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_the_parent()
    if sys.argv[1:]:
        _be_an_engine(json.loads(Path(sys.argv[1]).read_text()))
    start = _fork if has_cpu_engine() else _spawn
    if start is _fork:
        from vllm_nvmeof_bench.servers.forking import fork_engines

        _stand_in_for_xxhash()
        fork_engines()  # the stages of a pipeline
        for module in (*IMPORTED_ONCE, "tests.e2e.shapes.run"):
            importlib.import_module(module)
    print("READY", flush=True)
    for line in sys.stdin:
        print(start(line), flush=True)


def _fork(line: str) -> int:
    pid = os.fork()
    if pid == 0:
        _be_an_engine(json.loads(line))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _spawn(line: str) -> int:
    plan = Path(json.loads(line)["result"]).with_suffix(".plan")
    plan.write_text(line)
    command = [sys.executable, "-m", "tests.e2e.shapes.zygote", str(plan)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def _be_an_engine(plan: dict[str, object]) -> None:
    _die_with_the_parent()
    log = os.open(str(plan["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (0, 1, 2):
        os.dup2(log if stream else os.open(os.devnull, os.O_RDONLY), stream)
    _stand_in_for_xxhash()

    from tests.e2e.shapes import run

    result = run.play(plan)
    Path(str(plan["result"])).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stand_in_for_xxhash() -> None:
    """Provide another hash of 16 bytes if xxhash is missing, which is enough for a test."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        import hashlib

        def digest(data: bytes) -> bytes:
            return hashlib.blake2b(data, digest_size=16).digest()

        sys.modules["xxhash"] = SimpleNamespace(xxh3_128_digest=digest)  # type: ignore[assignment]


if __name__ == "__main__":
    main()
