# SPDX-License-Identifier: Apache-2.0
"""Staging: all pinned CPU memory of one rank, cut into cache slots and stream slots.

One anonymous mapping, populated at start, not inherited by forks (a child that touched it
while the kernel writes into it would see neither). Registration with CUDA and with a ring
comes with the GPU copy engine.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numpy as np

from vllm_nvmeof_offload.units import GIB, MIB
from vllm_nvmeof_offload.worker.pipeline import StagingMap

__all__ = ["Staging", "split_slots"]

_POPULATE_STEP_BYTES = 256 * MIB
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module


def split_slots(staging_bytes: int, slot_bytes: int, stream_slots: int) -> tuple[int, int]:
    """(cache slots, stream slots) that fit; streams take at most a quarter, at least one."""
    total = staging_bytes // slot_bytes
    streams = max(1, min(stream_slots, total // 4))
    return max(0, total - streams), streams


class Staging:
    """Owns the memory. `view` covers all slots; `map` says where each one lies."""

    def __init__(
        self,
        slot_bytes: int,
        cache_slots: int,
        stream_slots: int,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        size = slot_bytes * (cache_slots + stream_slots)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._advise_huge_pages()
        self.view = memoryview(self._memory)
        self._array = np.frombuffer(self.view, np.uint8)
        self.size_bytes = size
        self.map = StagingMap(self._array.ctypes.data, slot_bytes, cache_slots, stream_slots)
        self._populate(on_progress)

    def _advise_huge_pages(self) -> None:
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages: only slower
            return

    def _populate(self, on_progress: Callable[[int, int], None]) -> None:
        """Fault every page in now, so that no transfer pays for it later."""
        told_s = time.monotonic()
        for start in range(0, self.size_bytes, _POPULATE_STEP_BYTES):
            length = min(_POPULATE_STEP_BYTES, self.size_bytes - start)
            try:
                self._memory.madvise(_MADV_POPULATE_WRITE, start, length)
            except OSError:  # before Linux 5.14: touch the pages by hand
                self._array[start : start + length : mmap.PAGESIZE] = 0
            now_s = time.monotonic()
            if self.size_bytes > GIB and now_s - told_s > 1:
                told_s = now_s
                on_progress(start + length, self.size_bytes)

    def close(self) -> None:
        """Unmap. Only when no engine can touch the memory any more."""
        del self._array
        self.view.release()
        self._memory.close()
