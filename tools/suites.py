# SPDX-License-Identifier: Apache-2.0
"""Run test suites one after another, even after a failure; print the failed ones at the end.

`make test` calls `tools/suites.py MAKE NAME…`; each NAME stands for a target `suite-NAME` of the
Makefile. The exit status is 1 if a suite failed. After SIGINT or SIGTERM no further suite starts,
and the exit status is 128 plus the signal's number, when the running suite has exited.
"""

from __future__ import annotations

import signal
import subprocess
import sys


def run(make: str, names: list[str]) -> int:
    """Run the suites; return the exit status. `make` is the command `$(MAKE)`."""
    failed: list[str] = []
    for place, name in enumerate(names):
        stopped_by, status = _run_suite([make, "--no-print-directory", f"suite-{name}"])
        if stopped_by:
            left = names[place + 1 :]
            failed_before = f"; failed before: {', '.join(failed)}" if failed else ""
            print(
                f"test suites: {signal.Signals(stopped_by).name} ended {name}"
                f"{failed_before}; not run: {', '.join(left) or 'none'}",
                flush=True,
            )
            return 128 + stopped_by
        if status:
            failed.append(name)
    passed = [name for name in names if name not in failed]
    print(f"test suites passed: {', '.join(passed) or 'none'}", flush=True)
    if failed:
        print(f"test suites FAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _run_suite(command: list[str]) -> tuple[int, int]:
    """Run a suite; return the signal that stopped it (or 0), and its exit status."""
    stopped_by = 0
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        nonlocal stopped_by
        stopped_by = number
        # A terminal sends SIGINT to the whole process group. SIGTERM reaches only one process, but
        # make forwards it to its children.
        if number == signal.SIGTERM and process is not None:
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # The child needs the descriptors of make's job server, which are in MAKEFLAGS.
        process = subprocess.Popen(command, close_fds=False)
        if stopped_by == signal.SIGTERM:
            process.terminate()
        status = process.wait()
        return stopped_by, status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
