# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups as ours, over caches that vLLM's own planner places in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils as utils

from tests.chunks import pieces_of
from tests.upstream.planner_child import planned, planner, specs_of, views_of
from vllm_nvmeof_offload.config import blocks_that_fit
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.vllm_adapter.configure import choose_blocks_per_chunk
from vllm_nvmeof_offload.vllm_adapter.groups import (
    LayerCaches,
    blocks_of,
    facts_of,
    geometry_of,
    groups_of,
    rank_groups_of,
    resumes_at_any_block,
    set_sizes_of,
)

BLOCKS, BLOCK_TOKENS, PER_CHUNK = 9, 4, 2
DTYPE = torch.float32

_COMMON: dict[str, Any] = {"block_size": BLOCK_TOKENS, "dtype": DTYPE}


def _full(heads: int = 1, **more: Any) -> Any:
    return interface.FullAttentionSpec(**_COMMON, num_kv_heads=heads, head_size=8, **more)


def _window(heads: int = 1, tokens: int = 16, **more: Any) -> Any:
    return interface.SlidingWindowSpec(
        **_COMMON, num_kv_heads=heads, head_size=8, sliding_window=tokens, **more
    )


def _local(heads: int = 1, tokens: int = 16, **more: Any) -> Any:
    return interface.ChunkedLocalAttentionSpec(
        **_COMMON, num_kv_heads=heads, head_size=8, attention_chunk_size=tokens, **more
    )


def _state(size: int = 1, **more: Any) -> Any:
    return interface.MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((3, 5 * size), (8,)),
        dtypes=(DTYPE, torch.bfloat16),
        mamba_cache_mode="align",
        **more,
    )


MAKERS = [_full, _window, _local, _state]


@dataclass
class Cache:
    """A KV cache in memory, with vLLM's own view of each layer."""

    config: Any
    layout: str

    def __post_init__(self) -> None:
        size = self.config.kv_cache_tensors[0].size
        self.bytes = torch.zeros(size, dtype=torch.int8)
        self.views = views_of(self.config, self.layout, self.bytes)
        self.layers = LayerCaches(self.config, self.views)

    def bytes_of(self, group: int, block: int) -> set[int]:
        """The addresses that the group's layers write when they fill this block."""
        self.bytes.zero_()
        for name in self.config.kv_cache_groups[group].layer_names:
            self.views[name][block].view(torch.int8).fill_(1)
        return set((self.bytes.numpy().nonzero()[0] + self.bytes.data_ptr()).tolist())


def _offloading(config: Any, blocks_per_chunk: int = PER_CHUNK, stages: int = 1) -> Any:
    """vLLM's `OffloadingConfig` of all groups, as far as we read it."""
    groups = [
        SimpleNamespace(
            group_id=number, tokens_per_block=group.kv_cache_spec.block_size,
            layer_names=tuple(group.layer_names),
        )
        for number, group in enumerate(config.kv_cache_groups)
    ]  # fmt: skip
    return SimpleNamespace(
        groups=tuple(groups),
        cache=SimpleNamespace(blocks_per_chunk=blocks_per_chunk),
        parallel=SimpleNamespace(pp_size=stages),
    )


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[list[Any], str]:
    """Groups, of which some have no layers on this rank, and a layout that can hold them."""
    layout = draw(st.sampled_from(["LBHNC", "BLHNC", "LBNHC", "BLNHC"]))
    specs = [
        draw(st.sampled_from(MAKERS))(draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 4)))
    ]
    if layout.startswith("L") and len(specs) > 1:  # vLLM then makes pages of one size
        page_bytes = max(spec.page_size_bytes for spec in specs)
        specs = [replace(spec, page_size_padded=page_bytes) for spec in specs]
    groups = []
    for number, spec in enumerate(specs):
        count = draw(st.integers(0 if number else 1, 4))
        names = [f"{number}.{layer}" for layer in range(count)]
        whole: Any = spec
        if layout.startswith("B") and count and draw(st.booleans()):
            maker = MAKERS[[type(m()) for m in MAKERS].index(type(spec))]
            several = {n: maker(draw(st.integers(1, 3))) for n in names}
            whole = interface.UniformTypeKVCacheSpecs(
                block_size=BLOCK_TOKENS, kv_cache_specs=several
            )
        groups.append(interface.KVCacheGroupSpec(names, whole))
    return groups, layout


@settings(max_examples=150, deadline=None)
@given(shape=_shapes(), order=st.permutations(range(BLOCKS)), count=st.integers(1, BLOCKS - 1))
def test_a_groups_pieces_are_exactly_the_bytes_of_its_pages(
    shape: tuple[list[Any], str], order: list[int], count: int
) -> None:
    groups, layout = shape
    cache = Cache(planned(groups, layout, BLOCKS), layout)
    geometry = geometry_of(_offloading(cache.config), cache.layers)
    for number, group in enumerate(geometry.by_group):
        blocks = np.array(order[:count], np.int32)
        chunks = -(-count // group.blocks_per_chunk)
        pieces = pieces_of(group, blocks, 0, chunks)
        touched = [
            address
            for start, _, size in pieces.rows.tolist()
            for address in range(start, start + size)
        ]
        expected = set().union(*(cache.bytes_of(number, block) for block in order[:count]))
        assert len(touched) == len(set(touched))
        assert set(touched) == expected
        assert geometry.groups[number].block_bytes == len(expected) // count
        # Each chunk's payload is filled from its start without a gap.
        for chunk in range(chunks):
            rows = pieces.rows[pieces.first[chunk] : pieces.first[chunk + 1]]
            ends = np.cumsum(rows[:, 2])
            assert (rows[:, 1] == ends - rows[:, 2]).all()
            assert not len(rows) or ends[-1] <= group.payload_bytes


@settings(max_examples=100, deadline=None)
@given(shape=_shapes())
def test_the_scheduler_knows_the_bytes_of_a_rank_without_its_memory(
    shape: tuple[list[Any], str],
) -> None:
    groups, layout = shape
    cache = Cache(planned(groups, layout, BLOCKS), layout)
    geometry = geometry_of(_offloading(cache.config), cache.layers)
    known = utils.generate_scheduler_kv_cache_config([cache.config])
    assert rank_groups_of([one.group for one in geometry.groups], known) == list(geometry.groups)


def test_packed_layers_of_a_block_are_one_piece() -> None:
    groups = [
        interface.KVCacheGroupSpec(["a", "b", "c"], _full(2)),
        interface.KVCacheGroupSpec(["d"], _window(1)),
    ]
    cache = Cache(planned(groups, "BLHNC", BLOCKS), "BLHNC")
    geometry = geometry_of(_offloading(cache.config, 1), cache.layers)
    page = _full(2).page_size_bytes
    assert geometry.group_bytes == (3 * page, page // 2)
    for group, size in zip(geometry.by_group, geometry.group_bytes, strict=True):
        start = cache.bytes.data_ptr() + 4 * 3 * page
        assert pieces_of(group, np.array([4], np.int32)).rows.tolist() == [[start, 0, size]]


def test_groups_by_kind_and_reach() -> None:
    specs = [
        _window(tokens=20),
        _window(tokens=17, extra_retained_tokens=8),
        _local(tokens=32),
        _state(),
        interface.MLAAttentionSpec(**_COMMON, num_kv_heads=1, head_size=8),
        _replayed(bounded_replay=False),
    ]
    made = SimpleNamespace(
        kv_cache_groups=[interface.KVCacheGroupSpec([str(n)], s) for n, s in enumerate(specs)]
    )
    config = _offloading(made)
    config.groups = config.groups[1:]  # vLLM leaves the first out: positions are not its numbers
    assert groups_of(config, made) == (
        Group(1, GroupKind.WINDOW, 8, 2, 3, 24),
        Group(2, GroupKind.LOCAL, 8, 2, 4, 32),
        Group(3, GroupKind.STATE, 8, 2, 1),
        Group(4, GroupKind.FULL, 8, 2),
        Group(5, GroupKind.WINDOW, 8, 2, 2, 15),
    )


def test_the_facts_of_a_group_are_its_layers_kinds_and_sizes() -> None:
    groups = [
        interface.KVCacheGroupSpec(["a", "b"], _window(tokens=12)),
        interface.KVCacheGroupSpec(["c"], _state()),
    ]
    config = planned(groups, "BLHNC", BLOCKS)
    page = _window().page_size_bytes
    window = {"tokens_per_block": 4, "kind": "window", "sliding_window": 12}
    state = {"tokens_per_block": 4, "kind": "state", "mamba_cache_mode": "align"}
    states = [((3, 5), "torch.float32"), ((8,), "torch.bfloat16")]
    assert facts_of(_offloading(config), config) == [
        {**window, "layers": [(["a", "b"], {"page_bytes": page})]},
        {**state, "layers": [(["c"], {"page_bytes": 76, "states": states})]},
    ]


def _stages(groups: list[Any], *layers: set[str]) -> list[Any]:
    """The configurations that vLLM makes for the stages of a pipeline, by their layers."""
    specs = {name: spec for group in groups for name, spec in specs_of(group).items()}
    project = planner()._project_kv_cache_groups_to_worker
    return [
        planned(project(groups, {n: specs[n] for n in names}), "BLHNC", BLOCKS) for names in layers
    ]


def test_all_stages_of_a_pipeline_have_the_same_groups_facts_and_chunks() -> None:
    """They have other layers, and of a group perhaps none."""
    several = {"a": _full(1), "b": _full(2), "c": _full(2)}
    groups = [
        interface.KVCacheGroupSpec(
            list(several),
            interface.UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=several),
        ),
        interface.KVCacheGroupSpec(["d", "e"], _window(tokens=64)),
    ]
    stages = _stages(groups, {"a", "d", "e"}, {"b", "c"})
    page = _full(1).page_size_bytes
    lengths = [
        geometry_of(_offloading(one), Cache(one, "BLHNC").layers).group_bytes for one in stages
    ]
    assert lengths == [(PER_CHUNK * page, PER_CHUNK * 2 * page), (PER_CHUNK * 4 * page, 0)]
    first, second = (facts_of(_offloading(one, stages=2), one) for one in stages)
    assert first == second
    assert groups_of(_offloading(stages[0]), stages[0]) == groups_of(
        _offloading(stages[1]), stages[1]
    )
    chosen = {_chosen_of(one, stages=2) for one in stages}
    assert chosen == {64 // BLOCK_TOKENS}, "as many tokens as the window has"


# -- blocks per chunk ---------------------------------------------------------------------


def _chosen(specs: list[Any], **extra: Any) -> int:
    """The blocks per chunk of groups with one layer each."""
    groups = [interface.KVCacheGroupSpec([str(n)], spec) for n, spec in enumerate(specs)]
    made = interface.KVCacheConfig(
        BLOCKS, [interface.KVCacheTensor(BLOCKS << 10, ["0"], 1 << 10, 1 << 10)], groups
    )
    return _chosen_of(made, **extra)


def _chosen_of(made: Any, stages: int = 1, **extra: Any) -> int:
    parallel = SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=stages)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=parallel,
    )
    choose_blocks_per_chunk(config, made)
    chosen: int = extra["blocks_per_chunk"]
    return chosen


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([_full()], 8),
        ([_full(), _window(tokens=100)], 8),
        ([_full(), _window(tokens=31), _window(tokens=100)], 7),
        ([_full(), _window(tokens=3)], 1),
        ([_full(), _local(tokens=48)], 6),  # 8 and 7 do not divide its 12 blocks
        ([_window(tokens=20), _local(tokens=64)], 4),
        ([_full(), _state()], 1),
        ([_state()], 1),
        ([_full(), replace(_window(tokens=100), block_size=8)], 1),
    ],
)
def test_blocks_per_chunk_suit_all_groups(specs: list[Any], expected: int) -> None:
    assert _chosen(specs, chunk_bytes_min=8 << 10) == expected


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([_full(), _state()], "this model has states, each of which is one block"),
        ([_full(), replace(_window(), block_size=8)], "have different numbers of tokens"),
    ],
)
def test_a_number_that_no_chunk_can_have_is_refused(specs: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^blocks_per_chunk=2: .*{reason}.*leave it out"):
        _chosen(specs, blocks_per_chunk=2)
    assert _chosen(specs, blocks_per_chunk=1) == 1


def test_chunks_longer_than_a_window_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert _chosen([_full(), _window(tokens=16)], blocks_per_chunk=4) == 4
    assert not caplog.records
    assert _chosen([_full(), _window(tokens=16)], blocks_per_chunk=5) == 5
    (record,) = caplog.records
    assert "at most 4 blocks per chunk" in record.getMessage()


def _replayed(*, bounded_replay: bool = True) -> Any:
    """A window that vLLM recomputes after a hit, as in DeepSeek V4.1."""
    return interface.SlidingWindowMLASpec(
        **_COMMON, num_kv_heads=1, head_size=8, sliding_window=16, bounded_replay=bounded_replay
    )


@pytest.mark.parametrize(
    ("made", "resumes"),
    [
        ([_full], True),
        ([_window], False),
        ([_local], False),
        ([_state], False),
        ([_full, _full], False),
        ([_full, _window], False),
        ([_full, _replayed], False),
    ],
)
def test_vllm_resumes_at_any_block_of_one_group_that_keeps_all_tokens(
    made: list[Any], resumes: bool
) -> None:
    """Otherwise vLLM refuses failed blocks, even if it offloads only one of several groups."""
    groups = [interface.KVCacheGroupSpec([str(at)], one()) for at, one in enumerate(made)]
    assert resumes_at_any_block(interface.KVCacheConfig(BLOCKS, [], groups)) is resumes


def test_a_group_of_context_parallel_ranks_has_longer_blocks() -> None:
    groups = [interface.KVCacheGroupSpec(["a"], _full())]
    (blocks,) = blocks_of(interface.KVCacheConfig(BLOCKS, [], groups), 4)
    assert blocks.block_tokens == 4 * BLOCK_TOKENS
    assert blocks_that_fit([blocks], 3) == 3


def _latent(**more: Any) -> Any:
    return interface.MLAAttentionSpec(
        **_COMMON, num_kv_heads=1, head_size=8, max_tp_shards=1, **more
    )


@pytest.mark.parametrize(
    ("tensor_parallel", "specs", "expected"),
    [
        (4, [_latent()], (4,)),
        (1, [_latent()], (1,)),
        (4, [_full()], (1,)),  # vLLM does not say into how many its heads can be split
        (4, [_full(max_tp_shards=2)], (2,)),
        (2, [_full(max_tp_shards=8)], (1,)),
        (4, [_latent(), _full(max_tp_shards=2), _state()], (4, 2, 1)),
        (128, [_latent()], (1,)),
        (6, [_full(max_tp_shards=2), _full(max_tp_shards=3)], (3, 1)),  # 2 does not divide 3
    ],
)
def test_ranks_whose_layers_cannot_be_split_hold_equal_bytes(
    tensor_parallel: int, specs: list[Any], expected: tuple[int, ...]
) -> None:
    kinds = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    groups = [SimpleNamespace(group_id=number) for number in range(len(specs))]
    parallel = SimpleNamespace(tp_size=tensor_parallel, dcp_size=1)
    config = SimpleNamespace(parallel=parallel, groups=groups)
    assert set_sizes_of(config, SimpleNamespace(kv_cache_groups=kinds)) == expected


def test_ranks_that_divide_the_tokens_of_latent_attention_hold_different_bytes() -> None:
    kinds = [SimpleNamespace(kv_cache_spec=_latent())]
    parallel = SimpleNamespace(tp_size=4, dcp_size=2)
    config = SimpleNamespace(parallel=parallel, groups=[SimpleNamespace(group_id=0)])
    assert set_sizes_of(config, SimpleNamespace(kv_cache_groups=kinds)) == (1,)
