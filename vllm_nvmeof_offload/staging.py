# SPDX-License-Identifier: Apache-2.0
"""Staging: all pinned CPU memory of one rank, divided into cache, stream and serve slots.

Staging is one anonymous mapping of huge pages on the GPU's NUMA node, populated at start by several
threads. The copy engine registers it with CUDA and the I/O engine with its rings, so that storage
and GPU share one buffer. Forks do not inherit it, because after copy-on-write the kernel could
write to pages that no longer belong to the parent. Ranks with equal KV also map each other's
staging (`SetMemory`), because each copies from the others' slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_offload.units import GIB, MIB

#: Called with (bytes done, total bytes).
_Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SetMap:
    """The staging of all members of a set, as this rank maps it.

    `words` is the address of the words through which members wait for each other
    (native/machine/one_copy.h). `member` is this rank's number. `addresses` has the address of each
    member's cache slot 0, and `set_sizes`, by group, the number of consecutive members with equal
    bytes.
    """

    words: int
    member: int
    addresses: tuple[int, ...]
    set_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagingMap:
    """The layout of the slots: cache, stream and serve slots, in this order, with equal strides.

    `members` describes the set that shares its staging; None if this rank belongs to no set. Chunks
    for peers are read into serve slots, which the GPU does not use.
    """

    base_address: int
    slot_bytes: int
    cache_slots: int
    stream_slots: int
    members: SetMap | None = None
    serve_slots: int = 0

    @property
    def stream_address(self) -> int:
        return self.base_address + self.cache_slots * self.slot_bytes

    @property
    def serve_address(self) -> int:
        return self.stream_address + self.stream_slots * self.slot_bytes


_libc = ctypes.CDLL(None, use_errno=True)
_MBIND = {"x86_64": 237, "aarch64": 235}
#: This policy falls back to other nodes if the node is full; strict binding would kill the process.
_MPOL_PREFERRED = 1
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_STEP_BYTES = 256 * MIB
_THREADS_MAX = 8


def prefer_node(address: int, size_bytes: int, node: int | None) -> bool:
    """Prefer `node` (None: unknown) for pages that do not exist yet; return False if that fails.
    `address` is page-aligned."""
    number = _MBIND.get(platform.machine())
    if node is None or number is None:
        return False
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    arguments = (address, size_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), words * 64 + 1, 0)
    return bool(_libc.syscall(number, *map(ctypes.c_ulong, arguments)) == 0)


def populate(address: int, size_bytes: int, on_progress: _Progress) -> None:
    """Fault in every page, so that no transfer or registration has to. libc's `madvise` is called,
    because Python's holds the GIL while the kernel zeroes memory."""
    threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
    done = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="nvmeof-populate") as pool:
        parts = [
            pool.submit(_populate_part, address + start, min(_STEP_BYTES, size_bytes - start))
            for start in range(0, size_bytes, _STEP_BYTES)
        ]
        for part in as_completed(parts):
            done += part.result()
            on_progress(done, size_bytes)


def _populate_part(address: int, size_bytes: int) -> int:
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
    while _libc.madvise(*arguments, _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # before Linux 5.14
            ctypes.memset(address, 0, size_bytes)
            break
        if number not in (errno.EINTR, errno.EAGAIN):  # writing the pages would kill the process
            raise OSError(number, f"cannot get pinned memory: {os.strerror(number)}")
    return size_bytes


def _keep_private(memory: mmap.mmap) -> None:
    """Exclude the memory, which contains KV, from forks and core dumps; request huge pages."""
    memory.madvise(mmap.MADV_DONTFORK)
    memory.madvise(mmap.MADV_DONTDUMP)
    with contextlib.suppress(OSError):  # small pages work too, but are slower
        memory.madvise(mmap.MADV_HUGEPAGE)


def split_slots(staging_bytes: int, slot_bytes: int, stream_slots: int) -> tuple[int, int]:
    """Return the numbers of cache slots and stream slots that fit into `staging_bytes`. At most a
    quarter of all slots, but at least one, are stream slots."""
    total = staging_bytes // slot_bytes
    streams = max(1, min(stream_slots, total // 4))
    return max(0, total - streams), streams


class SetMemory:
    """The memory that the members of a set share: their words, then each member's staging. It is an
    anonymous file with a sealed size, which disappears when the last member exits."""

    def __init__(
        self,
        fd: int,
        words_bytes: int,
        staging_bytes: int,
        members: int,
        member: int,
        set_sizes: tuple[int, ...],
    ) -> None:
        """Map the file. `words_bytes` is a multiple of the page size; `staging_bytes` is for each
        member. `member` and `set_sizes` are as in `SetMap`.
        """
        size = words_bytes + members * staging_bytes
        self._memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        _keep_private(self._memory)
        self._view = memoryview(self._memory)
        self._staging_bytes = staging_bytes
        self._words_bytes = words_bytes
        words = np.frombuffer(self._view, np.uint8).ctypes.data
        parts = (words + words_bytes + number * staging_bytes for number in range(members))
        self.map = SetMap(words, member, tuple(parts), set_sizes)

    def part(self, member: int) -> memoryview:
        start = self._words_bytes + member * self._staging_bytes
        return self._view[start : start + self._staging_bytes]

    def close(self) -> None:
        self._view.release()
        self._memory.close()


class Staging:
    """The staging of one rank.

    `view` covers all slots, and `map` has their addresses. `numa_node` is the preferred node for
    the pages, and `on_node` whether the kernel accepted it. `shared` is the set's memory, which
    contains this rank's slots; None for private memory.
    """

    def __init__(
        self,
        slot_bytes: int,
        cache_slots: int,
        stream_slots: int,
        on_progress: _Progress = lambda done, total: None,
        numa_node: int | None = None,
        shared: SetMemory | None = None,
        serve_slots: int = 0,
    ) -> None:
        size = slot_bytes * (cache_slots + stream_slots + serve_slots)
        self._memory: mmap.mmap | SetMemory
        if shared is None:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _keep_private(self._memory)
            self.view = memoryview(self._memory)
        else:
            self._memory = shared
            self.view = shared.part(shared.map.member)
            assert len(self.view) == size, "the set's memory is for a different number of slots"
        self._array = np.frombuffer(self.view, np.uint8)
        self.size_bytes = size
        members = shared.map if shared else None
        base = self._array.ctypes.data
        self.map = StagingMap(base, slot_bytes, cache_slots, stream_slots, members, serve_slots)
        # Prefer the node before the first page exists, because pages do not move later.
        self.on_node = prefer_node(self.map.base_address, size, numa_node)
        populate(self.map.base_address, size, _limited(on_progress, size > GIB))

    def close(self) -> None:
        """Unmap the memory. The caller guarantees that no engine will touch it again."""
        del self._array
        self.view.release()
        self._memory.close()


def _limited(on_progress: _Progress, is_large: bool) -> _Progress:
    """Limit `on_progress` to one call per second; without `is_large`, never call it."""
    reported_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported_s
        if is_large and time.monotonic() - reported_s > 1:
            reported_s = time.monotonic()
            on_progress(done, total)

    return report
