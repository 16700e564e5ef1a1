# SPDX-License-Identifier: Apache-2.0
"""The memory that a model's layers keep for each sequence."""

from __future__ import annotations

import enum
from dataclasses import dataclass

#: Bytes of one element, by the names that models and vLLM use.
DTYPES = {
    "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2,
    "float32": 4, "fp32": 4, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip


def dtype_bytes(name: object) -> int | None:
    """Bytes of one element of dtype `name`; None for a name that is not known."""
    return DTYPES.get(str(name).removeprefix("torch.").lower())


class LayerKind(enum.Enum):
    """How a layer's memory grows with the sequence."""

    FULL = "full attention"
    LATENT = "latent attention (MLA)"
    INDEXER = "sparse-attention indexer"
    WINDOW = "sliding window"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State of one layer for one sequence, of any length, as numbers of elements.

    conv_width × conv_tokens of `conv_bytes` each, and recurrent_elements of `recurrent_bytes`.
    `group_width`: the part of conv_width that belongs to groups of heads; if there are more
    ranks than groups, each rank has a group of its own.
    """

    conv_width: int
    conv_tokens: int
    recurrent_elements: int
    conv_bytes: int
    recurrent_bytes: int
    groups: int = 0
    group_width: int = 0

    def rank_bytes(self, tensor_parallel: int) -> int:
        """Bytes on one of `tensor_parallel` ranks."""
        width = self.conv_width
        if self.groups and self.groups % tensor_parallel:
            width += (tensor_parallel - self.groups) * self.group_width
        conv = width // tensor_parallel * self.conv_tokens * self.conv_bytes
        return conv + self.recurrent_elements // tensor_parallel * self.recurrent_bytes


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` layers that keep the same.

    key_width, value_width: elements per token and KV head; a latent has one head and no value.
    window_tokens: the reach of a WINDOW layer. element_bytes: set if the layer does not follow
    the KV cache's dtype. state: of a STATE layer, None if its size is unknown.
    """

    kind: LayerKind
    layers: int
    kv_heads: int = 1
    key_width: int = 0
    value_width: int = 0
    window_tokens: int | None = None
    element_bytes: int | None = None
    state: RecurrentState | None = None

    @property
    def split_by_heads(self) -> bool:
        """Does tensor parallelism split it? A latent is whole on every rank."""
        return self.kind in (LayerKind.FULL, LayerKind.WINDOW)

    def token_bytes(self, tensor_parallel: int, kv_bytes: int) -> int:
        """Bytes of one token in one layer on one rank; 0 for a STATE layer."""
        if self.kind is LayerKind.STATE:
            return 0
        # With more ranks than KV heads each rank has a copy of one head.
        heads = max(1, self.kv_heads // tensor_parallel) if self.split_by_heads else 1
        return heads * (self.key_width + self.value_width) * (self.element_bytes or kv_bytes)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of all weights, over all ranks; None: unknown. `source`: how the number is known."""

    total_bytes: int | None
    source: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model that decides the size of its KV cache and weights."""

    name: str
    groups: tuple[LayerGroup, ...]
    weights: Weights
    element_bytes: int
    context_tokens_max: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)
