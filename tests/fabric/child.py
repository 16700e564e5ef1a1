# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the process under test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .report import LoadSpec, OpEnd
from .subject import run_load

REAP_S_MAX = 60.0
_FORK = multiprocessing.get_context("fork")


class LoadProcess:
    """The child under test, and the messages that it has sent."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.ops: list[OpEnd] = []
        self.verdicts: list[tuple[float, int, str]] = []
        self.counters: dict[str, float] | None = None
        self.unreleased = 0
        self.engine = ""
        self._pipe, far = _FORK.Pipe()
        self.process = _FORK.Process(target=run_load, args=(spec, far), daemon=True)
        self.process.start()
        far.close()

    def drain(self, wait_s: float) -> list[tuple[Any, ...]]:
        """Receive messages for `wait_s` seconds; return those that are not about operations."""
        news: list[tuple[Any, ...]] = []
        end_s = time.monotonic() + wait_s
        with suppress(EOFError, ConnectionResetError):
            while self._pipe.poll(max(0.0, end_s - time.monotonic())):
                what, at_s, *rest = self._pipe.recv()
                match what:
                    case "op":
                        self.ops.append(rest[0])
                        continue
                    case "ready":
                        self.engine = rest[0]
                    case "verdict":
                        self.verdicts.append((at_s, rest[0], rest[1]))
                    case "end":
                        self.counters, self.unreleased = rest
                news.append((what, at_s, *rest))
            return news
        if self.counters is None:
            news.append(("lost", time.monotonic()))
        time.sleep(max(0.0, end_s - time.monotonic()))
        return news

    def stop(self) -> None:
        """Ask the child to end; the stage waits for its last message."""
        with suppress(BrokenPipeError):
            self._pipe.send("stop")

    def kill(self) -> float:
        """Send SIGKILL; return the seconds until the child was reaped."""
        began_s = time.monotonic()
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(REAP_S_MAX)
        assert self.process.exitcode is not None, f"not reaped within {REAP_S_MAX:g} s"
        return time.monotonic() - began_s

    def thread_states(self) -> dict[str, str]:
        """Thread name → state letter of /proc: S sleeps and can be killed, D cannot."""
        found = {}
        for place in Path(f"/proc/{self.process.pid}/task").iterdir():
            name, _, rest = (place / "stat").read_text().partition("(")[2].rpartition(")")
            found[f"{name} {place.name}"] = rest.split()[0]
        return found

    def between(self, since_s: float, until_s: float = float("inf")) -> list[OpEnd]:
        """The operations that began in this interval and have ended."""
        return [op for op in self.ops if since_s <= op.began_s < until_s]
