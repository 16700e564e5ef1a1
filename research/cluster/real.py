# SPDX-License-Identifier: Apache-2.0
"""Two real servers on this machine's CPU, each with a slow link to its pool, and a simulation.

    python -m research.cluster.real [--seeds 1,2,3] [--json FILE] [--vllm-router PROGRAM]

The program first measures the machine, one request at a time: the cost of prompts with and without
KV in memory, and the rate of a link. The results become a table in a machine file. Then prompts
return at random times, in rounds, alternately to both servers and through
`examples/dual_path_router.py`. The simulator plays the same requests at the same times on that
machine. Enough other prompts come between two uses of a prompt that its KV is only in the pool.
Given the program of the package `vllm-router`, it also runs the policies of that router.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from vllm_nvmeof_bench.results import BenchError, percentile
from vllm_nvmeof_bench.servers.client import Client, Hits
from vllm_nvmeof_bench.servers.forked import ForkedServer, can_be_forked
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.router import RunningRouter, dual_path_router
from vllm_nvmeof_bench.servers.server import OffloadSpec, ReservedPort, Server, ServerSpec

from research.cluster.agents import Agent
from research.cluster.events import Cluster, Given, Rules
from research.cluster.machines import Machines, read_machines
from vllm_nvmeof_offload.config import ALLOW_FAULTS
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import GIB, slot_stride_bytes

LINK_BYTES_PER_S = 30_000_000
#: The bytes that prompts read, as a share of the links' capacity.
LOAD = 0.8
REQUESTS = 80
OFF_MAX = 0.15
PROMPTS, NEW_TOKENS, ANSWER_TOKENS = 35, 40, 8
_SHAPE = ModelShape(layers=8, hidden=256, intermediate=512, heads=4, kv_heads=4)
_CHUNK_TOKENS = 64
_CHUNK_BYTES = _CHUNK_TOKENS * _SHAPE.kv_bytes_per_token
#: The lengths of stored prompts in chunks, and their shares: chats, and agents' sessions.
_CHUNKS, _SHARES = (8, 60), (0.75, 0.25)
_SLOTS, _STREAM_SLOTS = 96, 24
#: The tokens of the prompts that measure the machine: found or loaded, and computed.
_SHORT, _LONG, _COMPUTED = _CHUNKS[0] * _CHUNK_TOKENS, _CHUNKS[1] * _CHUNK_TOKENS, 2048
_TRIES = 5
_MEASURED = "measured"
_ALTERNATELY = "alternately"
_ROUTERS = {_ALTERNATELY: "round_robin", "least": "least"}
_POLICIES = ("round_robin", "power_of_two")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Numbers:
    """Medians of single requests. `hit_s` is the TTFT of `NEW_TOKENS` after a short and after a
    long prompt in memory, and `loaded_s` after the same prompts in the pool. `computed_s` is the
    TTFT of `_COMPUTED` new tokens, and `step_s` the seconds per answer token."""

    hit_s: tuple[float, float]
    loaded_s: tuple[float, float]
    computed_s: float
    step_s: float


@dataclass(frozen=True)
class Asked:
    """A request: its time, and the stored prompt with which it begins."""

    at_s: float
    prompt: int


@dataclass
class Arm:
    """The measured and simulated results of one kind of routing, over all rounds."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    simulated_s: list[float] = field(default_factory=list)
    hits: Hits = field(default_factory=Hits)

    def off(self, share: float = 0.0) -> float:
        """Return the simulator's mean or percentile, divided by the servers', minus 1."""
        return _figure(self.simulated_s, share) / _figure(self.ttft_s, share) - 1


def _figure(values: Sequence[float], share: float) -> float:
    return percentile(values, share) if share else statistics.fmean(values)


def machine_values(numbers: Numbers) -> dict[str, float]:
    """Convert the numbers to values in a machine file's table, in which a FLOP is a nanosecond.

    The cost per new token is measured on a prompt of only new tokens. The cost per pair of a new
    token and an earlier one follows from the extra cost of a longer prompt, and so includes the
    server's work on that prompt. The rest is a fixed cost.
    """
    short_s, long_s = numbers.hit_s
    token_s = numbers.computed_s / _COMPUTED
    pair_s = max(0.0, (long_s - short_s) / (NEW_TOKENS * (_LONG - _SHORT)))
    hit_pairs = NEW_TOKENS * (_SHORT + NEW_TOKENS / 2)
    request_s = max(0.0, short_s - NEW_TOKENS * token_s - hit_pairs * pair_s)
    read_s = (numbers.loaded_s[1] - long_s) - (numbers.loaded_s[0] - short_s)
    return {
        "storage_bytes_per_s": (_LONG - _SHORT) * _SHAPE.kv_bytes_per_token / read_s,
        "bytes_per_token": _SHAPE.kv_bytes_per_token,
        "flop_per_token": 1e9 * token_s,
        "flop_per_pair": 1e9 * pair_s,
        "flop_per_s": 1e9,
        "request_s": request_s,
        "step_s_min": numbers.step_s,
    }


def machine_file(path: Path, numbers: Numbers) -> Machines:
    """Write and read a machine file with two servers that both prefill and decode."""
    fixed = {"prefill": 2, "decode": 0, "compute_bytes_per_s": 1e12}
    # The time of a whole step is measured, so these two numbers do not matter.
    fixed |= {"weight_bytes": 1.0, "memory_bytes_per_s": 1e12}
    fixed |= {"chunk_tokens": _CHUNK_TOKENS, "places": _STREAM_SLOTS}
    values = {**fixed, **machine_values(numbers)}
    lines = [f"[{_MEASURED}]", *(f"{name} = {value:.10g}" for name, value in values.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_machines(path, _MEASURED)


def simulated(
    machines: Machines, lengths: Sequence[int], asked: Sequence[Asked], router: str
) -> list[float]:
    agents = [
        Agent((lengths[one.prompt],), (NEW_TOKENS,), (ANSWER_TOKENS,), (0.0,)) for one in asked
    ]
    rules = Rules(path="own", router=router)
    starts_s = [one.at_s for one in asked]
    return Cluster(machines, rules, agents, starts_s, Given(agents, False)).run().ttft_s


class Crowd:
    """The stored prompts, and the requests that begin with them."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        rng = np.random.default_rng(7)
        chunks = rng.choice(_CHUNKS, PROMPTS, p=_SHARES)
        self.lengths = [int(count) * _CHUNK_TOKENS for count in chunks]
        self._prompts = [random_tokens(rng, tokens, _SHAPE) for tokens in self.lengths]
        self._probes = [random_tokens(rng, tokens, _SHAPE) for tokens in (_SHORT, _LONG)]
        self._next = 0

    def store(self) -> None:
        """Make both servers compute and store all prompts."""
        asyncio.run(_each(self._servers, self._store))

    def numbers(self, throttle: Mapping[Server, Path]) -> Numbers:
        """Measure both servers, one request at a time. Their links stay throttled afterwards."""
        found = [asyncio.run(self._measure(one, throttle[one])) for one in self._servers]
        first, second = map(asdict, found)
        both = {name: np.mean([first[name], second[name]], axis=0) for name in first}
        hit_s, loaded_s = (tuple(map(float, both[name])) for name in ("hit_s", "loaded_s"))
        return Numbers(hit_s, loaded_s, float(both["computed_s"]), float(both["step_s"]))

    def arrivals(self, machines: Machines, seed: int) -> list[Asked]:
        """Return requests for the prompts in rotation, at random times that load the links to
        `LOAD`."""
        mean_bytes = statistics.fmean(self.lengths) * machines.bytes_per_token
        rate = LOAD * machines.prefill * machines.storage_bytes_per_s / mean_bytes
        gaps_s = np.random.default_rng(seed).exponential(1 / rate, REQUESTS)
        found = []
        for at_s in np.cumsum(gaps_s).tolist():
            found.append(Asked(at_s, self._next))
            self._next = (self._next + 1) % PROMPTS
        return found

    def come(self, urls: Sequence[str], asked: Sequence[Asked], seed: int) -> list[float]:
        """Send requests at their times, to the addresses in rotation; return each request's
        TTFT."""
        return asyncio.run(self._come(urls, asked, seed))

    def forget_gpu(self) -> None:
        """Empty GPU memory, so that the next prompts do not find earlier ones there."""
        if not all(asyncio.run(_each(self._servers, Client.forget_gpu))):
            raise BenchError("the prefix cache cannot be emptied")

    def hits(self) -> Hits:
        """Return the hits of both servers since their start."""
        return _sum(*asyncio.run(_each(self._servers, Client.hits)))

    async def _store(self, client: Client) -> None:
        for prompt in [*self._prompts, *self._probes]:
            await client.complete(prompt, 1)
            await client.settle()

    async def _measure(self, server: Server, control: Path) -> Numbers:
        rng = np.random.default_rng(11)

        async def ttft(client: Client, prompt: Sequence[int]) -> float:
            more = random_tokens(rng, NEW_TOKENS, _SHAPE)
            return (await client.complete([*prompt, *more], 1)).ttft_s

        async with Client(server.url) as client:
            computed = [
                (await client.complete(random_tokens(rng, _COMPUTED, _SHAPE), 1)).ttft_s
                for _ in range(_TRIES)
            ]
            await client.settle()
            control.write_text(json.dumps({"bytes_per_s": LINK_BYTES_PER_S}))
            hit_s, loaded_s = [], []
            for probe in self._probes:
                loads = []
                for _ in range(_TRIES):
                    await client.forget_gpu()
                    loads.append(await ttft(client, probe))
                loaded_s.append(statistics.median(loads))
                found = [await ttft(client, probe) for _ in range(_TRIES)]
                hit_s.append(statistics.median(found))
            answer = await client.complete(self._probes[0], 4 * ANSWER_TOKENS)
        step_s = (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)
        median_s = statistics.median(computed)
        return Numbers((hit_s[0], hit_s[1]), (loaded_s[0], loaded_s[1]), median_s, step_s)

    async def _come(self, urls: Sequence[str], asked: Sequence[Asked], seed: int) -> list[float]:
        rng = np.random.default_rng(seed)
        texts = [
            [*self._prompts[one.prompt], *random_tokens(rng, NEW_TOKENS, _SHAPE)] for one in asked
        ]
        async with contextlib.AsyncExitStack() as open_clients:
            clients = [await open_clients.enter_async_context(Client(url)) for url in urls]

            async def ask(number: int) -> float:
                await asyncio.sleep(asked[number].at_s)
                client = clients[number % len(clients)]
                return (await client.complete(texts[number], ANSWER_TOKENS)).ttft_s

            return list(await asyncio.gather(*map(ask, range(len(asked)))))


async def _each(
    servers: Sequence[Server], work: Callable[[Client], Awaitable[_Result]]
) -> list[_Result]:
    async def one(server: Server) -> _Result:
        async with Client(server.url) as client:
            return await work(client)

    return list(await asyncio.gather(*map(one, servers)))


def _sum(*hits: Hits) -> Hits:
    return Hits(*map(sum, zip(*map(astuple, hits), strict=True)))


@contextlib.contextmanager
def _way(name: str, servers: Sequence[Server], program: str, logs: Path) -> Iterator[list[str]]:
    """Yield the addresses to which the requests are sent in rotation."""
    if name == _ALTERNATELY:
        yield [one.url for one in servers]
        return
    with contextlib.ExitStack() as stack:
        command = dual_path_router(servers)
        if name != "least":
            port = stack.enter_context(ReservedPort()).number
            urls = [one.url for one in servers]
            command = [program, "--worker-urls", *urls, "--policy", name.rpartition(" ")[2]]
            command += ["--prometheus-port", str(port)]
        yield [stack.enter_context(RunningRouter(command, logs / "router.log")).url]


def _spec(model: Path, pool: Path, control: Path) -> ServerSpec:
    slot = slot_stride_bytes(_CHUNK_BYTES)
    stored = sum(count * share for count, share in zip(_CHUNKS, _SHARES, strict=True))
    chunks = int(2 * PROMPTS * stored)
    extra = {
        "targets": [str(pool)],
        "pool_bytes": chunks * slot,
        "chunk_bytes_min": _CHUNK_BYTES,
        "stream_slots": _STREAM_SLOTS,
        "admission": "always",
        "share": "off",
        # Loads leave nothing in the CPU tier.
        "ahead_cache_share": 0.0,
        "read_deadline_ms": 60_000,
        "fault_injection": str(control),
    }
    return ServerSpec(
        model=model,
        max_model_len=_CHUNKS[1] * _CHUNK_TOKENS + 128,
        gpu_blocks=16_384 // 32 + 1,
        max_num_seqs=8,
        offload=OffloadSpec(_SLOTS * slot / GIB, extra),
        env={
            "VLLM_SERVER_DEV_MODE": "1",
            ALLOW_FAULTS: "1",
            # Each server computes with one thread, on any free core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        },
    )


def measure(
    console: Console, place: Path, seeds: Sequence[int], program: str
) -> tuple[Numbers, Machines, list[Arm]]:
    """Start both servers, measure them, and run the rounds."""
    model = make_model(place.parent / "models", _SHAPE)
    logs = place.parent / "cluster-logs"
    controls = [place / f"{name}.json" for name in "ab"]
    for control in controls:
        control.write_text("{}")
    names = [*_ROUTERS, *(f"vllm-router, {policy}" for policy in _POLICIES if program)]
    arms = [Arm(name) for name in names]
    with contextlib.ExitStack() as stack:
        servers = []
        for control in controls:
            spec = _spec(model, place / f"pool-{control.stem}", control)
            kind = ForkedServer if can_be_forked(spec) else Server
            servers.append(stack.enter_context(kind(spec, logs / f"{control.stem}.log")))
        with console.status("vllm serve, twice"):
            for server in servers:
                server.wait_ready()
        crowd = Crowd(servers)
        with console.status(f"computing and storing {PROMPTS} prompts"):
            crowd.store()
        with console.status("measuring the machine"):
            numbers = crowd.numbers(dict(zip(servers, controls, strict=True)))
        machines = machine_file(place / "machines.toml", numbers)
        for seed in seeds:
            asked = crowd.arrivals(machines, seed)
            for arm in arms:
                crowd.forget_gpu()
                before = crowd.hits()
                with _way(arm.name, servers, program, logs) as urls:
                    arm.ttft_s += crowd.come(urls, asked, seed)
                arm.hits = _sum(arm.hits, crowd.hits() - before)
                if router := _ROUTERS.get(arm.name):
                    arm.simulated_s += simulated(machines, crowd.lengths, asked, router)
                told = [("", arm.ttft_s), (", simulated", arm.simulated_s)]
                means = (f"{_figure(one, 0):.2f} s{words}" for words, one in told if one)
                console.print(f"seed {seed}, {arm.name}: mean so far", *means)
    return numbers, machines, arms


def _show(console: Console, machines: Machines, arms: Sequence[Arm]) -> None:
    values = {name: value for name, value in asdict(machines).items() if value}
    console.print("the machine:", ", ".join(f"{name} {value}" for name, value in values.items()))
    columns = ("TTFT mean", "p50", "p95", "simulated mean", "p50", "p95", "off", "off p50")
    table = Table("", "requests", *columns, "found in memory")
    for arm in arms:
        shown = [f"{_figure(arm.ttft_s, share):.2f} s" for share in (0.0, 0.5, 0.95)]
        if arm.simulated_s:
            shown += [f"{_figure(arm.simulated_s, share):.2f} s" for share in (0.0, 0.5, 0.95)]
            shown += [f"{arm.off():+.1%}", f"{arm.off(0.5):+.1%}"]
        else:
            shown += [""] * 5
        memory = f"{(arm.hits.gpu + arm.hits.cpu) / max(1, arm.hits.prompt):.1%}"
        table.add_row(arm.name, str(len(arm.ttft_s)), *shown, memory)
    console.print(table)


def _facts(numbers: Numbers, machines: Machines, arms: Sequence[Arm]) -> dict[str, object]:
    return {
        "link_bytes_per_s": LINK_BYTES_PER_S,
        "load": LOAD,
        "cores": os.cpu_count(),
        "numbers": asdict(numbers),
        "machine": asdict(machines),
        "arms": [asdict(arm) for arm in arms],
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare two real servers with the simulator.")
    parser.add_argument("--seeds", default="1,2,3", help="seeds, one round of arrivals per seed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--vllm-router", default="", metavar="PROGRAM")
    given = parser.parse_args(arguments)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    console, build = Console(), Path("build").resolve()
    build.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="cluster-real-", dir=build))
    try:
        numbers, machines, arms = measure(console, place, seeds, given.vllm_router)
    except (OffloadError, httpx.HTTPError) as error:
        console.print("[red]failed:[/]", type(error).__name__, escape(str(error)))
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if given.json:
        given.json.write_text(json.dumps(_facts(numbers, machines, arms), indent=1))
    _show(console, machines, arms)
    turn, least = arms[:2]
    off = max(abs(arm.off(share)) for arm in (turn, least) for share in (0.0, 0.5))
    ratio = _figure(least.ttft_s, 0.95) / _figure(turn.ttft_s, 0.95)
    console.print(
        f"simulated mean and median are off by up to {off:.0%} (goal: at most {OFF_MAX:.0%}); p95 "
        f"with the router / without it is {ratio:.2f} (goal: at most 1)"
    )
    return int(off > OFF_MAX or ratio > 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
