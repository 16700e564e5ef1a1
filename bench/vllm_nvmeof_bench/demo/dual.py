# SPDX-License-Identifier: Apache-2.0
"""A demo of two servers that share a pool over slow links. KV is loaded over one link or over both.

P answers the requests; D, a server with the same model, reads for P. First P computes and stores
the KV of a crowd of prompts; these answers are the reference. The crowd's prompts are then sent
again (the crowd *returns*): in several rounds with and without D, then while D is killed at most
every five seconds. SIGKILL ends all its processes at once, and the next D starts at P's other
address for D. D is killed after it has read for P, or after `_WAIT_S`. Without a GPU, all servers
are forked from a process that has imported vLLM, so that D restarts in seconds.

    python -m vllm_nvmeof_bench.demo.dual [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.forked import start
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import OffloadSpec, ReservedPort, Server, ServerSpec
from vllm_nvmeof_offload.commands.scrape import Metrics
from vllm_nvmeof_offload.config import ALLOW_FAULTS
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import GIB, slot_stride_bytes

LINK_BYTES_PER_S = 60_000_000
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 5, 4096, 8
#: The number of rounds, and how often per round the crowd returns over one path and over both.
ROUNDS, TIMES = 4, 2
#: The goal for the ratio of median TTFT over both paths to that over one.
RATIO_MAX = 0.6
KILLS, KILL_EVERY_S = 8, 5.0
_SHAPE = ModelShape(layers=8, hidden=256, intermediate=512, heads=4, kv_heads=4)
_CHUNK_BYTES = 1 << 20  # 64 tokens
_SLOTS, _SERVE_SLOTS = 96, 24
_PULLED = {"name": "vllm:nvmeof_peer_bytes_total", "direction": "pulled"}
_READ = {"name": "vllm:nvmeof_transfer_bytes_total", "direction": "load", "stage": "pool"}
_WAIT_ROUNDS_MAX = 8
#: D is killed after _WAIT_S even if it has read nothing for P; this is checked every _LOOK_S.
_WAIT_S, _LOOK_S = 60.0, 0.1
#: P counts as using D if D read more than this share of the loaded bytes.
_FOUND_SHARE = 0.4
#: Prompts sent only to evict the crowd from the CPU tier.
_OTHERS = 2


@dataclass
class Phase:
    """A crowd's results in one phase. pulled_bytes: read by D for P. read_bytes: read by P."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    failed: int = 0
    different: int = 0
    pulled_bytes: float = 0.0
    read_bytes: float = 0.0

    @property
    def pulled_share(self) -> float:
        return self.pulled_bytes / max(1.0, self.pulled_bytes + self.read_bytes)


class Pair:
    """Server P, and server D at one or both of its addresses. D can be killed and restarted."""

    def __init__(
        self, console: Console, build: Path, target: Path, addresses: tuple[str, str]
    ) -> None:
        self._logs = build / "demo-logs"
        self._faults = [target / f"{name}.json" for name in ("p", "d0", "d1")]
        for control in self._faults:
            control.write_text("{}")
        model = make_model(build / "models", _SHAPE)
        serve = {"serve_bytes": _SERVE_SLOTS * _slot_bytes()}
        serve["pool_bytes"] = _SERVE_SLOTS * _slot_bytes()  # for D's own pool, which stays empty
        self._specs = [
            _spec(model, target, control, peer_listen=address, **serve)
            for control, address in zip(self._faults[1:], addresses, strict=True)
        ]
        with console.status("starting P"):
            p = _spec(model, target, self._faults[0], peers=list(addresses))
            self.p = start(p, self._logs / "dual-p.log").wait_ready()
        self._ds: dict[int, Server] = {}

    def start_d(self, number: int = 0) -> Server:
        """Start D without waiting. D may read for P before it is ready to answer requests."""
        self._ds[number] = start(self._specs[number], self._logs / f"dual-d{number}.log")
        return self._ds[number]

    def kill_d(self, number: int = 0) -> None:
        if number in self._ds:
            self._ds.pop(number).kill()

    def throttle(self) -> None:
        for control in self._faults:
            control.write_text(json.dumps({"bytes_per_s": LINK_BYTES_PER_S}))

    def stop(self) -> None:
        for number in list(self._ds):
            self.kill_d(number)
        self.p.stop()


def _slot_bytes() -> int:
    return slot_stride_bytes(_CHUNK_BYTES)


def _spec(model: Path, target: Path, control: Path, **more: object) -> ServerSpec:
    chunk_tokens = _CHUNK_BYTES // _SHAPE.kv_bytes_per_token
    prompts = PROMPTS + _OTHERS
    pool_bytes = 2 * prompts * (PROMPT_TOKENS // chunk_tokens + 1) * _slot_bytes()
    extra = {
        "targets": [str(target / "pool")],
        "pool_bytes": pool_bytes,
        "chunk_bytes_min": _CHUNK_BYTES,
        "admission": "always",
        "ahead_cache_share": 0.0,
        "read_deadline_ms": 20_000,
        "fault_injection": str(control),
        **more,
    }
    return ServerSpec(
        model=model,
        max_model_len=PROMPT_TOKENS + 64,
        gpu_blocks=3 * PROMPT_TOKENS // 32,
        max_num_seqs=4,
        offload=OffloadSpec(_SLOTS * _slot_bytes() / GIB, extra),
        env={
            "VLLM_SERVER_DEV_MODE": "1",
            ALLOW_FAULTS: "1",
            # Otherwise vLLM binds the math threads of both servers to the same core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        },
    )


class Crowd:
    """A crowd's requests and expected answers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        rng = np.random.default_rng(5)
        drawn = [random_tokens(rng, PROMPT_TOKENS, _SHAPE) for _ in range(PROMPTS + _OTHERS)]
        self._prompts, self._others = drawn[:PROMPTS], drawn[PROMPTS:]
        self._right: list[Answer] = []

    def compute(self) -> Phase:
        """Send all prompts once, so that the server computes and stores their KV."""
        phase = Phase("computed")
        self._right = asyncio.run(self._compute())
        _count(phase, self._right)
        return phase

    def come(self, phase: Phase) -> None:
        """Empty the GPU's prefix cache, send the crowd's requests, and add the results."""
        answers, before, now = asyncio.run(self._return())
        whole = _count(phase, answers)
        pairs = zip(answers, self._right, strict=True)
        differ = [answer.tokens != right.tokens for answer, right in pairs if answer in whole]
        phase.different += sum(differ)
        phase.pulled_bytes += now.value(**_PULLED) - before.value(**_PULLED)
        phase.read_bytes += now.value(**_READ) - before.value(**_READ)

    async def _compute(self) -> list[Answer]:
        answers = []
        async with Client(self._server.url) as client:
            for prompt in [*self._prompts, *self._others]:
                answers.append(await client.complete(prompt, ANSWER_TOKENS))
                await client.settle()
        return answers[:PROMPTS]

    async def _return(self) -> tuple[list[Answer], Metrics, Metrics]:
        async with Client(self._server.url) as client:
            if not await client.forget_gpu():
                raise OffloadError("the prefix cache cannot be reset")
            before = await client.counted()
            answers = [await client.attempt(prompt, ANSWER_TOKENS) for prompt in self._prompts]
            return answers, before, await client.counted()


def _count(phase: Phase, answers: Sequence[Answer]) -> list[Answer]:
    """Add a crowd's results to `phase`, and return the complete answers."""
    whole = [answer for answer in answers if answer.failure is None]
    phase.failed += len(answers) - len(whole)
    phase.ttft_s += [answer.ttft_s for answer in whole]
    return whole


def _with_d(pair: Pair, crowd: Crowd, all_phases: Phase) -> None:
    """Start D, and send the crowd's requests until D reads enough of the KV."""
    pair.start_d().wait_ready()
    for _ in range(_WAIT_ROUNDS_MAX):
        phase = Phase("")
        crowd.come(phase)
        all_phases.failed += phase.failed
        all_phases.different += phase.different
        if phase.pulled_share > _FOUND_SHARE:
            return
    raise OffloadError("P loads little or nothing through D; see demo-logs/dual-p.log")


class Killer:
    """A task that starts and kills D on a thread while the crowd returns. killed_s: when D was
    killed. serving: the number of starts after which D read for P."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._ended = threading.Event()
        self.killed_s: list[float] = []
        self.serving = 0

    def run(self) -> None:
        last_s = time.monotonic()
        for number in range(KILLS):
            self._pair.start_d((number + 1) % 2)
            self.serving += self._wait_for_service()
            self._ended.wait(max(0.0, last_s + KILL_EVERY_S - time.monotonic()))
            if self._ended.is_set():
                return
            last_s = time.monotonic()
            self.killed_s.append(last_s)
            self._pair.kill_d(number % 2)

    def end(self) -> None:
        self._ended.set()

    def _wait_for_service(self) -> bool:
        """Wait until D has read for P; return False if it did not within `_WAIT_S`."""
        before, end_s = self._pulled_bytes(), time.monotonic() + _WAIT_S
        while time.monotonic() < end_s and not self._ended.wait(_LOOK_S):
            if self._pulled_bytes() > before:
                return True
        return False

    def _pulled_bytes(self) -> float:
        text = httpx.get(f"{self._pair.p.url}/metrics", timeout=30, trust_env=False).text
        return Metrics(text).value(**_PULLED)


def _killing(killer: Killer, crowd: Crowd, phase: Phase) -> None:
    """Send the crowd's requests repeatedly while `killer` runs."""
    with ThreadPoolExecutor(1) as thread:
        kills = thread.submit(killer.run)
        try:
            while not kills.done():
                crowd.come(phase)
        finally:
            killer.end()
        kills.result()


@dataclass(frozen=True)
class Outcome:
    """The results of a run. phases: computed, one path, both paths, D is killed, D starts."""

    phases: Sequence[Phase]
    kills: int
    kills_serving: int
    kill_gaps_s: Sequence[float]

    @property
    def ratio(self) -> float:
        _, one, both, *_ = self.phases
        return statistics.median(both.ttft_s) / statistics.median(one.ttft_s)

    @property
    def failed(self) -> int:
        return sum(phase.failed for phase in self.phases)

    @property
    def different(self) -> int:
        return sum(phase.different for phase in self.phases)

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.different and self.ratio <= RATIO_MAX


def measure(console: Console, build: Path, target: Path) -> Outcome:
    one, both = Phase("one path"), Phase("both paths")
    killed, starting = Phase("D is killed"), Phase("D starts")
    with ReservedPort() as first, ReservedPort() as second:
        addresses = f"127.0.0.1:{first.number}", f"127.0.0.1:{second.number}"
        pair = Pair(console, build, target, addresses)
        try:
            crowd = Crowd(pair.p)
            with console.status(f"computing {PROMPTS + _OTHERS} prompts"):
                computed = crowd.compute()
            pair.throttle()
            for number in range(ROUNDS):
                console.print(f"round {number + 1} of {ROUNDS}")
                _with_d(pair, crowd, starting)
                for _ in range(TIMES):
                    crowd.come(both)
                pair.kill_d()
                for _ in range(TIMES):
                    crowd.come(one)
            console.print(f"killing D {KILLS} times")
            _with_d(pair, crowd, starting)
            killer = Killer(pair)
            _killing(killer, crowd, killed)
        finally:
            pair.stop()
    gaps_s = [after - before for before, after in pairwise(killer.killed_s)]
    phases = [computed, one, both, killed, starting]
    return Outcome(phases, len(killer.killed_s), killer.serving, gaps_s)


def show(console: Console, outcome: Outcome) -> None:
    table = Table("", "requests", "failed", "different", "TTFT median", "slowest", "through D")
    for one in outcome.phases[:-1]:
        counts = len(one.ttft_s) + one.failed, one.failed, one.different
        times_s = (statistics.median(one.ttft_s), max(one.ttft_s)) if one.ttft_s else ()
        share = f"{one.pulled_share:.0%}"
        table.add_row(one.name, *map(str, counts), *(f"{t:.2f} s" for t in times_s), share)
    console.print(table)
    gaps_s = [round(gap_s, 1) for gap_s in outcome.kill_gaps_s]
    console.print(
        f"D was killed {outcome.kills} times, {outcome.kills_serving} times after it had sent "
        f"chunks; seconds between kills: {', '.join(map(str, gaps_s))}"
    )
    console.print(
        f"TTFT both/one: {outcome.ratio:.2f} at {LINK_BYTES_PER_S / 1e6:.0f} MB/s each (goal: "
        f"at most {RATIO_MAX}); {outcome.failed} failed requests; {outcome.different} "
        f"answers with different tokens; {os.cpu_count()} cores, "
        f"{_SHAPE.kv_bytes_per_token / 1024:.0f} KiB of KV per token"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 0 if no request failed, all tokens agreed and the goal is met."""
    console, build = Console(highlight=False), Path("build").resolve()
    build.mkdir(exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix="demo-dual-", dir=build))
    try:
        outcome = measure(console, build, target)
    except (OffloadError, httpx.HTTPError) as error:
        console.print("[red]demo failed:[/]", type(error).__name__, escape(str(error)))
        return 1
    finally:
        shutil.rmtree(target, ignore_errors=True)
    show(console, outcome)
    if arguments[:1] == ["--json"]:
        facts = asdict(outcome) | {"ratio": outcome.ratio}
        Path(arguments[1]).write_text(json.dumps(facts, indent=1))
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
