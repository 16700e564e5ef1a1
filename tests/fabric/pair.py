# SPDX-License-Identifier: Apache-2.0
"""Two processes with a pool behind a link each: one loads chunks, the other one reads for it.

Both have the real pool, I/O engine, pipeline and peers. Chunks come in messages, which needs no
NIXL. The one that loads has two pipelines, one of which knows of no peer; only one works at a time.
"""

from __future__ import annotations

import multiprocessing
import select
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from tests.chunks import batch_of, begin, geometry_of, place_in
from tests.fabric.subject import KEYSPACE, PAYLOAD_BYTES, content
from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.copy.geometry import CacheTensor
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.io.base import IoEngine, IoOp, Waker
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.peers.base import Common, SlotMemory
from vllm_nvmeof_offload.peers.clients import PeerClients
from vllm_nvmeof_offload.peers.server import PeerServer
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import LoadCommand, OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import HEADER_BYTES, KIB
from vllm_nvmeof_offload.worker.peer_reads import Peers, Serve, ServeQueue
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline
from vllm_nvmeof_offload.worker.regions import RegionFiles

CHUNKS = 128
LOADED_BYTES = CHUNKS * PAYLOAD_BYTES
#: Of each link; more than it moves in the time of a beat.
READS_MAX = 8
STREAM_SLOTS, SERVE_SLOTS = 4 * READS_MAX, READS_MAX
#: Of a read.
DEADLINE_S = 120.0
ANSWER_S_MAX = 900.0
POLL_S = 0.001
_FORK = multiprocessing.get_context("fork")


class Load(NamedTuple):
    """seconds: of one load of all chunks. pulled_bytes: of it from the peer."""

    seconds: float
    pulled_bytes: int
    wrong: int


class _Process:
    """The caller's side of a process that answers one question after the other."""

    def __init__(self, run: Callable[[Path, Connection], None], directory: Path) -> None:
        self._pipe, far = _FORK.Pipe()
        self._process = _FORK.Process(target=run, args=(directory, far), daemon=True)
        self._process.start()
        far.close()
        self.ready = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(ANSWER_S_MAX)

    def _ask(self, *what: object) -> Any:
        self._pipe.send(what)
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S_MAX), "the process does not answer"
        return self._pipe.recv()


class Loader(_Process):
    """Returns when all chunks are written."""

    def __init__(
        self, directory: Path, *, by_nixl: bool = False, deadline_s: float = DEADLINE_S
    ) -> None:
        super().__init__(partial(_load, _limits(deadline_s), by_nixl), directory)

    def connect(self, address: str) -> None:
        self._ask("connect", address)

    def is_connected(self) -> bool:
        return bool(self._ask("is_connected"))

    def load(self, *, with_peer: bool) -> Load:
        return Load(*self._ask("load", with_peer))


class Helper(_Process):
    """Its pool is beside that of the loader, or beside a copy of it. ready: where it listens."""

    def __init__(self, directory: Path, *, by_nixl: bool = False) -> None:
        super().__init__(partial(_help, by_nixl), directory)


def _open_pool(directory: Path, engine_index: int, chunks: int) -> Pool:
    size = chunks * (PoolSpec((directory,), 1, PAYLOAD_BYTES, KEYSPACE).slot_bytes + KIB)
    names = {"engine_index": engine_index, "o_direct": "on"}
    return Pool.open(PoolSpec((directory,), size, PAYLOAD_BYTES, KEYSPACE, log_pages=0, **names))


def _open_engine(pool: Pool, staging: Staging) -> IoEngine:
    place = pool, staging.view, staging.map.base_address
    engine, fallbacks = choose_io_engine("uring", *place, Tuning(io_depth=READS_MAX))
    assert not fallbacks, fallbacks
    return engine


def _limits(deadline_s: float) -> TransferLimits:
    return TransferLimits(
        group_bytes=(PAYLOAD_BYTES,),
        reads_in_flight_max=READS_MAX,
        read_deadline_s=deadline_s,
        write_deadline_s=deadline_s,
    )


def _run_pipeline(
    staging: Staging,
    waker: Waker,
    engine: IoEngine,
    io_fd: int,
    limits: TransferLimits,
    **more: Any,
) -> PipelineRunner:
    """more: as in `TransferPipeline`. io_fd: is readable while there is something to poll."""
    copy = HostCopyEngine(on_done=waker.wake)
    pipeline = TransferPipeline(staging.map, copy, engine, limits, **more)
    return PipelineRunner(pipeline, waker, io_fd)


def _chunk(number: int) -> SlotIdentity:
    return SlotIdentity(number.to_bytes(16, "little"), 1 + number)


class _Loading:
    """Writes all chunks at the start."""

    def __init__(self, limits: TransferLimits, by_nixl: bool, directory: Path) -> None:
        self._limits, self._by_nixl = limits, by_nixl
        self._pool = pool = _open_pool(directory, 0, CHUNKS)
        self._staging = Staging(pool.slot_bytes, 1, STREAM_SLOTS)
        self._pages = np.zeros((CHUNKS, PAYLOAD_BYTES // 8), np.uint64)  # the KV cache
        address = self._pages.ctypes.data
        tensor = CacheTensor(address, PAYLOAD_BYTES, PAYLOAD_BYTES, CHUNKS)
        self._geometry = geometry_of([tensor])
        engine = _open_engine(self._pool, self._staging)
        self._write(engine)
        self._alone = _run_pipeline(self._staging, Waker(), engine, engine.fileno(), limits)
        self._op = 0

    def _write(self, engine: IoEngine) -> None:
        address = self._staging.map.base_address
        for number in range(CHUNKS):
            identity = _chunk(number)
            self._staging.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = memoryview(
                content(identity)
            ).cast("B")
            where = place_in(number), address, identity, PAYLOAD_BYTES, engine.stamp
            engine.submit([IoOp(number, OpKind.WRITE, Urgency.WRITE, *where)])
            while not (ends := engine.poll()):
                time.sleep(POLL_S)
            assert ends[0].outcome.ok, ends

    def connect(self, address: str) -> None:
        pool, staging = self._pool, self._staging
        engine = _open_engine(pool, staging)
        self._clients = PeerClients(
            [address],
            Common(KEYSPACE.digest, 0, 1, pool.slot_bytes),
            pool.stamp.tag,
            SlotMemory(staging.map.base_address, pool.slot_bytes, 1 + STREAM_SLOTS),
            staging.view,
            by_nixl=self._by_nixl,
        )
        self._ready = select.epoll()
        for fd in (engine.fileno(), self._clients.fileno()):
            self._ready.register(fd, select.EPOLLIN)
        seams = {"peers": Peers(self._clients, 1, pool.slot_place, HostCopyEngine())}
        fd = self._ready.fileno()
        self._both = _run_pipeline(staging, Waker(), engine, fd, self._limits, **seams)

    def is_connected(self) -> bool:
        return self._clients.state(0).usable

    def load(self, with_peer: bool) -> tuple[float, int, int]:
        """Load all chunks: seconds, bytes from the peer, wrong chunks."""
        runner = self._both if with_peer else self._alone
        self._pages[:] = 0
        self._op += 1
        batch = batch_of(*((_chunk(n), None, place_in(n)) for n in range(CHUNKS)))
        command = LoadCommand(self._op, batch)
        pulled, began_s = self._clients.counts.pulled_bytes, time.monotonic()
        runner.hand_over(lambda p: begin(p, self._geometry, command, range(CHUNKS)), self._op)
        runner.wait([self._op])
        seconds = time.monotonic() - began_s
        (finished,), _, _ = runner.take()
        assert not finished.failures, finished.failures
        wrong = sum(
            not np.array_equal(page, content(_chunk(number)))
            for number, page in enumerate(self._pages)
        )
        return seconds, self._clients.counts.pulled_bytes - pulled, wrong


def _load(limits: TransferLimits, by_nixl: bool, directory: Path, pipe: Connection) -> None:
    loading = _Loading(limits, by_nixl, directory)
    pipe.send(None)
    while True:
        what, *rest = pipe.recv()
        pipe.send(getattr(loading, what)(*rest))


def _help(by_nixl: bool, directory: Path, pipe: Connection) -> None:
    pool = _open_pool(directory, 1, 1)
    staging = Staging(pool.slot_bytes, 1, READS_MAX, serve_slots=SERVE_SLOTS)
    waker = Waker()
    queue = ServeQueue(waker.wake)
    engine = _open_engine(pool, staging)
    seams = {"opener": RegionFiles(pool, waker.wake), "serve": Serve(queue, {})}
    limits = _limits(DEADLINE_S)
    runner = _run_pipeline(staging, waker, engine, engine.fileno(), limits, **seams)
    server = PeerServer(
        "tcp://127.0.0.1:0",
        Common(KEYSPACE.digest, 0, 1, pool.slot_bytes),
        pool.stamp.tag,
        SlotMemory(staging.map.serve_address, pool.slot_bytes, SERVE_SLOTS),
        staging.view[(1 + READS_MAX) * pool.slot_bytes :],
        queue,
        by_nixl=by_nixl,
    )
    pipe.send(server.address)
    pipe.recv()  # it is killed before anything comes
    runner.stop()
