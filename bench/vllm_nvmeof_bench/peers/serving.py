# SPDX-License-Identifier: Apache-2.0
"""A helper's own loads, with and without a constant load from peers.

This process is the helper. A thread stands in for the peers: like the peer server, it requests as
many chunks from the pipeline as there are serve slots, and another whenever one completes.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import threading
import time
from collections.abc import Iterator

import numpy as np

from vllm_nvmeof_bench.peers.helper import linked_engine
from vllm_nvmeof_bench.progress import OnProgress
from vllm_nvmeof_bench.reports.peers import (
    ALONE,
    BESIDE,
    MB,
    PEERS_ALONE,
    SERVING,
    Sample,
    link_rates,
)
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.stream.load import Rig
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.peers.base import PeerRead
from vllm_nvmeof_offload.worker.peer_reads import OwnRegion, Serve, ServeQueue

#: Sizes of the helper's own loads, in chunks.
_SIZES = (4, 16)
_PAUSE_S = 0.01, 0.03  # between loads
_SETTLE_S = 0.3
#: A pause, because a target reads less for peers just after a load; then the measured time.
_FORGOTTEN_S, _PEERS_S = 2.5, 3.0
_WITHIN_S = 60.0


class _Peers(threading.Thread):
    """A thread that requests chunks while `asks` is set."""

    def __init__(self, rig: Rig, queue: ServeQueue) -> None:
        super().__init__(name="asks", daemon=True)
        self.asks = threading.Event()
        self.served_bytes = 0
        self.failed = 0
        self._rig, self._queue = rig, queue
        self._numbers = itertools.count()
        self._free = list(range(rig.staging.serve_slots))
        self._slots: dict[int, int] = {}  # token → slot
        self._ends = threading.Event()
        self.start()

    def close(self) -> None:
        self.asks.clear()
        self._ends.set()
        self.join(_WITHIN_S)

    def run(self) -> None:
        ready = select.poll()
        ready.register(self._queue.fileno(), select.POLLIN)
        while self._slots or not self._ends.is_set():
            if self.asks.is_set() and self._free:
                self._queue.serve([self._read() for _ in range(len(self._free))])
            ready.poll(10)
            for end in self._queue.poll():
                self._free.append(self._slots.pop(end.token))
                is_ok = end.outcome is not None and end.outcome.ok
                self.served_bytes += is_ok * self._rig.settings.chunk_bytes
                self.failed += not is_ok

    def _read(self) -> PeerRead:
        rig, token, slot = self._rig, next(self._numbers), self._free.pop()
        self._slots[token] = slot
        number = token % len(rig.identities)
        address = rig.staging.serve_address + slot * rig.staging.slot_bytes
        what = (
            rig.settings.chunk_bytes,
            rig.identities[number],
            rig.pool.superblocks[0].place(number),
        )
        return PeerRead(token, address, *what, rig.pool.stamp.tag, time.monotonic() + _WITHIN_S)


class _Helper:
    def __init__(self, rig: Rig, rates: str, stack: contextlib.ExitStack, seed: int) -> None:
        """Open the helper; its reads share a link with the first of `rates`."""
        self._rig, self._rates = rig, rates
        self._dice = random.Random(f"{seed} serving")
        waker, own_rate = Waker(), link_rates(rates)[0]
        io = linked_engine(rig, stack, own_rate * MB)
        queue = ServeQueue(waker.wake)
        own = {rig.pool.superblocks[0].place(0).region_uuid: OwnRegion(0, rig.pool.slots)}
        worker = rig.open_worker(stack, waker, io, io.fileno(), serve=Serve(queue, own))
        rig.copy, rig.runner = worker
        self.peers = _Peers(rig, queue)
        stack.callback(self.peers.close)

    def loads(self, arm: str, chunks: int, numbers: range) -> Iterator[Sample]:
        if arm == BESIDE:
            self.peers.asks.set()
        time.sleep(_SETTLE_S)
        self._load(arm, chunks, -1)
        for number in numbers:
            time.sleep(self._dice.uniform(*_PAUSE_S))
            yield self._load(arm, chunks, number)
        self.peers.asks.clear()

    def _load(self, arm: str, chunks: int, number: int) -> Sample:
        rig = self._rig
        pieces = [rig.pieces(chunk) for chunk in range(chunks)]
        batch = rig.batch(range(chunks), np.full(chunks, -1, np.int32))
        served = self.peers.served_bytes
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        rig.runner.wait([rig.start(batch, pieces)])
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        rig.check()
        served = self.peers.served_bytes - served
        size = chunks * rig.settings.chunk_bytes
        return Sample(SERVING, self._rates, "", arm, number, seconds, size, served, cpu_s, 0.0)

    def peers_alone(self) -> Sample:
        time.sleep(_FORGOTTEN_S)
        self.peers.asks.set()
        time.sleep(_SETTLE_S)
        served, begin_s = self.peers.served_bytes, time.perf_counter()
        cpu_s = time.process_time()
        time.sleep(_PEERS_S)
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        served = self.peers.served_bytes - served
        self.peers.asks.clear()
        return Sample(SERVING, self._rates, "", PEERS_ALONE, 0, seconds, 0, served, cpu_s, 0.0)


def serving(
    rig: Rig, rates: str, rounds: int, loads: int, seed: int, on_progress: OnProgress
) -> Iterator[Sample]:
    """Measure `loads` loads per size, arm and round. rates: the first is that of the helper's link.

    Raises: BenchError: a load or a read for peers failed.
    """
    with contextlib.ExitStack() as stack:
        helper = _Helper(rig, rates, stack, seed)
        sizes = sorted({min(size, len(rig.identities)) for size in _SIZES})
        arms = [(arm, size) for arm in (ALONE, BESIDE) for size in sizes]
        dice = random.Random(f"{seed} order")
        for number in range(rounds):
            for arm, chunks in dice.sample(arms, len(arms)):
                on_progress(number, rounds, f"{chunks} chunks · {arm}")
                first = number * loads
                yield from helper.loads(arm, chunks, range(first, first + loads))
        yield helper.peers_alone()
        if helper.peers.failed:
            raise BenchError(f"{helper.peers.failed} chunks for peers could not be read")
