# SPDX-License-Identifier: Apache-2.0
"""A server that reads for another server: `python -m vllm_nvmeof_bench.peers.helper PLAN`.

It runs the product's pipeline and native machine over its own small pool, and opens the other
server's region read-only. Its reads share a simulated link. It prints its address, and serves
requests until its stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers.faults import FaultPlan, FaultyIoEngine
from vllm_nvmeof_bench.stream.load import Rig, Settings
from vllm_nvmeof_offload.io.base import IoEngine, Waker
from vllm_nvmeof_offload.peers.base import Common, SlotMemory
from vllm_nvmeof_offload.peers.server import PeerServer
from vllm_nvmeof_offload.protocol import AttachCommand
from vllm_nvmeof_offload.units import KIB
from vllm_nvmeof_offload.worker.peer_reads import Serve, ServeQueue
from vllm_nvmeof_offload.worker.regions import RegionFiles

BLOCK_BYTES = 128 * KIB
#: The loading server, whose directory is the first one.
_OWNER, _ENGINE_INDEX = 1, 0
_OWN_CHUNKS = 8
_ATTACH = 1
_CLOSE_S_MAX = 30.0


@dataclass(frozen=True)
class Plan:
    """directory: target of both servers' pools. pool_uuid: UUID of the loading server's, in hex.

    slots: slots into which the helper reads for others. bytes_per_s: its link's rate; 0: no limit.
    """

    directory: str
    pool_uuid: str
    keyspace: str
    chunk_bytes: int
    slots: int
    bytes_per_s: float

    @property
    def rig(self) -> Settings:
        return Settings(
            parts=("load",),
            throttle_mb_per_s=0,
            tier_bytes=_OWN_CHUNKS * self.chunk_bytes,
            chunk_bytes=self.chunk_bytes,
            block_bytes=BLOCK_BYTES,
            sizes=(1,),
        )


class Helper:
    """A handle for a helper's process. Created by `helper`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchError("the helping server has exited")
        self.address: str = line.strip()
        #: Returns the CPU seconds of the process so far.
        self.cpu_s = cpu_clock(process.pid)


def cpu_clock(pid: int) -> Callable[[], float]:
    """Return a function that returns the CPU seconds of a process so far."""
    return partial(time.clock_gettime, ~pid << 3 | 2)  # clock_getcpuclockid(3)


@contextmanager
def helper(plan: Plan) -> Iterator[Helper]:
    """Run a helper in a process of its own; stop it at the end."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(plan))]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        yield Helper(process)
        process.communicate(timeout=2 * _CLOSE_S_MAX)
    finally:
        process.kill()
        process.wait()


def linked_engine(rig: Rig, stack: contextlib.ExitStack, bytes_per_s: float) -> IoEngine:
    """Open an I/O engine whose reads share a link. bytes_per_s: the link's rate; 0: no link."""
    engine = rig.open_engine(stack)
    if not bytes_per_s:
        return engine
    link = FaultPlan({"bytes_per_s": bytes_per_s})
    memory = rig.pool, rig.memory.view, rig.staging.base_address
    linked = FaultyIoEngine(engine, link, *memory)
    stack.callback(linked.close, _CLOSE_S_MAX)
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
        stack.callback(server.close, _CLOSE_S_MAX)
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
