# SPDX-License-Identifier: Apache-2.0
"""D's storage: an I/O engine that nothing else uses."""

from __future__ import annotations

import collections
import select
import time
from collections.abc import Mapping, Sequence

from vllm_nvmeof_offload.errors import CANCELLED
from vllm_nvmeof_offload.io.base import IoEngine, IoOp, Waker
from vllm_nvmeof_offload.peers.base import Levels, PeerRead, Served
from vllm_nvmeof_offload.peers.session import BusyRate
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.protocol import OpKind, Urgency, owned_by, place_of
from vllm_nvmeof_offload.units import slot_stride_bytes


class EnginePort:
    """Implements `base.ServePort`. The serve slots are in the engine's memory."""

    def __init__(self, engine: IoEngine, regions: Mapping[bytes, tuple[int, int]]) -> None:
        """regions: by uuid, the owner and the target by which the engine reads a region."""
        self._engine, self._regions = engine, regions
        self._waiting: collections.deque[PeerRead] = collections.deque()
        self._reading: dict[int, PeerRead] = {}
        self._ended: list[Served] = []
        self._queued_bytes = 0
        self._rate = BusyRate()
        self._waker = Waker()
        self._epoll = select.epoll()
        for fd in (engine.fileno(), self._waker.fd):
            self._epoll.register(fd, select.EPOLLIN)

    def serve(self, reads: Sequence[PeerRead]) -> None:
        for read in reads:
            if read.place.region_uuid in self._regions:
                self._waiting.append(read)
                self._queued_bytes += slot_stride_bytes(read.payload_bytes)
            else:
                self._end(Served(read.token, None))
        self._submit()

    def cancel(self, tokens: Sequence[int]) -> None:
        for token in self._engine.cancel([one for one in tokens if one in self._reading]):
            self._queued_bytes -= slot_stride_bytes(self._reading.pop(token).payload_bytes)
            self._end(Served(token, CANCELLED))
        for read in [one for one in self._waiting if one.token in tokens]:
            self._waiting.remove(read)
            self._queued_bytes -= slot_stride_bytes(read.payload_bytes)
            self._end(Served(read.token, CANCELLED))

    def poll(self) -> list[Served]:
        self._waker.clear()
        for one in self._engine.poll():
            size_bytes = slot_stride_bytes(self._reading.pop(one.token).payload_bytes)
            self._queued_bytes -= size_bytes
            if one.outcome.ok:
                self._rate.moved(size_bytes, time.monotonic(), more=bool(self._reading))
            self._ended.append(Served(one.token, one.outcome))
        if not self._reading:
            self._rate.stop()
        self._submit()
        ended, self._ended = self._ended, []
        return ended

    def levels(self) -> Levels:
        return Levels(self._queued_bytes, self._rate.bytes_per_s)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def _submit(self) -> None:
        reads = [self._waiting.popleft() for _ in range(self._room())]
        for read in reads:
            self._reading[read.token] = read
        if reads:
            self._rate.moves(time.monotonic())
            self._engine.submit([self._op_of(read) for read in reads])

    def _room(self) -> int:
        return min(len(self._waiting), self._engine.room().reads)

    def _op_of(self, read: PeerRead) -> IoOp:
        owner, target = self._regions[read.place.region_uuid]
        return IoOp(
            read.token,
            OpKind.LOAD,
            Urgency.DEMAND,
            owned_by(owner, place_of(target, read.place.slot)),
            read.address,
            read.identity,
            read.payload_bytes,
            Stamp(0, read.tag),
        )

    def _end(self, served: Served) -> None:
        self._ended.append(served)
        self._waker.wake()
