# SPDX-License-Identifier: Apache-2.0
"""A client of the OpenAI HTTP API, and a reader of `/metrics`.

Prompts and answers are token IDs, so that servers can be compared token by token. The client does
little work per token, because it shares the servers' cores.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import operator
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Self, TypeAlias

import httpx
import numpy as np

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers.server import MODEL_NAME
from vllm_nvmeof_offload.commands.scrape import Metrics
from vllm_nvmeof_offload.errors import OffloadError

#: A chat message: role and content.
Message: TypeAlias = dict[str, str]

_CONNECTIONS_MAX = 256
#: vLLM's server closes an idle connection after 5 s, and can lose a request that arrives just then.
_IDLE_S_MAX = 2.0
#: A prompt too short to be stored, sent to make vLLM update its counters.
NUDGE = (5, 6, 7)
_SETTLE_S_MAX = 90.0
_PAUSE_S = 0.1
_FORGET_TRIES_MAX = 600
_FAILURE_MAX = 300
_OURS = "vllm:nvmeof_loaded_tokens_total"
_THEIRS = ("vllm:prompt_tokens_cached_by_source_total", ("host", "disk"))
#: The counter of chunks that our servers did not store, by reason.
UNSTORED = "vllm:nvmeof_unstored_chunks_total"
#: Counters of bytes written to our pool, and to the second tier of vLLM's tiering.
WRITTEN = (
    "vllm:nvmeof_target_written_bytes_total",
    "vllm:kv_offload_tiering_write_bytes_total",
)
#: Gauges of work that continues after the last answer: ours, and those of vLLM's tiering.
_BUSY = (
    "vllm:nvmeof_writes_pending",
    "vllm:kv_offload_tiering_active_cascade_jobs",
    "vllm:kv_offload_tiering_active_promotion_jobs",
)


class ClientError(OffloadError):
    """An error for a request that the server refused, or whose answer is incomplete."""


@dataclass
class Answer:
    """One streamed answer. Times are `time.perf_counter()` seconds.

    tokens, logprobs, gaps: each generated token's ID and log-probability, and the difference from
    the runner-up's; empty if not reported or not requested. times: arrivals of tokens, or of events
    if the server reports no IDs. ended: when the last byte arrived or the request failed.
    tokens_in, tokens_out: counted by the server, otherwise by the client. tokens_cached: prompt
    tokens found in any tier, from a server with `--enable-prompt-tokens-details`. failure: why the
    answer is incomplete. id: the request's ID in the response.
    """

    sent: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    failure: str | None = None
    id: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token, which must have arrived."""
        return self.times[0] - self.sent

    @property
    def end_s(self) -> float:
        """Seconds from the request to the end of its answer."""
        return self.ended - self.sent

    @property
    def digest(self) -> str:
        """A short hash of the answer's tokens or, without token IDs, of its text."""
        text = " ".join(map(str, self.tokens)) or self.text
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def same(self, other: Answer) -> bool:
        """Return whether both answers have the same tokens and the same text."""
        return (self.tokens, self.text) == (other.tokens, other.text)


@dataclass(frozen=True)
class Tokens:
    """A range of ordinary token IDs, from `low` to `high` - 1."""

    low: int = 2
    high: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high - 1:
            raise BenchError(f"token ids from {self.low} to {self.high}: give at least two")

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Parse LOW:HIGH; raise BenchError if the text is malformed."""
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
    """Prompt tokens by where their KV was found: counters, or differences between two readings.

    pool: with vLLM's tiering, its second tier. other: found in an unreported location outside the
    GPU. shared: the part of `other` found in the pools of our other servers.
    """

    prompt: int = 0
    gpu: int = 0
    cpu: int = 0
    pool: int = 0
    other: int = 0
    shared: int = 0

    @classmethod
    def of(cls, found: Metrics) -> Self:
        """Read our counters if the server exports them, otherwise vLLM's."""
        name, sources = (_OURS, ("cpu", "pool")) if found.has(_OURS) else _THEIRS
        cpu, pool = (int(found.value(name, source=source)) for source in sources)
        external = int(found.value("vllm:external_prefix_cache_hits_total"))
        return cls(
            prompt=int(found.value("vllm:prompt_tokens_total")),
            gpu=int(found.value("vllm:prefix_cache_hits_total")),
            cpu=cpu,
            pool=pool,
            other=max(0, external - cpu - pool),
            shared=int(found.value(_OURS, source="shared")),
        )

    def __add__(self, more: Hits) -> Hits:
        return Hits(*map(operator.add, astuple(self), astuple(more)))

    def __sub__(self, before: Hits) -> Hits:
        return Hits(*map(operator.sub, astuple(self), astuple(before)))

    @property
    def by_place(self) -> dict[str, int]:
        """The fields that also occur in samples."""
        return {"gpu": self.gpu, "cpu": self.cpu, "pool": self.pool, "other": self.other}


class Client:
    """An asynchronous client of one server. Create, use and close it in the same event loop. model:
    the model to request; "": the first one that the server lists."""

    def __init__(
        self,
        url: str,
        timeout_s: float = 600.0,
        model: str = MODEL_NAME,
        api_key: str | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=_CONNECTIONS_MAX, keepalive_expiry=_IDLE_S_MAX),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Return the model's name, requested once if it was not given; raise BenchError if the
        server does not answer or lists no model."""
        if not self._model:
            try:
                response = await self._http.get("/v1/models")
                if response.status_code != httpx.codes.OK:
                    raise BenchError(f"{self._http.base_url}: no list of models: {_why(response)}")
                self._model = str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                raise BenchError(f"{self._http.base_url}: no list of models: {error!r}") from None
        return self._model

    async def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        cache_salt: str | None = None,
        replica: int | None = None,
        helpers: Sequence[str] | None = None,
    ) -> Answer:
        """Stream a greedy answer of exactly `max_tokens` tokens to `prompt`.

        cache_salt: only requests with the same salt share KV. replica: the data-parallel rank.
        helpers: the peers that may read for the request; None: any peer.

        Raises: ClientError: the server refused the request, or the answer is incomplete.
        """
        more: dict[str, Any] = {"logprobs": 2, "return_tokens_as_token_ids": True}
        if cache_salt is not None:
            more["cache_salt"] = cache_salt
        if helpers is not None:
            more["kv_transfer_params"] = {"nvmeof": {"helpers": list(helpers)}}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        answer = Answer(sent=0.0)
        await self._stream(answer, {"prompt": list(prompt)}, max_tokens, more, headers)
        if len(answer.tokens) != max_tokens:
            raise ClientError(f"{len(answer.tokens)} of {max_tokens} tokens arrived")
        return answer

    async def chat(
        self, messages: Sequence[Message], max_tokens: int, *, whole: bool = False
    ) -> Answer:
        """Stream a greedy answer of at most `max_tokens` tokens. It continues an assistant's last
        message. whole: generate exactly `max_tokens`, ignoring the model's end token.

        Raises: ClientError: the server refused the request, or the answer is empty or too short.
        """
        goes_on = messages[-1]["role"] == "assistant"
        more = {
            "logprobs": True,
            "top_logprobs": 2,
            "ignore_eos": whole,
            "continue_final_message": goes_on,
            "add_generation_prompt": not goes_on,
        }
        answer = Answer(sent=0.0)
        await self._stream(answer, {"messages": list(messages)}, max_tokens, more, {})
        if not answer.tokens or (whole and len(answer.tokens) != max_tokens):
            raise ClientError(f"{len(answer.tokens)} of {max_tokens} tokens arrived")
        return answer

    async def attempt(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int,
        into: Answer | None = None,
        *,
        cache_salt: str | None = None,
        prompt_tokens_max: int | None = None,
    ) -> Answer:
        """Stream as `complete` does, without log-probabilities; record failures in the answer.

        prompt: token IDs, or text of which the server uses the last `prompt_tokens_max` tokens.
        into: the answer to fill, for callers that watch it or can cancel the request.
        """
        answer = Answer(sent=time.perf_counter()) if into is None else into
        asked = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        more = {"cache_salt": cache_salt, "truncate_prompt_tokens": prompt_tokens_max}
        try:
            given = {name: value for name, value in more.items() if value is not None}
            await self._stream(answer, asked, max_tokens, given, {})
            if answer.tokens_out < max_tokens or not answer.times:
                answer.failure = f"{answer.tokens_out} of {max_tokens} tokens arrived"
        except ClientError as error:
            answer.failure = str(error)[:_FAILURE_MAX]
        except (httpx.HTTPError, ValueError) as error:
            answer.failure = repr(error)[:_FAILURE_MAX]
        answer.ended = time.perf_counter()
        return answer

    async def _stream(
        self,
        answer: Answer,
        asked: Mapping[str, Any],
        max_tokens: int,
        more: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> None:
        """Send a request, and fill `answer` until its stream ends. asked: a prompt, or a chat's
        messages. more: other fields of the body.

        Raises: ClientError: the server refused the request, or reported an error in the stream.
        """
        body = {
            "model": await self.model(),
            **asked,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **more,
        }
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        call = self._http.stream("POST", path, json=body, headers=headers)
        answer.sent = time.perf_counter()
        async with call as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise ClientError(_why(response))
            async for line in _lines(response):
                if line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]), time.perf_counter())
        answer.ended = time.perf_counter()

    async def metrics(self) -> Metrics:
        """Return the metrics from `/metrics`."""
        return Metrics((await self._http.get("/metrics")).raise_for_status().text)

    async def counted(self) -> Metrics:
        """Send a short request, and return up-to-date metrics; empty without `/metrics`."""
        await self.attempt(NUDGE, 1)
        try:
            return await self.metrics()
        except httpx.HTTPError:
            return Metrics("")

    async def settle(self) -> Metrics:
        """Wait until the server reports no pending writes; return its metrics. Raise ClientError
        after `_SETTLE_S_MAX`."""
        end_s = time.monotonic() + _SETTLE_S_MAX
        while time.monotonic() < end_s:
            found = await self.counted()
            if not any(found.value(name) for name in _BUSY):
                return found
            await asyncio.sleep(_PAUSE_S)
        raise ClientError(f"{self._http.base_url} is still writing after {_SETTLE_S_MAX:.0f} s")

    async def hits(self) -> Hits:
        """Return the prompt tokens so far, by where their KV was found; 0 without `/metrics`."""
        return Hits.of(await self.counted())

    async def forget_gpu(self) -> bool:
        """Empty the GPU's prefix cache, but not offloaded KV; return False if this is unsupported.

        vLLM supports this with VLLM_SERVER_DEV_MODE=1, and refuses while blocks are in use. Raises
        BenchError if it refuses for a minute.
        """
        for _ in range(_FORGET_TRIES_MAX):
            try:
                response = (await self._http.post("/reset_prefix_cache")).raise_for_status()
            except httpx.HTTPError:
                return False
            if not response.content or response.json().get("success", True):
                return True
            await asyncio.sleep(_PAUSE_S)
        raise BenchError(f"{self._http.base_url} cannot empty its prefix cache: blocks in use")


def _why(response: httpx.Response) -> str:
    """Return the status and message of a refusal in one line. The response must have been read."""
    try:
        text = _message(response.json())
    except (ValueError, RecursionError):
        text = response.text
    text = " ".join(text.split())[:_FAILURE_MAX]
    return f"HTTP {response.status_code}: {text or response.reason_phrase}"


def _message(body: object) -> str:
    """Return the message in an error from the OpenAI API or a web framework."""
    found = body
    for key in ("error", "message", "detail"):
        found = found.get(key, found) if isinstance(found, dict) else found
    return str(found)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield an event stream's lines. Unlike httpx, do not split texts at Unicode separators."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _of_a_chat(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert a chat's log-probabilities to the form of completions."""
    return {
        "token_logprobs": [one["logprob"] for one in found],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in found
        ],
    }


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Add a streamed event to the answer; raise ClientError if it reports an error."""
    if "error" in event:
        raise ClientError(f"the server failed the request: {_message(event)}")
    answer.id = str(event.get("id") or answer.id)
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        logprobs = choice.get("logprobs") or {}
        if "delta" in choice:
            if not ids and not choice["delta"].get("content"):
                continue  # the role, or the end
            logprobs = _of_a_chat(logprobs.get("content") or ())
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.tokens += ids or ()
        answer.times += [now] * (1 if ids is None else len(ids))
        # JSON has no NaN: a NaN logit, for example from wrong KV, is sent as null.
        answer.logprobs += [
            float("nan") if p is None else p for p in logprobs.get("token_logprobs", [])
        ]
        for top in logprobs.get("top_logprobs", []):
            best = sorted((p for p in top.values() if p is not None), reverse=True)
            answer.gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    usage = event.get("usage") or {}  # only in the last event, which contains no token
    answer.tokens_in = usage.get("prompt_tokens") or 0
    answer.tokens_out = usage.get("completion_tokens") or len(answer.times)
    answer.tokens_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
