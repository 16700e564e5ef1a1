# SPDX-License-Identifier: Apache-2.0
"""The reads that this rank does for peers. The peer server's thread requests them, and the native
machine does them after the reads that local loads wait for.

A peer may request anything, so a read is passed to the machine only if its region is open here, it
fits the region, and it is for our current weights.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from vllm_nvmeof_offload.errors import STALE, Outcome, outcome_of
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.native import Machine
from vllm_nvmeof_offload.peers.base import Levels, PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.protocol import OURS, ChunkBatch, owned_by, place_of

#: Returns the owner and target of another engine's region, by uuid; None if it is not open.
FindRegion = Callable[[bytes], tuple[int, int] | None]


_T = TypeVar("_T")


class OwnRegion(NamedTuple):
    """One of our regions: its target, and its number of slots."""

    target: int
    slots: int


class ServeQueue:
    """The queue between the peer server, for which it implements `ServePort`, and the pipeline."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` wakes the pipeline's thread."""
        self._wake = wake
        self._asked: collections.deque[Sequence[PeerRead]] = collections.deque()
        self._unwanted: collections.deque[Sequence[int]] = collections.deque()
        self._ended: collections.deque[Sequence[Served]] = collections.deque()
        self._levels = Levels(0, 0.0)
        self._waker = Waker()

    # -- the server's thread ----------------------------------------------------------

    def serve(self, reads: Sequence[PeerRead]) -> None:
        self._asked.append(reads)
        self._wake()

    def cancel(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._unwanted.append(tokens)
            self._wake()

    def poll(self) -> list[Served]:
        self._waker.clear()
        return _taken(self._ended)

    def levels(self) -> Levels:
        return self._levels

    def fileno(self) -> int:
        return self._waker.fd

    # -- the pipeline's thread --------------------------------------------------------

    def take(self) -> tuple[list[PeerRead], list[int]]:
        """Return the reads requested since the last call, and the tokens of cancelled ones."""
        unwanted = _taken(self._unwanted)  # first, or a read could follow its cancellation
        return _taken(self._asked), unwanted

    def put(self, ended: Sequence[Served], levels: Levels) -> None:
        self._levels = levels
        if ended:
            self._ended.append(ended)
            self._waker.wake()


def _taken(batches: collections.deque[Sequence[_T]]) -> list[_T]:
    taken: list[_T] = []
    while batches:
        taken += batches.popleft()
    return taken


@dataclass(frozen=True, slots=True)
class Serve:
    """The service for peers: the `queue` of the peer server, and our `own` regions by uuid."""

    queue: ServeQueue
    own: Mapping[bytes, OwnRegion]


class Serving:
    """One machine's reads for peers. All calls come from the pipeline's thread."""

    def __init__(
        self,
        machine: Machine,
        serve: Serve,
        memory: SlotMemory,
        group_bytes: Sequence[int],
        clock: Callable[[], float],
        find_region: FindRegion,
    ) -> None:
        """`memory` holds the serve slots. `find_region` finds other engines' regions."""
        self._machine, self._serve, self._memory, self._clock = machine, serve, memory, clock
        self._find_region = find_region
        #: The groups by chunk length. If several have the same length, any one will do.
        self._groups = {size: group for group, size in enumerate(group_bytes)}
        self._refused: list[Served] = []

    def take_in(self, tag: bytes) -> None:
        """Pass the requested reads to the machine. `tag` is the current share tag."""
        reads, unwanted = self._serve.queue.take()
        rows: dict[int, list[_Row]] = {}
        for read in reads:
            row = self._row_of(read, tag)
            if isinstance(row, _Row):  # a batch's keys must have equal lengths
                rows.setdefault(len(read.identity.key), []).append(row)
            else:
                self._refused.append(Served(read.token, row))
        for alike in rows.values():
            self._begin(alike)
        if unwanted:
            self._machine.end_serving(unwanted)

    def hand_over(self) -> None:
        """Report completed reads and the current load to the peer server."""
        ended = [
            Served(token, outcome_of(code, number))
            for token, code, number in self._machine.take_served()
        ]
        if self._refused:
            ended += self._refused
            self._refused = []
        self._serve.queue.put(ended, Levels(*self._machine.serve_levels()))

    def _row_of(self, read: PeerRead, tag: bytes) -> _Row | Outcome | None:
        """Return the row to read, or the outcome of a refusal: None if its region is not open."""
        uuid, slot = read.place.region_uuid, read.place.slot
        group = self._groups.get(read.payload_bytes)
        own = self._serve.own.get(uuid)
        if own is not None:
            owner, target = OURS, own.target
        elif (found := self._find_region(uuid)) is not None:
            owner, target = found
        else:
            return None
        if read.tag != tag or group is None or (own is not None and slot >= own.slots):
            return STALE
        return _Row(read, owned_by(owner, place_of(target, slot)), group)

    def _begin(self, rows: Sequence[_Row]) -> None:
        now_s = self._clock()
        reads = [row.read for row in rows]
        batch = ChunkBatch.of(
            b"".join(read.identity.key for read in reads),
            np.array([read.identity.generation for read in reads], np.uint64),
            np.array([self._memory.slot_of(read.address) for read in reads], np.int32),
            np.array([row.place for row in rows], np.int64),
            np.array([row.group for row in rows], np.uint8),
        )
        within_s = [read.deadline_s - now_s for read in reads]
        self._machine.serve([read.token for read in reads], batch, within_s)


class _Row(NamedTuple):
    read: PeerRead
    place: int
    group: int
