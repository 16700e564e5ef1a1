# SPDX-License-Identifier: Apache-2.0
"""Reading vLLM's scheduler: the rest of a chunk of which GPU memory has a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the view reads vLLM's objects")

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.core import FROM_CPU
from vllm_nvmeof_offload.manager.look_up import Question
from vllm_nvmeof_offload.vllm_adapter.scheduler_view import SchedulerView, key_bytes_of

BLOCK, BLOCKS_PER_CHUNK = 16, 2
CHUNK = BLOCK * BLOCKS_PER_CHUNK
ONE = (Group(0, GroupKind.FULL, CHUNK, BLOCKS_PER_CHUNK),)


class State:
    """vLLM's state of a request: its keys follow its tokens."""

    def __init__(self, request: Any) -> None:
        self.req = request
        self.req_context = None
        self.transfer_jobs: set[int] = set()
        self.max_load_tokens: int | None = None
        self.group_states = (SimpleNamespace(offload_keys=[]),)

    def update_offload_keys(self) -> None:
        count = self.req.num_tokens // CHUNK
        self.group_states[0].offload_keys[:] = [b"key %d" % i for i in range(count)]


def _view(
    request: Any,
    hit: bool = True,
    cached: tuple[bytes, ...] = (),
    groups: tuple[Group, ...] = ONE,
    state: Any = None,
    computed: int = 0,
) -> SchedulerView:
    """Of a scheduler with one request. cached: block hashes that GPU memory has. computed: the
    reported number of the request's computed tokens."""
    configs = tuple(
        SimpleNamespace(
            group_idx=group.group_id, tokens_per_block=BLOCK, hashes_per_chunk=BLOCKS_PER_CHUNK
        )
        for group in groups
    )
    found = LookupResult.HIT if hit else LookupResult.MISS
    resumes = SimpleNamespace(computed=lambda request_id: computed)
    manager = SimpleNamespace(
        lookup=lambda key, context: found, waiting=SimpleNamespace(resumes=resumes)
    )
    scheduler = SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=configs, tokens_per_hash=BLOCK),
        _req_status={"a": state or State(request)},
        _chunks_being_loaded=set(),
        manager=manager,
    )
    pool = SimpleNamespace(get_cached_block=lambda key, groups: [1] if key in cached else None)
    return SchedulerView(scheduler, groups, lambda: SimpleNamespace(block_pool=pool))


def _question(local: int, cap: int | None = None) -> Question:
    return Question(0, None, local, cap, FROM_CPU)


def _rest(
    num_tokens: int,
    local: int,
    computed: int,
    hit: bool = True,
    most: int | None = None,
    cap: int | None = None,
) -> int:
    """Ask for a request's rest of a chunk; `computed` is the reported number of computed tokens.

    most: the request's `max_load_tokens`.
    """
    hashes = [b"%d" % i for i in range(num_tokens // BLOCK)]
    request = SimpleNamespace(request_id="a", num_tokens=num_tokens, block_hashes=hashes)
    state = State(request)
    state.max_load_tokens = most
    view = _view(request, hit, state=state, computed=computed)
    return view.rest_of_a_chunk(request, _question(local, cap))


@pytest.mark.parametrize("limit", ["most", "cap"])
def test_no_rest_is_offered_beyond_what_may_be_loaded(limit: str) -> None:
    for tokens, rest in ((0, 0), (15, 0), (16, 16)):
        assert _rest(num_tokens=40, local=16, computed=39, **{limit: tokens}) == rest


def test_the_rest_of_a_chunk_that_was_computed_is_offered() -> None:
    assert _rest(num_tokens=40, local=16, computed=39) == 16
    assert _rest(num_tokens=40, local=16, computed=39, hit=False) == 0


def test_no_rest_is_offered_after_whole_chunks_or_beyond_computed_tokens() -> None:
    assert _rest(num_tokens=80, local=32, computed=79) == 0
    assert _rest(num_tokens=80, local=48, computed=63) == 0


def test_a_count_beyond_the_requests_tokens_is_not_trusted() -> None:
    """No key has so high a number."""
    assert _rest(num_tokens=30, local=16, computed=34) == 0
    assert _rest(num_tokens=31, local=16, computed=1000) == 0


def test_a_chunk_is_cached_if_its_last_block_is_cached() -> None:
    request = SimpleNamespace(request_id="a", num_tokens=64, block_hashes=[b"0", b"1", b"2", b"3"])
    is_cached = _view(request, cached=(b"0", b"3")).queue(by_priority=False).is_cached
    keys = [make_offload_key(BlockHash(last), 0) for last in (b"1", b"3")]
    assert [is_cached(request, key) for key in keys] == [False, True]


def test_of_several_groups_only_full_attention_counts_as_cached() -> None:
    request = SimpleNamespace(request_id="a", num_tokens=40, block_hashes=[b"0", b"1"])
    groups = (
        Group(1, GroupKind.WINDOW, CHUNK, BLOCKS_PER_CHUNK, 1, 31),
        Group(4, GroupKind.FULL, CHUNK, BLOCKS_PER_CHUNK),
    )
    view = _view(request, cached=(b"1",), groups=groups, computed=39)
    queue = view.queue(by_priority=False)
    assert queue.groups == groups
    keys = [make_offload_key(BlockHash(b"1"), group.group_id) for group in groups]
    assert [queue.is_cached(request, key) for key in keys] == [False, True]
    assert view.leading_id == 4
    assert view.rest_of_a_chunk(request, _question(BLOCK)) == 0, "a window would have to be there"


def test_after_a_failed_load_every_group_stores_what_is_computed_again() -> None:
    """A group whose chunks are twice as long has stored half as many of them."""
    groups = (
        Group(0, GroupKind.WINDOW, CHUNK, BLOCKS_PER_CHUNK, 4),
        Group(1, GroupKind.FULL, 2 * CHUNK, BLOCKS_PER_CHUNK),
    )
    request = SimpleNamespace(request_id="a", num_computed_tokens=5 * CHUNK)
    states = [SimpleNamespace(next_stored_chunk_idx=stored) for stored in (8, 2)]
    view = _view(request, groups=groups, state=SimpleNamespace(req=request, group_states=states))
    view.store_again()
    assert [state.next_stored_chunk_idx for state in states] == [5, 2]
    request.num_computed_tokens = 0  # vLLM was told of the request, and not of its blocks
    view.store_again()
    assert [state.next_stored_chunk_idx for state in states] == [0, 0]


def test_what_was_refused_is_offered_again_from_its_first_chunk_on() -> None:
    groups = (
        Group(0, GroupKind.WINDOW, CHUNK, BLOCKS_PER_CHUNK, 4),
        Group(1, GroupKind.FULL, 2 * CHUNK, BLOCKS_PER_CHUNK),
    )
    keys = {make_offload_key(BlockHash(b"%d" % n), 1): 2 * n * CHUNK for n in (3, 4)}
    tail = make_offload_key(BlockHash(b"tail"), 0)
    keys[tail] = 8 * CHUNK + 1  # of a partial tail, which is in the chunk after eight whole ones
    states = [SimpleNamespace(next_stored_chunk_idx=stored) for stored in (8, 4)]
    request = SimpleNamespace(is_finished=lambda: False)
    context = SimpleNamespace(get_offload_key_position=keys.get)
    state = SimpleNamespace(req=request, group_states=states, req_context=context)
    view = _view(request, groups=groups, state=state)
    view.offer_again({"a": list(keys), "gone": [tail]})
    assert [state.next_stored_chunk_idx for state in states] == [8, 2]
    request.is_finished = lambda: True
    view.offer_again({"a": [make_offload_key(BlockHash(b"0"), 1)]})
    assert [state.next_stored_chunk_idx for state in states] == [8, 2]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_length_of_keys_follows_from_the_hash_algorithm(algorithm: str) -> None:
    if algorithm.startswith("xxhash"):
        pytest.importorskip("xxhash", reason="vLLM hashes with it")
    key = make_offload_key(get_hash_fn_by_name(algorithm)((b"parent", (1, 2, 3), None)), 7)
    assert key_bytes_of(algorithm) == len(key) == (36 if algorithm.startswith("sha") else 20)
