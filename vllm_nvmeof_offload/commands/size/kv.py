# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache: of a token, a block, a session in GPU memory, and of what is offloaded.

A *stage* is one part of a pipeline; layers are spread over stages as evenly as they go, the
first stages taking what is left over. Rank figures are of the fullest stage, number 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_nvmeof_offload.commands.size.model import LayerGroup, LayerKind, ModelShape
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.config_check import chunk_blocks
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.pool.table import ENTRY_BYTES
from vllm_nvmeof_offload.units import slot_stride_bytes

__all__ = ["KvSizes", "Layout", "SessionSlots"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is served.

    kv_bytes: of one element of the KV cache. block_tokens: tokens in one block.
    blocks_per_chunk: None for as many as `chunk_bytes_min` asks for, as the server chooses.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_bytes: int = 2
    block_tokens: int = 16
    blocks_per_chunk: int | None = None

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def alone(self) -> Layout:
        """The same on one rank."""
        return replace(self, tensor_parallel=1, pipeline_parallel=1)


@dataclass(frozen=True, slots=True)
class SessionSlots:
    """`count` slots of `payload_bytes` each, on one rank, hold a session's part in some layers."""

    count: int
    payload_bytes: int

    @property
    def stride_bytes(self) -> int:
        """Bytes of one slot in staging and in a slab: header page and padded payload."""
        return slot_stride_bytes(self.payload_bytes)


class KvSizes:
    """The formulas for one model in one layout. All results in bytes unless named otherwise."""

    def __init__(self, model: ModelShape, layout: Layout) -> None:
        """Raises: ConfigError for a split that vLLM refuses."""
        self.model, self.layout = model, layout
        for group in model.groups:
            _check_split(group, layout)
        if layout.pipeline_parallel > model.layers:
            remedy = f"the model has {model.layers} layers"
            raise ConfigError("--pp", layout.pipeline_parallel, remedy)
        self.blocks_per_chunk = layout.blocks_per_chunk or self._default_blocks_per_chunk()

    @property
    def chunk_tokens(self) -> int:
        return self.blocks_per_chunk * self.layout.block_tokens

    def token_bytes(self) -> int:
        """One token in all layers, each thing once: what the model itself makes."""
        kv_bytes = self.layout.kv_bytes
        return sum(group.layers * group.token_bytes(1, kv_bytes) for group in self.model.groups)

    def rank_token_bytes(self, stage: int = 0) -> int:
        """One token in the layers of one rank."""
        return sum(
            self._layers(group, stage) * self._token_bytes(group) for group in self.model.groups
        )

    def copies(self) -> float:
        """Bytes over all ranks for each byte that the model makes; above 1: ranks hold alike."""
        once = self.token_bytes()
        ranks = sum(self.rank_token_bytes(stage) for stage in self._stages())
        return ranks * self.layout.tensor_parallel / once if once else 1.0

    def page_bytes(self, group: LayerGroup) -> int:
        """One block in one layer on one rank."""
        return self.layout.block_tokens * self._token_bytes(group)

    def fragment_bytes(self, group: LayerGroup) -> int:
        """The piece of a page that lies together where keys and values are apart."""
        pieces = 2 if group.value_width else 1
        return self.page_bytes(group) // pieces

    def block_bytes(self, stage: int = 0) -> int:
        """One block in all layers of one rank: one physical block, all layers together."""
        return self.layout.block_tokens * self.rank_token_bytes(stage)

    def state_bytes(self, stage: int = 0) -> int:
        """Recurrent state of one sequence on one rank."""
        states = ((g, g.state) for g in self.model.groups if g.state is not None)
        tensor_parallel = self.layout.tensor_parallel
        return sum(self._layers(g, stage) * s.rank_bytes(tensor_parallel) for g, s in states)

    def session_rank_bytes(self, context_tokens: int, stage: int = 0) -> int:
        """A session in GPU memory, on one rank: whole blocks, windows as far as they reach."""
        attention = sum(
            self._layers(group, stage)
            * self.page_bytes(group)
            * _kept(group, context_tokens, self.layout.block_tokens)
            for group in self.model.groups
        )
        return attention + self.state_bytes(stage)

    def session_slots(self, context_tokens: int, stage: int = 0) -> list[SessionSlots]:
        """What one rank stores of a session: whole chunks only, windows as far as they reach."""
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
        """A session's slots on one rank, in pinned memory; also what a load reads there."""
        return sum(s.count * s.stride_bytes for s in self.session_slots(context_tokens, stage))

    def loaded_bytes(self, context_tokens: int) -> int:
        """Bytes that all ranks read to bring a session back from the pool."""
        each = sum(self.staged_rank_bytes(context_tokens, stage) for stage in self._stages())
        return each * self.layout.tensor_parallel

    def pooled_bytes(self, context_tokens: int) -> int:
        """Bytes of a session in the pool, over all ranks, with the table's entries."""
        slots = sum(
            s.count for stage in self._stages() for s in self.session_slots(context_tokens, stage)
        )
        entries = slots * self.layout.tensor_parallel * ENTRY_BYTES
        return self.loaded_bytes(context_tokens) + entries

    def _stages(self) -> Iterator[int]:
        return iter(range(self.layout.pipeline_parallel))

    def _layers(self, group: LayerGroup, stage: int) -> int:
        whole, left = divmod(group.layers, self.layout.pipeline_parallel)
        return whole + (stage < left)

    def _token_bytes(self, group: LayerGroup) -> int:
        return group.token_bytes(self.layout.tensor_parallel, self.layout.kv_bytes)

    def _default_blocks_per_chunk(self) -> int:
        # One way to choose: the server's own, with its default chunk_bytes_min.
        return chunk_blocks(OffloadConfig(), self.block_bytes(), self.layout.block_tokens)


def _kept(group: LayerGroup, context_tokens: int, unit_tokens: int) -> int:
    """Units (blocks or chunks) of `unit_tokens` that a layer keeps of a context."""
    units = -(-context_tokens // unit_tokens)
    if group.kind is LayerKind.WINDOW and group.window_tokens is not None:
        # A window need not begin where a unit does: one more than it covers.
        units = min(units, -(-(group.window_tokens - 1) // unit_tokens) + 1)
    return units


def _check_split(group: LayerGroup, layout: Layout) -> None:
    ranks, heads = layout.tensor_parallel, group.kv_heads
    if group.split_by_heads and heads % ranks and ranks % heads:
        raise ConfigError(
            "--tp", ranks, f"vLLM cannot share {heads} KV heads over it; give a divisor or multiple"
        )
