# SPDX-License-Identifier: Apache-2.0
"""The contract of a copy engine between the KV cache and staging, and the pieces of a transfer."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import Outcome

#: The columns of n pieces, uint64[n, 3]: KV cache address, staging address, bytes.
Descriptors = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of a batch of chunks.

    rows: uint64[m, 3], (KV cache address, offset in the slot's payload, bytes). first: uint32[n+1];
    chunk i has the rows from `first[i]` to before `first[i + 1]`.
    """

    rows: Descriptors
    first: npt.NDArray[np.uint32]

    @staticmethod
    def of(chunks: Sequence[Descriptors]) -> Pieces:
        """Join the pieces of chunks."""
        first = np.zeros(len(chunks) + 1, np.uint32)
        np.cumsum([len(rows) for rows in chunks], out=first[1:])
        return Pieces(np.concatenate(chunks), first)

    @staticmethod
    def together(batches: Sequence[Pieces]) -> Pieces:
        """Join batches into one, with their chunks in the same order."""
        if len(batches) == 1:
            return batches[0]
        rows = [np.empty((0, 3), np.uint64), *(one.rows for one in batches)]
        counts = [np.zeros(1, np.uint32), *(np.diff(one.first) for one in batches)]
        return Pieces(np.concatenate(rows), np.cumsum(np.concatenate(counts), dtype=np.uint32))

    def at(self, payloads: Sequence[int]) -> Descriptors:
        """Return the rows with addresses instead of offsets. `payloads` has each chunk's, in
        staging."""
        rows = self.rows.copy()
        rows[:, 1] += np.repeat(np.array(payloads, np.uint64), np.diff(self.first))
        return rows


class Direction(enum.Enum):
    """The direction of a copy."""

    STORE = "store"  # KV cache → staging
    LOAD = "load"  # staging → KV cache


class Backend(enum.Enum):
    """The way to move the bytes."""

    DMA = "dma"
    OVERLAP = "dma_overlap"  # DMA with a hint to overlap it with compute
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Payloads:
    """The payloads in staging that a store fills or a load copies, in the order of its pieces.

    counts: uint32[n], the number of pieces of each. addresses: uint64[n]. sizes: uint64[n], the
    bytes of each. crcs: int64[n], written by an engine that `makes_checksums` before `poll` returns
    the ticket: the CRC-32C of a payload that the pieces cover in order and without a gap;
    otherwise, or if the engine could not compute it, -1. It is computed from the bytes in the KV
    cache: for a load from those that arrived there, for a store from those that it copies.
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
        """Describe payloads without checksums so far."""
        return Payloads(counts, addresses, sizes, np.full(len(counts), -1, np.int64))


class CopyEngine(Protocol):
    """Submit/poll. Called by one thread at a time, the pipeline's; never blocks in submit.

    A ticket is in flight from `submit` until `poll` returns it: until then the engine may touch
    both sides of every piece.

    No chunk waits for another job's fence. A ticket starts when its own fence has passed and its
    memory is registered, whatever was submitted before it and whatever fences are still open: loads
    that stream from the pool hold a stream slot each, and a younger load with a fence after a
    running forward pass must not keep those slots. So if one ticket writes what another one
    touches, the caller orders them: it submits the second when `poll` has returned the first. Only
    a ticket without pieces waits for others: it ends after every ticket of its direction that was
    submitted before it, and after its own fence.
    """

    #: Set only while no ticket is in flight: the KV cache's memory is unmapped, and every ticket
    #: fails.
    asleep: bool
    #: Whether the engine computes the checksums of payloads, also of loads; it may omit some.
    makes_checksums: bool

    def record_fence(self) -> object:
        """Record, on the model's thread, the point that a later copy must wait for. Fences pass in
        the order of their recording. CUDA: an event on the model's stream, the same one for all
        fences. Host: None, because there is nothing to wait for: the forward pass has run."""

    def has_passed(self, fence: object) -> bool:
        """Return whether a copy after this fence could start now. It never becomes False again.

        Then copies after it may be combined with those after older fences, without any fence. False
        also if the engine cannot know.
        """

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        """Start copying; return the ticket.

        `fence` is None if there is nothing to wait for. `payloads` are those of the pieces; None if
        no checksum is needed.
        """

    def poll(self) -> list[tuple[int, Outcome]]:
        """Return the tickets that have finished since the last call, with their outcome."""

    def close(self) -> None:
        """Wait for what is in flight and free everything."""


#: The most descriptors of one call and parts of one launch. Batches of about 50,000 have crashed
#: drivers.
DESCRIPTORS_MAX = 4096

_Words = npt.NDArray[np.uint64]


def coalesce(pieces: Descriptors, starts: _Words) -> Descriptors:
    """Merge pieces that are neighbours in the list and on both sides. `starts` has the sorted
    addresses at which an allocation or registration begins. No descriptor may cross one, even if
    the next begins exactly at the end of the previous one. The columns of the result are
    contiguous, because they are used separately."""
    columns = np.ascontiguousarray(pieces.T)
    cache, staging, sizes = columns
    # Blocks of a paged cache are rarely neighbours, so that usually the first comparison decides.
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
    """Cut pieces into parts of at most `bytes_max`. Returns the number of parts of each piece, and
    for each part its offset in the piece and its bytes."""
    repeats = ((sizes + np.uint64(bytes_max - 1)) // np.uint64(bytes_max)).astype(np.intp)
    before = np.cumsum(repeats) - repeats
    numbers = np.arange(int(repeats.sum())) - np.repeat(before, repeats)
    offsets = numbers.astype(np.uint64) * np.uint64(bytes_max)
    return repeats, offsets, np.minimum(np.repeat(sizes, repeats) - offsets, np.uint64(bytes_max))


def spans(sizes: _Words, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Divide parts into launches of at most `bytes_max`: yield (first, count) of each.

    No part may be larger than that.
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
    """Return the columns of pieces that are copied in this direction."""
    columns = np.ascontiguousarray(pieces.T)
    if direction is Direction.STORE:
        return columns[1], columns[0], columns[2]
    return columns[0], columns[1], columns[2]


def address_of(words: _Words) -> int:
    """Return a writable, contiguous array's address, four times as fast as `ndarray.ctypes`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, words)))


def _among(addresses: _Words, starts: _Words) -> npt.NDArray[np.bool_]:
    if not len(starts):
        return np.zeros(len(addresses), bool)
    at = np.minimum(np.searchsorted(starts, addresses), len(starts) - 1)
    found: npt.NDArray[np.bool_] = starts[at] == addresses
    return found
