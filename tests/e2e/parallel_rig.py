# SPDX-License-Identifier: Apache-2.0
"""A model whose KV cache is split over two ranks, and servers of that model."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import faults_rig as rig
from tests.e2e.plain_answers import plain_answers
from vllm_nvmeof_offload.units import GIB

RANKS = 2
#: Two KV heads: each rank holds a different one, so that one rank's bytes cannot replace the
#: other's. A rank's slot is as large as that of the one-headed model.
SHAPE = replace(rig.SHAPE, kv_heads=2)
PROMPTS, ANSWER_TOKENS = 4, 8
#: Room for two of the prompts.
GPU_BLOCKS = 69
HITS = "vllm:external_prefix_cache_hits_total"
LOADED = "vllm:nvmeof_loaded_tokens_total"
FAILED = "vllm:nvmeof_failed_chunks_total"


@functools.cache
def reference() -> rig.Reference:
    """Prompts, and the answers of the model without vLLM and without this package."""
    asked = rig.prompts(seed=23, count=PROMPTS)
    model = make_model(rig.BUILD / "models", SHAPE)
    answers = plain_answers(model, asked, ANSWER_TOKENS)
    assert min(min(a.gaps) for a in answers) > 2 * rig.LOGPROB_TOLERANCE, "choose another seed"
    return rig.Reference(asked, answers)


def spec(target: Path, option: str, **extra: object) -> ServerSpec:
    """A server with two ranks or replicas, by `option`. Each has the usual number of slots."""
    pool_bytes = RANKS * rig.POOL_SLOTS * (rig.SLOT_BYTES + 64)
    base = rig.spec(target, pool_bytes=pool_bytes, **extra)
    assert base.offload is not None
    size_gib = RANKS * rig.STAGING_SLOTS * rig.SLOT_BYTES / GIB
    return replace(
        base,
        model=make_model(rig.BUILD / "models", SHAPE),
        gpu_blocks=GPU_BLOCKS,
        offload=replace(base.offload, size_gib=size_gib),
        extra_args=(option, str(RANKS)),
        # Bound to cores, two ranks would need four cores: vLLM leaves one free per rank.
        env={**base.env, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    )


def ask(
    server: Server,
    asked: Sequence[Sequence[int]],
    *,
    cache_salt: str | None = None,
    replica: int | None = None,
) -> list[Answer]:
    """Ask the prompts one after the other, optionally for one tenant or one replica."""

    async def run() -> list[Answer]:
        async with Client(server.url) as client:
            return [
                await client.complete(p, ANSWER_TOKENS, cache_salt=cache_salt, replica=replica)
                for p in asked
            ]

    return asyncio.run(run())


def whole(prompt: Sequence[int]) -> int:
    """The number of a prompt's tokens that are in whole chunks."""
    return len(prompt) // rig.CHUNK_TOKENS * rig.CHUNK_TOKENS
