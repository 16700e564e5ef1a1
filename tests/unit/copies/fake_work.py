# SPDX-License-Identifier: Apache-2.0
"""Operations that wait on the streams of `FakeCuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


class Mark:
    """One recording of an event."""

    done = False


@dataclass
class Move:
    """One copy on its way. early: the source's bytes, read in the call."""

    destination: int
    source: int
    count: int
    early: bytes | None = None

    def run(self) -> None:
        content = ctypes.string_at(self.source, self.count) if self.early is None else self.early
        ctypes.memmove(self.destination, content, self.count)


@dataclass
class Work:
    """One operation of a stream: a wait, a recording, a batch of moves, or a kernel."""

    wait: Mark | None = None
    record: Mark | None = None
    moves: list[Move] = field(default_factory=list)
    kernel: Callable[[], None] | None = None


def make_crcs(table: int, count: int, out: int) -> list[int]:
    """What `crc_blocks` writes, by the library; returns the bytes of each part.

    The library's CRC of a part, less its CRC of as many zeros, is the CRC without inversions.
    """
    from crc32c import crc32c

    rows = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(table))
    words = np.ctypeslib.as_array((ctypes.c_uint32 * (32 * count)).from_address(out))
    lanes = words.reshape(count, 32)
    lanes[:] = np.random.default_rng(count).integers(0, 1 << 32, lanes.shape, np.uint32)
    sizes = rows.reshape(count, 2)[:, 1].tolist()
    for lane, (address, size) in zip(lanes, rows.reshape(count, 2).tolist(), strict=True):
        raw = crc32c(ctypes.string_at(address, size)) ^ crc32c(bytes(size))
        lane[0] = np.bitwise_xor.reduce(lane[1:]) ^ np.uint32(raw)  # their xor counts
    return sizes
