# SPDX-License-Identifier: Apache-2.0
"""Runs suites of tests one after the other, even after one failed; prints the failed ones last.

`make test` calls it: `tools/suites.py MAKE NAME…`, where each NAME is a target `suite-NAME` of
the Makefile. Ends with 1 if a suite failed, and with 128 + the signal's number, as a shell does,
after SIGINT or SIGTERM; the suite that was running then has ended and no other is started.
"""

from __future__ import annotations

import signal
import subprocess
import sys


def run(make: str, names: list[str]) -> int:
    """Return the exit status. make: the command, `$(MAKE)`."""
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
    """Return the number of the signal that stopped it, or 0; and its exit status."""
    stopped_by = 0
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        nonlocal stopped_by
        stopped_by = number
        # A terminal sends SIGINT to the whole process group; SIGTERM reaches only one process, and
        # make passes it on to its own children.
        if number == signal.SIGTERM and process is not None:
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # The descriptors of make's job server are inherited: MAKEFLAGS names them.
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
