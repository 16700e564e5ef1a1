# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-nvmeof try`, which uses the client from vllm_nvmeof_bench."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from vllm_nvmeof_bench.servers.client import NUDGE, Answer, Client, Hits

from vllm_nvmeof_offload.commands import print_json
from vllm_nvmeof_offload.commands.scrape import Metrics, scrape_ours
from vllm_nvmeof_offload.commands.top import PLACES, growth
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.metrics import PREFIX
from vllm_nvmeof_offload.units import human_seconds, printable

_SYLLABLES = list(map("".join, product("bdfgklmnprstvz", "aeiou")))
_ANSWER_TOKENS = 16
#: The number of simultaneous requests that fill a step but leave room for other requests.
_FLOODING = 4


@dataclass
class Tried:
    """The result. `tokens` are the tokens of the second prompt, by source."""

    url: str
    model: str
    prompt_tokens: int
    first_ttft_s: float
    emptied: str = ""
    second_ttft_s: float | None = None
    second_id: str = ""
    tokens: dict[str, int] = field(default_factory=dict)
    same_answer: bool | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def proved(self) -> bool:
        loaded = sum(
            count for name, count in self.tokens.items() if name not in ("gpu", "computed")
        )
        return bool(self.same_answer) and loaded > 0

    @property
    def compared(self) -> str:
        assert self.second_ttft_s is not None
        faster = self.first_ttft_s / self.second_ttft_s
        if faster < 0.95:
            return f"slower: {1 / faster:.1f} times as long"
        return f"{faster:.1f} times as fast"


def run(url: str, model: str | None, tokens: int, api_key: str | None, as_json: bool) -> int:
    """Try the server at `url`, print the result and return the exit code. Raises OffloadError."""

    async def work() -> Tried:
        console = Console(stderr=True)
        columns = ("{task.description}", BarColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        async with Client(url, model=model or "", api_key=api_key) as client:
            with bar:
                task = bar.add_task("")
                return await _try(client, start, url, tokens, functools.partial(bar.update, task))

    url = url.rstrip("/").removesuffix("/v1")
    start = scrape_ours(url)
    tried = asyncio.run(work())
    if as_json:
        print_json({**asdict(tried), "proved": tried.proved})
    else:
        _print(tried)
    return 0 if tried.proved else 1


async def _try(
    client: Client, start: Metrics, url: str, tokens: int, progress: Callable[..., None]
) -> Tried:
    prompt = _words(tokens)
    progress(description="first time", total=None)
    first = await _ask(client, prompt, tokens)
    tried = Tried(url, await client.model(), first.tokens_in, first.ttft_s)
    if running := start.value("vllm:num_requests_running"):
        tried.warnings.append(f"{running:.0f} other requests were running and affect the times")
    progress(description="writing to the pool")
    await client.settle()
    now = scrape_ours(url)
    if not _grown(start, now, "stored_chunks"):
        reasons = (
            ", ".join(_grown(start, now, "unstored_chunks")) or "it may be shorter than a chunk"
        )
        tried.warnings.append(f"the prompt was not stored: {reasons}")
        return tried
    tried.emptied = "emptied by /reset_prefix_cache"
    if not await client.forget_gpu():
        tried.emptied = await _flood(client, tokens, now, progress)
    before = await client.counted()
    progress(description="second time", total=None)
    second = await _ask(client, prompt, tokens)
    after = await client.counted()
    hits = Hits.of(after) - Hits.of(before)
    found = {"gpu": hits.gpu, "cpu": hits.cpu, "pool": hits.pool, "shared": hits.shared}
    tried.tokens = {**found, "computed": max(0, second.tokens_in - sum(found.values()))}
    tried.second_ttft_s, tried.same_answer = second.ttft_s, second.same(first)
    tried.second_id = second.id
    if (others := hits.prompt - second.tokens_in - len(NUDGE)) > 0:
        tried.warnings.append(f"{others:,} prompt tokens of other requests may be counted too")
    for reason, count in _grown(before, after, "recomputed_tokens").items():
        tried.warnings.append(f"{count:,.0f} tokens were found but recomputed: {reason}")
    return tried


async def _ask(
    client: Client, prompt: str, tokens: int, answer_tokens: int = _ANSWER_TOKENS
) -> Answer:
    answer = await client.attempt(prompt, answer_tokens, prompt_tokens_max=tokens)
    if answer.failure:
        why = printable(answer.failure)
        raise OffloadError(f"the server did not answer a prompt of {tokens} tokens: {why}")
    return answer


async def _flood(client: Client, tokens: int, now: Metrics, progress: Callable[..., None]) -> str:
    """Send other prompts until the GPU's cache must have evicted our prompt. Raises OffloadError if
    the size of the cache is unknown, or if the tiers would evict the prompt too."""
    gpu = 0
    for labels, _ in now.samples("vllm:cache_config_info"):
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        gpu += int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
    room = max(now.value(f"{PREFIX}capacity_tokens", tier=tier) for tier in ("cpu", "pool"))
    sent, needed = 0, gpu + tokens
    left = math.ceil(needed / tokens)
    if not gpu or room < needed + tokens:
        why = f"it holds {gpu:,} tokens, too many for the larger tier ({room:,.0f})"
        if not gpu:
            why = "its size is unknown: vllm:cache_config_info has no num_gpu_blocks"
        raise OffloadError(
            "the GPU's cache can be emptied neither by /reset_prefix_cache (start the server with "
            f"VLLM_SERVER_DEV_MODE=1) nor by other prompts: {why}"
        )
    while left:
        progress(description="replacing the GPU's content", completed=sent, total=needed)
        count = min(_FLOODING, left)
        left -= count
        asked = (_ask(client, _words(tokens), tokens, 1) for _ in range(count))
        sent += sum(answer.tokens_in for answer in await asyncio.gather(*asked))
    await client.settle()
    return f"flooded with {sent:,} tokens of other prompts"


def _grown(before: Metrics, now: Metrics, name: str) -> dict[str, float]:
    """Return the growth of one of our counters, by its label `reason` ("" if it has none)."""
    grown = {}
    for labels, value in now.samples(f"{PREFIX}{name}_total"):
        more = growth(before.value(f"{PREFIX}{name}_total", **labels), value)
        if more:
            grown[labels.get("reason", "")] = more
    return grown


def _words(count: int) -> str:
    draw = random.SystemRandom().choices(_SYLLABLES, k=2 * count)
    return " ".join(map("".join, zip(draw[::2], draw[1::2], strict=True)))


def _print(tried: Tried) -> None:
    rows = {
        "prompt": f"{tried.prompt_tokens:,} tokens, model {tried.model}",
        "first time": f"first token after {human_seconds(tried.first_ttft_s)}",
        "GPU cache": tried.emptied or "not emptied",
    }
    if tried.second_ttft_s is not None:
        took = human_seconds(tried.second_ttft_s)
        rows["second time"] = f"first token after {took}, {tried.compared}"
        places = (f"{PLACES[source]} {count:,}" for source, count in tried.tokens.items())
        rows["tokens from"] = ", ".join(places)
        rows["answers"] = "the same" if tried.same_answer else "different"
    rows["result"] = "loaded from a tier" if tried.proved else "NOT PROVED"
    if tried.second_id:  # not `--last`: later requests updated the counters
        rows["details"] = f"vllm-nvmeof explain {shlex.quote(tried.second_id)}"
    for name, text in rows.items():
        typer.echo(f"{name:12} {printable(text)}")
    for warning in tried.warnings:
        typer.echo(f"warning: {printable(warning)}", err=True)
