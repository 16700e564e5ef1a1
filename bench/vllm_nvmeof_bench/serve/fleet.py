# SPDX-License-Identifier: Apache-2.0
"""The servers of all arms at once, and a client of each; requests go where the benchmark says.

What is started here is started two at a time, in a directory that its owner deletes. Servers
that are given by their URL are left alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_nvmeof_bench.cost.fleet import plainly
from vllm_nvmeof_bench.pool import conditions as pool_conditions
from vllm_nvmeof_bench.pool.settings import Settings as PoolSettings
from vllm_nvmeof_bench.serve.arms import PEER_NOTE, Arm, Sizes, engine_id, server_spec
from vllm_nvmeof_bench.serve.client import Client
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import Server
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.fabric.machine import read_gpus

__all__ = ["ServeFleet", "conditions_of"]

Tell = Callable[[str], None]
_AT_ONCE = 2
_MB = 1_000_000
_SHARED = Path("/dev/shm")


class ServeFleet:
    """A context manager: starts the arms' servers in `home` (logs in `logs`), stops them.

        with ServeFleet(arms, sizes, home, logs, tell) as fleet:
            reply = fleet.run(fleet.clients["pool"].complete(prompt, 16))

    Raises (on entry):
        BenchError: a server did not start; its log lies in `logs`.
        ThrottleError: an arm needs a throttled disk, and this machine does not let us.
    """

    def __init__(
        self, arms: Sequence[Arm], sizes: Sizes, home: Path, logs: Path, tell: Tell
    ) -> None:
        self.arms = tuple(arms)
        self.sizes = sizes
        self._home = home
        self._logs = logs
        self._tell = tell
        self._stack = ExitStack()
        self._runner = asyncio.Runner()
        self.servers: dict[str, Server] = {}
        self.clients: dict[str, Client] = {}

    def __enter__(self) -> Self:
        with self._stack as stack:
            stack.enter_context(self._runner)
            ours = [arm for arm in self.arms if arm.url is None]
            if ours:
                self._tell("making the model")
                model = make_model(self.sizes.models.resolve(), self.sizes.shape)
            for at in range(0, len(ours), _AT_ONCE):
                self._start(stack, ours[at : at + _AT_ONCE], model)
            for arm in self.arms:
                client = Client(arm.url or self.servers[arm.name].url, api_key=_key(arm))
                self.clients[arm.name] = client
                stack.callback(lambda one=client: self._runner.run(one.close()))
                self.run(client.model())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tell("stopping the servers")
        self._stack.__exit__(kind, error, trace)

    def run(self, coroutine: Any) -> Any:
        """Run a client's coroutine to its end."""
        return self._runner.run(coroutine)

    def _start(self, stack: ExitStack, arms: Sequence[Arm], model: Path) -> None:
        self._tell("starting vllm serve: " + ", ".join(arm.name for arm in arms))
        for arm in arms:
            place = self._home / arm.name
            place.mkdir()
            if arm.peer:
                stack.callback(_drop_shared, arm.name)
            throttle = None
            if arm.throttled:
                rate = self.sizes.target_mb_per_s * _MB
                throttle = stack.enter_context(Throttle(place, rate, rate))
            spec = server_spec(arm, self.sizes, model, place)
            server = stack.enter_context(Server(spec, self._logs / f"{arm.name}.log"))
            if throttle is not None:
                throttle.add(server.pid)  # and all that it starts
            self.servers[arm.name] = server
        for arm in arms:
            with plainly(arm.name):
                self.servers[arm.name].wait_ready()


def _key(arm: Arm) -> str | None:
    """Of a server given by its URL, as other OpenAI clients take it."""
    return os.environ.get("OPENAI_API_KEY") if arm.url is not None else None


def _drop_shared(name: str) -> None:
    """What a peer that was killed leaves behind: its CPU tier's file."""
    left = _SHARED / f"vllm_offload_{engine_id(name)}.mmap"
    left.unlink(missing_ok=True)


def conditions_of(arms: Sequence[Arm], sizes: Sizes | None, directory: Path) -> dict[str, Any]:
    """Versions, machine and disk as `bench pool` says them, and what each arm is."""
    common = pool_conditions.at_start(PoolSettings(), directory)
    kept = ("versions", "machine", "disk", "load_average_at_start")
    found: dict[str, Any] = {name: common[name] for name in kept}
    found["arms"] = {arm.name: _described(arm, sizes) for arm in arms}
    if any(arm.peer for arm in arms) and has_cpu_engine():
        found["peer_note"] = PEER_NOTE
    if not has_cpu_engine():
        found["gpus"] = [f"{gpu.name}, driver {gpu.driver}" for gpu in read_gpus()]
    if any(arm.throttled for arm in arms) and sizes is not None:
        found["stand_in"] = (
            f"the NVMe-oF target is a stand-in: a directory on the local disk, whose reads and "
            f"writes a control group limits to {sizes.target_mb_per_s} MB/s each"
        )
    if sizes is not None and any(arm.url is None for arm in arms):
        shape = sizes.shape
        found["model"] = {
            "name": f"random Llama, {sizes.dtype}",
            "parameters": shape.parameters,
            "kv_bytes_per_token": sizes.kv_bytes_per_token,
            "shape": asdict(shape),
        }
        found["gpu_tokens"] = sizes.gpu_tokens
        found["chunk_bytes"] = sizes.chunk_bytes
    return found


def _described(arm: Arm, sizes: Sizes | None) -> dict[str, Any]:
    if arm.url is not None:
        return {"says": arm.says}
    assert sizes is not None
    described: dict[str, Any] = {"says": arm.says}
    if arm.tier != "none":
        described["staging_bytes"] = sizes.staging_bytes(arm.tier)
    if arm.pool and not arm.peer:
        described["pool_bytes"] = sizes.pool_bytes
    if arm.throttled:
        described["throttled_mb_per_s"] = sizes.target_mb_per_s
    return described
