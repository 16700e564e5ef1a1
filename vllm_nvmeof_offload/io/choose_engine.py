# SPDX-License-Identifier: Apache-2.0
"""The choice of an I/O engine that works on this machine, and its fallbacks."""

from __future__ import annotations

import errno
import os
import resource

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import IoEngine
from vllm_nvmeof_offload.io.engine import How, NativeIoEngine, UringDeniedError
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.units import format_bytes


def choose_io_engine(
    wanted: str, pool: Pool, memory: memoryview, base_address: int, tuning: Tuning
) -> tuple[IoEngine, tuple[str, ...]]:
    """Set up the first engine that works here: io_uring with registered staging, io_uring without,
    or threads. Return it and its fallbacks.

    `wanted` is "auto", "uring" to fail rather than use threads, or "threads" to try no other. Each
    fallback is one line, also logged as a warning, that names the cause and the remedy. Raises:
    EngineError: `wanted` is "uring", and the kernel refuses io_uring.
    """
    fallbacks: list[str] = []
    for how in (How.REGISTERED, How.UNREGISTERED) if wanted != "threads" else ():
        try:
            return NativeIoEngine(pool, memory, base_address, tuning, how), tuple(fallbacks)
        except UringDeniedError as error:
            goes_on = how is How.REGISTERED and "register" in error.step
            step = "io_uring registered→unregistered" if goes_on else "io_uring→threads"
            fallbacks.append(f"{step}: {explain_denial(error, len(memory))}")
        logger.warning("I/O falls back to a slower method: %s", fallbacks[-1])
        if not goes_on:
            break
    if wanted == "uring":
        raise EngineError(f'io_engine="uring" cannot run here: {fallbacks[-1]}')
    return NativeIoEngine(pool, memory, base_address, tuning, How.THREADS), tuple(fallbacks)


def explain_denial(error: UringDeniedError, memory_bytes: int) -> str:
    """Return the step that was refused, its errno's name, and the remedy."""
    name = errno.errorcode.get(error.errno, str(error.errno))
    if error.errno == errno.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        remedy = (
            f"the locked-memory limit is {shown} and staging is {format_bytes(memory_bytes)}; "
            "raise it (ulimit -l, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1)"
        )
    elif error.errno in (errno.EPERM, errno.EACCES):
        remedy = (
            "a container's seccomp profile or kernel.io_uring_disabled forbids io_uring; allow "
            f"io_uring_setup, io_uring_enter and io_uring_register for uid {os.geteuid()}"
        )
    elif error.errno == errno.ENOSYS:
        remedy = "this kernel has no io_uring, or a seccomp profile hides it"
    else:
        remedy = os.strerror(error.errno)
    return f"{error.step}: {name}; {remedy}"
