# SPDX-License-Identifier: Apache-2.0
"""`vllm` in a process whose seccomp filter denies io_uring, as a container's own profile does."""

from __future__ import annotations

import errno
import runpy
import sys
from pathlib import Path

from vllm_nvmeof_bench import servers

sys.path.append(str(Path(__file__).parents[2]))  # `python -P` leaves it out

from tests.faults.denied_child import SYSCALLS, deny

if __name__ == "__main__":
    deny([*SYSCALLS], errno.EPERM)
    # A script: importing it imports vLLM.
    runpy.run_path(str(Path(servers.__file__).with_name("forking.py")), run_name="__main__")
