# SPDX-License-Identifier: Apache-2.0
"""`vllm` with forked engines and workers, which is vLLM's default for a GPU.

On the CPU vLLM spawns engine and worker, which import it again: 12 s of one core, twice per server.
`make demo-dual` and the end-to-end tests start many servers. `make demo`, the examples and the
tests of the wheel start vLLM unchanged.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from multiprocessing.context import BaseContext

from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils import system_utils


def _forked() -> BaseContext:
    return multiprocessing.get_context("fork")


def fork_engines() -> None:
    """Replace vLLM's choice of a start method; call this before another module imports it.

    Forking is safe without math threads: the environment has to say OMP_NUM_THREADS=1.
    """
    system_utils.get_mp_context = _forked
    # Engine and worker wait for each other by busy polling until no message has come for a second.
    # With two servers on two cores, polling takes half of the other server's computing time.
    shm_broadcast.sched_yield = functools.partial(time.sleep, 0.0002)
    # More of /dev/shm than a container has would have to be free, and little of it is used.
    shm_broadcast.check_shm_free_space = lambda *_, **__: None


if __name__ == "__main__":
    fork_engines()
    from vllm.entrypoints.cli.main import main

    main()
