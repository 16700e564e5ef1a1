# SPDX-License-Identifier: Apache-2.0
"""`bench stream`: its parts one after the other; here are those that run `vllm serve`.

    load       one load of `sizes` × the CPU tier from a throttled pool, without vLLM (see `load`):
                 ours       one LoadCommand: streamed, with as many landings as the manager has
                 read       the bare I/O engine reads and checks the same chunks, no copy
                 copy       the bare copy engine moves as many bytes from cache slots
                 two_phase  all chunks into the CPU tier first, then from there; beyond the
                            tier in rounds of one tier (vLLM's tiering would report a miss)
               case "memory": copies as fast as memory is; "paced": as slow as the target, as
               with a DMA engine that takes no CPU: only the overlap reaches the ratio
    resume     a crowd that preempts: from room to the next token; arms reload, recompute.
               `demo.workload.resume_times_s` defines the time that a client can see
    prefetch   requests that wait in vLLM's queue, their KV only in a throttled pool; arms on,
               off. The server runs one request at a time; in each round the next prompts of a
               circle are sent at once. Case "turn": from the last token of the request before to
               the first token; case "total": of the whole round
    admission  prompts that return, one at a time, while the target is throttled to
               `admission_mb_per_s`: time to first token; arms auto, always (load), never (no
               offloading: recompute). The three servers run side by side and are asked in turn

The servers have a small random model on vLLM's CPU engine. Resume and prefetch run one server at
a time, so their arms follow each other; within a server everything runs round by round.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.demo.workload import Plan, offload_spec, run_crowd, server_spec
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import OffloadSpec, Server, ServerSpec
from vllm_nvmeof_bench.settings import recorded
from vllm_nvmeof_bench.stream.load import MB, Settings, load_steps, measure_load
from vllm_nvmeof_bench.stream.report import Sample, throttle_name
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes

OnStep = Callable[[str], None]
Found = tuple[list[Sample], dict[str, Any]]

#: A small model: computing 2,000 of its tokens takes about as long as reading their KV, 8 MiB,
#: at some 20 MB/s, so that both sides of that crossover are measured in little time.
SHAPE = ModelShape(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2)
_BLOCK_TOKENS = 32
_CHUNK_BYTES = 512 * KIB
_STREAM_SLOTS = 16
_READ_DEADLINE_MS = 60_000
_SETTLE_S_MAX = 60.0
_SETTLE_PAUSE_S = 0.1
_NUDGE = [5, 6, 7]
#: Measurements' names have so many parts and more; fewer: a step between measurements.
_MEASUREMENT_PARTS = 3
_AT_ONCE = 6
#: Tokens of the computed answers that answers with loaded KV are compared with.
_FIRST_TOKENS = 8


# -- shared by the parts with servers -----------------------------------------------------


@dataclass(frozen=True)
class ReturnPlan:
    """Prompts that are stored once and return in a circle, too many for GPU and CPU memory, so
    that a returning prompt is only in the pool.

    count: prompts of `prompt_tokens`. tier_prompts: how many of them the CPU tier holds.
    """

    count: int
    tier_prompts: float
    prompt_tokens: int = 2000
    answer_tokens: int = 4
    max_num_seqs: int = 1

    def prompts(self, seed: int) -> list[list[int]]:
        rng = np.random.default_rng([seed, 2000])
        return [random_tokens(rng, self.prompt_tokens, SHAPE) for _ in range(self.count)]

    def server(
        self, models: Path, target: Path | None, extra: Mapping[str, Any] | None = None
    ) -> ServerSpec:
        """Without offloading, or with a pool in `target` and the keys of `extra`; the GPU cache
        holds little more than one request."""
        blocks = math.ceil((self.prompt_tokens + self.answer_tokens + 1) / _BLOCK_TOKENS)
        offload = None
        if target is not None:
            prompt_bytes = self.prompt_tokens * SHAPE.kv_bytes_per_token
            slots = math.ceil(self.tier_prompts * prompt_bytes / _CHUNK_BYTES) + _STREAM_SLOTS
            settings = {
                "targets": [str(target)],
                "pool_bytes": math.ceil(1.5 * self.count * prompt_bytes) + 16 * MIB,
                "chunk_bytes_min": _CHUNK_BYTES,
                "stream_slots": _STREAM_SLOTS,
                "read_deadline_ms": _READ_DEADLINE_MS,
            }
            size_gib = slots * slot_stride_bytes(_CHUNK_BYTES) / GIB
            offload = OffloadSpec(size_gib, {**settings, **(extra or {})})
        return ServerSpec(
            model=make_model(models.resolve(), SHAPE),
            max_model_len=(blocks + 1) * _BLOCK_TOKENS,
            gpu_blocks=blocks + blocks // 4,
            block_size=_BLOCK_TOKENS,
            max_num_seqs=self.max_num_seqs,
            cores_reserved=0,
            offload=offload,
        )

    def facts(self, throttle: str, agreement: Agreement) -> dict[str, Any]:
        """For the conditions."""
        return {
            "throttle": throttle,
            "prompts": self.count,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "tier_prompts": self.tier_prompts,
            "kv_bytes_per_token": SHAPE.kv_bytes_per_token,
            "answers": agreement.facts(),
        }


@dataclass
class Agreement:
    """Whether every arm answers a prompt with the same tokens. A batch of another shape rounds
    differently, which can flip a near tie: `different` is then small, and reported.
    """

    compared: int = 0
    different: int = 0
    _first: dict[str, Sequence[int]] = field(default_factory=dict)

    def add(self, name: str, answer: Answer) -> None:
        """Compare with the first answer of this name."""
        first = self._first.setdefault(name, answer.tokens)
        if first is not answer.tokens:
            length = min(len(first), len(answer.tokens))
            self.compared += 1
            self.different += list(first[:length]) != list(answer.tokens[:length])

    def facts(self) -> dict[str, int]:
        return {"compared": self.compared, "different": self.different}


@contextmanager
def _served(spec: ServerSpec, name: str, home: Path, on_step: OnStep) -> Iterator[Server]:
    """A server that answers.

    Raises:
        ServerError: it did not start, with the end of its output.
    """
    on_step(f"{name} · starting a server")
    with Server(spec, home / "logs" / f"{name.replace(' ', '-')}.log") as server:
        yield server.wait_ready()


async def _settle(client: Client, offloads: bool) -> None:
    """Wait until the pool has everything; a short request makes vLLM publish its gauges.

    Raises:
        BenchError: writes are still pending after `_SETTLE_S_MAX`.
    """
    pending = ("vllm:nvmeof_writes_pending", "vllm:nvmeof_write_backlog")
    deadline = time.monotonic() + _SETTLE_S_MAX
    while True:
        await client.complete(_NUDGE, 2)
        if not offloads:
            return
        now = await client.metrics()
        if all(now.has(name) and now.value(name) == 0 for name in pending):
            return
        if time.monotonic() > deadline:
            raise BenchError(f"writes to the pool were still pending after {_SETTLE_S_MAX:.0f} s")
        await asyncio.sleep(_SETTLE_PAUSE_S)


async def _loaded_tokens(client: Client) -> int:
    """Tokens loaded so far, by the server's own counters; a short request publishes them."""
    await client.complete(_NUDGE, 2)
    return int((await client.metrics()).value("vllm:nvmeof_loaded_tokens_total"))


def _rows(
    part: str, case: str, arm: str, number: int, times: Sequence[float], loaded: int
) -> list[Sample]:
    """One sample per time."""
    return [
        Sample(part, case, arm, None, number, i, round(seconds, 6), loaded_tokens=loaded)
        for i, seconds in enumerate(times)
    ]


# -- resume -------------------------------------------------------------------------------

_RESUME_ARMS = ("recompute", "reload")


def _measure_resume(settings: Settings, home: Path, on_step: OnStep) -> Found:
    """The demo's crowd, with another seed in each round and the same on both servers.

    Raises:
        BenchError: a crowd was not preempted.
    """
    plan, shape = Plan(), ModelShape()
    plain = server_spec(plan, make_model(settings.models.resolve(), shape))
    samples: list[Sample] = []
    preemptions = dict.fromkeys(_RESUME_ARMS, 0)
    agreement = Agreement()

    async def crowds(server: Server, arm: str) -> list[Sample]:
        found: list[Sample] = []
        async with Client(server.url) as client:
            await client.complete(_NUDGE, 4)  # takes the costs of a first request
            for number in range(settings.server_rounds):
                on_step(f"resume · round {number + 1} · a crowd that preempts · {arm}")
                crowd = replace(plan.crowd, seed=plan.crowd.seed + 100 * settings.seed + number)
                before = await client.metrics()
                result = await run_crowd(client, replace(plan, crowd=crowd), shape)
                name = "vllm:nvmeof_reloaded_tokens_total"
                grown = (await client.metrics()).value(name) - before.value(name)
                each = round(grown / max(1, result.preemptions))
                preemptions[arm] += result.preemptions
                for index, answer in enumerate(result.answers):
                    agreement.add(f"{number} {index}", answer)
                found += _rows("resume", "crowd", arm, number, result.resumes_s, each)
        return found

    for arm in _RESUME_ARMS:
        offload = offload_spec(plan, shape, home / "resume-pool") if arm == "reload" else None
        with _served(replace(plain, offload=offload), f"resume {arm}", home, on_step) as server:
            found = asyncio.run(crowds(server, arm))
        if not found:
            raise BenchError(f"resume, {arm}: no preemption that a client can see")
        samples += found
    return samples, {
        "preemptions": preemptions,
        "requests": plan.crowd.count,
        "prompt_tokens": plan.crowd.prompt_tokens,
        "gpu_tokens": plan.gpu_tokens,
        "hidden": shape.hidden,
        "layers": shape.layers,
        "answers": agreement.facts(),
    }


# -- prefetch -----------------------------------------------------------------------------

_PREFETCH_PLAN = ReturnPlan(count=18, tier_prompts=8.2, answer_tokens=64)
#: Only loads are compared here: no arm may find that recomputing is faster.
_PREFETCH_ARMS: dict[str, dict[str, Any]] = {
    "off": {"admission": "always", "prefetch_cache_share": 0.0, "reload_cache_share": 0.0},
    "on": {"admission": "always"},
}


def _measure_prefetch(settings: Settings, home: Path, on_step: OnStep) -> Found:
    plan = _PREFETCH_PLAN
    prompts = plan.prompts(settings.seed)
    samples: list[Sample] = []
    agreement = Agreement()
    prefetched: dict[str, int] = {}

    async def rounds(server: Server, throttle: Throttle, arm: str) -> None:
        async with Client(server.url) as client:
            on_step(f"prefetch · computing everything once, {arm}")
            for index, prompt in enumerate(prompts):
                agreement.add(str(index), await client.complete(prompt, _FIRST_TOKENS))
            await _settle(client, offloads=True)
            throttle.add_group(server.pid)
            throttle.limit(read_bytes_per_s=settings.prefetch_mb_per_s * MB)
            for number in range(settings.server_rounds):
                on_step(f"prefetch · round {number + 1} · {_AT_ONCE} requests at once · {arm}")
                chosen = [(number * _AT_ONCE + i) % len(prompts) for i in range(_AT_ONCE)]
                before = await _loaded_tokens(client)
                sent = (client.complete(prompts[i], plan.answer_tokens) for i in chosen)
                answers = await asyncio.gather(*sent)
                each = round((await _loaded_tokens(client) - before) / _AT_ONCE)
                for index, answer in zip(chosen, answers, strict=True):
                    agreement.add(str(index), answer)
                ordered = sorted(answers, key=lambda answer: answer.times[0])
                pairs = itertools.pairwise(ordered)
                turns = [right.times[0] - left.times[-1] for left, right in pairs]
                total = max(one.times[-1] for one in answers) - min(one.sent for one in answers)
                samples.extend(_rows("prefetch", "turn", arm, number, turns, each))
                samples.extend(_rows("prefetch", "total", arm, number, [total], each))
            metrics = await client.metrics()
            prefetched[arm] = int(metrics.value("vllm:nvmeof_prefetches_total"))

    for arm, keys in _PREFETCH_ARMS.items():
        spec = plan.server(settings.models, home / f"prefetch-{arm}", keys)
        name = f"prefetch {arm}"
        with Throttle(home) as throttle, _served(spec, name, home, on_step) as server:
            asyncio.run(rounds(server, throttle, arm))
    return samples, {
        **plan.facts(throttle.kind, agreement),
        "read_mb_per_s": settings.prefetch_mb_per_s,
        "sent_at_once": _AT_ONCE,
        "prefetched_chunks": prefetched,
    }


# -- admission ----------------------------------------------------------------------------

_ADMISSION_PLAN = ReturnPlan(count=12, tier_prompts=4.0)
_ADMISSION_ARMS: dict[str, dict[str, Any] | None] = {
    "never": None,
    "always": {"admission": "always"},
    "auto": {"admission": "auto"},
}


def _measure_admission(settings: Settings, home: Path, on_step: OnStep) -> Found:
    """The order of the rates is drawn from the seed. At each rate, in each round, a server first
    gets some requests that are not kept, to learn that the rate has changed."""
    samples: list[Sample] = []
    agreement = Agreement()

    async def measure() -> None:
        for arm in arms:
            on_step(f"admission · computing everything once, {arm.name}")
            await arm.prepare(throttle)
        for number in range(settings.server_rounds):
            dice = random.Random(f"{settings.seed} {number}")
            rates = dice.sample(settings.admission_mb_per_s, len(settings.admission_mb_per_s))
            for place, rate in enumerate(rates):
                throttle.limit(read_bytes_per_s=rate * MB or None)
                for arm in dice.sample(arms, len(arms)):
                    if arm.offloads or not place:  # computing does not depend on the rate
                        name = throttle_name(rate)
                        on_step(f"admission · round {number + 1} · {name} · {arm.name}")
                        samples.extend(await arm.batch(number, rate if arm.offloads else None))

    with ExitStack() as running:
        throttle = running.enter_context(Throttle(home))
        arms = []
        for name, extra in _ADMISSION_ARMS.items():
            target = None if extra is None else home / f"admission-{name}"
            spec = _ADMISSION_PLAN.server(settings.models, target, extra)
            server = running.enter_context(_served(spec, f"admission {name}", home, on_step))
            arms.append(_AdmissionArm(server, name, settings, agreement))
        asyncio.run(measure())
        return samples, _ADMISSION_PLAN.facts(throttle.kind, agreement)


class _AdmissionArm:
    """One server, and its position in the circle of prompts."""

    def __init__(self, server: Server, name: str, settings: Settings, agreement: Agreement) -> None:
        self.name = name
        self.offloads = name != "never"
        self._server = server
        self._settings = settings
        self._agreement = agreement
        self._circle = itertools.cycle(enumerate(_ADMISSION_PLAN.prompts(settings.seed)))

    async def prepare(self, throttle: Throttle) -> None:
        """Compute and store everything once."""
        async with Client(self._server.url) as client:
            for _ in range(_ADMISSION_PLAN.count):
                await self._ask(client)
            await _settle(client, self.offloads)
        if self.offloads:
            throttle.add_group(self._server.pid)

    async def batch(self, number: int, at: float | None) -> list[Sample]:
        """Requests at one rate; the first of them are not kept."""
        async with Client(self._server.url) as client:
            for _ in range(self._settings.warm_requests):
                await self._ask(client)
            before = await _loaded_tokens(client)
            times = [await self._ask(client) for _ in range(self._settings.requests)]
            each = round((await _loaded_tokens(client) - before) / len(times))
        rows = _rows("admission", "ttft", self.name, number, times, each)
        return [replace(row, at=at) for row in rows]

    async def _ask(self, client: Client) -> float:
        """Send the next prompt of the circle; return the seconds to its first token."""
        index, prompt = next(self._circle)
        answer = await client.complete(prompt, _ADMISSION_PLAN.answer_tokens)
        self._agreement.add(str(index), answer)
        return answer.ttft_s


# -- the run ------------------------------------------------------------------------------

_PARTS: dict[str, tuple[Callable[[Settings, Path, OnStep], Found], Callable[[Settings], int]]] = {
    "load": (measure_load, load_steps),
    "resume": (_measure_resume, lambda one: one.server_rounds * len(_RESUME_ARMS)),
    "prefetch": (_measure_prefetch, lambda one: one.server_rounds * len(_PREFETCH_ARMS)),
    "admission": (
        _measure_admission,
        lambda one: one.server_rounds * (1 + 2 * len(one.admission_mb_per_s)),
    ),
}


def steps(settings: Settings) -> int:
    """The number of measurements."""
    return sum(_PARTS[part][1](settings) for part in settings.parts)


def run(
    settings: Settings,
    on_progress: OnProgress = unheard,
    on_part: Callable[[list[Sample], dict[str, Any]], None] = lambda samples, conditions: None,
) -> Found:
    """Measure in a new directory, which is deleted at the end; return samples and conditions.

    on_part: gets all of that after each part, so that a later part that fails loses only itself.

    Raises:
        BenchError: too little space, or a transfer failed.
        OffloadError: this machine cannot throttle, or a server or a request failed.
    """
    with home_in(settings.directory, settings.disk_bytes_max) as home:
        conditions = {**at_start(home), "settings": recorded(settings), "parts": {}}
        samples: list[Sample] = []
        total, done = steps(settings), 0

        def on_step(what: str) -> None:
            nonlocal done
            on_progress(done, total, what)
            done += what.count(" · ") >= _MEASUREMENT_PARTS

        for part in settings.parts:
            found, facts = _PARTS[part][0](settings, home, on_step)
            samples += found
            conditions["parts"][part] = facts
            conditions["load_average_at_end"] = load_average()
            on_part(samples, conditions)
        on_progress(total, total, "done")
        return samples, conditions


def _measure(settings: Settings, json_path: Path) -> None:
    def is_logged(what: str) -> bool:
        """A log gets no line per load."""
        return not what.startswith("load") or what.count(" · ") < _MEASUREMENT_PARTS

    with progress(is_logged) as on_progress:
        run(settings, on_progress, lambda *found: dump(json_path, "stream", *found))


COMMANDS = (
    Command(
        "stream",
        "Measure loads larger than the CPU tier, resumes after preemption, prefetch, admission.\n\n"
        "A control group throttles the disk, which mostly requires root. The part load takes 3 "
        "minutes; the others start vllm serve on the CPU with a small random model, seven times in "
        "all, and take 10. The disk is left as it was.",
        Settings,
        _measure,
    ),
)
