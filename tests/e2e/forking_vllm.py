# SPDX-License-Identifier: Apache-2.0
"""`vllm`, whose engine and workers are forked, as vLLM does it for a GPU by default.

On the CPU it starts them anew, and each of the two imports vLLM again: 12 s of one core, twice
a server. `make demo`, the examples and the tests of the wheel start vLLM as it is.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from multiprocessing.context import BaseContext

from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils import system_utils

_PAUSE_S = 0.0002


def _forked() -> BaseContext:
    return multiprocessing.get_context("fork")


def fork_engines() -> None:
    """Call it before anything of vLLM has taken the function that it replaces.

    Safe beside the CPU's math threads: there are none, OMP_NUM_THREADS is 1 in all these tests.
    """
    system_utils.get_mp_context = _forked
    # Engine and worker wait for each other by asking again and again, until nothing has come for
    # a second. Of two servers on two cores that is half of what the other one could compute.
    shm_broadcast.sched_yield = functools.partial(time.sleep, _PAUSE_S)


if __name__ == "__main__":
    fork_engines()
    from vllm.entrypoints.cli.main import main

    main()
