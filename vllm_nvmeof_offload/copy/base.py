# SPDX-License-Identifier: Apache-2.0
"""The contract of a copy engine between the KV cache and staging, and the pieces of a transfer."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import Outcome

#: The columns of n pieces, uint64[n, 3]: KV cache address, staging address, bytes.
Descriptors = npt.NDArray[np.uint64]


class Direction(enum.Enum):
    STORE = "store"  # KV cache → staging
    LOAD = "load"  # staging → KV cache


class Backend(enum.Enum):
    DMA = "dma"
    OVERLAP = "dma_overlap"  # DMA with a hint to overlap it with compute
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Payloads:
    """The payloads in staging that a store fills or a load copies, in the order of its pieces.

    `counts` (uint32[n]) is the number of pieces per payload. `addresses` and `sizes` (uint64[n])
    are the payloads' addresses and lengths in bytes. `crcs` (int64[n]) are their CRC-32Cs, which an
    engine that `makes_checksums` writes before `poll` returns the ticket. A CRC stays -1 if the
    pieces do not cover the payload in order and without gaps, or if the engine cannot compute it. A
    load's CRC covers the bytes written to the KV cache, and a store's CRC those read from it.
    """

    counts: npt.NDArray[np.uint32]
    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    crcs: npt.NDArray[np.int64]

    @staticmethod
    def of(
        counts: npt.NDArray[np.uint32],
        addresses: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> Payloads:
        """Create payloads that have no checksums yet."""
        return Payloads(counts, addresses, sizes, np.full(len(counts), -1, np.int64))


class CopyEngine(Protocol):
    """A submit/poll interface, used on the pipeline's thread. `submit` never blocks.

    A ticket is in flight from `submit` until `poll` returns it. Until then the engine may touch
    both sides of every piece.

    A ticket starts when its own fence has passed and its memory is registered, regardless of
    earlier tickets and other open fences. If tickets waited for each other, a load that waits for a
    forward pass would delay the release of other loads' stream slots. Tickets are therefore
    independent: if one writes memory that another touches, the caller submits the second only after
    `poll` has returned the first. Only a ticket without pieces waits for others: it ends after all
    earlier tickets of its direction, and after its own fence.
    """

    #: Whether the KV cache's memory is unmapped, so that every ticket fails. Set it only while no
    #: ticket is in flight.
    asleep: bool
    #: Whether the engine computes checksums of at least some payloads.
    makes_checksums: bool

    def record_fence(self) -> object:
        """Record, on the model's thread, a point that later copies must wait for. Fences pass in
        the order of their recording. With CUDA a fence is an event on the model's stream. On the
        host it is None, because the forward pass has already run."""

    def has_passed(self, fence: object) -> bool:
        """Return whether a copy after this fence could start now; False if the engine cannot know.

        The answer never changes back to False. After True, copies can be submitted without this
        fence, together with copies after older fences.
        """

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        """Start copying `pieces`; return the ticket.

        `fence` is None if there is nothing to wait for. `payloads` is None if no checksum is
        needed.
        """

    def poll(self) -> list[tuple[int, Outcome]]:
        """Return the tickets that finished since the last call, with their outcomes."""

    def close(self) -> None:
        """Wait for all tickets in flight, and free all resources."""


#: The limit on parts per launch; native/copies/cuda.h has the same bound on copies per call.
DESCRIPTORS_MAX = 4096

_Words = npt.NDArray[np.uint64]


def coalesce(pieces: Descriptors, starts: _Words) -> Descriptors:
    """Merge pieces that are adjacent in the list and contiguous on both sides. `starts` holds the
    sorted start addresses of allocations and registrations, which no descriptor may cross, even if
    two allocations are adjacent. The columns of the result are contiguous in memory."""
    columns = np.ascontiguousarray(pieces.T)
    cache, staging, sizes = columns
    # Blocks of a paged cache are rarely adjacent, so the first comparison usually decides.
    neighbours = cache[:-1] + sizes[:-1] == cache[1:]
    if not np.count_nonzero(neighbours):
        return columns.T
    joins = neighbours.nonzero()[0]
    joins = joins[staging[joins] + sizes[joins] == staging[joins + 1]] + 1
    joins = joins[~(_among(cache[joins], starts) | _among(staging[joins], starts))]
    if not len(joins):
        return columns.T
    heads = np.ones(len(pieces), bool)
    heads[joins] = False
    first = heads.nonzero()[0]
    merged = columns.take(first, axis=1)
    merged[2] = np.add.reduceat(sizes, first)
    return merged.T


def cut_sizes(sizes: _Words, bytes_max: int) -> tuple[npt.NDArray[np.intp], _Words, _Words]:
    """Cut pieces into parts of at most `bytes_max`. Return the number of parts per piece, and each
    part's offset in its piece and its size in bytes."""
    repeats = ((sizes + np.uint64(bytes_max - 1)) // np.uint64(bytes_max)).astype(np.intp)
    before = np.cumsum(repeats) - repeats
    numbers = np.arange(int(repeats.sum())) - np.repeat(before, repeats)
    offsets = numbers.astype(np.uint64) * np.uint64(bytes_max)
    return repeats, offsets, np.minimum(np.repeat(sizes, repeats) - offsets, np.uint64(bytes_max))


def spans(sizes: _Words, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Group parts into launches of at most `bytes_max`; yield (first, count) for each launch.

    No part may be larger than `bytes_max`.
    """
    ends = np.cumsum(sizes)
    first, done = 0, 0
    while first < len(ends):
        last = int(np.searchsorted(ends, np.uint64(done + bytes_max), side="right"))
        last = min(last, first + DESCRIPTORS_MAX)
        yield first, last - first
        first, done = last, int(ends[last - 1])


#: The columns (destinations, sources, sizes), each uint64[n] and contiguous.
Columns = tuple[_Words, _Words, _Words]


def sides(direction: Direction, pieces: Descriptors) -> Columns:
    """Return the columns of pieces for a copy in this direction."""
    columns = np.ascontiguousarray(pieces.T)
    if direction is Direction.STORE:
        return columns[1], columns[0], columns[2]
    return columns[0], columns[1], columns[2]


def address_of(words: _Words) -> int:
    """Return the address of a writable, contiguous array; 4 times as fast as `ndarray.ctypes`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, words)))


def _among(addresses: _Words, starts: _Words) -> npt.NDArray[np.bool_]:
    if not len(starts):
        return np.zeros(len(addresses), bool)
    at = np.minimum(np.searchsorted(starts, addresses), len(starts) - 1)
    found: npt.NDArray[np.bool_] = starts[at] == addresses
    return found
