# SPDX-License-Identifier: Apache-2.0
"""How often vLLM is told to keep windows and states, on vLLM's own configurations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest

pytest.importorskip("vllm", reason="the specs are vLLM's")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.vllm_adapter.retention import automatic, keep_boundaries

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
        names = [f"layer{number}" for number in range(layers)]
        self.cache = KVCacheConfig(
            num_blocks=100,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(names, spec) for spec in specs],
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
    assert (engine.keep(), engine.interval) == (1024, 64)
    large = MambaSpec(
        block_size=1056, shapes=((1056, 64),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
    )
    full = FullAttentionSpec(block_size=1056, **HEADS)
    engine = Engine(full, large, large, large)
    every = engine.keep()
    assert every == engine.interval
    assert every % 1056 == 0


def test_windows_alone_are_kept_in_half_of_all_places() -> None:
    engine = Engine(WINDOW)
    assert engine.keep() == engine.interval == 2048


@pytest.mark.parametrize(("asked", "interval"), [(64, 64), (100, 112), (1, 16)])
def test_a_configured_number_is_rounded_up_to_whole_chunks(asked: int, interval: int) -> None:
    engine = Engine(FULL, STATE)
    assert engine.keep(asked) == engine.interval == interval


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


def test_the_share_of_what_is_stored() -> None:
    full = Group(0, GroupKind.FULL, 16)
    state = Group(1, GroupKind.STATE, 16, reach_chunks=1)
    assert automatic([full, state], [100, 50], 16) == (16, 1024)
    assert automatic([full, state], [100, 10_000], 16) == (3200, 3200)
