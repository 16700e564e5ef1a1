# SPDX-License-Identifier: Apache-2.0
"""`bench simulate`: simulate both tiers on a trace, for every size and policy of the sweeps.

Look-up, eviction, write policy and store threshold are those of the product's `ManagerCore`.
Simulated requests run one after another and take no time; every copy, read and write succeeds at
once. GPU memory is LRU that evicts a prompt's tail first, because vLLM frees blocks in that order.
"""

from __future__ import annotations

import itertools
import platform
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import OnProgress, progress, unheard
from vllm_nvmeof_bench.reports.simulate import Sample
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.settings import check_positive, option, recorded
from vllm_nvmeof_bench.traces import CONTEXT_HELP, TRACE_HELP, Pace, Trace, read_trace, virtual
from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.eviction import POLICIES, choose_policy, credit_share
from vllm_nvmeof_offload.manager.handshake import WritePolicy, agree
from vllm_nvmeof_offload.protocol import CancelCommand, OpReport, RankHello, WriteCommand


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. prompt: its chunks, named by the ID of their last block, which identifies all
    earlier blocks too. answer: the chunks that the answer fills, named by unique negative numbers,
    because traces do not record which of them return in a later prompt."""

    at_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def asks_of(trace: Trace, pace: Pace, blocks_per_chunk: int) -> list[Ask]:
    """Return all requests of the trace in time order."""
    numbers = itertools.count(1)
    chunk_tokens = blocks_per_chunk * trace.block_tokens
    asks = []
    for at_s, request in virtual(trace, pace):
        whole = request.input_tokens // trace.block_tokens
        ends = request.blocks[:whole][blocks_per_chunk - 1 :: blocks_per_chunk].tolist()
        filled = (request.input_tokens + request.output_tokens) // chunk_tokens - len(ends)
        answer = tuple(-next(numbers) for _ in range(max(0, filled)))
        asks.append(Ask(at_s, tuple(ends), answer))
    return asks


_CHUNK_BYTES = 1 << 20  # arbitrary: sizes here are in chunks
_CHUNKS_MIN = 8


@dataclass(frozen=True)
class Shape:
    """Sizes in chunks, and policies. policy: a value of the key `eviction_policy`."""

    gpu: int
    cache: int
    pool: int
    policy: str = "lru"
    write_policy: str = WritePolicy.THROUGH.value
    store_threshold: int = 1


@dataclass(frozen=True)
class Settings:
    """Settings for the run. Sizes are shares of the trace's working set. kv_bytes_per_token: by
    default that of Llama 3.1 8B at 16 bits. Raises BenchError or ConfigError for wrong values."""

    pace: Pace = field(default_factory=Pace)
    chunk_tokens: int = option(512, "Tokens per chunk, at least one block of the trace.", min=1)
    context_tokens_max: int = option(
        131_072,
        CONTEXT_HELP,
        flag="--context-max",
        min=1,
    )
    gpu: float = option(0.02, "Size of GPU memory as a share of the working set.")
    cpu: float = option(0.05, "Size of the CPU tier as a share of the working set.")
    pool: float = option(0.1, "Size of the pool as a share of the working set.")
    pools: tuple[float, ...] = option(
        (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.4, 0.8), "Pool sizes to sweep."
    )
    cpus: tuple[float, ...] = option((0.02, 0.05, 0.1, 0.2), "CPU tier sizes to sweep.")
    kv_bytes_per_token: int = option(
        131_072, "KV bytes per token, as reported by `vllm-nvmeof size` for a model.", min=1
    )
    policies: tuple[str, ...] = option(
        tuple(sorted(POLICIES, reverse=True)),
        "Eviction policies to simulate: values of the key eviction_policy, including module:Class.",
    )
    trace: Path = option(Path(), TRACE_HELP, argument=True)

    def __post_init__(self) -> None:
        check_positive(self, "chunk_tokens", "context_tokens_max", "kv_bytes_per_token")
        shares = (self.gpu, self.cpu, self.pool, *self.pools, *self.cpus)
        if any(not 0 <= share <= 10 for share in shares):
            raise BenchError("sizes must be shares of the working set, from 0 to 10")
        for policy in self.policies:
            choose_policy(policy)

    def shapes(self, unique: int) -> Iterator[tuple[str, Shape]]:
        """Yield the (sweep, shape) of every run. unique: chunks in the working set."""

        def chunks(share: float) -> int:
            return max(_CHUNKS_MIN, int(share * unique)) if share else 0

        middle = Shape(chunks(self.gpu), chunks(self.cpu), chunks(self.pool))
        for policy in self.policies:
            base = replace(middle, policy=policy)
            for share in self.pools:
                yield "pool", replace(base, pool=chunks(share))
            for share in self.cpus:
                yield "cpu", replace(base, cache=chunks(share))
            for write_policy in ("through", "on_eviction"):
                for threshold in (1, 2):
                    shape = replace(base, write_policy=write_policy, store_threshold=threshold)
                    yield "writes", shape


class World:
    """A simulated server. counts: chunks found in `gpu`, `cpu` or `pool`, chunks that were not
    found (`miss`), and chunks `stored` and `written`."""

    def __init__(self, shape: Shape) -> None:
        self.counts: Counter[str] = Counter()
        self._gpu: OrderedDict[int, None] = OrderedDict()
        self._gpu_chunks = shape.gpu
        config = CoreConfig(
            key_bytes=len(_key(0)),
            write_policy=WritePolicy(shape.write_policy),
            store_threshold=shape.store_threshold,
            # Unlike the product, credit returning chunks even if chunks are written on eviction, so
            # that the simulation shows the benefit.
            credit_share=credit_share(shape.policy),
        )
        hello = RankHello(
            rank=0,
            engine_index=0,
            keyspace="simulated",
            cache_slots=shape.cache,
            pool_slots=shape.pool,
            target_count=1,
            slot_bytes=_CHUNK_BYTES,
        )
        policy = choose_policy(shape.policy)
        self._core = ManagerCore(config, agree([hello]), policy=policy, first_generation=0)

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Process a request from its look-up to its end. All chunks are full."""
        core = self._core
        in_gpu = sum(1 for _ in itertools.takewhile(self._gpu.__contains__, prompt))
        keys = list(map(_key, prompt))
        there = itertools.takewhile(lambda key: core.lookup(key) is not None, keys[in_gpu:])
        found = list(there)
        self.counts["gpu"] += in_gpu
        self.counts["miss"] += len(prompt) - in_gpu - len(found)
        if found:
            command = core.prepare_load(found)
            pool = int(np.count_nonzero(command.batch.places >= 0))
            self.counts["pool"] += pool
            self.counts["cpu"] += len(found) - pool
            core.report([OpReport(command.op)])
        keys += map(_key, answer)
        plan = core.prepare_store(keys)
        if plan.command is not None:
            self.counts["stored"] += len(plan.command.batch)
            core.report([OpReport(plan.command.op)])
        core.turn()
        while commands := core.take_commands():
            assert not any(isinstance(one, CancelCommand) for one in commands), "nothing is overdue"
            writes = (one for one in commands if isinstance(one, WriteCommand))
            self.counts["written"] += sum(len(one.batch) for one in writes)
            core.report([OpReport(one.op) for one in commands])
        core.ended(keys)
        for number in reversed([*prompt, *answer]):
            self._gpu[number] = None
            self._gpu.move_to_end(number)
        while len(self._gpu) > self._gpu_chunks:
            self._gpu.popitem(last=False)

    def chunks(self) -> set[int]:
        """Return the chunks in the tiers."""
        entries = self._core.entries()
        return {int.from_bytes(entry.key[:8], "little", signed=True) for entry in entries}


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True) + bytes(GROUP_ID_BYTES)


def _measure(settings: Settings, json_path: Path) -> None:
    with progress() as on_progress:
        dump(json_path, "simulate", *run(settings, on_progress))


def run(
    settings: Settings, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Simulate every shape with the same requests; return samples and conditions. Raise BenchError
    if the trace cannot be read or has no usable request."""
    on_progress(0, 0, "reading the trace")
    trace = read_trace(settings.trace).capped(settings.context_tokens_max)
    per_chunk = max(1, settings.chunk_tokens // trace.block_tokens)
    chunk_tokens = per_chunk * trace.block_tokens
    asks = asks_of(trace, settings.pace, per_chunk)
    before: dict[int, int | None] = {}  # chunk of a prompt → preceding chunk
    for ask in asks:
        before.update(zip(ask.prompt, (None, *ask.prompt), strict=False))
    if not before:
        raise BenchError(f"{settings.trace}: no request of a chunk or more under --context-max")
    shapes = list(settings.shapes(len(before)))
    total = len(shapes)
    samples: list[Sample] = []
    for sweep, shape in shapes:
        on_progress(len(samples), total, f"{sweep} · {shape.policy}")
        world = World(shape)
        for ask in asks:
            world.serve(ask.prompt, ask.answer)
        there = world.chunks()
        lost = sum(before.get(one) is not None and before[one] not in there for one in there)
        stranded = lost / len(there) if there else 0.0
        samples.append(_sample(sweep, shape, world.counts, chunk_tokens, stranded))
    asked = sum(len(ask.prompt) for ask in asks)
    on_progress(total, total, "done")
    return samples, {
        "versions": {"vllm-nvmeof-offload": __version__, "python": platform.python_version()},
        "trace": trace.name,
        "settings": recorded(settings),
        "sessions": len(trace.sessions),
        "requests": len(asks),
        "chunk_tokens": chunk_tokens,
        "prompt_tokens": asked * chunk_tokens,
        "working_set_tokens": len(before) * chunk_tokens,
        "reusable": 1 - len(before) / asked,
        "virtual_seconds": asks[-1].at_s,
        "simulated": "the product's manager; requests in sequence; instant copies and I/O",
    }


def _sample(
    sweep: str, shape: Shape, counts: Counter[str], chunk_tokens: int, stranded: float
) -> Sample:
    hits = [chunk_tokens * counts[place] for place in ("gpu", "cpu", "pool")]
    return Sample(
        *(sweep, shape.policy, shape.write_policy, shape.store_threshold),
        *(chunk_tokens * chunks for chunks in (shape.gpu, shape.cache, shape.pool)),
        sum(hits) + chunk_tokens * counts["miss"],
        *hits,
        stored=chunk_tokens * counts["stored"],
        written=chunk_tokens * counts["written"],
        stranded=stranded,
    )


COMMANDS = (
    Command(
        "simulate",
        "Simulate hits by tier and bytes moved on a trace, by size and eviction policy.\n\n"
        "Uses the product's manager without servers, GPUs or disks. Sizes are shares of the "
        "trace's working set.",
        Settings,
        _measure,
    ),
)
