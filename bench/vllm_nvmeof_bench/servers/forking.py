# SPDX-License-Identifier: Apache-2.0
"""A `vllm` that forks its engines and workers, as vLLM does by default with a GPU.

On the CPU, vLLM spawns the engine and the worker, and each imports vLLM again, which takes 12 s on
one core. `make demo-dual` and the end-to-end tests start many servers with this module; `make
demo`, the examples and the tests of the wheel start vLLM unchanged.
"""

from __future__ import annotations

import functools
import multiprocessing
import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils import system_utils


def fork_engines() -> None:
    """Make vLLM fork. Call this before other modules import the replaced functions, and with
    OMP_NUM_THREADS=1, because forking is unsafe with math threads."""
    system_utils.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
    # The engine and the worker poll until a second has passed without a message. With two servers
    # on two cores, polling takes half of the other server's computing time.
    shm_broadcast.sched_yield = functools.partial(time.sleep, 0.0002)
    # vLLM requires more free space in /dev/shm than containers have, but uses little of it.
    shm_broadcast.check_shm_free_space = lambda *_, **__: None


if __name__ == "__main__":
    fork_engines()
    from vllm.entrypoints.cli.main import main

    main()
