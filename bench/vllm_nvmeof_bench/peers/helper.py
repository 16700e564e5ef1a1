# SPDX-License-Identifier: Apache-2.0
"""A server that reads for another one: `python -m vllm_nvmeof_bench.peers.helper PLAN`.

It has the product's pipeline and native machine over a small pool of its own beside the other
server's, whose region it opens read-only. Its reads share a link of so many bytes per second. It
prints its address, and serves until its stdin ends.
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
from vllm_nvmeof_offload.worker.regions import RegionFiles
from vllm_nvmeof_offload.worker.serving import Serve, ServeQueue

BLOCK_BYTES = 128 * KIB
#: Of the server that loads, whose directory is the first one there.
_OWNER, _ENGINE_INDEX = 1, 0
_OWN_CHUNKS = 8
_ATTACH = 1
_CLOSE_S_MAX = 30.0


@dataclass(frozen=True)
class Plan:
    """directory: of both servers' pools. pool_uuid: of that of the server that loads, in hex.

    slots: that the helper reads into for others. bytes_per_s: of its link; 0: as fast as it is.
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
    """The process from the outside. Use `helper`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchError("the server that was to help has ended")
        self.address: str = line.strip()
        #: CPU seconds of the process so far.
        self.cpu_s = cpu_clock(process.pid)


def cpu_clock(pid: int) -> Callable[[], float]:
    """A function that returns the CPU seconds of a process so far."""
    return partial(time.clock_gettime, ~pid << 3 | 2)  # clock_getcpuclockid(3)


@contextmanager
def helper(plan: Plan) -> Iterator[Helper]:
    """Run it."""
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
    """An I/O engine whose reads share a link. bytes_per_s: 0: they share nothing."""
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
