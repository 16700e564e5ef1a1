# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering with its p2p tier: `python -m vllm_nvmeof_bench.peers.vllm_tiers PLAN`.

Each of two processes runs vLLM's whole manager with its CPU tier, an fs tier and the p2p tier, and
drives it step by step as vLLM's scheduler does. Only one function of vLLM is replaced, the one with
which the fs tier reads files: now a simulated link limits its rate, file by file.

The p2p tier sends chunks from the other server's CPU tier. The fs tier there first promotes all
requested chunks that are only in storage; then all are written to our CPU tier at once. vLLM uses
the first tier that has a chunk, so our own fs tier would read any chunk that both servers stored.
Here each chunk is in only one server's storage, divided in the ratio of the links. The measured
time ends when the last chunk is in our CPU tier: it excludes vLLM's copy to the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_nvmeof_bench.peers.helper import cpu_clock
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers.faults import FaultPlan

_HOST = "127.0.0.1"
#: Space in the CPU tier in addition to the chunks of a load.
_SPARE_CHUNKS = 4
_STEP_S = 0.001
_MEMORY = Path("/dev/shm")
_LOAD_S_MAX = 60.0
_CLOSE_S_MAX = 30.0
_CONNECT_S_MAX, _CONNECT_PAUSE_S = 60.0, 0.3
#: The two processes may have to reconnect after being stopped; the default timeout is 30 s.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_P2P_HANDSHAKE_TIMEOUT_S": "3",
}
#: The size of an unmeasured load before each measured one, in chunks; it reconnects the two.
_WARM_CHUNKS = 4


@dataclass(frozen=True)
class Plan:
    """numbers: the chunks in this server's storage. chunks: capacity of its CPU tier. ports: this
    server's port and the other one's. bytes_per_s: rate of this server's link.
    """

    directory: str
    numbers: tuple[int, ...]
    chunks: int
    chunk_bytes: int
    bytes_per_s: float
    ports: tuple[int, int]
    seed: int


class Load(NamedTuple):
    """A load's result. cpu_s: CPU time of the loading process; helper_cpu_s: of the other one."""

    seconds: float
    pulled_bytes: int
    cpu_s: float
    helper_cpu_s: float


class _Process:
    """A handle for one of the processes, which is stopped between loads, because vLLM steps
    endlessly and NIXL's threads poll."""

    def __init__(self, plan: Plan, stack: contextlib.ExitStack) -> None:
        command = [sys.executable, "-m", __name__, json.dumps(asdict(plan))]
        pipe, environment = subprocess.PIPE, os.environ | _ENVIRONMENT
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        )
        stack.callback(self._end)
        self.cpu_s = cpu_clock(self._process.pid)

    def ask(self, **what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise BenchError("a process with vLLM's p2p tier has exited")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def _end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=_CLOSE_S_MAX)
        self._process.kill()
        # Delete the file of the process's CPU tier, if the process did not.
        (_MEMORY / f"vllm_offload_{_engine(self._process.pid)}.mmap").unlink(missing_ok=True)


class VllmPair:
    """Both processes. Created by `vllm_pair`."""

    def __init__(self, plans: Sequence[Plan], stack: contextlib.ExitStack) -> None:
        self._both = [_Process(plan, stack) for plan in plans]
        for one in self._both:
            one.answer()
        self._signal(signal.SIGSTOP)
        stack.callback(self._signal, signal.SIGCONT)  # neither exits while the other is stopped

    def _signal(self, number: signal.Signals) -> None:
        for one in self._both:
            one.signal(number)

    def load(self, chunks: int) -> Load:
        """Load the first `chunks`; raise BenchError if one is missing or its bytes are wrong."""
        loader, helper = self._both
        self._signal(signal.SIGCONT)
        try:
            self._connect()
            cpu_s, helper_s = loader.cpu_s(), helper.cpu_s()
            found = self._load(chunks)
            if "error" in found:
                raise BenchError(f"vLLM's p2p tier: {found['error']}")
            # Neither time includes the check of the bytes.
            cpu_s, helper_s = found["cpu_s"] - cpu_s, helper.cpu_s() - helper_s
        finally:
            self._signal(signal.SIGSTOP)
        return Load(found["seconds"], found["pulled_bytes"], cpu_s, helper_s)

    def _connect(self) -> None:
        """Load until both processes are connected, because after a long stop each may consider the
        other one lost."""
        end_s = time.monotonic() + _CONNECT_S_MAX
        time.sleep(_CONNECT_PAUSE_S)
        while "error" in (found := self._load(_WARM_CHUNKS)):
            if time.monotonic() > end_s:
                raise BenchError(f"vLLM's p2p tier: {found['error']}")
            time.sleep(_CONNECT_PAUSE_S)

    def _load(self, chunks: int) -> dict[str, Any]:
        loader, helper = self._both
        loader.ask(load=chunks)
        found = loader.answer()
        for one in (loader, helper):
            one.ask(forget=True)
            one.answer()
        return found


@contextmanager
def vllm_pair(plan: Plan, links: tuple[float, float]) -> Iterator[VllmPair]:
    """Run both processes. plan: the loader's; both get a part of its chunks, and its directory is
    deleted at the end. links: rates in bytes per second.
    """
    share = links[1] / sum(links)
    far = [n for n in range(plan.chunks) if int((n + 1) * share) > int(n * share)]
    near = sorted(set(range(plan.chunks)) - set(far))
    ports = _free_ports()
    root = Path(plan.directory)
    plans = [
        replace(plan, directory=str(root / name), numbers=tuple(numbers), bytes_per_s=rate,
                chunks=room + _SPARE_CHUNKS, ports=found)
        for name, numbers, rate, room, found in (
            ("near", near, links[0], plan.chunks, ports),
            ("far", far, links[1], len(far), ports[::-1]),
        )
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        yield VllmPair(plans, stack)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind((_HOST, 0))
        return first.getsockname()[1], second.getsockname()[1]


# -- in each process ----------------------------------------------------------------------


class _Link:
    """A replacement for the function with which the fs tier reads files."""

    def __init__(self, bytes_per_s: float, read: Any) -> None:
        self._plan = FaultPlan({"bytes_per_s": bytes_per_s})
        self._turn = threading.Lock()
        self._read = read

    def read(
        self, paths: list[str], view: memoryview, offsets: list[int], size: int, direct: bool
    ) -> None:
        now_s = time.monotonic()
        with self._turn:  # reserves the link for the whole job, so that it never waits for a thread
            ends_s = [self._plan.link_ends_s(size, now_s) for _ in paths]
        for path, offset, end_s in zip(paths, offsets, ends_s, strict=True):
            self._read([path], view, [offset], size, direct)
            time.sleep(max(0.0, end_s - time.monotonic()))


class _Server:
    """vLLM's manager, and the chunks in its storage."""

    def __init__(self, plan: Plan) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext
        from vllm.v1.kv_offload.tiering.fs import manager

        manager.batch_load_block = _Link(plan.bytes_per_s, manager.batch_load_block).read
        self._plan = plan
        self._step_ends = ScheduleEndContext((), ())
        self._manager = _manager(plan)
        view = self._manager.primary_tier.get_kv_memoryview().cast("B")
        self._rows = np.frombuffer(view, np.uint8).reshape(-1, plan.chunk_bytes)
        self._requests = 0
        for first in range(0, len(plan.numbers), plan.chunks):
            self._store(plan.numbers[first : first + plan.chunks])

    def step(self) -> None:
        self._manager.on_schedule_end(self._step_ends)

    def _store(self, numbers: Sequence[int]) -> None:
        """Store chunks as vLLM does after computing them; the fs tier then writes their files."""
        keys, context = list(map(_key, numbers)), self._context(None)
        self._manager.on_new_request(context)
        found = self._manager.prepare_store(keys, context)
        assert found is not None
        assert len(found.keys_to_store) == len(keys)
        for number, row in zip(numbers, found.store_spec.chunk_ids, strict=True):
            self._rows[row] = _content(self._plan, number)
        self._manager.complete_store(keys, context)
        self._manager.on_request_finished(context)
        self.forget()

    def forget(self) -> None:
        """Wait for transfers in flight, and empty the CPU tier."""
        self._manager.reset_cache()
        self._rows[:] = 0
        self.step()

    def load(self, chunks: int) -> dict[str, Any]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        numbers = range(chunks)
        keys = list(map(_key, numbers))
        began_s = time.perf_counter()
        context = self._context(self._plan.ports[1])
        self._manager.on_new_request(context)
        while (missing := self._missing(keys, context)) is None:
            self.step()
            if time.perf_counter() - began_s > _LOAD_S_MAX:
                return {"error": "a load does not end"}
            time.sleep(_STEP_S)
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time()
        if missing:
            self._manager.on_request_finished(context)
            return {"error": f"{missing} chunks are missing"}
        sources = [self._manager.get_load_source(key, context) for key in keys]
        rows = self._manager.prepare_load(keys, context).chunk_ids
        wrong = sum(
            not np.array_equal(self._rows[row], _content(self._plan, number))
            for number, row in zip(numbers, rows, strict=True)
        )
        self._manager.complete_load(keys, context)
        self._manager.on_request_finished(context)
        if wrong:
            return {"error": f"{wrong} chunks do not hold what was written"}
        pulled = self._plan.chunk_bytes * sources.count(CacheHitSource.P2P)
        return {"seconds": seconds, "cpu_s": cpu_s, "pulled_bytes": pulled}

    def _missing(self, keys: Sequence[bytes], context: Any) -> int | None:
        """Look up each chunk as the scheduler does; return how many miss, or None if unknown."""
        from vllm.v1.kv_offload.base import LookupResult

        found = [self._manager.lookup(key, context) for key in keys]
        missing = found.count(LookupResult.MISS)
        return missing if missing + found.count(LookupResult.HIT) == len(keys) else None

    def _context(self, port: int | None) -> Any:
        """Return a new request's context. port: the other server's, if that may have the chunks."""
        from vllm.v1.kv_offload.base import ReqContext

        self._requests += 1
        name = f"{self._plan.ports[0]} {self._requests}"
        source = {"kv_request_id": name, "remote_host": _HOST, "remote_port": port}
        return ReqContext(name, {"remote_kv_source": source} if port else None)

    def close(self) -> None:
        del self._rows  # would keep the tier's memory mapped
        self._manager.shutdown()


def _manager(plan: Plan) -> Any:
    """Return vLLM's manager, with one group and one rank."""
    from vllm.v1.kv_offload import config as fields
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    tiers = [
        {"type": "fs", "root_dir": plan.directory},
        {"type": "p2p", "host": _HOST, "port": plan.ports[0]},
    ]
    memory = {"cpu_bytes_to_use": plan.chunks * plan.chunk_bytes}
    return TieringOffloadingSpec(
        fields.OffloadingConfig(
            groups=(fields.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=plan.chunk_bytes,
            enable_kv_cache_events=False,
            extra_config={**memory, "secondary_tiers": tiers},
            engine_id=_engine(os.getpid()),
            model=fields.OffloadingModelConfig(name="bench", dtype="bfloat16"),
            cache=fields.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=fields.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
    ).get_manager()


def _engine(pid: int) -> str:
    """Return the engine's name, after which vLLM names the CPU tier's file."""
    return f"bench-{pid}"


def _key(number: int) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return bytes(make_offload_key(number.to_bytes(32, "little"), 0))


def _content(plan: Plan, number: int) -> Any:
    dice = np.random.default_rng([plan.seed, number])
    return np.frombuffer(dice.bytes(plan.chunk_bytes), np.uint8)


def main(plan: Plan) -> None:
    server = _Server(plan)
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if not select.select([sys.stdin], [], [], _STEP_S)[0]:
            server.step()
            continue
        line = sys.stdin.readline()
        if not line:
            break
        asked = json.loads(line)
        if "load" in asked:
            print(json.dumps(server.load(asked["load"])), flush=True)
        else:
            server.forget()
            print(json.dumps({"forgotten": True}), flush=True)
    server.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Plan(**given | {name: tuple(given[name]) for name in ("numbers", "ports")}))
