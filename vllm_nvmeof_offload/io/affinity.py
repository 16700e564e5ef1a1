# SPDX-License-Identifier: Apache-2.0
"""CPU affinity of I/O threads.

vLLM's CPU worker binds its threads to cores for OpenMP, and a thread inherits the binding of
the one that made it: eight I/O threads would then share one core with the model's busiest
thread. They run wherever the process was allowed to when this module was imported, or its
parent is, which nobody binds for OpenMP; a user's taskset or cpuset stays respected.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["allowed_cpus", "unbind_this_thread"]


def _find_allowed() -> frozenset[int]:
    cpus: set[int] = set()
    for pid in (0, os.getppid()):
        with contextlib.suppress(OSError):
            cpus |= os.sched_getaffinity(pid)
    return frozenset(cpus)


_ALLOWED = _find_allowed()


def allowed_cpus() -> frozenset[int]:
    """The CPUs on which I/O threads may run."""
    return _ALLOWED


def unbind_this_thread() -> None:
    """Let the calling thread run on every CPU the process may use; failure is harmless."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, _ALLOWED)
