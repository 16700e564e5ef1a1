# SPDX-License-Identifier: Apache-2.0
"""A client of any OpenAI-compatible server: streamed completions, timed; a failure is a result.

The client shares the cores with the servers that a benchmark starts, so it does little per token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import httpx
import numpy as np

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers.client import Metrics

_NUDGE_TOKENS = 3
_CONNECTIONS_MAX = 256
_FORGET_TRIES_MAX = 600
_PAUSE_S = 0.1
_SETTLE_S_MAX = 90.0
_FAILURE_MAX = 300
#: Gauges of work that goes on after the last answer: ours, and those of vLLM's tiering.
_BUSY = (
    "vllm:nvmeof_writes_pending",
    "vllm:nvmeof_write_backlog",
    "vllm:kv_offload_tiering_active_cascade_jobs",
    "vllm:kv_offload_tiering_active_promotion_jobs",
)
_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_OURS = "vllm:nvmeof_loaded_tokens_total"


@dataclass(frozen=True)
class Tokens:
    """Token ids from `low` up to, without, `high`: none of them special in the model."""

    low: int = 2
    high: int = 2048

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """LOW:HIGH.

        Raises:
            BenchError: the text has another form.
        """
        low, _, high = text.partition(":")
        try:
            found = cls(int(low), int(high))
        except ValueError:
            raise BenchError(f"token ids {text!r}: give LOW:HIGH, such as 1000:30000") from None
        if not 0 <= found.low < found.high - _NUDGE_TOKENS:
            raise BenchError(f"token ids {text!r}: give a larger HIGH than LOW")
        return found

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(self.low, self.high, count)]

    @property
    def nudge(self) -> list[int]:
        """A prompt too short to be stored, which makes a server publish its counters."""
        return [self.low + number for number in range(_NUDGE_TOKENS)]


@dataclass(frozen=True)
class Hits:
    """Prompt tokens by where their KV was found: counters, or the difference of two readings.

    prompt: of all prompts. pool: with vLLM's tiering, its second tier. other: found outside of the
    GPU, where the server does not report the place. tier_read_bytes: bytes that vLLM's tiering
    read from its second tier.
    """

    prompt: int = 0
    gpu: int = 0
    cpu: int = 0
    pool: int = 0
    other: int = 0
    tier_read_bytes: int = 0

    @classmethod
    def of(cls, found: Metrics) -> Self:
        """Read from our own counters where they exist, else from vLLM's."""
        if found.has(_OURS):
            cpu, pool = (int(found.value(_OURS, source=one)) for one in ("cpu", "pool"))
        else:
            cpu, pool = (int(found.value(_BY_SOURCE, source=one)) for one in ("host", "disk"))
        external = int(found.value("vllm:external_prefix_cache_hits_total"))
        return cls(
            prompt=int(found.value("vllm:prompt_tokens_total")),
            gpu=int(found.value("vllm:prefix_cache_hits_total")),
            cpu=cpu,
            pool=pool,
            other=max(0, external - cpu - pool),
            tier_read_bytes=int(found.value("vllm:kv_offload_tiering_read_bytes_total")),
        )

    def __sub__(self, before: Hits) -> Hits:
        earlier = asdict(before)
        return Hits(**{name: value - earlier[name] for name, value in asdict(self).items()})

    @property
    def by_place(self) -> dict[str, int]:
        """The fields that samples have."""
        return {"gpu": self.gpu, "cpu": self.cpu, "pool": self.pool, "other": self.other}

    @property
    def found(self) -> int:
        """Tokens that were in any cache."""
        return sum(self.by_place.values())


@dataclass(frozen=True)
class Reply:
    """The result of one request. Seconds are from sending it; sent_s is `time.perf_counter()`.

    ttft_s: to the first token, None if none came. end_s: to the last byte, or to the failure.
    tokens_in, tokens_out: as the server counts them, else as the client does. tokens: ids of the
    answer, where the server reports them. failure: None, or the reason why the answer is cut.
    """

    sent_s: float
    ttft_s: float | None
    end_s: float
    tokens_in: int
    tokens_out: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    failure: str | None = None

    def same(self, other: Reply) -> bool:
        """Whether both have the same answer."""
        return (self.tokens, self.text) == (other.tokens, other.text)


class Client:
    """A client of one server; made, used and closed inside one event loop.

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
        """The model's name; the server is asked for it once.

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

    async def complete(self, prompt: Sequence[int] | str, answer_tokens: int) -> Reply:
        """Stream a greedy answer of exactly `answer_tokens` tokens; never raises for a failure."""
        body = {
            "model": await self.model(),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
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
        """One reading of `/metrics`; None where the server has no such route."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        return Metrics(response.text) if response.status_code == httpx.codes.OK else None

    async def hits(self, nudge: Sequence[int] | None = None) -> Hits:
        """Prompt tokens so far, by where their KV was found; zeros without `/metrics`.

        nudge: a short prompt to send first, after which vLLM has published its counters.
        """
        if nudge is not None:
            await self.complete(nudge, 1)
        found = await self.metrics()
        return Hits() if found is None else Hits.of(found)

    async def settle(self, nudge: Sequence[int]) -> None:
        """Wait until no write is pending, as far as the server reports them.

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

        vLLM has the route where VLLM_SERVER_DEV_MODE=1 is set. It refuses while blocks are in
        use; the client then asks again.

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
    """The state of one stream."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._usage: dict[str, Any] = {}
        self._events = 0

    def take(self, line: str) -> str | None:
        """Take one event; return the failure that it reports, if any."""
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
        return Reply(
            sent_s=self._sent_s,
            ttft_s=None if self._first_s is None else self._first_s - self._sent_s,
            end_s=time.perf_counter() - self._sent_s,
            tokens_in=int(self._usage.get("prompt_tokens") or 0),
            tokens_out=came,
            text="".join(self._parts),
            tokens=tuple(self._tokens),
            failure=failure,
        )
