# SPDX-License-Identifier: Apache-2.0
"""A router process in front of servers: our example, or another router."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from vllm_nvmeof_bench.servers.server import ReservedPort, Server, ServerError, launch

_ROOT = Path(__file__).resolve().parents[3]
_EXAMPLE = _ROOT / "examples" / "dual_path_router.py"
_POLL_S = 0.05
_READY_S, _STOP_S = 60.0, 10.0


def dual_path_router(prefill: Sequence[Server], decode: Sequence[Server] = ()) -> list[str]:
    """Return the command for our example router, which needs a checkout of this project."""
    return [
        *(sys.executable, str(_EXAMPLE)),
        *(word for one in prefill for word in ("--prefill", one.url)),
        *(word for one in decode for word in ("--decode", one.url)),
    ]


class RunningRouter:
    """A running router; a context manager. command: starts it; the address is appended."""

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        self._reserved = ReservedPort()
        self._log_path = log_path
        self.url = f"http://127.0.0.1:{self._reserved.number}"
        address = ("--host", "127.0.0.1", "--port", str(self._reserved.number))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process = launch([*command, *address], log_path, {**os.environ, "NO_COLOR": "1"})

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reserved.close()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError), socket.create_connection(self._reserved.getsockname(), 1.0):
                return
            time.sleep(_POLL_S)
        last = self._log_path.read_text(errors="replace").splitlines()[-10:]
        raise ServerError("\n".join([f"the router does not answer; {self._log_path} ends:", *last]))
