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

#: uint64[n, 3]: (KV cache address, staging address, bytes) of n pieces.
Descriptors = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of a batch of chunks.

    rows: uint64[m, 3], (KV cache address, offset in the slot's payload, bytes). first: uint32[n+1]:
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
        """Return the rows with addresses in place of offsets. payloads: by chunk, in staging."""
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
    OVERLAP = "dma_overlap"  # DMA with the hint that it should overlap with compute
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Payloads:
    """The payloads in staging that a store fills or a load copies, in the order of its pieces.

    counts: uint32[n], pieces of each. addresses: uint64[n]. sizes: uint64[n], bytes of each.
    crcs: int64[n], written by an engine that `makes_checksums`, before `poll` returns the ticket:
    the CRC-32C of a payload that the pieces cover in order and without a gap, else -1, as where the
    engine could not make it. It is made from the KV cache's bytes: of a load from those that
    arrived there, of a store from those that it copies.
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
        """Describe payloads whose checksums are not made yet."""
        return Payloads(counts, addresses, sizes, np.full(len(counts), -1, np.int64))


class CopyEngine(Protocol):
    """Submit/poll. Called by one thread at a time, the pipeline's; never blocks in submit.

    A ticket is in flight from `submit` until `poll` returns it: until then the engine may
    touch both sides of every piece.

    No chunk waits for another job's fence. A ticket starts when its own fence has passed and its
    memory is registered, whatever was submitted before it and whatever fences are still open:
    loads that stream in from the pool hold a stream slot each, and a younger load whose fence
    is behind a running forward pass must not keep those slots. So if one ticket writes what
    another one touches, the caller orders them: it submits the second when `poll` has returned
    the first. Only a ticket of no pieces waits for others: it ends behind every ticket of its
    direction that was submitted before it, and behind its own fence.
    """

    #: Set while no ticket is in flight: the KV cache's memory is gone, and every ticket fails.
    asleep: bool
    #: Whether it makes the checksums of payloads, of loads as well; it may leave some out.
    makes_checksums: bool

    def record_fence(self) -> object:
        """Record, on the model's thread, the point that a later copy must come after.

        Fences pass in the order of their recording. CUDA: an event on the model's stream, the same
        one for all fences. Host: None, nothing to come after; the forward pass has run.
        """

    def has_passed(self, fence: object) -> bool:
        """Return whether a copy after this fence could start now. It never becomes False again.

        Then copies after it may go together with those after older fences, as copies that come
        after nothing. False also where the engine cannot know.
        """

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        """Start copying; return the ticket.

        fence: None if there is nothing to come after. payloads: those of the pieces; None: no
        checksum is wanted.
        """

    def poll(self) -> list[tuple[int, Outcome]]:
        """Return the tickets that have finished since the last call, with their outcome."""

    def close(self) -> None:
        """Wait for what is in flight and free everything."""


#: Descriptors of one call, and parts of one launch. Batches of about 50,000 have crashed drivers.
DESCRIPTORS_MAX = 4096

_Words = npt.NDArray[np.uint64]


def coalesce(pieces: Descriptors, starts: _Words) -> Descriptors:
    """Merge pieces that are neighbours in the list and on both sides.

    starts: sorted addresses at which an allocation or a registration begins. No descriptor may
    cross one, even if the next one begins at the very end of the last.
    The columns of the result are contiguous, because they are used one by one.
    """
    columns = np.ascontiguousarray(pieces.T)
    cache, staging, sizes = columns
    # Blocks of a paged cache are seldom neighbours: mostly the first comparison decides.
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
    """Cut pieces into parts of at most `bytes_max`.

    Returns the number of parts of each piece; of each part its offset in the piece, and its bytes.
    """
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


#: (destinations, sources, sizes), each uint64[n] and contiguous.
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
