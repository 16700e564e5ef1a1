# SPDX-License-Identifier: Apache-2.0
"""CRC-32C of chunks in GPU memory, computed by the GPU: the host's half of `kernels/crc_blocks.cu`.

The kernel returns the CRC of short parts without its first and last inversion; parts are joined
here. Servers do not use this yet.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.units import KIB, MIB

#: The file of the kernel, and its name in there.
CRC_BLOCKS = "crc_blocks.cu"
KERNEL_NAME = "crc_blocks"
#: Bytes that a warp reads at once: sizes of pieces must be multiples of it.
STRIPE_BYTES = 512
_ALIGNMENT = 16
#: Bytes of one part, which one warp takes; a multiple of a stripe.
_PART_BYTES_MAX = 64 * KIB
_LANES = 32
_ROW_BYTES = 2 * 8
_WORD_ROW_BYTES = _LANES * 4
_POLYNOMIAL = 0x82F63B78
_ALL_ONES = 0xFFFFFFFF

_Words = npt.NDArray[np.uint32]
_Rows = npt.NDArray[np.uint64]


@functools.cache
def _zeros(count: int) -> _Words:
    """Return uint32[32]: what each bit of a CRC becomes when `count` zero bytes follow."""
    if count == 0:
        return np.uint32(1) << np.arange(32, dtype=np.uint32)
    if count == 1:
        crc = _zeros(0)
        for _ in range(8):
            crc = (crc >> np.uint32(1)) ^ (crc & np.uint32(1)) * np.uint32(_POLYNOMIAL)
        return crc
    half = _zeros(count // 2)
    both = _apply(half, half)
    return _apply(_zeros(1), both) if count % 2 else both


def _apply(columns: _Words, values: _Words) -> _Words:
    found = np.zeros_like(values)
    for bit in range(32):
        found ^= columns[bit] * ((values >> np.uint32(bit)) & np.uint32(1))
    return found


@functools.cache
def _by_bytes(count: int) -> list[list[int]]:
    """Return the same as `_zeros`, as a table of 256 for each of the four bytes of a CRC."""
    values = np.arange(256, dtype=np.uint32)
    return [_apply(_zeros(count), values << np.uint32(8 * at)).tolist() for at in range(4)]


def kernel_tables() -> _Words:
    """Return the kernel's tables, in the order that its source names."""
    values = np.arange(16, dtype=np.uint32)
    nibbles = [_apply(_zeros(STRIPE_BYTES), values << np.uint32(4 * at)) for at in range(8)]
    behind = [_zeros(16 * (_LANES - 1 - lane)) for lane in range(_LANES)]
    return np.concatenate([*nibbles, _zeros(4), *behind])


def cut_chunks(chunks: Sequence[_Rows]) -> tuple[_Rows, list[int]]:
    """Return (uint64[n, 2] of (address, bytes) of parts, the number of parts of each chunk).

    chunks: each uint64[m, 2], the (address, bytes) of its pieces in their order.

    Raises: EngineError: a piece that is not a multiple of 512 bytes, or not aligned to 16.
    """
    parts: list[tuple[int, int]] = []
    counts: list[int] = []
    for chunk in chunks:
        before = len(parts)
        for address, size in chunk.tolist():
            if size == 0 or size % STRIPE_BYTES:
                raise _refused(f"of {size} bytes", STRIPE_BYTES)
            if address % _ALIGNMENT:
                raise _refused(f"at {address:#x}", _ALIGNMENT)
            cuts = range(0, size, _PART_BYTES_MAX)
            parts += [(address + at, min(_PART_BYTES_MAX, size - at)) for at in cuts]
        counts.append(len(parts) - before)
    return np.array(parts, np.uint64).reshape(-1, 2), counts


def _refused(what: str, multiple: int) -> EngineError:
    return EngineError(f"the GPU makes no CRC of a piece {what}: it needs a multiple of {multiple}")


def join(words: _Words, sizes: npt.NDArray[np.uint64], counts: Sequence[int]) -> list[int]:
    """Return each chunk's CRC-32C. words: the kernel's uint32[n, 32]; sizes: of its n parts."""
    raw = np.bitwise_xor.reduce(words, axis=1).tolist()
    lengths = sizes.tolist()
    found: list[int] = []
    at = 0
    for count in counts:
        crc = _ALL_ONES
        for part in range(at, at + count):
            first, second, third, fourth = _by_bytes(lengths[part])
            low = first[crc & 255] ^ second[crc >> 8 & 255]
            crc = low ^ third[crc >> 16 & 255] ^ fourth[crc >> 24] ^ raw[part]
        found.append(crc ^ _ALL_ONES)
        at += count
    return found


class Launch(NamedTuple):
    """How the kernel is started.

    blocks_max: thread blocks of one launch; they keep their multiprocessors until it ends. threads:
    of a block, at most 1024. bytes_max: of one launch. urgent: before other kernels that wait.
    """

    blocks_max: int = 4
    threads: int = 256
    bytes_max: int = 8 * MIB
    urgent: bool = False

    def __str__(self) -> str:
        size = f"{self.blocks_max}x{self.threads}, {self.bytes_max // MIB} MiB"
        return size + (", urgent" if self.urgent else "")


class CrcKernel:
    """CRCs of the same chunks, as often as wanted, on a stream of its own.

    chunks: as `cut_chunks` takes them.
    """

    def __init__(
        self, cuda: Cuda, kernel: int, chunks: Sequence[_Rows], launch: Launch | None = None
    ) -> None:
        self._cuda = cuda
        self._kernel = kernel
        self._launch = launch or Launch()
        self._parts, self._counts = cut_chunks(chunks)
        tables = kernel_tables()
        sizes = [self._parts.nbytes, len(self._parts) * _WORD_ROW_BYTES, tables.nbytes]
        self._memory = cuda.allocate_host(sum(sizes))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * sum(sizes)).from_address(self._memory))
        rows, words, behind = np.split(memory, np.cumsum(sizes)[:-1])
        rows[:] = self._parts.view(np.uint8).ravel()
        behind[:] = tables.view(np.uint8)
        self._words = words.view(np.uint32).reshape(-1, _LANES)
        self._words_at = self._memory + sizes[0]
        self._tables_at = self._words_at + sizes[1]
        self._stream = cuda.create_stream(self._launch.urgent)

    def run(self) -> None:
        """Return when all parts are done; then `join`."""
        blocks_max, threads, bytes_max, _ = self._launch
        ends = np.cumsum(self._parts[:, 1])
        first, done = 0, 0
        while first < len(self._parts):
            last = int(np.searchsorted(ends, np.uint64(done + bytes_max), side="right"))
            blocks = min(blocks_max, -(-(last - first) * _LANES // threads))
            rows_at = self._memory + first * _ROW_BYTES
            words_at = self._words_at + first * _WORD_ROW_BYTES
            arguments = rows_at, last - first, self._tables_at, words_at
            self._cuda.launch(self._kernel, blocks, threads, self._stream, arguments)
            first, done = last, int(ends[last - 1])
        self._cuda.synchronize_stream(self._stream)

    def join(self) -> list[int]:
        """Return each chunk's CRC-32C."""
        return join(self._words, self._parts[:, 1], self._counts)

    def close(self) -> None:
        self._cuda.destroy_stream(self._stream)
        self._cuda.free_host(self._memory)
