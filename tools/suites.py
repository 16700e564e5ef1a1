# SPDX-License-Identifier: Apache-2.0
"""Runs suites of tests one after the other, even after one failed; prints the failed ones last.

`make test` calls it: `tools/suites.py MAKE NAME…`, where each NAME is a target `suite-NAME` of
the Makefile; NAME+NAME: two side by side, of which the second is printed when both have ended.
Ends with 1 if a suite failed, and with 128 + the signal's number, as a shell does, after SIGINT or
SIGTERM; the suites that were running then have ended and no other is started.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import IO


def run(make: str, steps: list[str]) -> int:
    """Return the exit status. make: the command, `$(MAKE)`."""
    passed: list[str] = []
    failed: list[str] = []
    for place, step in enumerate(steps):
        stopped_by, statuses = _run_side_by_side(make, step.split("+"))
        if stopped_by:
            left = ", ".join(steps[place + 1 :]).replace("+", ", ")
            failed_before = f"; failed before: {', '.join(failed)}" if failed else ""
            print(
                f"test suites: {signal.Signals(stopped_by).name} ended {step}"
                f"{failed_before}; not run: {left or 'none'}",
                flush=True,
            )
            return 128 + stopped_by
        for name, status in statuses.items():
            (failed if status else passed).append(name)
    print(f"test suites passed: {', '.join(passed) or 'none'}", flush=True)
    if failed:
        print(f"test suites FAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _run_side_by_side(make: str, names: list[str]) -> tuple[int, dict[str, int]]:
    """Return the number of the signal that stopped them, or 0; and their exit statuses."""
    stopped_by = 0
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def stop(number: int, _: object) -> None:
        nonlocal stopped_by
        stopped_by = number
        # A terminal sends SIGINT to the whole process group; SIGTERM reaches only one process, and
        # make passes it on to its own children.
        if number == signal.SIGTERM:
            for process in processes.values():
                process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ExitStack() as files:
            outputs: list[IO[bytes] | None] = [None]  # that of this process
            outputs += [files.enter_context(tempfile.TemporaryFile()) for _ in names[1:]]
            for name, output in zip(names, outputs, strict=True):
                if not stopped_by:
                    command = [make, "--no-print-directory", f"suite-{name}"]
                    # The descriptors of make's job server are inherited: MAKEFLAGS names them.
                    processes[name] = subprocess.Popen(
                        command, stdout=output, stderr=output, close_fds=False
                    )
            if stopped_by == signal.SIGTERM:
                for process in processes.values():
                    process.terminate()
            statuses = {name: process.wait() for name, process in processes.items()}
            for output in filter(None, outputs):
                output.seek(0)
                sys.stdout.buffer.write(output.read())
                sys.stdout.flush()
        return stopped_by, statuses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
