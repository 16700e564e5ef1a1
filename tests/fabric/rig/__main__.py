# SPDX-License-Identifier: Apache-2.0
"""Runs a bash script in the guest: `python -m tests.fabric.rig SCRIPT [SECONDS]`.

The guest sees this machine's files, read-only, at their own paths, and works in real time.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from .guest import Guest, GuestFailedError
from .packages import RigUnavailableError

DEFAULT_S = 300.0


def main() -> int:
    """The script's exit status; 99 if the guest cannot be had or did not end."""
    path = Path(sys.argv[1]).resolve(strict=True)
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT_S
    command = f"cd {shlex.quote(str(Path.cwd()))} && exec bash {shlex.quote(str(path))}\n"
    try:
        guest = Guest.prepare()
        with tempfile.TemporaryDirectory(prefix="vllm-nvmeof-guest-") as job:
            result = guest.run(Path(job), command, seconds)
    except (GuestFailedError, RigUnavailableError) as error:
        print(error, file=sys.stderr)
        return 99
    print(result.console)
    return result.status


if __name__ == "__main__":
    sys.exit(main())
