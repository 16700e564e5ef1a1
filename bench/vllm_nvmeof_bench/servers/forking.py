# SPDX-License-Identifier: Apache-2.0
"""A `vllm` that forks its engines and workers, as vLLM does by default with a GPU.

On the CPU, vLLM spawns the engine and the worker, and both import vLLM again: 12 s of one core,
twice per server. `make demo-dual` and the end-to-end tests start many servers. `make demo`, the
examples and the tests of the wheel start vLLM unchanged.
"""

from __future__ import annotations

import functools
import multiprocessing
import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils import system_utils


def fork_engines() -> None:
    """Replace vLLM's choice of a start method. Call this before other modules import it.

    Forking is safe only if there are no math threads: OMP_NUM_THREADS must be 1.
    """
    system_utils.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
    # Engine and worker poll for messages, and sleep only after a second without any. With two
    # servers on two cores, this polling takes half of the other server's computing time.
    shm_broadcast.sched_yield = functools.partial(time.sleep, 0.0002)
    # vLLM requires more free space in /dev/shm than a container has, but uses little of it.
    shm_broadcast.check_shm_free_space = lambda *_, **__: None


if __name__ == "__main__":
    fork_engines()
    from vllm.entrypoints.cli.main import main

    main()
