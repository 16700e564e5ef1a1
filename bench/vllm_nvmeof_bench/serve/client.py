# SPDX-License-Identifier: Apache-2.0
"""A client of any OpenAI-compatible server, and what the server reports of its caches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

import httpx
import numpy as np

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers import client as plain
from vllm_nvmeof_bench.servers.client import NUDGE, Answer, ClientError, Metrics

_TIMEOUT_S = 600.0
_FORGET_TRIES_MAX = 600
_PAUSE_S = 0.1
_FAILURE_MAX = 300
_OURS = "vllm:nvmeof_loaded_tokens_total"
_THEIRS = ("vllm:prompt_tokens_cached_by_source_total", ("host", "disk"))


@dataclass(frozen=True)
class Tokens:
    """Token ids from `low` up to, without, `high`: none of them special in the model."""

    low: int = 2
    high: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high - 1:
            raise BenchError(f"token ids from {self.low} to {self.high}: give at least two")

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Raises: BenchError: the text is not LOW:HIGH."""
        low, _, high = text.partition(":")
        try:
            return cls(int(low), int(high))
        except ValueError:
            raise BenchError(f"token ids {text!r}: give LOW:HIGH, such as 1000:30000") from None

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        tokens: list[int] = rng.integers(self.low, self.high, count).tolist()
        return tokens


@dataclass(frozen=True)
class Hits:
    """Prompt tokens by where their KV was found: counters, or the difference of two readings.

    pool: with vLLM's tiering, its second tier, from which it read `tier_read_bytes`. other: found
    outside of the GPU, where the server does not report the place.
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
        name, sources = (_OURS, ("cpu", "pool")) if found.has(_OURS) else _THEIRS
        cpu, pool = (int(found.value(name, source=source)) for source in sources)
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
        return Hits(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def by_place(self) -> dict[str, int]:
        """The fields that samples have."""
        return {"gpu": self.gpu, "cpu": self.cpu, "pool": self.pool, "other": self.other}


class Client(plain.Client):
    """A client to which a failed request is a result, and a missing `/metrics` an empty one.

    model: the name to ask for; empty: the first that the server lists.
    """

    def __init__(self, url: str, model: str = "", api_key: str | None = None) -> None:
        super().__init__(url, _TIMEOUT_S, model, api_key)

    async def model(self) -> str:
        """The model's name; the server is asked for it once.

        Raises:
            BenchError: the server does not answer, or lists none.
        """
        if not self._model:
            try:
                response = (await self._http.get("/v1/models")).raise_for_status()
                self._model = str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                raise BenchError(f"{self._http.base_url}: no list of models: {error!r}") from None
        return self._model

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Stream a greedy answer of exactly `max_tokens` tokens; never raises for a failure."""
        await self.model()
        answer = Answer(sent=time.perf_counter())
        try:
            await self._stream(answer, prompt, max_tokens, {}, {})
            if answer.tokens_out < max_tokens or not answer.times:
                answer.failure = f"{answer.tokens_out} of {max_tokens} tokens came"
        except ClientError as error:
            answer.failure = str(error)[:_FAILURE_MAX]
        except (httpx.HTTPError, ValueError) as error:
            answer.failure = repr(error)[:_FAILURE_MAX]
        answer.ended = time.perf_counter()
        return answer

    async def metrics(self) -> Metrics:
        """One reading of `/metrics`; empty where the server has no such route."""
        try:
            return await super().metrics()
        except httpx.HTTPError:
            return Metrics("")

    async def hits(self) -> Hits:
        """Prompt tokens so far, by where their KV was found; zeros without `/metrics`."""
        await self.complete(NUDGE, 1)
        return Hits.of(await self.metrics())

    async def forget_gpu(self) -> bool:
        """Empty the GPU's prefix cache and keep what is offloaded; False if the server cannot.

        vLLM has the route where VLLM_SERVER_DEV_MODE=1 is set. It refuses while blocks are in
        use; the client then asks again.

        Raises:
            BenchError: it refuses for a minute.
        """
        for _ in range(_FORGET_TRIES_MAX):
            try:
                response = (await self._http.post("/reset_prefix_cache")).raise_for_status()
            except httpx.HTTPError:
                return False
            if not response.content or response.json().get("success", True):
                return True
            await asyncio.sleep(_PAUSE_S)
        raise BenchError(f"{self._http.base_url} does not empty its prefix cache: blocks in use")


def whole(answers: Sequence[Answer]) -> Sequence[Answer]:
    """The answers, none of which may have failed.

    Raises:
        BenchError: a request failed, or an answer is not whole.
    """
    for answer in answers:
        if answer.failure is not None:
            raise BenchError(f"a request failed: {answer.failure}")
    return answers
