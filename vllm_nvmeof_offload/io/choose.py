# SPDX-License-Identifier: Apache-2.0
"""Chooses the I/O engine: io_uring with registered staging, without, or threads.

Each is really set up, in this order, until one works. A step down is never silent: one
warning that names what refused and the remedy, and one line in `ChosenEngine.fallbacks`.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import IoEngine
from vllm_nvmeof_offload.io.threads import ThreadsIoEngine
from vllm_nvmeof_offload.io.uring import UringDeniedError, UringIoEngine
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.native import WHY_NOT, core
from vllm_nvmeof_offload.units import KIB, MIB, format_bytes

if TYPE_CHECKING:
    from vllm_nvmeof_offload.pool.pool import Pool

__all__ = ["ChosenEngine", "IoLimits", "choose_io_engine", "explain_denial"]

logger = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Bounds of an engine, each for one target where it has rings; see `config_keys`."""

    threads: int = 8
    depth: int = 64
    split_bytes: int = MIB
    read_bytes_in_flight_max: int = 64 * MIB
    write_bytes_in_flight_max: int = 32 * MIB
    write_bytes_beside_reads_max: int = 512 * KIB


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """fallbacks: what runs slower than it could, and why; empty where nothing does."""

    engine: IoEngine
    fallbacks: tuple[str, ...]


def choose_io_engine(
    wanted: str, pool: Pool, memory: memoryview, base_address: int, limits: IoLimits
) -> ChosenEngine:
    """Set up the best engine that works here.

    wanted: "auto"; "uring": an error rather than threads; "threads": no other is tried.
    memory: all staging, uint8, at `base_address`.

    Raises:
        EngineError: `wanted` is "uring", and the kernel refuses it.
    """
    fallbacks: list[str] = []
    if wanted != "threads":
        engine = _first_ring(pool, memory, base_address, limits, fallbacks)
        if engine is not None:
            return ChosenEngine(engine, tuple(fallbacks))
        if wanted == "uring":
            raise EngineError(f'io_engine="uring" cannot run here: {fallbacks[-1]}')
    threads = ThreadsIoEngine(
        pool,
        memory,
        base_address,
        threads=limits.threads,
        read_bytes_in_flight_max=limits.read_bytes_in_flight_max,
        write_bytes_in_flight_max=limits.write_bytes_in_flight_max,
    )
    return ChosenEngine(threads, tuple(fallbacks))


def _first_ring(
    pool: Pool, memory: memoryview, base_address: int, limits: IoLimits, fallbacks: list[str]
) -> UringIoEngine | None:
    """Try with registration and without; each failure is logged and noted in `fallbacks`."""
    if core is None:
        _fall_back(fallbacks, f"io_uring→threads: {WHY_NOT}")
        return None
    for registered in (True, False):
        try:
            return UringIoEngine(
                pool,
                memory,
                base_address,
                registered=registered,
                depth=limits.depth,
                split_bytes=limits.split_bytes,
                read_bytes_in_flight_max=limits.read_bytes_in_flight_max,
                write_bytes_in_flight_max=limits.write_bytes_in_flight_max,
                write_bytes_beside_reads_max=limits.write_bytes_beside_reads_max,
            )
        except UringDeniedError as error:
            why = explain_denial(error, len(memory))
            if not registered or "register" not in error.step:
                _fall_back(fallbacks, f"io_uring→threads: {why}")
                return None
            _fall_back(fallbacks, f"io_uring registered→unregistered: {why}")
    raise AssertionError("unreachable")


def _fall_back(fallbacks: list[str], line: str) -> None:
    fallbacks.append(line)
    logger.warning("I/O falls back to something slower: %s", line)


def explain_denial(error: UringDeniedError, memory_bytes: int) -> str:
    """What refused, by its errno's name, and the remedy."""
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
