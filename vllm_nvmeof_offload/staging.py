# SPDX-License-Identifier: Apache-2.0
"""Staging: all pinned CPU memory of one rank, cut into cache slots and stream slots.

One anonymous mapping, on the GPU's NUMA node, of huge pages, populated at start by several
threads, not inherited by forks (a child that touched it while the kernel writes into it would
see neither). The copy engine registers it with CUDA and the I/O engine with its rings, so that
storage and GPU meet in one buffer.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable

import numpy as np

from vllm_nvmeof_offload.memory import populate, prefer_node
from vllm_nvmeof_offload.staging_map import StagingMap
from vllm_nvmeof_offload.units import GIB

__all__ = ["Staging", "split_slots"]


def split_slots(staging_bytes: int, slot_bytes: int, stream_slots: int) -> tuple[int, int]:
    """(cache slots, stream slots) that fit; streams take at most a quarter, at least one."""
    total = staging_bytes // slot_bytes
    streams = max(1, min(stream_slots, total // 4))
    return max(0, total - streams), streams


class Staging:
    """Owns the memory. `view` covers all slots; `map` says where each one lies.

    numa_node: where its pages should come from; None: anywhere. `on_node` says whether the
    kernel took the wish.
    """

    def __init__(
        self,
        slot_bytes: int,
        cache_slots: int,
        stream_slots: int,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        numa_node: int | None = None,
    ) -> None:
        size = slot_bytes * (cache_slots + stream_slots)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # no transparent huge pages here: only slower
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self._array = np.frombuffer(self.view, np.uint8)
        self.size_bytes = size
        self.map = StagingMap(self._array.ctypes.data, slot_bytes, cache_slots, stream_slots)
        # Before the first page is there: pages stay where they are.
        self.on_node = prefer_node(self.map.base_address, size, numa_node)
        populate(self.map.base_address, size, on_progress=_now_and_then(on_progress, size > GIB))

    def close(self) -> None:
        """Unmap. Only when no engine can touch the memory any more."""
        del self._array
        self.view.release()
        self._memory.close()


def _now_and_then(
    on_progress: Callable[[int, int], None], is_large: bool
) -> Callable[[int, int], None]:
    """At most once a second, and only of large memory."""
    told_s = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if is_large and now_s - told_s > 1:
            told_s = now_s
            on_progress(done, total)

    return tell
