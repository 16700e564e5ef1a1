# SPDX-License-Identifier: Apache-2.0
"""A client of the OpenAI HTTP API, as a user's would be, and a reader of `/metrics`.

Prompts are sent as token ids, and answers come back as token ids with log-probabilities, so
that two servers can be compared token by token.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from vllm_nvmeof_bench.servers.server import MODEL_NAME
from vllm_nvmeof_offload.errors import OffloadError


class ClientError(OffloadError):
    """The server refused a request or ended it early."""


@dataclass
class Answer:
    """One streamed answer. Times are `time.perf_counter()` seconds.

    tokens, logprobs, gaps: per generated token its id, its log-probability, and how far the
    runner-up's is below it. times: when each token arrived.
    """

    sent: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.times[0] - self.sent


class Metrics:
    """One reading of the server's counters and gauges."""

    _LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$")
    _LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            match = self._LINE.match(line)
            if match is not None and not line.startswith("#"):
                labels = dict(self._LABEL.findall(match.group(2) or ""))
                self._samples.setdefault(match.group(1), []).append((labels, float(match.group(3))))

    def has(self, name: str) -> bool:
        """Whether the server exports `name` at all."""
        return name in self._samples

    def names(self, prefix: str) -> list[str]:
        """Return the exported names that begin with `prefix`."""
        return sorted(n for n in self._samples if n.startswith(prefix))

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of `name` over all samples that carry `labels`; 0 if there is none."""
        return sum(
            value
            for have, value in self._samples.get(name, [])
            if all(have.get(k) == v for k, v in labels.items())
        )


class Client:
    """An asynchronous client of one server."""

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout_s, limits=limits, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        cache_salt: str | None = None,
        replica: int | None = None,
    ) -> Answer:
        """Stream a greedy answer of exactly `max_tokens` tokens to `prompt`.

        cache_salt: requests of one salt share KV. replica: the data-parallel one that answers.

        Raises:
            ClientError: the server refused the request, or the answer is not whole.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 2,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        answer = Answer(sent=time.perf_counter())
        call = self._http.stream("POST", "/v1/completions", json=body, headers=headers)
        async with call as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise ClientError(f"HTTP {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(answer, json.loads(line[6:]), time.perf_counter())
        if len(answer.tokens) != max_tokens:
            raise ClientError(f"{len(answer.tokens)} of {max_tokens} tokens came")
        return answer

    async def metrics(self) -> Metrics:
        """Read `/metrics`."""
        response = await self._http.get("/metrics")
        response.raise_for_status()
        return Metrics(response.text)

    async def reset_prefix_cache(self) -> None:
        """Drop the GPU prefix cache (the server must run in vLLM's development mode)."""
        (await self._http.post("/reset_prefix_cache")).raise_for_status()


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Add one streamed event to the answer.

    Raises:
        ClientError: the server reports an error in the stream.
    """
    if "error" in event:
        raise ClientError(str(event["error"]))
    for choice in event.get("choices", []):
        ids = choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        answer.tokens += ids
        answer.times += [now] * len(ids)
        # JSON has no NaN; a model that computes one (wrong KV does that) gives null.
        answer.logprobs += [
            float("nan") if p is None else p for p in logprobs.get("token_logprobs", [])
        ]
        for top in logprobs.get("top_logprobs", []):
            best = sorted((p for p in top.values() if p is not None), reverse=True)
            answer.gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))
