# SPDX-License-Identifier: Apache-2.0
"""A model's KV cache groups, as vLLM 0.32 and 0.33 form them from the caches of its layers.

Caches that need the same blocks form one group. Otherwise the layout decides. With blocks outermost
(BLHNC, which this package requires on a GPU), caches of several page sizes are *packed*: one group
per kind, except that windows and states are split until a group fits the block that the other
groups need. In all other cases pages are made equal in size, by larger blocks or by padding, and
each kind is split into groups with as many layers as the smallest kind.

The largest group determines the size of a block in GPU memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vllm_nvmeof_offload.commands.size.deployment import (
    BLOCKS_OUTERMOST,
    LAYERS_OUTERMOST,
    Deployment,
)
from vllm_nvmeof_offload.commands.size.model import LayerCache, LayerKind, ModelShape
from vllm_nvmeof_offload.config import GroupBlocks, OffloadConfig, blocks_of_chunk
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.units import align_up

#: In models with states, kernels of latent attention need a multiple of this many tokens per block.
_LATENT_STATE_ALIGN_TOKENS = 128
#: The largest kind determines the group size if it has fewer layers than this multiple of the
#: smallest kind's.
_SIMILAR = 1.5


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's cache on one rank. `page_bytes` and `true_bytes` are the bytes of a block, with
    and without padding. `block_tokens` are the tokens of a block over all ranks that share it."""

    layer: int
    cache: LayerCache
    block_tokens: int
    page_bytes: int
    true_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A KV cache group: pages that need the same number of blocks for any sequence."""

    pages: tuple[Page, ...]

    @property
    def cache(self) -> LayerCache:
        return self.pages[0].cache

    @property
    def block_tokens(self) -> int:
        return self.pages[0].block_tokens

    @property
    def stored(self) -> bool:
        return all(page.cache.stored for page in self.pages)

    @property
    def kind(self) -> GroupKind:
        """Return the kind as the server sees it: latents and indexer keys count as FULL."""
        return GroupKind.__members__.get(self.cache.kind.name, GroupKind.FULL)

    def page_bytes(self, stage: range) -> int:
        return sum(page.page_bytes for page in self.pages if page.layer in stage)

    def true_bytes(self, stage: range) -> int:
        return sum(page.true_bytes for page in self.pages if page.layer in stage)


@dataclass(frozen=True, slots=True)
class Plan:
    """All groups of a model. `stages` are the decoder layers of each pipeline stage."""

    groups: tuple[PlannedGroup, ...]
    stages: tuple[range, ...]

    def stride_bytes(self, stage: int = 0) -> int:
        return max(group.page_bytes(self.stages[stage]) for group in self.groups)

    @property
    def stored(self) -> tuple[PlannedGroup, ...]:
        return tuple(group for group in self.groups if group.stored)

    def blocks_of_chunk(self, config: OffloadConfig) -> tuple[int, str]:
        """Return the blocks per chunk and a warning, as `config.blocks_of_chunk` does. Raises
        the same errors."""
        groups = [GroupBlocks(g.kind, g.block_tokens, g.cache.reach_tokens) for g in self.stored]
        if not groups:
            return config.blocks_per_chunk or 1, ""
        return blocks_of_chunk(config, groups, self.stride_bytes(), len(self.stages))


def plan_groups(model: ModelShape, deployment: Deployment) -> Plan:
    """Form the groups. Raises ConfigError if a size is unknown or vLLM refuses the layout."""
    pages = _pages(model, deployment)
    if not any(page.page_bytes for page in pages):
        raise ConfigError("--model", model.name, "the sizes of its KV cache and states are unknown")
    grouped = _alike(pages, _needs)
    if len(grouped) > 1:
        sizes = {page.page_bytes for page in pages}
        packed = deployment.layout == BLOCKS_OUTERMOST and len(sizes) > 1
        grouped = _packed(grouped) if packed else _split_evenly(_one_page_size(pages))
    groups = []
    for group in grouped:
        # Ranks share the tokens of each block; a state is whole on every rank.
        kept = group[0].cache.kind.keeps_every_token
        tokens = group[0].block_tokens * (deployment.decode_context_parallel if kept else 1)
        groups.append(PlannedGroup(tuple(replace(page, block_tokens=tokens) for page in group)))
    return Plan(tuple(groups), stages_of(model.layers, deployment.pipeline_parallel))


def stages_of(layers: int, count: int) -> tuple[range, ...]:
    """Return the decoder layers of each stage; the stages before the last get the remainder."""
    each, rest = divmod(layers, count)
    ends = [at * each + min(rest, max(0, at - (count - 1 - rest))) for at in range(count + 1)]
    return tuple(itertools.starmap(range, itertools.pairwise(ends)))


def _pages(model: ModelShape, deployment: Deployment) -> list[Page]:
    ranks, kv_bytes = deployment.tensor_parallel, deployment.kv_element_bytes
    block_tokens = deployment.block_tokens or model.block_tokens
    states = [one for one in model.caches if one.kind is LayerKind.STATE]
    tokens = [one for one in model.caches if one.kind.keeps_every_token]
    padded = 0
    if states and tokens:
        # Blocks grow until one layer's keys and values in a block are at least as large as a state.
        entry = max(one.entry_bytes(ranks, kv_bytes) for one in tokens)
        state = max(one.block_bytes(0, ranks, kv_bytes) for one in states)
        if any(one.kind is LayerKind.LATENT for one in tokens):
            block_tokens = max(block_tokens, _LATENT_STATE_ALIGN_TOKENS)
        block_tokens *= max(1, -(-state // (block_tokens * entry)))
        padded = block_tokens * entry
    pages = []
    for layer, position in model.order:
        cache = model.caches[position]
        own = cache.block_tokens or block_tokens
        true = cache.block_bytes(own, ranks, kv_bytes)
        whole = padded if cache.kind is LayerKind.STATE else align_up(true, cache.align_bytes)
        pages.append(Page(layer, cache, own, whole or true, true))
    return pages


def _alike(pages: Iterable[Page], key: Callable[[Page], object]) -> list[list[Page]]:
    found: dict[object, list[Page]] = {}
    for page in pages:
        found.setdefault(key(page), []).append(page)
    return list(found.values())


def _needs(page: Page) -> object:
    """Return a value that is equal for pages of one `PlannedGroup`."""
    cache = page.cache
    if cache.kind.keeps_every_token:
        return page.block_tokens
    state_bytes = page.page_bytes if cache.kind is LayerKind.STATE else 0
    return page.block_tokens, cache.kind, cache.reach_tokens, cache.stored, state_bytes


def _one_page_size(pages: list[Page]) -> list[Page]:
    """Make all pages as large as the largest, with more tokens per block or with padding."""
    largest = max(page.page_bytes for page in pages)
    unified = []
    for page in pages:
        is_state = page.cache.kind is LayerKind.STATE
        times, rest = (1, 0) if is_state else divmod(largest, page.page_bytes)
        if rest and page.cache.kind in (LayerKind.LATENT, LayerKind.INDEXER):
            sizes = f"pages of {page.page_bytes} and {largest} bytes"
            remedy = f"vLLM cannot unify {sizes} in this layout; give {BLOCKS_OUTERMOST}"
            raise ConfigError("--layout", LAYERS_OUTERMOST, remedy)
        times = 1 if rest else times
        tokens, true = page.block_tokens * times, page.true_bytes * times
        unified.append(replace(page, block_tokens=tokens, page_bytes=largest, true_bytes=true))
    return unified


def _split_evenly(pages: list[Page]) -> list[list[Page]]:
    """Split kinds into groups as large as the smallest kind, or the largest if it is similar."""
    kinds = _alike(pages, lambda page: (page.cache, page.block_tokens, page.page_bytes))
    fewest, most = min(map(len, kinds)), max(map(len, kinds))
    size = most if most < fewest * _SIMILAR else fewest
    return [group for kind in kinds for group in _split(kind, -(-len(kind) // size))]


def _packed(buckets: list[list[Page]]) -> list[list[Page]]:
    """Form groups in which a block holds pages of several sizes side by side."""
    sizes = [Counter(page.page_bytes for page in bucket) for bucket in buckets]
    even = [one for one in sizes if len(set(one.values())) == 1]
    most = [max(one.values()) for one in even]
    mixed = max((max(one.values()) for one in even if len(one) > 1), default=0)
    # The number of layers of each page size per group: the largest number with the least padding
    # over all buckets, or 0 if no bucket mixes sizes evenly.
    repeats = mixed and min(
        range(mixed, max(most) + 1),
        key=lambda size: (sum(-count % size for count in most), -size),
    )
    counts = [-(-max(one.values()) // repeats) if repeats and one in even else 1 for one in sizes]
    # States and rings and, if `repeats` is 0, windows can be split down to one page per group.
    split = {LayerKind.STATE, LayerKind.RING} | (set() if repeats else {LayerKind.WINDOW})
    counts_max = [
        len(bucket) if bucket[0].cache.kind in split else count
        for bucket, count in zip(buckets, counts, strict=True)
    ]
    widest = max(
        sum(-(-same // count) * size for size, same in one.items())
        for one, count in zip(sizes, counts_max, strict=True)
    )
    groups = []
    for bucket, count, count_max in zip(buckets, counts, counts_max, strict=True):
        fit = max(widest // bucket[0].page_bytes, 1)
        groups += _split(bucket, min(count_max, max(count, -(-len(bucket) // fit))))
    return groups


def _split(bucket: list[Page], count: int) -> list[list[Page]]:
    if count == 1:
        return [bucket]
    patterns = list(zip(*_alike(bucket, lambda page: page.page_bytes), strict=False))
    return [[*itertools.chain(*patterns[first::count])] for first in range(count)]
