# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache per token, block and session; sessions that fit; bandwidth that they need.

A *stage* is one part of a pipeline. Layers are spread over stages as evenly as possible, and
the first stages take the remainder. Figures of a rank are those of the fullest stage, number 0.

A reload is the worst case: all KV is only in the pool, and all of `concurrency` sessions come
back at the same moment, spread evenly over drives, links and GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_nvmeof_offload.commands.size.deployment import Deployment, parse_link
from vllm_nvmeof_offload.commands.size.model import LayerGroup, LayerKind, ModelShape
from vllm_nvmeof_offload.config import OffloadConfig, chunk_blocks
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.staging import split_slots
from vllm_nvmeof_offload.units import slot_stride_bytes


@dataclass(frozen=True, slots=True)
class SessionSlots:
    """`count` slots of `payload_bytes` each hold one rank's part of a session in some layers."""

    count: int
    payload_bytes: int

    @property
    def stride_bytes(self) -> int:
        """Bytes of one slot in staging and in a slab: header page and padded payload."""
        return slot_stride_bytes(self.payload_bytes)


class KvSizes:
    """Formulas for one model in one deployment; results are bytes unless named otherwise."""

    def __init__(self, model: ModelShape, deployment: Deployment) -> None:
        """ConfigError for a split of the model that vLLM refuses."""
        self.model, self.deployment = model, deployment
        self._stages = range(deployment.pipeline_parallel)
        ranks = deployment.tensor_parallel
        for group in model.groups:
            heads = group.kv_heads
            if group.split_by_heads and heads % ranks and ranks % heads:
                remedy = f"vLLM cannot share {heads} KV heads over it; give a divisor or multiple"
                raise ConfigError("--tp", ranks, remedy)
        if deployment.pipeline_parallel > model.layers:
            remedy = f"the model has {model.layers} layers"
            raise ConfigError("--pp", deployment.pipeline_parallel, remedy)
        # The server's own way to choose, with its default chunk_bytes_min.
        self.blocks_per_chunk: int = deployment.blocks_per_chunk or chunk_blocks(
            OffloadConfig(), self.block_bytes(), deployment.block_tokens
        )

    @property
    def chunk_tokens(self) -> int:
        return self.blocks_per_chunk * self.deployment.block_tokens

    def token_bytes(self) -> int:
        """One token in all layers, each byte counted once however many ranks hold it."""
        kv_bytes = self.deployment.kv_element_bytes
        return sum(group.layers * group.token_bytes(1, kv_bytes) for group in self.model.groups)

    def rank_token_bytes(self, stage: int = 0) -> int:
        """One token in the layers of one rank."""
        return sum(
            self._layers(group, stage) * self._token_bytes(group) for group in self.model.groups
        )

    def copies(self) -> float:
        """Bytes on all ranks ÷ bytes that the model makes; above 1: ranks hold equal bytes."""
        once = self.token_bytes()
        ranks = sum(self.rank_token_bytes(stage) for stage in self._stages)
        return ranks * self.deployment.tensor_parallel / once if once else 1.0

    def page_bytes(self, group: LayerGroup) -> int:
        """One block in one layer on one rank."""
        return self.deployment.block_tokens * self._token_bytes(group)

    def fragment_bytes(self, group: LayerGroup) -> int:
        """The contiguous piece of a page where keys and values are apart."""
        return self.page_bytes(group) // (2 if group.value_width else 1)

    def block_bytes(self) -> int:
        """One block in all layers of one rank: one physical block, all layers together."""
        return self.deployment.block_tokens * self.rank_token_bytes()

    def rank_weights_bytes(self) -> int | None:
        """Weights on one rank, spread evenly; None: unknown."""
        total = self.model.weights.total_bytes
        return None if total is None else -(-total // self.deployment.ranks)

    def state_bytes(self, stage: int = 0) -> int:
        """Recurrent state of one sequence on one rank."""
        states = ((g, g.state) for g in self.model.groups if g.state is not None)
        tensor_parallel = self.deployment.tensor_parallel
        return sum(self._layers(g, stage) * s.rank_bytes(tensor_parallel) for g, s in states)

    def session_rank_bytes(self, context_tokens: int) -> int:
        """A session in GPU memory on one rank: whole blocks, windows as far as they reach."""
        total = self.state_bytes()
        for group in self.model.groups:
            blocks = _kept(group, context_tokens, self.deployment.block_tokens)
            total += self._layers(group, 0) * self.page_bytes(group) * blocks
        return total

    def session_slots(self, context_tokens: int, stage: int = 0) -> list[SessionSlots]:
        """Slots that one rank stores of a session: whole chunks, windows as far as they reach."""
        chunks = context_tokens // self.chunk_tokens
        full, slots = 0, []
        for group in self.model.groups:
            payload = self._layers(group, stage) * self.page_bytes(group) * self.blocks_per_chunk
            if group.kind is LayerKind.WINDOW:
                kept = _kept(group, chunks * self.chunk_tokens, self.chunk_tokens)
                slots.append(SessionSlots(kept, payload))
            else:
                full += payload
        if full:
            slots.append(SessionSlots(chunks, full))
        if chunks and self.state_bytes(stage):
            slots.append(SessionSlots(1, self.state_bytes(stage)))
        return slots

    def staged_rank_bytes(self, context_tokens: int, stage: int = 0) -> int:
        """A session's slots on one rank: bytes of pinned memory, and bytes that a load reads."""
        return sum(s.count * s.stride_bytes for s in self.session_slots(context_tokens, stage))

    def loaded_bytes(self, context_tokens: int) -> int:
        """Bytes that all ranks read to bring a session back from the pool."""
        each = sum(self.staged_rank_bytes(context_tokens, stage) for stage in self._stages)
        return each * self.deployment.tensor_parallel

    def pooled_bytes(self, context_tokens: int) -> int:
        """Bytes of a session in the pool, over all ranks, with the table's entries."""
        slots = sum(
            s.count for stage in self._stages for s in self.session_slots(context_tokens, stage)
        )
        entries = slots * self.deployment.tensor_parallel * ENTRY_BYTES
        return self.loaded_bytes(context_tokens) + entries

    def _layers(self, group: LayerGroup, stage: int) -> int:
        whole, left = divmod(group.layers, self.deployment.pipeline_parallel)
        return whole + (stage < left)

    def _token_bytes(self, group: LayerGroup) -> int:
        return group.token_bytes(self.deployment.tensor_parallel, self.deployment.kv_element_bytes)


def _kept(group: LayerGroup, context_tokens: int, unit_tokens: int) -> int:
    """Units (blocks or chunks) of `unit_tokens` that a layer keeps of a context."""
    units = -(-context_tokens // unit_tokens)
    if group.kind is LayerKind.WINDOW and group.window_tokens is not None:
        # A window need not begin where a unit does: one more than it covers.
        units = min(units, -(-(group.window_tokens - 1) // unit_tokens) + 1)
    return units


@dataclass(frozen=True, slots=True)
class Room:
    """Sessions that fit into the bytes for KV on one GPU, one rank's cache slots, or the pool.

    free_bytes below 0: the weights do not fit. session_bytes: of one session there.
    """

    free_bytes: int
    session_bytes: int
    sessions: int


def _room(free_bytes: int, session_bytes: int, engines: int = 1) -> Room:
    each = max(0, free_bytes) // session_bytes if session_bytes else 0
    return Room(free_bytes, session_bytes, each * engines)


def gpu_room(sizes: KvSizes) -> Room | None:
    """GPU memory, weights spread evenly; None if the weights' size is unknown."""
    deployment, weights = sizes.deployment, sizes.rank_weights_bytes()
    if weights is None:
        return None
    taken = int(deployment.gpu_memory_bytes * deployment.gpu_memory_utilization)
    free = taken - deployment.gpu_reserve_bytes - weights
    return _room(free, sizes.session_rank_bytes(deployment.context_tokens), deployment.engines)


def cpu_room(sizes: KvSizes) -> Room:
    """The cache slots of the staging."""
    deployment = sizes.deployment
    session = sizes.staged_rank_bytes(deployment.context_tokens)
    if not session:
        return _room(0, 0)
    stride = max(slot.stride_bytes for slot in sizes.session_slots(deployment.context_tokens))
    staging = deployment.staging_bytes // deployment.ranks
    cache_slots, _ = split_slots(staging, stride, deployment.stream_slots)
    return _room(cache_slots * stride, session, deployment.engines)


def pool_room(sizes: KvSizes, drives: int) -> Room:
    """The pool on `drives` drives; a session may use several, so no drive's rest is lost."""
    each = int(sizes.deployment.drive_bytes * sizes.deployment.drive_fill)
    return _room(each * drives, sizes.pooled_bytes(sizes.deployment.context_tokens))


@dataclass(frozen=True, slots=True)
class Hop:
    """One thing that all bytes pass. needed: how many of it the objective asks for."""

    name: str
    bytes_per_s: float
    needed: int


@dataclass(frozen=True, slots=True)
class Reload:
    """All of the returning sessions, loaded at once."""

    session_bytes: int
    needed_bytes_per_s: float
    hops: tuple[Hop, ...]
    seconds: float
    sessions_in_time: int

    @property
    def bottleneck(self) -> Hop:
        return min(self.hops, key=lambda hop: hop.bytes_per_s)


def plan_reload(sizes: KvSizes, drives: int) -> Reload:
    """Load `concurrency` sessions from `drives` drives within the TTFT objective."""
    deployment, session = sizes.deployment, sizes.loaded_bytes(sizes.deployment.context_tokens)
    needed = deployment.concurrency * session / deployment.ttft_seconds
    link, gpu_link = parse_link(deployment.link), parse_link(deployment.gpu_link)
    hops = tuple(
        Hop(name, count * each, math.ceil(needed / each))
        for name, count, each in (
            ("drives", drives, deployment.drive_read_bytes_per_s),
            ("links", link.count, link.bytes_per_s * deployment.link_efficiency),
            ("GPU links", deployment.gpus, gpu_link.total_bytes_per_s * deployment.link_efficiency),
        )
    )
    rate = min(hop.bytes_per_s for hop in hops)
    in_time = math.floor(rate * deployment.ttft_seconds / session) if session else 0
    seconds = deployment.concurrency * session / rate
    return Reload(session, needed, hops, seconds, in_time)
