# SPDX-License-Identifier: Apache-2.0
"""CRC-32C of payloads in GPU memory: the host side of `kernels/crc_blocks.cu`.

Pieces are cut into parts, one per warp. The kernel reads the part table from pinned memory and
writes back 32 words per part, also to pinned memory; the native core combines these words into each
payload's CRC.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vllm_nvmeof_offload.copy.base import Descriptors, Payloads, cut_sizes, spans
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.units import KIB, MIB

#: The kernel's source file, and its name in that file.
CRC_BLOCKS = "crc_blocks.cu"
KERNEL_NAME = "crc_blocks"
#: The bytes that a warp reads at once. The size of a piece must be a multiple of this.
STRIPE_BYTES = 512
_ALIGNMENT = 16
#: The maximum number of bytes that one warp processes, a multiple of a stripe.
PART_BYTES_MAX = 64 * KIB
#: The limit on parts in all transfers in progress: 9 MiB of pinned memory, enough for 4 GiB of
#: pieces.
_PARTS_MAX = 64 << 10
_LANES = 32
_ROW_BYTES = 2 * 8
_WORD_ROW_BYTES = _LANES * 4

_Words = npt.NDArray[np.uint32]
_Rows = npt.NDArray[np.uint64]
_Counts = npt.NDArray[np.uint32]


class Launch(NamedTuple):
    """The shape of a launch. The default was the best on an H200: 58 to 62 GB/s on an idle GPU; at
    12.5 GB/s it slowed a concurrent bf16 matrix product by 0.8 to 1.1 %. `blocks_max` (thread
    blocks) and `bytes_max` are per launch, `threads` per block (at most 1024)."""

    blocks_max: int = 8
    threads: int = 1024
    bytes_max: int = 24 * MIB


def kernel_tables() -> _Words:
    """Return the kernel's tables, in the order of its source."""
    nibbles = [_after(STRIPE_BYTES, value << 4 * at) for at in range(8) for value in range(16)]
    behind = [16 * (_LANES - 1 - lane) for lane in range(_LANES)]
    bits = [_after(count, 1 << bit) for count in (4, *behind) for bit in range(32)]
    return np.array(nibbles + bits, np.uint32)


def _after(count: int, crc: int) -> int:
    """Return the value of `crc`, without its inversions, after `count` further zero bytes."""
    return int(crc32c(bytes(count), crc ^ 0xFFFFFFFF)) ^ 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts into which some payloads of a transfer are cut. `rows` is uint64[n, 2]: (address in
    GPU memory, bytes). `chunks` holds the payloads' indexes, in order. `counts` (uint32) is the
    number of parts per payload."""

    rows: _Rows
    chunks: npt.NDArray[np.intp]
    counts: _Counts


def cut_payloads(pieces: Descriptors, payloads: Payloads) -> Parts:
    """Cut payloads into parts, skipping those whose checksum the kernel cannot compute: pieces must
    cover the payload in order and without gaps, be multiples of 512 bytes, and be aligned to 16
    bytes."""
    cache, staging, sizes = np.ascontiguousarray(pieces.T)
    counts = payloads.counts.astype(np.intp)
    last = np.cumsum(counts)
    assert last[-1:].sum() == len(pieces), "pieces and payloads do not match"
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes, dtype=np.uint64)])
    begins = ends[last - counts]
    offsets = ends[:-1] - np.repeat(begins, counts)
    good = staging == np.repeat(payloads.addresses, counts) + offsets
    good &= (sizes != 0) & (sizes % np.uint64(STRIPE_BYTES) == 0)
    good &= cache % np.uint64(_ALIGNMENT) == 0
    goods = np.concatenate([np.zeros(1, np.intp), np.cumsum(good)])
    whole = (goods[last] - goods[last - counts] == counts) & (counts > 0)
    whole &= ends[last] - begins == payloads.sizes
    taken = np.repeat(whole, counts)
    repeats, within, parts = cut_sizes(sizes[taken], PART_BYTES_MAX)
    rows = np.empty((len(parts), 2), np.uint64)
    rows[:, 0] = np.repeat(cache[taken], repeats) + within
    rows[:, 1] = parts
    (chunks,) = whole.nonzero()
    pieces_before = np.cumsum(counts[chunks]) - counts[chunks]
    parts_each = np.add.reduceat(repeats, pieces_before) if len(chunks) else repeats
    return Parts(rows, chunks, parts_each.astype(np.uint32))


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    first: int
    end: int


class _Ring:
    """Hands out runs of numbers below `size` in ring order. Runs can be given back in any order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: deque[_Run] = deque()  # oldest first

    def room(self, wanted: int) -> tuple[int, int]:
        """Return (start, length) of a free run of at least `wanted` numbers, or of the longest."""
        if not self._taken:
            return 0, self._size
        oldest, newest = self._taken[0].first, self._taken[-1].end
        if newest <= oldest:
            return newest, oldest - newest
        behind = self._size - newest
        return (newest, behind) if behind >= min(wanted, oldest) else (0, oldest)

    def take(self, first: int, count: int) -> _Run:
        run = _Run(first, first + count)
        self._taken.append(run)
        return run

    def give_back(self, run: _Run) -> None:
        self._taken.remove(run)  # a gap is reused after all older, or all newer, runs are back


@dataclass(frozen=True, slots=True, eq=False)
class Checksums:
    """The checksums of one transfer, from `GpuChecksums.prepare` to `give_back`. `sizes`
    (uint64[n]) gives the bytes per part in `run`; `chunks` and `counts` are those of `Parts`."""

    run: _Run
    sizes: _Rows
    chunks: npt.NDArray[np.intp]
    counts: _Counts
    payloads: Payloads


class GpuChecksums:
    """Computes the checksums of payloads in GPU memory. `parts_max` is the maximum number of parts
    in all transfers in progress; a payload that would exceed it gets no checksum. Raises:
    CudaError: no pinned memory is available."""

    def __init__(
        self, cuda: Cuda, kernel: int, launch: Launch | None = None, parts_max: int = _PARTS_MAX
    ) -> None:
        self._cuda = cuda
        self._kernel = kernel
        self._launch = launch or Launch()
        self._ring = _Ring(parts_max)
        tables = kernel_tables()
        sizes = [parts_max * _ROW_BYTES, parts_max * _WORD_ROW_BYTES, tables.nbytes]
        self._memory = cuda.allocate_host(sum(sizes))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * sum(sizes)).from_address(self._memory))
        rows, words, behind = np.split(memory, np.cumsum(sizes)[:-1])
        behind[:] = tables.view(np.uint8)
        self._rows = rows.view(np.uint64).reshape(-1, 2)
        self._words = words.view(np.uint32).reshape(-1, _LANES)
        self._words_at = self._memory + sizes[0]
        self._tables_at = self._words_at + sizes[1]

    def prepare(self, pieces: Descriptors, payloads: Payloads) -> Checksums | None:
        """Fill in the kernel's table for as many payloads as fit. Return None if none fits."""
        parts = cut_payloads(pieces, payloads)
        ends = np.cumsum(parts.counts, dtype=np.intp)
        first, room = self._ring.room(len(parts.rows))
        fitting = int(np.searchsorted(ends, room, side="right"))
        if not fitting:
            return None
        run = self._ring.take(first, int(ends[fitting - 1]))
        rows = parts.rows[: run.end - first]
        self._rows[first : run.end] = rows
        sizes = np.ascontiguousarray(rows[:, 1])
        return Checksums(run, sizes, parts.chunks[:fitting], parts.counts[:fitting], payloads)

    def close(self) -> None:
        """Free the memory. Call only when nothing is in progress."""
        self._cuda.free_host(self._memory)

    def launch(self, checksums: Checksums, stream: int) -> None:
        """Launch the checksums on `stream`. After a CudaError, some launches may be running."""
        blocks_max, threads, bytes_max = self._launch
        launches: list[tuple[int, ...]] = []
        for first, count in spans(checksums.sizes, bytes_max):
            at = checksums.run.first + first
            blocks = min(blocks_max, -(-count * _LANES // threads))
            words_at = self._words_at + at * _WORD_ROW_BYTES
            row_at = self._memory + at * _ROW_BYTES
            launches.append((blocks, row_at, count, self._tables_at, words_at))
        self._cuda.submit_launches(self._kernel, threads, np.array(launches, np.uint64), stream)

    def write(self, checksums: Checksums) -> None:
        """Write the checksums to their payloads. Call only when the GPU has computed them all."""
        crcs = np.empty(len(checksums.counts), np.uint32)
        words = self._words[checksums.run.first : checksums.run.end]
        core.join_crcs(words, checksums.sizes, checksums.counts, crcs)
        checksums.payloads.crcs[checksums.chunks] = crcs

    def give_back(self, checksums: Checksums) -> None:
        """Free the checksums' rows of the table. Call only when their launches have ended."""
        self._ring.give_back(checksums.run)
