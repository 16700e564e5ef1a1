# SPDX-License-Identifier: Apache-2.0
"""Run benchmarks on servers: start or connect to them, measure, record the conditions."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import OnProgress, drop_logs, home_in, progress, quiet_interpreter
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.serve.arms import (
    PEER_NOTE,
    Arm,
    ServerSettings,
    Sizes,
    engine_id,
    server_spec,
)
from vllm_nvmeof_bench.servers import smollm2
from vllm_nvmeof_bench.servers.client import Client, Tokens
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import Server, ServerError, ServerSpec, group_cpu_s
from vllm_nvmeof_bench.settings import recorded
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.fabric.machine import read_gpus
from vllm_nvmeof_offload.units import MIB

#: Servers to start at once: one per four cores, but at least two.
_AT_ONCE = max(2, (os.cpu_count() or 1) // 4)
_MB = 1_000_000
#: Ordinary token IDs in nearly every model's vocabulary.
_REMOTE_TOKENS = Tokens(1000, 30000)


@dataclass
class Fleet:
    """The clients of all servers, and the servers that were started here, by name."""

    runner: asyncio.Runner
    clients: dict[str, Client] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)

    def run(self, coroutine: Any) -> Any:
        """Run a client's coroutine to completion."""
        return self.runner.run(coroutine)

    def cpu_s(self, name: str) -> float | None:
        """Return a server's CPU seconds so far; None if it was not started here."""
        server = self.servers.get(name)
        return None if server is None else group_cpu_s(server.pid)

    def shuffled(self, words: str) -> list[str]:
        """Return the servers' names, in an order determined by `words`."""
        return random.Random(words).sample(list(self.clients), len(self.clients))


@contextmanager
def serving(
    wanted: Mapping[str, ServerSpec | str],
    logs: Path,
    on_step: Callable[[str], None],
    throttles: Mapping[str, Throttle],
) -> Iterator[Fleet]:
    """Start the wanted servers, a few at a time; stop them at the end. A URL is a running server.

    throttles: disk throttles by server name; they limit all processes that the server starts.

    Raises:
        BenchError: a server did not start (its log is in `logs`), or does not answer.
    """
    ours = {name: spec for name, spec in wanted.items() if not isinstance(spec, str)}
    # The key for servers given by URL, from the variable that other OpenAI clients use.
    key = os.environ.get("OPENAI_API_KEY")
    with ExitStack() as stack:
        fleet = Fleet(stack.enter_context(asyncio.Runner()))
        for at in range(0, len(ours), _AT_ONCE):
            some = list(ours)[at : at + _AT_ONCE]
            on_step("starting vllm serve: " + ", ".join(some))
            for name in some:
                server = stack.enter_context(Server(ours[name], logs / f"{name}.log"))
                fleet.servers[name] = server
                if name in throttles:
                    throttles[name].add(server.pid)
            for name in some:
                _wait_ready(name, fleet.servers[name])
        for name, spec in wanted.items():
            if name in ours:
                client = Client(fleet.servers[name].url)
            else:
                client = Client(str(spec), model="", api_key=key)
            fleet.clients[name] = client
            stack.callback(lambda client=client: fleet.run(client.close()))
            fleet.run(client.model())
        yield fleet
        on_step("stopping the servers")


def _wait_ready(name: str, server: Server) -> None:
    """Wait until a server is ready; raise BenchError with the cause and the log's last error."""
    try:
        server.wait_ready()
    except ServerError as error:
        what, *tail = str(error).splitlines()
        reasons = [line for line in tail if "Error" in line] or tail[-1:] or [""]
        raise BenchError(f"arm {name}: {what} … {reasons[-1].strip()}") from None


@dataclass(frozen=True)
class Run:
    """A running measurement; it appends `samples` one by one, and adds to `conditions`."""

    fleet: Fleet
    tokens: Tokens
    samples: list[Any]
    conditions: dict[str, Any]
    on_progress: OnProgress


def run(
    name: str,
    settings: ServerSettings,
    sizes: Sizes,
    measure: Callable[[Run], None],
    json_path: Path,
    quiet: bool = True,
    logged: Callable[[str], bool] = lambda what: True,
) -> None:
    """Start the servers, or connect to them, measure, and write the JSON file of benchmark `name`.

    If the measurement is interrupted, the file contains the samples so far, and `cut_off` in the
    conditions. If the run fails, the logs of the servers that it started are kept next to the file.
    sizes: those of the servers to start. quiet: disable garbage collection, which a long
    measurement needs. logged: the parameter of `progress`.

    Raises:
        BenchError: the benchmark cannot run here, or a server does not start or answer.
    """
    arms = settings.servers()
    ours = [arm for arm in arms if arm.url is None]
    logs = json_path.parent / f"{name}-logs"
    tokens = _tokens(settings, sizes, bool(ours))
    pools = sum(arm.pool for arm in arms)
    disk_bytes = pools * sizes.pool_bytes + 256 * MIB if pools else 0
    with ExitStack() as stack:
        on_progress = stack.enter_context(progress(logged))
        home = stack.enter_context(home_in(settings.directory, disk_bytes))
        conditions = {**_conditions(arms, sizes, home), "token_ids": [tokens.low, tokens.high]}
        throttles = _places(stack, ours, sizes, home)
        wanted: dict[str, ServerSpec | str] = {arm.name: arm.url for arm in arms if arm.url}
        if ours:
            on_progress(0, 0, "making the model")
            real = sizes.shape == smollm2.SHAPE
            model = smollm2.make() if real else make_model(sizes.models.resolve(), sizes.shape)
            wanted = {
                arm.name: server_spec(arm, sizes, model, home / arm.directory) for arm in ours
            }
        fleet = stack.enter_context(serving(wanted, logs, partial(on_progress, 0, 0), throttles))
        models = {name: fleet.run(one.model()) for name, one in fleet.clients.items()}
        conditions |= {"models": models, "settings": recorded(settings)}
        conditions["load_average_at_start"] = load_average()
        samples: list[Any] = []
        try:
            with quiet_interpreter() if quiet else nullcontext():
                measure(Run(fleet, tokens, samples, conditions, on_progress))
        except BaseException:
            conditions["cut_off"] = True
            raise
        finally:
            if samples:
                conditions["load_average_at_end"] = load_average()
                dump(json_path, name, samples, conditions)
    drop_logs(logs, [arm.name for arm in ours])


def command(name: str, text: str, kind: type[Any]) -> Command:
    """Return the command of a benchmark on servers. text: its help. kind: its settings, which
    contain the methods `sizes` and `measure`, the parameters of `run`."""

    def start(settings: Any, json_path: Path) -> None:
        run(name, settings, settings.sizes(), settings.measure, json_path)

    return Command(name, text, kind, start)


def _tokens(settings: ServerSettings, sizes: Sizes, ours: bool) -> Tokens:
    """Return the token IDs for prompts. ours: whether servers with a small model are started."""
    default = Tokens(high=sizes.shape.vocab) if ours else _REMOTE_TOKENS
    tokens = Tokens.parse(settings.token_ids) if settings.token_ids else default
    if ours and tokens.high > sizes.shape.vocab:
        raise BenchError(
            f"token ids up to {tokens.high}: the small model here has only {sizes.shape.vocab}"
        )
    return tokens


def _places(stack: ExitStack, arms: Sequence[Arm], sizes: Sizes, home: Path) -> dict[str, Throttle]:
    """Create a directory per arm; return the throttles of arms that need one.

    Raises:
        ThrottleError: this machine does not allow throttling.
    """
    throttles = {}
    for arm in arms:
        place = home / arm.directory
        place.mkdir(exist_ok=True)
        if arm.peer:  # a killed peer does not remove its CPU tier's file
            left = Path("/dev/shm") / f"vllm_offload_{engine_id(arm.name)}.mmap"
            stack.callback(left.unlink, missing_ok=True)
        if arm.throttled:
            rate = sizes.target_mb_per_s * _MB
            throttles[arm.name] = stack.enter_context(Throttle(place, rate, rate))
    return throttles


def _conditions(arms: Sequence[Arm], sizes: Sizes, directory: Path) -> dict[str, Any]:
    """Return the conditions before the servers start, with a description of each arm."""
    found = at_start(directory)
    found["arms"] = {arm.name: _described(arm, sizes) for arm in arms}
    if any(arm.peer for arm in arms) and has_cpu_engine():
        found["peer_note"] = PEER_NOTE
    if not has_cpu_engine():
        found["gpus"] = [f"{gpu.name}, driver {gpu.driver}" for gpu in read_gpus()]
    if any(arm.throttled for arm in arms):
        found["stand_in"] = (
            f"the NVMe-oF target is a stand-in: a directory on the local disk, with reads and "
            f"writes limited by a control group to {sizes.target_mb_per_s} MB/s each"
        )
    if any(arm.url is None for arm in arms):
        real = sizes.shape == smollm2.SHAPE
        found["model"] = {
            "name": f"{smollm2.NAME if real else 'random Llama'}, {sizes.dtype}",
            "parameters": sizes.shape.parameters,
            "kv_bytes_per_token": sizes.kv_bytes_per_token,
            "shape": asdict(sizes.shape),
        }
        found["gpu_tokens"] = sizes.gpu_tokens
        found["chunk_bytes"] = sizes.chunk_bytes
    return found


def _described(arm: Arm, sizes: Sizes) -> dict[str, Any]:
    described: dict[str, Any] = {"says": arm.about}
    if arm.tier != "none":
        described["staging_bytes"] = sizes.staging_bytes(arm.tier)
    if arm.pool and not arm.peer:
        described["pool_bytes"] = sizes.pool_bytes
    if arm.throttled:
        described["throttled_mb_per_s"] = sizes.target_mb_per_s
    return described
