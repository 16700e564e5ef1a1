# SPDX-License-Identifier: Apache-2.0
"""`bench peers`: a load over a server's own storage link, and over a second server's as well.

This process is the loading server: the product's pipeline and native machine over a pool on the
disk. A second process, `python -m vllm_nvmeof_bench.peers PLAN`, is the helper: it has its own
small pool, opens the loading server's region read-only, prints its address, and serves requests
until its stdin ends. The reads of each server share a simulated link to an NVMe-oF target.

    without   there is no peer
    absent    a peer is configured, but nothing listens at its address
    both      the helper is the peer
    landing   like both, but every other chunk is also kept in the CPU tier

Each round measures all arms with the same chunks, in random order. "GPU memory" is zeroed before
each load and then compared with what was written, so that a load of wrong data gives no result.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import (
    OnProgress,
    home_in,
    progress,
    quiet_interpreter,
    sync_file_system,
    unheard,
)
from vllm_nvmeof_bench.reports.peers import (
    ABSENT,
    BOTH,
    IDLE,
    LANDING,
    LOAD,
    MESSAGES,
    NO_LINKS,
    WITHOUT,
    Sample,
    link_rates,
)
from vllm_nvmeof_bench.results import MB, BenchError, dump
from vllm_nvmeof_bench.rig import Rig
from vllm_nvmeof_bench.rig import Settings as RigSettings
from vllm_nvmeof_bench.servers.faults import FaultPlan, FaultyIoEngine
from vllm_nvmeof_bench.settings import check_names, check_positive, option, recorded, size_option
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.io.base import IoEngine, Waker
from vllm_nvmeof_offload.peers.base import Common, SlotMemory
from vllm_nvmeof_offload.peers.clients import PeerClients
from vllm_nvmeof_offload.peers.server import PeerServer
from vllm_nvmeof_offload.pool.format import read_superblock
from vllm_nvmeof_offload.protocol import AttachCommand
from vllm_nvmeof_offload.units import KIB, MIB, slot_stride_bytes
from vllm_nvmeof_offload.worker.peer_reads import Peers, Serve, ServeQueue
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner
from vllm_nvmeof_offload.worker.regions import RegionFiles

_KEYSPACE = "bench peers"
_ARMS = (WITHOUT, ABSENT, BOTH, LANDING)
_POOL = "pool"
_SERVE_SLOTS = 32  # the product's serve slots of 64 MiB
_CONNECT_S_MAX = 20.0
_CLOSE_S_MAX = 10.0
_SETTLE_S = 2.0


@dataclass(frozen=True)
class Settings:
    """Settings for the run. tier_chunks: number of cache slots."""

    rates: tuple[str, ...] = option(
        ("400:400", "200:600", "600:200"), "Link rates in MB/s: the server's and the peer's."
    )
    arms: tuple[str, ...] = option(_ARMS, "Arms to measure.")
    rounds: int = option(5, "Rounds of all arms.", min=1)
    chunks: int = option(256, "Chunks per load.", min=4)
    chunk_bytes: int = size_option(2 * MIB, "Payload of a chunk.", flag="--chunk")
    idle_s: float = option(30.0, "Seconds for which idle servers are measured; 0: none.", min=0)
    seed: int = option(1, "Seed for contents and orders.")
    directory: Path = option(Path("build/bench/disk"), "Directory for the pool.", flag="--dir")
    tier_chunks: int = 128

    def __post_init__(self) -> None:
        check_names("arm", self.arms, _ARMS)
        check_positive(self, "rounds", "chunks")
        if self.chunk_bytes % BLOCK_BYTES:
            raise BenchError(f"a chunk must be a multiple of {BLOCK_BYTES} bytes")
        for rates in self.rates:
            if min(link_rates(rates)) <= 0:
                raise BenchError(f"{rates}: a link's rate must be above 0 MB/s")

    @property
    def rig(self) -> RigSettings:
        return RigSettings(
            seed=self.seed,
            tier_bytes=self.tier_chunks * self.chunk_bytes,
            chunk_bytes=self.chunk_bytes,
            block_bytes=BLOCK_BYTES,
            sizes=(self.chunks / self.tier_chunks,),
        )

    @property
    def disk_bytes(self) -> int:
        return (self.chunks + 8) * (slot_stride_bytes(self.chunk_bytes) + 4 * KIB) + 64 * MIB


class _Worker(NamedTuple):
    """The loading side of an arm."""

    copy: Any
    runner: PipelineRunner
    clients: PeerClients | None


@dataclass
class _Pair:
    """Both servers, for one pair of link rates."""

    rig: Rig
    settings: Settings
    rates: str
    stack: contextlib.ExitStack

    def open(self, home: Path, *arms: str) -> tuple[dict[str, _Worker], Helper]:
        """Start the helper and the arms' workers; raise BenchError if these do not connect."""
        rig = self.rig
        (region,) = rig.pool.directories
        plan = Plan(
            directory=str(home),
            pool_uuid=read_superblock(region).uuid.hex(),
            keyspace=_KEYSPACE,
            chunk_bytes=self.settings.chunk_bytes,
            slots=_SERVE_SLOTS,
            bytes_per_s=link_rates(self.rates)[1] * MB,
        )
        second = self.stack.enter_context(helper(plan))
        peer = second.address
        addresses = {WITHOUT: None, ABSENT: _nowhere(), BOTH: peer, LANDING: peer}
        workers = {arm: self._worker(addresses[arm]) for arm in arms}
        end_s = time.monotonic() + _CONNECT_S_MAX
        connecting = [workers[arm].clients for arm in (BOTH, LANDING) if arm in workers]
        while any(one is not None and not one.state(0).usable for one in connecting):
            if time.monotonic() > end_s:
                raise BenchError("the two servers do not connect")
            time.sleep(0.01)
        return workers, second

    def _worker(self, address: str | None) -> _Worker:
        rig, stack = self.rig, self.stack
        io = linked_engine(rig, stack, link_rates(self.rates)[0] * MB)
        if address is None:
            return _Worker(*rig.open_worker(stack, Waker(), io, io.fileno()), None)
        staging = rig.staging
        slots = staging.cache_slots + staging.stream_slots
        clients = PeerClients(
            [address],
            Common(_KEYSPACE, rig.pool.superblocks[0].rank, 1, staging.slot_bytes),
            rig.pool.stamp.tag,
            SlotMemory(staging.base_address, staging.slot_bytes, slots),
            rig.memory.view,
            by_nixl=False,
        )
        stack.callback(clients.close, _CLOSE_S_MAX)
        ready = stack.enter_context(select.epoll())
        for fd in (io.fileno(), clients.fileno()):
            ready.register(fd, select.EPOLLIN)
        waker = Waker()
        landing = HostCopyEngine(waker.wake)
        stack.callback(landing.close)
        peers = Peers(clients, 1, rig.pool.slot_place, landing)
        worker = rig.open_worker(stack, waker, io, ready.fileno(), peers=peers)
        return _Worker(*worker, clients)

    def load(self, worker: _Worker, second: Helper, arm: str, number: int) -> Sample:
        """Measure a load; raise BenchError if a chunk failed or its bytes are wrong."""
        rig, count, clients = self.rig, self.settings.chunks, worker.clients
        rig.copy, rig.runner = worker.copy, worker.runner
        cache = np.full(count, -1, np.int32)
        if arm == LANDING:
            landing = min(count // 2, rig.staging.cache_slots)
            cache[: 2 * landing : 2] = np.arange(landing)
        batch = rig.batch(range(count), cache)
        rig.zero(count)
        gc.collect()
        pulled = clients.counts.pulled_bytes if clients else 0
        cpu_s, helper_s, begin_s = time.process_time(), second.cpu_s(), time.perf_counter()
        rig.runner.wait([rig.start(batch, range(count))])
        seconds = time.perf_counter() - begin_s
        cpu_s, helper_s = time.process_time() - cpu_s, second.cpu_s() - helper_s
        rig.check()
        if not rig.same(count):
            raise BenchError(f"{arm}: the blocks differ from the written bytes")
        pulled = clients.counts.pulled_bytes - pulled if clients else 0
        size = count * self.settings.chunk_bytes
        where = LOAD, self.rates, MESSAGES, arm, number
        return Sample(*where, seconds, size, pulled, cpu_s, helper_s)

    def idle(self, home: Path, arm: str) -> Sample:
        """Measure both servers while idle after a load; they are connected if the arm is `BOTH`."""
        workers, second = self.open(home, arm)
        self.load(workers[arm], second, arm, 0)
        time.sleep(_SETTLE_S)
        cpu_s, helper_s, begin_s = time.process_time(), second.cpu_s(), time.perf_counter()
        time.sleep(self.settings.idle_s)
        seconds = time.perf_counter() - begin_s
        cpu_s, helper_s = time.process_time() - cpu_s, second.cpu_s() - helper_s
        return Sample(IDLE, self.rates, MESSAGES, arm, 0, seconds, 0, 0, cpu_s, helper_s)


def _nowhere() -> str:
    """Return an address on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _loads(pair: _Pair, home: Path, on_step: OnProgress) -> Iterator[Sample]:
    settings = pair.settings
    arms = settings.arms
    workers, second = pair.open(home / _POOL, *arms)
    for arm, worker in workers.items():
        pair.load(worker, second, arm, -1)  # discarded: the worker learns both links' rates
    done = itertools.count()
    for number in range(settings.rounds):
        dice = random.Random(f"{settings.seed} {pair.rates} {number}")
        for arm in dice.sample(arms, len(arms)):
            what = f"{pair.rates} MB/s · round {number + 1} · {arm}"
            on_step(next(done), settings.rounds * len(arms), what)
            yield pair.load(workers[arm], second, arm, number)


def run(
    settings: Settings, home: Path, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Return samples and conditions; raise BenchError if a load failed or returned wrong bytes.
    home: an empty directory."""
    found = {**at_start(home), "settings": recorded(settings)}
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        on_progress(0, 0, "writing the pool")
        rig = stack.enter_context(contextlib.closing(Rig(home / _POOL, settings.rig)))
        rig.write_all()
        sync_file_system(home)
        found |= {"engine": rig.engine, "stream_slots": rig.staging.stream_slots}
        gc.collect()
        with quiet_interpreter():
            for rates in settings.rates:
                with contextlib.ExitStack() as inner:
                    pair = _Pair(rig, settings, rates, inner)
                    samples += _loads(pair, home, on_progress)
            for arm in (ABSENT, BOTH) if settings.idle_s else ():
                on_progress(0, 0, f"idle · {arm}")
                with contextlib.ExitStack() as inner:
                    pair = _Pair(rig, settings, NO_LINKS, inner)
                    samples.append(pair.idle(home / _POOL, arm))
    found["load_average_at_end"] = load_average()
    return samples, found


def _measure(settings: Settings, json_path: Path) -> None:
    with progress() as on_progress, home_in(settings.directory, settings.disk_bytes) as home:
        dump(json_path, "peers", *run(settings, home, on_progress))


COMMANDS = (
    Command(
        "peers",
        """Measure a load over a server's own storage link, and over a second server's as well.

        Starts a second process and limits the reads of both. Nothing else should run at the same
        time.
        """,
        Settings,
        _measure,
    ),
)


BLOCK_BYTES = 128 * KIB
#: The loading server's number as an owner, and the index of its directory.
_OWNER, _ENGINE_INDEX = 1, 0
_OWN_CHUNKS = 8
_ATTACH = 1
_HELPER_CLOSE_S_MAX = 30.0


@dataclass(frozen=True)
class Plan:
    """A helper's settings. directory: target of both pools. pool_uuid: UUID of the loading server's
    pool, in hex. slots: serve slots. bytes_per_s: the link's rate; 0: no limit."""

    directory: str
    pool_uuid: str
    keyspace: str
    chunk_bytes: int
    slots: int
    bytes_per_s: float

    @property
    def rig(self) -> RigSettings:
        return RigSettings(
            tier_bytes=_OWN_CHUNKS * self.chunk_bytes,
            chunk_bytes=self.chunk_bytes,
            block_bytes=BLOCK_BYTES,
            sizes=(1,),
        )


class Helper:
    """A handle for a helper's process, created by `helper`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchError("the helper has exited")
        self.address: str = line.strip()
        self.cpu_s = cpu_clock(process.pid)


def cpu_clock(pid: int) -> Callable[[], float]:
    """Return a function that returns the CPU seconds of a process so far."""
    return partial(time.clock_gettime, ~pid << 3 | 2)  # clock_getcpuclockid(3)


@contextmanager
def helper(plan: Plan) -> Iterator[Helper]:
    """Run a helper in a separate process; stop it at the end."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(plan))]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        yield Helper(process)
        process.communicate(timeout=2 * _HELPER_CLOSE_S_MAX)
    finally:
        process.kill()
        process.wait()


def linked_engine(rig: Rig, stack: contextlib.ExitStack, bytes_per_s: float) -> IoEngine:
    """Open an I/O engine whose reads share a link. bytes_per_s: the link's rate; 0: no limit."""
    engine = rig.open_engine(stack)
    if not bytes_per_s:
        return engine
    link = FaultPlan({"bytes_per_s": bytes_per_s})
    memory = rig.pool, rig.memory.view, rig.staging.base_address
    linked = FaultyIoEngine(engine, link, *memory)
    stack.callback(linked.close, _HELPER_CLOSE_S_MAX)
    return linked


def main(plan: Plan) -> None:
    with contextlib.ExitStack() as stack:
        directory = Path(plan.directory)
        rig = stack.enter_context(contextlib.closing(Rig(directory, plan.rig, plan.slots)))
        pool, view, staging = rig.pool, rig.memory.view, rig.staging
        engine = linked_engine(rig, stack, plan.bytes_per_s)
        waker = Waker()
        queue = ServeQueue(waker.wake)
        seams = {"opener": RegionFiles(pool, waker.wake), "serve": Serve(queue, {})}
        _, runner = rig.open_worker(stack, waker, engine, engine.fileno(), **seams)
        attach = AttachCommand(_ATTACH, _OWNER, _ENGINE_INDEX, bytes.fromhex(plan.pool_uuid))
        runner.hand_over(lambda pipeline: pipeline.command(attach))
        size_bytes = staging.slot_bytes
        first = (staging.cache_slots + staging.stream_slots) * size_bytes
        server = PeerServer(
            "tcp://127.0.0.1:0",
            Common(plan.keyspace, pool.superblocks[0].rank, 1, size_bytes),
            pool.stamp.tag,
            SlotMemory(staging.serve_address, size_bytes, plan.slots),
            view[first:],
            queue,
            by_nixl=False,
        )
        stack.callback(server.close, _HELPER_CLOSE_S_MAX)
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
