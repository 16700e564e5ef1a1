# SPDX-License-Identifier: Apache-2.0
"""A client of any OpenAI-compatible server: streamed completions, timed; failures are answers.

It shares the cores with servers that are started here, so it does little per token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.serve.hits import Hits
from vllm_nvmeof_bench.servers.client import Metrics

__all__ = ["Client", "Reply"]

_CONNECTIONS_MAX = 256
_FORGET_TRIES_MAX = 600
_PAUSE_S = 0.1
_SETTLE_S_MAX = 90.0
#: Work behind the last answer, by name of a gauge: ours, and of vLLM's tiering.
_BUSY = (
    "vllm:nvmeof_writes_pending",
    "vllm:nvmeof_write_backlog",
    "vllm:kv_offload_tiering_active_cascade_jobs",
    "vllm:kv_offload_tiering_active_promotion_jobs",
)
_FAILURE_MAX = 300


@dataclass(frozen=True)
class Reply:
    """One request's end. Seconds are from sending it; sent_s is `time.perf_counter()`.

    ttft_s: to the first token, None if none came. end_s: to the last byte, or to the failure.
    tokens_in, tokens_out: as the server counts them, else as we do. tokens: ids of the answer,
    where the server tells them. failure: None, or why the answer is not whole.
    """

    sent_s: float
    ttft_s: float | None
    end_s: float
    tokens_in: int
    tokens_out: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    failure: str | None = None


class Client:
    """Of one server; made, used and closed inside one event loop.

    model: the name to ask for; None: the first that the server lists.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=_CONNECTIONS_MAX)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout_s, trust_env=False, limits=limits, headers=headers
        )
        self._model = model

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The model's name, asked for once.

        Raises:
            BenchError: the server does not answer, or lists none.
        """
        if self._model is None:
            try:
                response = await self._http.get("/v1/models")
                response.raise_for_status()
                self._model = str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                raise BenchError(f"{self._http.base_url}: no list of models: {error!r}") from None
        return self._model

    async def complete(
        self, prompt: Sequence[int] | str, answer_tokens: int, cache_salt: str | None = None
    ) -> Reply:
        """Stream a greedy answer of exactly `answer_tokens` tokens; never raises for a failure."""
        body: dict[str, Any] = {
            "model": await self.model(),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        content = json.dumps(body).encode()
        answer = _Answer(time.perf_counter())
        failure = None
        try:
            async with self._http.stream("POST", "/v1/completions", content=content) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    failure = f"HTTP {response.status_code}: {text[:_FAILURE_MAX]}"
                else:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            failure = failure or answer.take(line)
        except (httpx.HTTPError, ValueError) as error:
            failure = repr(error)[:_FAILURE_MAX]
        return answer.reply(failure, answer_tokens)

    async def metrics(self) -> Metrics | None:
        """What `/metrics` has; None where there is none."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        return Metrics(response.text) if response.status_code == httpx.codes.OK else None

    async def hits(self, nudge: Sequence[int] | None = None) -> Hits:
        """Prompt tokens so far, by where their KV came from; zeros where it is not told.

        nudge: a short prompt to ask first, after which vLLM has published its counters.
        """
        if nudge is not None:
            await self.complete(nudge, 1)
        found = await self.metrics()
        return Hits() if found is None else Hits.of(found)

    async def settle(self, nudge: Sequence[int]) -> None:
        """Wait until nothing is written behind any more, as far as the server tells.

        Raises:
            BenchError: it is still busy after 90 s.
        """
        end_s = time.monotonic() + _SETTLE_S_MAX
        while time.monotonic() < end_s:
            await self.complete(nudge, 1)
            found = await self.metrics()
            if found is None or not any(found.value(name) for name in _BUSY):
                return
            await asyncio.sleep(_PAUSE_S)
        raise BenchError(f"{self._http.base_url} still writes after {_SETTLE_S_MAX:.0f} s")

    async def forget_gpu(self) -> bool:
        """Empty the GPU's prefix cache and keep what is offloaded; False if the server cannot.

        vLLM has the route where VLLM_SERVER_DEV_MODE=1 is set. While blocks are still in use it
        refuses, and is asked again.

        Raises:
            BenchError: it refuses for a minute.
        """
        for _ in range(_FORGET_TRIES_MAX):
            try:
                response = await self._http.post("/reset_prefix_cache")
            except httpx.HTTPError:
                return False
            if response.status_code != httpx.codes.OK:
                return False
            if not response.content or response.json().get("success", True):
                return True
            await asyncio.sleep(_PAUSE_S)
        raise BenchError(f"{self._http.base_url} does not empty its prefix cache: blocks in use")


class _Answer:
    """What came of one stream so far."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._usage: dict[str, Any] = {}
        self._events = 0

    def take(self, line: str) -> str | None:
        """Take one event; return the failure that it tells of."""
        event = json.loads(line[6:])
        if "error" in event:
            return f"the server failed it: {str(event['error'])[:_FAILURE_MAX]}"
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            if self._first_s is None:
                self._first_s = time.perf_counter()
            self._events += 1
            self._parts.append(choice.get("text") or "")
            self._tokens += choice.get("token_ids") or ()
        return None

    def reply(self, failure: str | None, wanted: int) -> Reply:
        came = int(self._usage.get("completion_tokens") or len(self._tokens) or self._events)
        if failure is None and (came < wanted or self._first_s is None):
            failure = f"{came} of {wanted} tokens came"
        first_s = None if self._first_s is None else self._first_s - self._sent_s
        return Reply(
            sent_s=self._sent_s,
            ttft_s=first_s,
            end_s=time.perf_counter() - self._sent_s,
            tokens_in=int(self._usage.get("prompt_tokens") or 0),
            tokens_out=came,
            text="".join(self._parts),
            tokens=tuple(self._tokens),
            failure=failure,
        )
