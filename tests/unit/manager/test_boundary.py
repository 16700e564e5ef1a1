# SPDX-License-Identifier: Apache-2.0
"""The boundary of a load: the same as vLLM's own look-up finds, for any groups and any holes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.boundary import (
    full_prefix,
    limit_of,
    plan,
    taken,
    unit_tokens,
    wanted,
)

FULL = Group(0, GroupKind.FULL, 16)
WINDOW = Group(1, GroupKind.WINDOW, 16, reach_chunks=2, reach_tokens=31)
LOCAL = Group(2, GroupKind.LOCAL, 16, reach_chunks=4, reach_tokens=64)
STATE = Group(3, GroupKind.STATE, 16, reach_chunks=1)


class Index:
    """keys: group ids and ends in tokens of the chunks that are present."""

    def __init__(self, groups: list[Group], tokens: int, missing: set[tuple[int, int]]) -> None:
        self.groups = groups
        self.keys = [
            [
                b"%d/%d" % (group.group_id, end)
                for end in range(group.tokens_per_chunk, tokens + 1, group.tokens_per_chunk)
            ]
            for group in groups
        ]
        self.missing = {b"%d/%d" % one for one in missing}
        self.questions = 0

    def has(self, keys: Any) -> bytes:
        self.questions += 1
        return bytes(key not in self.missing for key in keys)

    def plan(self, local: int, limit: int) -> tuple[int, list[bytes]]:
        return plan(self.groups, self.keys, local, limit, self.has)


def test_the_full_prefix_comes_first_then_windows_then_states() -> None:
    index = Index([STATE, WINDOW, FULL], 80, set())
    boundary, keys = index.plan(0, 80)
    assert boundary == 64, "the last token is computed, and a state is there at its chunk's end"
    assert keys == [b"0/16", b"0/32", b"0/48", b"0/64", b"1/48", b"1/64", b"3/64"]


def test_of_a_full_group_alone_every_token_may_be_loaded() -> None:
    index = Index([FULL], 80, {(0, 64)})
    assert index.plan(16, 80) == (48, [b"0/32", b"0/48"])
    assert Index([FULL], 80, set()).plan(0, 80)[0] == 80


def test_a_hole_in_a_window_moves_the_boundary_to_the_last_whole_reach() -> None:
    index = Index([FULL, WINDOW], 96, {(1, 80)})
    boundary, keys = index.plan(0, 96)
    assert boundary == 64
    assert keys[-2:] == [b"1/48", b"1/64"]


def test_local_chunks_are_wanted_from_the_last_multiple_on() -> None:
    index = Index([FULL, LOCAL], 80, set())
    assert index.plan(0, 81)[1][-1:] == [b"2/80"]
    assert wanted(index.groups, index.keys, 0, 64) == [b"0/16", b"0/32", b"0/48", b"0/64"]


def test_what_is_in_gpu_memory_is_not_wanted() -> None:
    index = Index([FULL, WINDOW, STATE], 96, set())
    assert index.plan(48, 96) == (80, [b"0/64", b"0/80", b"1/64", b"1/80", b"3/80"])
    assert index.plan(80, 96) == (80, [])


def key_of(group: Group, end: int) -> bytes:
    return b"%d" % end + group.group_id.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("groups", "hits", "local", "boundary", "expected"),
    [
        pytest.param(
            [WINDOW, FULL],
            [(FULL, 32), (FULL, 48), (FULL, 64), (FULL, 80), (WINDOW, 80), (WINDOW, 64)],
            16,
            64,
            [(FULL, 32), (FULL, 48), (FULL, 64), (WINDOW, 48), (WINDOW, 64)],
            id="whole chunks",
        ),
        pytest.param(
            [STATE, FULL],
            [(FULL, 16), (FULL, 32), (STATE, 16), (STATE, 24), (FULL, 28), (FULL, 24)],
            0,
            24,
            [(FULL, 16), (STATE, 24), (FULL, 24)],
            id="the head of a chunk that is there too",
        ),
        pytest.param(
            [STATE, FULL],
            [(FULL, 16), (STATE, 24), (FULL, 24)],
            0,
            24,
            [(FULL, 16), (STATE, 24), (FULL, 24)],
            id="the head of a chunk that nobody has stored",
        ),
    ],
)
def test_a_load_takes_what_was_hit(
    groups: list[Group],
    hits: list[tuple[Group, int]],
    local: int,
    boundary: int,
    expected: list[tuple[Group, int]],
) -> None:
    ends = {key_of(*one): one[1] for one in hits}
    by_group = [[key_of(group, end) for end in range(16, 97, 16)] for group in groups]
    found = taken(
        groups, by_group, list(ends), local, boundary, lambda keys: [ends[k] for k in keys]
    )
    assert found == [key_of(*one) for one in expected]


def test_the_index_is_asked_once_per_group() -> None:
    index = Index([FULL, WINDOW, STATE], 4096, {(3, end) for end in range(64, 4097, 16)})
    assert index.plan(0, 4096)[0] == 48
    assert index.questions == 3


@pytest.mark.parametrize(("hole", "tokens"), [(None, 784), (32, 16), (304, 288), (784, 768)])
def test_full_attention_is_counted_up_to_its_first_hole(hole: int | None, tokens: int) -> None:
    index = Index([FULL, STATE], 800, {(0, hole)} if hole else set())
    assert full_prefix(index.groups, index.keys, 16, 800, index.has) == tokens
    assert index.questions <= 3, "16, 32 and 64 chunks"


def test_the_unit_of_groups_of_other_chunks() -> None:
    assert unit_tokens([FULL, dataclasses.replace(WINDOW, tokens_per_chunk=24)]) == 48


# -- against vLLM -------------------------------------------------------------------------


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[Group], int, int, set[tuple[int, int]]]:
    """Groups, tokens of a request, tokens in GPU memory, the ends of chunks that are missing."""
    size = st.sampled_from([16, 32, 48])
    state_tokens = draw(size)
    groups: list[Group] = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(list(GroupKind)))
        tokens = state_tokens if kind is GroupKind.STATE else draw(size)
        if kind is GroupKind.FULL:
            groups.append(Group(number, kind, tokens))
        elif kind is GroupKind.STATE:
            groups.append(Group(number, kind, tokens, reach_chunks=1))
        elif kind is GroupKind.LOCAL:
            reach = tokens * draw(st.integers(1, 4))
            groups.append(Group(number, kind, tokens, 1, reach // tokens, reach))
        else:
            window, extra = draw(st.integers(2, 160)), draw(st.sampled_from([0, 0, 3]))
            chunks = max(-(-window // tokens), -(-(window - 1 + extra) // tokens))
            groups.append(Group(number, kind, tokens, 1, chunks, window - 1 + extra))
    tokens = draw(st.integers(20, 420))
    unit = unit_tokens(groups)
    local = draw(st.integers(0, tokens // unit // 2)) * unit
    ends = [
        (group.group_id, end)
        for group in groups
        for end in range(group.tokens_per_chunk, tokens + 1, group.tokens_per_chunk)
    ]
    missing = draw(st.sets(st.sampled_from(ends), max_size=6)) if ends else set()
    return groups, tokens, local, missing


def _vllm_finds(index: Index, tokens: int, local: int) -> int:
    """Tokens beyond `local` that vLLM's own look-up finds."""
    theirs = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
    )
    from vllm.v1.kv_offload.base import LookupResult

    side = object.__new__(theirs.OffloadingConnectorScheduler)
    configs = tuple(_config(theirs, group) for group in index.groups)
    full = tuple(at for at, one in enumerate(configs) if one.sliding_window_size_in_chunks is None)
    tails = [at for at in range(len(configs)) if at not in full]
    tails.sort(key=lambda at: configs[at].sliding_window_size_in_chunks, reverse=True)
    side.config = SimpleNamespace(kv_group_configs=configs)
    side._lookup_groups, side._sliding_window_groups = full + tuple(tails), tuple(tails)
    sizes = [g.tokens_per_chunk for g in index.groups if g.kind is GroupKind.STATE]
    side._mamba_align_size = sizes[0] if sizes else None
    side._chunks_being_loaded = set()
    side._events_tracker = SimpleNamespace(record_lookup=lambda *args: None)
    results = {0: LookupResult.MISS, 1: LookupResult.HIT}
    side.manager = SimpleNamespace(lookup=lambda key, context: results[index.has([key])[0]])
    states = tuple(
        SimpleNamespace(offload_keys=keys, lookup_hit_end_chunk_idx=0) for keys in index.keys
    )
    status = SimpleNamespace(
        num_locally_computed_tokens=local,
        req=SimpleNamespace(num_tokens=tokens, request_id="a"),
        req_context=None,
        max_load_tokens=None,
        group_states=states,
    )
    found: int = side._lookup_complete_chunks(status)
    return found


def _config(theirs: Any, group: Group) -> Any:
    """vLLM's own configuration of the group, as far as a look-up reads it."""
    fields: dict[str, Any] = dict.fromkeys(theirs.GroupOffloadConfig._fields)
    spec: Any = None
    if group.kind is GroupKind.WINDOW:
        assert group.reach_tokens is not None
        spec = object.__new__(theirs.SlidingWindowSpec)
        for name, value in {
            "sliding_window": group.reach_tokens + 1,
            "extra_retained_tokens": 0,
        }.items():
            object.__setattr__(spec, name, value)
    return theirs.GroupOffloadConfig(
        **{
            **fields,
            "group_idx": group.group_id,
            "tokens_per_chunk": group.tokens_per_chunk,
            "sliding_window_size_in_chunks": group.reach_chunks,
            "kv_cache_spec": spec,
            "is_eagle_group": False,
        }
    )


@settings(max_examples=500, deadline=None)
@given(_cases())
def test_the_boundary_is_the_one_that_vllms_look_up_finds(
    case: tuple[list[Group], int, int, set[tuple[int, int]]],
) -> None:
    groups, tokens, local, missing = case
    index = Index(groups, tokens, missing)
    boundary, keys = index.plan(local, tokens)
    assert boundary - local == _vllm_finds(index, tokens, local)
    assert not index.missing.intersection(keys)
    assert boundary <= max(local, limit_of(groups, tokens))
