# SPDX-License-Identifier: Apache-2.0
"""`bench simulate`: simulate both tiers on a trace, for every size and policy of the sweeps.

Look-up, eviction, write policy and store threshold are those of the product's `ManagerCore`. The
rest is simulated: requests run one after another and take no time, and every copy, read and write
succeeds at once. GPU memory is plain LRU that evicts a prompt's tail before its head, because vLLM
frees blocks in that order. Sizes are shares of the trace's working set.

Policies are compared with models. `s3_fifo` is the one by Yang et al. (SOSP '23), with a small
queue of a tenth, a main queue, a ghost queue as long as the tier, and counts up to 3. A chunk is
counted once per request; otherwise its look-up and its store would be two uses. `best` is Belady's:
it evicts the chunk that is needed last, which requires knowing the future.
"""

from __future__ import annotations

import heapq
import itertools
import platform
from abc import ABC, abstractmethod
from bisect import bisect_right
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
from vllm_nvmeof_bench.traces import TRACE_HELP, Pace, Trace, read_trace, virtual
from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.eviction import POLICIES, choose_policy, credit_share
from vllm_nvmeof_offload.manager.handshake import WritePolicy, agree
from vllm_nvmeof_offload.protocol import CancelCommand, OpReport, RankHello, WriteCommand

_NEVER = 1 << 62
_SMALL = 0.1
_COUNT_MAX = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. prompt: its chunks, each named by the ID of its last block, which identifies all
    earlier blocks too. answer: the chunks that the answer fills, named by unique negative numbers,
    because no trace records which of them return in a later prompt."""

    at_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def asks_of(trace: Trace, pace: Pace, blocks_per_chunk: int) -> list[Ask]:
    """Return every request of the trace in order of time."""
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


class Tier(ABC):
    """A model of one tier of `slots` chunks; it knows all requests. counts: under `cpu`, how many
    chunks of prompts were found so far, each prompt's only up to its first miss."""

    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        self.counts: Counter[str] = Counter()
        self._slots = slots
        self._now = -1  # the number of the current request
        self._asked: dict[int, int] = {}  # chunk in the tier → last request that used it

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Process the next request from its look-up to its end."""
        self._now += 1
        there = itertools.takewhile(self._asked.__contains__, prompt)
        self.counts["cpu"] += sum(1 for _ in there)
        chunks = (*prompt, *answer)
        for chunk in reversed(chunks):
            if chunk in self._asked:
                self._use(chunk)
        for chunk in chunks:
            if chunk not in self._asked and not self._insert(chunk):
                break

    @abstractmethod
    def _use(self, chunk: int) -> None:
        """Record that a chunk in the tier was used."""

    @abstractmethod
    def _insert(self, chunk: int) -> bool:
        """Add a chunk, evict another if necessary; return False if this request uses all chunks."""


class _S3Fifo(Tier):
    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        super().__init__(slots, asks)
        self._small_max = max(1, int(_SMALL * slots))
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._count: dict[int, int] = {}

    def _use(self, chunk: int) -> None:
        if self._asked[chunk] != self._now:
            self._count[chunk] = min(_COUNT_MAX, self._count[chunk] + 1)
            self._asked[chunk] = self._now

    def _insert(self, chunk: int) -> bool:
        if len(self._asked) >= self._slots and not self._evict():
            return False
        if chunk in self._ghost:
            del self._ghost[chunk]
            self._main[chunk] = None
        else:
            self._small[chunk] = None
        self._count[chunk] = 0
        self._asked[chunk] = self._now
        return True

    def _evict(self) -> bool:
        for _ in range((_COUNT_MAX + 2) * self._slots):
            small = len(self._small) > self._small_max or not self._main
            queue = self._small if small else self._main
            chunk, _none = queue.popitem(last=False)
            if self._count[chunk] > 0:
                self._count[chunk] = 0 if small else self._count[chunk] - 1
                self._main[chunk] = None
            elif self._asked[chunk] == self._now:
                queue[chunk] = None
            else:
                del self._count[chunk], self._asked[chunk]
                if small:
                    self._ghost[chunk] = None
                    if len(self._ghost) > self._slots:
                        self._ghost.popitem(last=False)
                return True
        return False


class _Best(Tier):
    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        super().__init__(slots, asks)
        self._uses: dict[int, list[int]] = {}
        for now, ask in enumerate(asks):
            for chunk in ask.prompt:
                self._uses.setdefault(chunk, []).append(now)
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def _use(self, chunk: int) -> None:
        uses = self._uses.get(chunk, [])
        at = bisect_right(uses, self._now)
        self._next[chunk] = uses[at] if at < len(uses) else _NEVER
        self._asked[chunk] = self._now
        heapq.heappush(self._heap, (-self._next[chunk], chunk))

    def _insert(self, chunk: int) -> bool:
        while len(self._asked) >= self._slots:
            negative, victim = self._heap[0]
            if victim in self._asked and self._next[victim] == -negative:
                if self._asked[victim] == self._now:
                    return False
                del self._asked[victim]
            heapq.heappop(self._heap)
        self._use(chunk)
        return True


MODELS: dict[str, type[Tier]] = {"s3_fifo": _S3Fifo, "best": _Best}


_CHUNK_BYTES = 1 << 20  # arbitrary: sizes here are in chunks
_CHUNKS_MIN = 8


@dataclass(frozen=True)
class Shape:
    """Sizes in chunks, and policies. pool: 0: no pool. policy: a value of key `eviction_policy`."""

    gpu: int
    cache: int
    pool: int
    policy: str = "lru"
    write_policy: str = WritePolicy.THROUGH.value
    store_threshold: int = 1


@dataclass(frozen=True)
class Settings:
    """The settings of a simulation. Sizes are shares of the trace's working set. The default of
    kv_bytes_per_token is that of Llama 3.1 8B in 16 bits.

    Raises (on creation):
        BenchError: a number is out of range.
        ConfigError: a policy is unknown or cannot be loaded.
    """

    pace: Pace = field(default_factory=Pace)
    chunk_tokens: int = option(512, "Tokens per chunk, at least a block of the trace.", min=1)
    context_tokens_max: int = option(
        131_072, "Longest request in tokens; a session ends before it.", flag="--context-max", min=1
    )
    gpu: float = option(0.02, "Size of GPU memory / working set.")
    cpu: float = option(0.05, "Size of the CPU tier / working set.")
    pool: float = option(0.1, "Size of the pool / working set.")
    pools: tuple[float, ...] = option(
        (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.4, 0.8), "Pool sizes to sweep."
    )
    cpus: tuple[float, ...] = option((0.02, 0.05, 0.1, 0.2), "CPU tier sizes to sweep.")
    alone: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.4, 0.8)
    kv_bytes_per_token: int = option(
        131_072, "KV bytes per token, as reported by `vllm-nvmeof size` for a model.", min=1
    )
    policies: tuple[str, ...] = option(
        tuple(sorted(POLICIES, reverse=True)),
        "Eviction policies: values of the key eviction_policy, including module:Class.",
    )
    trace: Path = option(Path(), TRACE_HELP, argument=True)

    def __post_init__(self) -> None:
        check_positive(self, "chunk_tokens", "context_tokens_max", "kv_bytes_per_token")
        shares = (self.gpu, self.cpu, self.pool, *self.pools, *self.cpus, *self.alone)
        if any(not 0 <= share <= 10 for share in shares):
            raise BenchError("sizes must be shares of the working set, from 0 to 10")
        for policy in self.policies:
            choose_policy(policy)

    def shapes(self, unique: int) -> Iterator[tuple[str, Shape]]:
        """Yield the (sweep, shape) of every run. unique: number of chunks in the working set."""

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
    """One simulated server. counts: the chunks so far by where they were found (`gpu`, `cpu`,
    `pool`, `miss`), and how many were `stored` and `written`."""

    def __init__(self, shape: Shape) -> None:
        self.counts: Counter[str] = Counter()
        self._gpu: OrderedDict[int, None] = OrderedDict()
        self._gpu_chunks = shape.gpu
        config = CoreConfig(
            key_bytes=len(_key(0)),
            write_policy=WritePolicy(shape.write_policy),
            store_threshold=shape.store_threshold,
            # The product ignores returning chunks if chunks are written on eviction. Here they are
            # counted too, so that the simulation shows the benefit.
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
        """Process a request from its look-up to its end. A chunk's number identifies all tokens up
        to the chunk's end; all chunks are full."""
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
        """Return all chunks that are in the tiers now."""
        entries = self._core.entries()
        return {int.from_bytes(entry.key[:8], "little", signed=True) for entry in entries}


def _key(number: int) -> bytes:
    """Return the chunk's key in group 0."""
    return number.to_bytes(8, "little", signed=True) + bytes(GROUP_ID_BYTES)


def _measure(settings: Settings, json_path: Path) -> None:
    with progress() as on_progress:
        dump(json_path, "simulate", *run(settings, on_progress))


def run(
    settings: Settings, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Simulate every shape of the sweeps with the same requests; return samples and conditions.

    Raises:
        BenchError: the trace cannot be read, or no request is left.
    """
    on_progress(0, 0, "reading the trace")
    trace = read_trace(settings.trace).capped(settings.context_tokens_max)
    per_chunk = max(1, settings.chunk_tokens // trace.block_tokens)
    chunk_tokens = per_chunk * trace.block_tokens
    asks = asks_of(trace, settings.pace, per_chunk)
    before: dict[int, int | None] = {}  # chunk of a prompt → preceding chunk
    for ask in asks:
        before.update(zip(ask.prompt, (None, *ask.prompt), strict=False))
    if not before:
        raise BenchError(f"{settings.trace}: no request of a chunk or more under the context cap")
    shapes = list(settings.shapes(len(before)))
    orders = (*settings.policies, *MODELS)
    total = len(shapes) + len(settings.alone) * len(orders)
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
    for share in settings.alone:
        for name in orders:
            on_progress(len(samples), total, f"one tier · {name}")
            slots = max(_CHUNKS_MIN, int(share * len(before)))
            found = hits_of(name, slots, asks)
            counts = Counter(pool=found, miss=asked - found)
            shape = Shape(0, 0, slots, name, write_policy="")
            samples.append(_sample("alone", shape, counts, chunk_tokens))
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
        "simulated": "requests in sequence, copies and I/O take no time; the manager is real",
    }


def hits_of(policy: str, slots: int, asks: Sequence[Ask]) -> int:
    """Return how many chunks of the prompts are found in one tier of `slots` chunks. policy: one of
    the manager, for its CPU tier, or one of `MODELS`."""
    tier = MODELS[policy](slots, asks) if policy in MODELS else World(Shape(0, slots, 0, policy))
    for ask in asks:
        tier.serve(ask.prompt, ask.answer)
    return tier.counts["cpu"]


def _sample(
    sweep: str, shape: Shape, counts: Counter[str], chunk_tokens: int, stranded: float = 0.0
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
        "Simulate both tiers on a trace: hits by tier and bytes moved, by size and policy.\n\n"
        "It uses the product's own manager, without servers, GPUs or disks. Sizes are shares of "
        "the trace's working set.",
        Settings,
        _measure,
    ),
)
