# SPDX-License-Identifier: Apache-2.0
"""What the parts with servers share: model, sizes, a server, prompts, answers that must agree."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import OffloadSpec, Server, ServerSpec
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes

__all__ = ["SHAPE", "Agreement", "ReturnPlan", "Tell", "loaded_tokens", "served", "settle"]

Tell = Callable[[str], None]

#: A small model: computing 2,000 of its tokens takes about as long as reading their KV, 8 MiB,
#: at some 20 MB/s, so that both sides of that crossover are measured in little time.
SHAPE = ModelShape(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2)
BLOCK_TOKENS = 32
_CHUNK_BYTES = 512 * KIB
_STREAM_SLOTS = 16
_READ_DEADLINE_MS = 60_000
_SETTLE_S_MAX = 60.0
_SETTLE_PAUSE_S = 0.1
_UNSETTLED = ("vllm:nvmeof_writes_pending", "vllm:nvmeof_write_backlog")
_LOADED = "vllm:nvmeof_loaded_tokens_total"


@dataclass(frozen=True)
class ReturnPlan:
    """Prompts that are stored once and return in a circle, too many for GPU and CPU memory.

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
        """Without offloading, or with a pool in `target` and the keys of `extra`.

        Its GPU cache holds little more than one request.
        """
        blocks = math.ceil((self.prompt_tokens + self.answer_tokens + 1) / BLOCK_TOKENS)
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
            max_model_len=(blocks + 1) * BLOCK_TOKENS,
            gpu_blocks=blocks + blocks // 4,
            block_size=BLOCK_TOKENS,
            max_num_seqs=self.max_num_seqs,
            cores_reserved=0,
            offload=offload,
        )


@contextmanager
def served(spec: ServerSpec, name: str, home: Path, tell: Tell) -> Iterator[Server]:
    """A server that answers.

    Raises:
        ServerError: it did not start, with the end of its output.
    """
    tell(f"{name} · starting a server")
    with Server(spec, home / "logs" / f"{name.replace(' ', '-')}.log") as server:
        yield server.wait_ready()


async def settle(client: Client, offloads: bool) -> None:
    """Wait until the pool has everything; a short request makes vLLM publish its gauges.

    Raises:
        BenchError: writes are still pending after `_SETTLE_S_MAX`.
    """
    deadline = time.monotonic() + _SETTLE_S_MAX
    while True:
        await client.complete([5, 6, 7], 2)
        if not offloads:
            return
        now = await client.metrics()
        if all(now.has(name) and now.value(name) == 0 for name in _UNSETTLED):
            return
        if time.monotonic() > deadline:
            raise BenchError(f"writes to the pool were still pending after {_SETTLE_S_MAX:.0f} s")
        await asyncio.sleep(_SETTLE_PAUSE_S)


async def loaded_tokens(client: Client) -> int:
    """Tokens loaded so far, by the server's own counters; a short request brings them up."""
    await client.complete([5, 6, 7], 2)
    return int((await client.metrics()).value(_LOADED))


@dataclass
class Agreement:
    """Whether every arm gives a prompt the same tokens. A batch of another shape rounds
    otherwise, which can turn a near tie: `different` is then small, and not hidden.
    """

    compared: int = 0
    different: int = 0
    _first: dict[str, Sequence[int]] = field(default_factory=dict)

    def add(self, name: str, answer: Answer) -> None:
        """The first answer by this name is what the others are compared with."""
        first = self._first.setdefault(name, answer.tokens)
        if first is not answer.tokens:
            length = min(len(first), len(answer.tokens))
            self.compared += 1
            self.different += list(first[:length]) != list(answer.tokens[:length])

    def facts(self) -> dict[str, int]:
        return {"compared": self.compared, "different": self.different}
