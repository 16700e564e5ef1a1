# SPDX-License-Identifier: Apache-2.0
"""`bench stream`: this module runs all parts, and contains those that need `vllm serve`.

    load       one load of `sizes` × the CPU tier from a throttled pool, without vLLM (see `load`)
    prefetch   requests that wait in vLLM's queue, with their KV only in a throttled pool; arms on,
               off. The server runs one request at a time; each round sends the next prompts of a
               cycle at once. Case "turn": from the previous request's last token to the first
               token; case "total": the whole round
    admission  TTFT of returning prompts, one at a time, with the target throttled to
               `admission_mb_per_s`; arms auto, always (load), never (no offloading: recompute)

The servers run a small random model on vLLM's CPU engine, concurrently, and are used in turn.
`vllm-nvmeof demo` measures how long preempted requests take to resume.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.reports.stream import ARMS, Sample, throttle_name
from vllm_nvmeof_bench.results import dump
from vllm_nvmeof_bench.serve.fleet import serving
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS, OffloadSpec, ServerSpec, on_blocks
from vllm_nvmeof_bench.settings import recorded
from vllm_nvmeof_bench.stream.load import MB, Settings, measure_load
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.units import KIB, MIB

OnStep = Callable[[str], None]
Found = tuple[list[Sample], dict[str, Any]]

#: A small model: it takes about as long to compute 2,000 tokens as to read their KV, 8 MiB, at
#: about 20 MB/s, so both sides of this crossover can be measured quickly.
SHAPE = ModelShape(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2)
_CHUNK_BYTES = 512 * KIB
_READ_DEADLINE_MS = 60_000
#: Descriptions of measurements have at least this many parts; those of other steps fewer.
_MEASUREMENT_PARTS = 3
#: Tokens of each computed answer, with which later answers are compared.
_FIRST_TOKENS = 8


# -- shared by the parts with servers -----------------------------------------------------


@dataclass(frozen=True)
class ReturnPlan:
    """Prompts that are stored once and return in a cycle. They are too many for GPU and CPU memory,
    so that a returning prompt is only in the pool.

    arms: configuration keys of each arm's server; None: no offloading. count: number of prompts of
    `prompt_tokens`. tier_prompts: number of prompts that the CPU tier holds. sent_at_once: how many
    requests the client sends concurrently.
    """

    part: str
    arms: Mapping[str, Mapping[str, Any] | None]
    count: int
    tier_prompts: float
    prompt_tokens: int = 2000
    answer_tokens: int = 4
    sent_at_once: int = 1

    def prompts(self, seed: int) -> list[list[int]]:
        rng = np.random.default_rng([seed, 2000])
        return [random_tokens(rng, self.prompt_tokens, SHAPE) for _ in range(self.count)]

    def server(self, models: Path, home: Path, arm: str) -> ServerSpec:
        """Return an arm's server, whose GPU cache holds little more than one request."""
        needed = on_blocks(self.prompt_tokens + self.answer_tokens + 1)
        offload, keys = None, self.arms[arm]
        if keys is not None:
            prompt_bytes = self.prompt_tokens * SHAPE.kv_bytes_per_token
            offload = OffloadSpec.sized(
                math.ceil(self.tier_prompts * prompt_bytes / _CHUNK_BYTES),
                _CHUNK_BYTES,
                math.ceil(1.5 * self.count * prompt_bytes) + 16 * MIB,
                home / f"{self.part}-{arm}",
                read_deadline_ms=_READ_DEADLINE_MS,
                **keys,
            )
        return ServerSpec(
            model=make_model(models.resolve(), SHAPE),
            max_model_len=needed + BLOCK_TOKENS,
            gpu_blocks=needed * 5 // 4 // BLOCK_TOKENS,
            max_num_seqs=1,
            cores_reserved=0,
            offload=offload,
        )


@dataclass
class Agreement:
    """A count of answers to the same prompt that differ between arms. Batches of different shapes
    round differently, which can flip a near tie: then `different` is small, but not zero.
    """

    compared: int = 0
    different: int = 0
    _first: dict[str, Sequence[int]] = field(default_factory=dict)

    def add(self, name: str, answer: Answer) -> None:
        """Compare an answer with the first one of this name."""
        first = self._first.setdefault(name, answer.tokens)
        if first is not answer.tokens:
            self.compared += 1
            self.different += any(a != b for a, b in zip(first, answer.tokens, strict=False))

    def facts(self) -> dict[str, int]:
        return {"compared": self.compared, "different": self.different}


def _rows(times: Sequence[float], loaded_tokens: int, *common: Any) -> list[Sample]:
    """Return a sample per time. common: the values of the samples' first fields, part to round."""
    return [
        Sample(*common, number, round(seconds, 6), loaded_tokens=loaded_tokens)
        for number, seconds in enumerate(times)
    ]


# -- returning prompts --------------------------------------------------------------------

#: Only loads are compared here: no arm may choose to recompute instead.
PREFETCH = ReturnPlan(
    "prefetch",
    {
        "off": {"admission": "always", "ahead_cache_share": 0.0},
        "on": {"admission": "always"},
    },
    count=18,
    tier_prompts=8.2,
    answer_tokens=64,
    sent_at_once=6,
)
ADMISSION = ReturnPlan(
    "admission",
    {"never": None, "always": {"admission": "always"}, "auto": {"admission": "auto"}},
    count=12,
    tier_prompts=4.0,
)


class _Circle:
    """An arm's server, to which the plan's prompts are sent in a cycle."""

    def __init__(
        self, plan: ReturnPlan, arm: str, client: Client, seed: int, agreement: Agreement
    ) -> None:
        self.arm = arm
        self.client = client
        self.offloads = plan.arms[arm] is not None
        self._plan = plan
        self._agreement = agreement
        self._prompts = itertools.cycle(enumerate(plan.prompts(seed)))

    async def ask(self, count: int, tokens: int = 0) -> tuple[list[Answer], int]:
        """Send the next prompts; return the answers, and the mean of loaded tokens per prompt.

        tokens: tokens per answer; 0: as planned.
        """
        chosen = list(itertools.islice(self._prompts, count))
        turns = asyncio.Semaphore(self._plan.sent_at_once)

        async def send(prompt: list[int]) -> Answer:
            async with turns:
                return await self.client.complete(prompt, tokens or self._plan.answer_tokens)

        before = await self.client.hits()
        answers = await asyncio.gather(*(send(prompt) for _, prompt in chosen))
        hits = await self.client.hits() - before
        for (index, _), answer in zip(chosen, answers, strict=True):
            self._agreement.add(str(index), answer)
        return answers, round((hits.cpu + hits.pool) / count)


Batch = Callable[[_Circle, int, int], Coroutine[Any, Any, list[Sample]]]


def _measure_returns(
    plan: ReturnPlan, batch: Batch, rates: Sequence[int], settings: Settings, home: Path,
    on_step: OnStep,
) -> Found:  # fmt: skip
    """Measure returning prompts, with rates and arms in random order."""
    samples: list[Sample] = []
    agreement = Agreement()
    specs = {arm: plan.server(settings.models, home, arm) for arm in plan.arms}
    with Throttle(home) as throttle, serving(specs, home / "logs", on_step, {}) as fleet:
        circles = {
            arm: _Circle(plan, arm, client, settings.seed, agreement)
            for arm, client in fleet.clients.items()
        }
        for arm, circle in circles.items():
            on_step(f"{plan.part} · computing all prompts, {arm}")
            fleet.run(circle.ask(plan.count, min(_FIRST_TOKENS, plan.answer_tokens)))
            fleet.run(circle.client.settle())
            if circle.offloads:
                throttle.add_group(fleet.servers[arm].pid)
        for number in range(settings.server_rounds):
            dice = random.Random(f"{settings.seed} {number}")
            for place, rate in enumerate(dice.sample(rates, len(rates))):
                throttle.limit(read_bytes_per_s=rate * MB or None)
                for arm in fleet.shuffled(f"{settings.seed} {number} {rate}"):
                    if place and not circles[arm].offloads:
                        continue  # computing does not depend on the rate
                    name = throttle_name(rate)
                    on_step(f"{plan.part} · round {number + 1} · {name} · {arm}")
                    samples += fleet.run(batch(circles[arm], number, rate))
    return samples, {
        "throttle": throttle.kind,
        "prompts": plan.count,
        "prompt_tokens": plan.prompt_tokens,
        "answer_tokens": plan.answer_tokens,
        "tier_prompts": plan.tier_prompts,
        "kv_bytes_per_token": SHAPE.kv_bytes_per_token,
        "answers": agreement.facts(),
    }


def _measure_prefetch(settings: Settings, home: Path, on_step: OnStep) -> Found:
    prefetched: dict[str, int] = {}

    async def batch(circle: _Circle, number: int, rate: int) -> list[Sample]:
        answers, each = await circle.ask(PREFETCH.sent_at_once)
        metrics = await circle.client.metrics()
        prefetched[circle.arm] = int(metrics.value("vllm:nvmeof_prefetches_total"))
        ordered = sorted(answers, key=lambda answer: answer.times[0])
        turns = [b.times[0] - a.times[-1] for a, b in itertools.pairwise(ordered)]
        total = max(one.times[-1] for one in answers) - min(one.sent for one in answers)
        return [
            *_rows(turns, each, "prefetch", "turn", circle.arm, None, number),
            *_rows([total], each, "prefetch", "total", circle.arm, None, number),
        ]

    rates = (settings.prefetch_mb_per_s,)
    samples, facts = _measure_returns(PREFETCH, batch, rates, settings, home, on_step)
    return samples, {
        **facts,
        "read_mb_per_s": settings.prefetch_mb_per_s,
        "sent_at_once": PREFETCH.sent_at_once,
        "prefetched_chunks": prefetched,
    }


def _measure_admission(settings: Settings, home: Path, on_step: OnStep) -> Found:
    async def batch(circle: _Circle, number: int, rate: int) -> list[Sample]:
        await circle.ask(settings.warm_requests)  # lets the server learn the new rate
        answers, each = await circle.ask(settings.requests)
        at = rate if circle.offloads else None
        times = [one.ttft_s for one in answers]
        return _rows(times, each, "admission", "ttft", circle.arm, at, number)

    rates = settings.admission_mb_per_s
    return _measure_returns(ADMISSION, batch, rates, settings, home, on_step)


# -- the run ------------------------------------------------------------------------------

_PARTS = {
    "load": measure_load,
    "prefetch": _measure_prefetch,
    "admission": _measure_admission,
}


def steps(settings: Settings) -> int:
    """Return the number of measurements."""
    rounds = settings.server_rounds
    counts = {
        "load": settings.rounds * len(settings.cases) * len(ARMS["load"]),
        "prefetch": rounds * len(PREFETCH.arms),
        "admission": rounds * (1 + 2 * len(settings.admission_mb_per_s)),
    }
    return sum(counts[part] for part in settings.parts)


def run(
    settings: Settings,
    on_progress: OnProgress = unheard,
    on_part: Callable[[list[Sample], dict[str, Any]], None] = lambda samples, conditions: None,
) -> Found:
    """Measure in a new directory; return samples and conditions.

    on_part: called with both after each part, so that a failing part loses no earlier results.

    Raises:
        BenchError: there is too little space, or a transfer failed.
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
            found, facts = _PARTS[part](settings, home, on_step)
            samples += found
            conditions["parts"][part] = facts
            conditions["load_average_at_end"] = load_average()
            on_part(samples, conditions)
        on_progress(total, total, "done")
        return samples, conditions


def _measure(settings: Settings, json_path: Path) -> None:
    def is_logged(what: str) -> bool:
        """Return whether to log a step; single loads are left out."""
        return not what.startswith("load") or what.count(" · ") < _MEASUREMENT_PARTS

    with progress(is_logged) as on_progress:
        run(settings, on_progress, lambda *found: dump(json_path, "stream", *found))


COMMANDS = (
    Command(
        "stream",
        "Measure loads larger than the CPU tier, prefetch and admission.\n\n"
        "A control group throttles the disk, which usually requires root. The part load takes 3 "
        "minutes. The others start vllm serve on the CPU with a small random model, five times in "
        "all, and take 10 minutes. Disk space is freed at the end.",
        Settings,
        _measure,
    ),
)
