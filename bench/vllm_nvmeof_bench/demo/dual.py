# SPDX-License-Identifier: Apache-2.0
"""Two servers on one pool, each behind a slow storage link: a crowd returns over one, and both.

P answers. D, a server of the same model, reads for it. The crowd's prompts are computed and stored
once, and their answers are what is right. Then the crowd returns, round after round: while D runs,
while it does not, and while it is killed five seconds after each of its starts.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_nvmeof_bench.servers.client import Answer, Client, Metrics
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import OffloadSpec, ReservedPort, Server, ServerSpec
from vllm_nvmeof_offload.config import ALLOW_FAULTS
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import GIB, slot_stride_bytes

LINK_BYTES_PER_S = 60_000_000
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 5, 4096, 8
ROUNDS = 3
#: Of one path's median time to first token.
RATIO_MAX = 0.6
KILLS, KILL_AFTER_S = 3, 5.0
_SHAPE = ModelShape(layers=8, hidden=256, intermediate=512, heads=4, kv_heads=4)
_CHUNK_BYTES = 1 << 20  # 64 tokens
_SLOTS, _SERVE_SLOTS = 96, 24
_PULLED = "vllm:nvmeof_peer_pulled_bytes_total"
_READ = "vllm:nvmeof_read_bytes_total"
_WAIT_ROUNDS_MAX = 8


@dataclass
class Phase:
    """What the crowd saw in one state of D."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    different: int = 0
    pulled_bytes: float = 0.0
    read_bytes: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.ttft_s)

    @property
    def pulled_share(self) -> float:
        return self.pulled_bytes / max(1.0, self.pulled_bytes + self.read_bytes)


class Pair:
    """P and D. D may be killed and started again; P and the pool stay."""

    def __init__(self, console: Console, build: Path, target: Path, address: str) -> None:
        self._console, self._logs = console, build / "demo-logs"
        self._faults = [target / f"{name}.json" for name in "pd"]
        for control in self._faults:
            control.write_text("{}")
        model = make_model(build / "models", _SHAPE)
        serve = {"peer_listen": address, "serve_bytes": _SERVE_SLOTS * _slot_bytes()}
        self._d = _spec(model, target, self._faults[1], **serve)
        self.p = self._start(_spec(model, target, self._faults[0], peers=address), "dual-p")
        self.d: Server | None = None

    def start_d(self) -> None:
        self.d = self._start(self._d, "dual-d")

    def kill_d(self) -> None:
        if self.d is not None:
            self.d.kill()
            self.d = None

    def throttle(self) -> None:
        for control in self._faults:
            control.write_text(json.dumps({"bytes_per_s": LINK_BYTES_PER_S}))

    def stop(self) -> None:
        self.kill_d()
        self.p.stop()

    def _start(self, spec: ServerSpec, name: str) -> Server:
        with self._console.status(f"vllm serve, {name}"):
            return Server(spec, self._logs / f"{name}.log").wait_ready()


def _slot_bytes() -> int:
    return slot_stride_bytes(_CHUNK_BYTES)


def _spec(model: Path, target: Path, control: Path, **more: object) -> ServerSpec:
    chunk_tokens = _CHUNK_BYTES // _SHAPE.kv_bytes_per_token
    pool_bytes = 2 * PROMPTS * (PROMPT_TOKENS // chunk_tokens + 1) * _slot_bytes()
    extra = {
        "targets": [str(target / "pool")],
        "pool_bytes": pool_bytes,
        "chunk_bytes_min": _CHUNK_BYTES,
        "admission": "always",
        "prefetch_cache_share": 0.0,
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
        env={"VLLM_SERVER_DEV_MODE": "1", ALLOW_FAULTS: "1"},
    )


class Crowd:
    """The requests, and their answers when all was computed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        rng = np.random.default_rng(5)
        self._prompts = [random_tokens(rng, PROMPT_TOKENS, _SHAPE) for _ in range(PROMPTS)]
        self._right: list[Answer] = []

    def compute(self) -> list[float]:
        """Let the server compute and store all prompts; returns their times to first token."""
        self._right = asyncio.run(self._compute())
        return [answer.ttft_s for answer in self._right]

    def come(self, phase: Phase) -> None:
        """Return once, when nothing of it is in GPU memory any more."""
        answers, before, now = asyncio.run(self._return())
        phase.ttft_s += [answer.ttft_s for answer in answers]
        pairs = zip(answers, self._right, strict=True)
        phase.different += sum(answer.tokens != right.tokens for answer, right in pairs)
        phase.pulled_bytes += now.value(_PULLED) - before.value(_PULLED)
        phase.read_bytes += now.value(_READ) - before.value(_READ)

    async def _compute(self) -> list[Answer]:
        answers = []
        async with Client(self._server.url) as client:
            for prompt in self._prompts:
                answers.append(await client.complete(prompt, ANSWER_TOKENS))
                await client.settle()
        return answers

    async def _return(self) -> tuple[list[Answer], Metrics, Metrics]:
        async with Client(self._server.url) as client:
            if not await client.forget_gpu():
                raise OffloadError("the prefix cache cannot be reset")
            before = await client.counted()
            asked = (client.complete(prompt, ANSWER_TOKENS) for prompt in self._prompts)
            answers = [await one for one in asked]
            return answers, before, await client.counted()


def _with_d(pair: Pair, crowd: Crowd) -> None:
    """Start D, and let the crowd come until P has found it."""
    pair.start_d()
    for _ in range(_WAIT_ROUNDS_MAX):
        phase = Phase("")
        crowd.come(phase)
        if phase.pulled_share > 0.2:
            return
    raise OffloadError("nothing comes through D; see demo-logs/dual-p.log")


def _killing(pair: Pair, crowd: Crowd, phase: Phase) -> None:
    """Let the crowd come while D is killed again and again."""
    ended = threading.Event()

    def kill() -> None:
        for _ in range(KILLS):
            if pair.d is None:
                pair.start_d()
            ended.wait(KILL_AFTER_S)
            pair.kill_d()

    with ThreadPoolExecutor(1) as killer:
        kills = killer.submit(kill)
        try:
            while not kills.done():
                crowd.come(phase)
        finally:
            ended.set()
        kills.result()


def measure(console: Console, build: Path, target: Path) -> tuple[list[Phase], list[float]]:
    """Return the phases, and the times to first token of prompts that are computed."""
    both, one, killed = Phase("both paths"), Phase("one path"), Phase("D killed again and again")
    with ReservedPort() as port:
        pair = Pair(console, build, target, f"127.0.0.1:{port.number}")
        try:
            crowd = Crowd(pair.p)
            with console.status(f"computing {PROMPTS} prompts of {PROMPT_TOKENS} tokens"):
                computed = crowd.compute()
            pair.throttle()
            for number in range(ROUNDS):
                console.print(f"round {number + 1} of {ROUNDS}")
                _with_d(pair, crowd)
                crowd.come(both)
                pair.kill_d()
                crowd.come(one)
            console.print(f"killing D {KILLS} times")
            _with_d(pair, crowd)
            _killing(pair, crowd, killed)
        finally:
            pair.stop()
    return [one, both, killed], computed


def _show(console: Console, phases: Sequence[Phase], computed: Sequence[float]) -> None:
    table = Table("", "requests", "TTFT median", "slowest", "through D", "other tokens")
    slowest, median = max(computed), statistics.median(computed)
    table.add_row("computed", str(len(computed)), f"{median:.2f} s", f"{slowest:.2f} s", "", "")
    for one in phases:
        share, times = f"{one.pulled_share:.0%}", (one.median_s, max(one.ttft_s))
        shown = [f"{time_s:.2f} s" for time_s in times]
        table.add_row(one.name, str(len(one.ttft_s)), *shown, share, str(one.different))
    console.print(table)


def main(arguments: Sequence[str]) -> int:
    """Return 0 if all tokens were right and both paths fast enough, else 1."""
    console, build = Console(highlight=False), Path("build").resolve()
    build.mkdir(exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix="demo-dual-", dir=build))
    try:
        phases, computed = measure(console, build, target)
    except (OffloadError, httpx.HTTPError) as error:
        console.print("[red]demo failed:[/]", type(error).__name__, escape(str(error)))
        return 1
    finally:
        shutil.rmtree(target, ignore_errors=True)
    _show(console, phases, computed)
    ratio = phases[1].median_s / phases[0].median_s
    different = sum(phase.different for phase in phases)
    console.print(
        f"both paths take {ratio:.2f} of one at {LINK_BYTES_PER_S / 1e6:.0f} MB/s each (at most "
        f"{RATIO_MAX} is wanted); 0 failed requests; {different} answers with other tokens; "
        f"{os.cpu_count()} cores, {_SHAPE.kv_bytes_per_token / 1024:.0f} KiB of KV a token"
    )
    if arguments[:1] == ["--json"]:
        facts = {"ratio": ratio, "phases": [vars(one) for one in phases], "computed_s": computed}
        Path(arguments[1]).write_text(json.dumps(facts, indent=1))
    return int(bool(different) or ratio > RATIO_MAX)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
