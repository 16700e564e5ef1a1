# SPDX-License-Identifier: Apache-2.0
"""Places and fills large mappings: on a NUMA node, by several threads.

By libc itself, since Python's own `madvise` keeps the interpreter lock while the kernel zeroes
memory, which stops the model's thread and lets no second thread help.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from vllm_nvmeof_offload.units import MIB

__all__ = ["populate", "prefer_node"]

_libc = ctypes.CDLL(None, use_errno=True)
_MBIND = {"x86_64": 237, "aarch64": 235}
#: Takes other nodes' memory where this one's is used up; to bind would end the process then.
_MPOL_PREFERRED = 1
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_STEP_BYTES = 256 * MIB
_THREADS_MAX = 8


def prefer_node(address: int, size_bytes: int, node: int | None) -> bool:
    """Have pages that are not there yet come from `node`; False: they come from anywhere.

    None: the machine, or its hypervisor, does not say where the GPU is. address: page-aligned.
    """
    number = _MBIND.get(platform.machine())
    if node is None or number is None:
        return False
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    arguments = (address, size_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), words * 64 + 1, 0)
    return bool(_libc.syscall(number, *map(ctypes.c_ulong, arguments)) == 0)


def populate(
    address: int,
    size_bytes: int,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fault every page in now, so that no transfer and no registration pays for it.

    threads: default: the process's CPUs, at most 8.
    """
    workers = threads or min(_THREADS_MAX, len(os.sched_getaffinity(0)))
    parts = [
        (address + start, min(_STEP_BYTES, size_bytes - start))
        for start in range(0, size_bytes, _STEP_BYTES)
    ]
    done = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="nvmeof-populate") as pool:
        for finished in as_completed([pool.submit(_populate_part, *part) for part in parts]):
            done += finished.result()
            on_progress(done, size_bytes)


def _populate_part(address: int, size_bytes: int) -> int:
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
    while _libc.madvise(*arguments, _MADV_POPULATE_WRITE):
        if ctypes.get_errno() in (errno.EINTR, errno.EAGAIN):
            continue
        ctypes.memset(address, 0, size_bytes)  # before Linux 5.14: write the pages by hand
        break
    return size_bytes
