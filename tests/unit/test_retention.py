# SPDX-License-Identifier: Apache-2.0
"""The interval at which vLLM keeps windows and states, on vLLM's own configurations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest

pytest.importorskip("vllm", reason="the specs are vLLM's")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.boundary import automatic
from vllm_nvmeof_offload.vllm_adapter.groups import keep_boundaries

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=1024, **HEADS)
STATE = MambaSpec(
    block_size=16, shapes=((64, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
)


class Config(NamedTuple):
    """vLLM's configuration of the offloading scheduler, as far as it is changed."""

    alignment_tokens: int | None = None
    retention_interval: int | None = 0


class Engine:
    """One layer per spec and group."""

    def __init__(
        self, *specs: Any, blocks_per_chunk: int = 1, given: int | None = 0, layers: int = 1
    ) -> None:
        kinds = {FullAttentionSpec: GroupKind.FULL, MambaSpec: GroupKind.STATE}
        self.groups = [
            Group(
                number,
                kind := kinds.get(type(spec), GroupKind.WINDOW),
                spec.block_size * blocks_per_chunk,
                blocks_per_chunk,
                {GroupKind.FULL: None, GroupKind.STATE: 1, GroupKind.WINDOW: 64}[kind],
            )
            for number, spec in enumerate(specs)
        ]
        names = [[f"{group}.{layer}" for layer in range(layers)] for group in range(len(specs))]
        pages = [spec.page_size_bytes for spec in specs]
        self.cache = KVCacheConfig(
            num_blocks=100,
            kv_cache_tensors=[
                KVCacheTensor(10**12, own, page, 10**9)
                for own, page in zip(names, pages, strict=True)
            ],
            kv_cache_groups=list(map(KVCacheGroupSpec, names, specs)),
        )
        self.cache.prefix_cache_retention_interval = given
        self.vllm: Any = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_cache_retention_interval=given),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        )
        self.scheduler = SimpleNamespace(config=Config(retention_interval=given))

    def keep(self, asked: int | Literal["auto"] = "auto") -> int:
        return keep_boundaries(self.scheduler, self.vllm, self.cache, self.groups, asked)

    @property
    def interval(self) -> int | None:
        interval: int | None = self.vllm.cache_config.prefix_cache_retention_interval
        assert self.cache.prefix_cache_retention_interval == interval
        return interval


def test_a_window_is_kept_where_it_costs_at_most_half_of_full_attention() -> None:
    engine = Engine(FULL, WINDOW, WINDOW, WINDOW, WINDOW, WINDOW)
    assert engine.keep() == engine.interval == 2 * 5 * 1024
    assert engine.scheduler.config == Config(16, None)


def test_states_are_kept_more_often_than_they_last() -> None:
    engine = Engine(FULL, STATE, STATE)
    assert (engine.keep(), engine.interval) == (1024, 16)
    large = MambaSpec(
        block_size=1056, shapes=((1056, 64),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
    )
    full = FullAttentionSpec(block_size=1056, **HEADS)
    engine = Engine(full, large, large, large)
    assert engine.keep() == 3 * engine.interval == 3 * 1056


def test_windows_alone_are_kept_in_half_of_all_places() -> None:
    engine = Engine(WINDOW)
    assert engine.keep() == engine.interval == 2048


@pytest.mark.parametrize(("asked", "every"), [(64, 64), (100, 112), (1, 16)])
def test_a_configured_number_is_rounded_up_to_whole_chunks(asked: int, every: int) -> None:
    engine = Engine(FULL, WINDOW)
    assert engine.keep(asked) == engine.interval == every


def test_a_configured_number_is_how_long_states_last_and_not_how_often_they_are_kept() -> None:
    """Otherwise the end of an answer would be lost, up to so many tokens."""
    engine = Engine(FULL, STATE)
    assert (engine.keep(4096), engine.interval) == (4096, 16)
    engine = Engine(FULL, STATE, WINDOW)
    assert engine.keep(4096) == engine.interval == 4096


def test_zero_leaves_the_choice_to_vllm() -> None:
    engine = Engine(FULL, WINDOW)
    assert (engine.keep(0), engine.interval) == (0, 0)
    assert engine.scheduler.config == Config(16, 0)


@pytest.mark.parametrize("asked", ["auto", 0, 64])
def test_what_the_user_gave_vllm_counts(asked: int | Literal["auto"]) -> None:
    engine = Engine(FULL, WINDOW, given=256)
    assert (engine.keep(asked), engine.interval) == (256, 256)
    assert engine.scheduler.config.retention_interval is None


def test_where_vllm_keeps_all_of_them_it_goes_on_to() -> None:
    engine = Engine(FULL, STATE, given=None)
    assert (engine.keep(), engine.interval) == (1024, None)


def test_of_full_attention_only_nothing_is_changed_but_the_alignment() -> None:
    engine = Engine(FULL, blocks_per_chunk=4)
    assert (engine.keep(), engine.interval) == (0, 0)
    assert engine.scheduler.config == Config(64, 0)


def test_chunks_of_other_sizes_align_at_their_least_common_multiple() -> None:
    engine = Engine(FullAttentionSpec(block_size=48, **HEADS), WINDOW)
    assert engine.keep() % 48 == 0
    assert engine.scheduler.config.alignment_tokens == 48


def _rank_groups(full_bytes: int, state_bytes: int) -> list[RankGroup]:
    full = RankGroup(Group(0, GroupKind.FULL, 16), full_bytes)
    return [full, RankGroup(Group(1, GroupKind.STATE, 16, reach_chunks=1), state_bytes)]


def test_the_share_of_what_is_stored() -> None:
    assert automatic(_rank_groups(100, 50), 16) == 1024
    assert automatic(_rank_groups(100, 10_000), 16) == 3200


def test_a_stage_of_a_pipeline_without_states_keeps_them_as_often_as_it_may() -> None:
    assert automatic(_rank_groups(100, 0), 16) == 1024
    assert automatic(_rank_groups(0, 0), 16) == 1024


def test_no_boundary_is_kept_for_full_attention_only() -> None:
    assert automatic(_rank_groups(100, 50)[:1], 16) == 0


def test_a_padded_state_costs_what_it_has() -> None:
    """As in LFM2, whose state has a quarter of a page's bytes."""
    state = replace(STATE, shapes=((64 * 2048,),))
    padded = replace(state, page_size_padded=4 * state.page_size_bytes)
    assert Engine(FULL, padded).keep() == Engine(FULL, state).keep() == 2 * 64 * 16


def test_a_group_of_several_page_sizes_costs_what_its_layers_have() -> None:
    """The scheduler knows only the spec of the group's first layer."""
    small = replace(FULL, head_size=8, head_size_v=8)
    assert FULL.page_size_bytes == 8 * small.page_size_bytes
    engine = Engine(small, WINDOW, layers=2)
    engine.cache.kv_cache_tensors[:1] = [
        KVCacheTensor(10**9, ["0.0"], small.page_size_bytes, 10**6),
        KVCacheTensor(10**9, ["0.1"], FULL.page_size_bytes, 10**6),
    ]
    # 9 of 16 parts of the bytes of two layers like the windows'.
    assert engine.keep() == 3648 >= 2 * 1024 * 16 / 9
