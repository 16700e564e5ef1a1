# SPDX-License-Identifier: Apache-2.0
"""A lean client: it shares the cores with the server, so it parses no more than it must."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.server import MODEL_NAME

__all__ = ["Client", "Timed"]

_TIMEOUT_S = 300.0
_ERROR = 'data: {"error"'


@dataclass(frozen=True)
class Timed:
    """When requests sent at the same time got their first tokens (median), and the last one."""

    ttft_s: float
    seconds: float


class Client:
    """An asynchronous client of one server; made and used inside one event loop."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Timed:
        """Send all prompts at once; each gets exactly `answer_tokens`, greedily.

        Raises:
            BenchError: a request was refused, or an answer is not whole.
        """
        bodies = [_body(prompt, answer_tokens) for prompt in prompts]
        start_s = time.perf_counter()
        times = await asyncio.gather(*(self._stream(body, answer_tokens) for body in bodies))
        return Timed(
            ttft_s=statistics.median(first for first, _ in times) - start_s,
            seconds=max(last for _, last in times) - start_s,
        )

    async def metrics(self) -> Metrics:
        try:
            response = await self._http.get("/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise BenchError(f"a server's /metrics failed: {error!r}") from None
        return Metrics(response.text)

    async def _stream(self, body: bytes, answer_tokens: int) -> tuple[float, float]:
        """Return when the first and the last token came (perf_counter seconds)."""
        first_s = last_s = 0.0
        usage = ""
        try:
            async with self._http.stream(
                "POST", "/v1/completions", content=body, headers=_HEADERS
            ) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise BenchError(f"a server answered {response.status_code}: {text[:300]}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if line.startswith(_ERROR):
                        raise BenchError(f"a server failed a request: {line[:300]}")
                    if '"choices":[]' in line:
                        usage = line  # the last event: counts, no token
                        continue
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
        except httpx.HTTPError as error:
            raise BenchError(f"a request failed: {error!r}") from None
        came = json.loads(usage[6:])["usage"]["completion_tokens"] if usage else 0
        if came != answer_tokens or not first_s:
            seen = "" if first_s else ", none of them seen"
            raise BenchError(f"{came} of {answer_tokens} tokens came{seen}")
        return first_s, last_s


_HEADERS = {"content-type": "application/json"}


def _body(prompt: Sequence[int], answer_tokens: int) -> bytes:
    return json.dumps(
        {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
