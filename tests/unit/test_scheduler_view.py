# SPDX-License-Identifier: Apache-2.0
"""Reading vLLM's scheduler: the rest of a chunk of which GPU memory has a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the view reads vLLM's objects")

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from vllm_nvmeof_offload.vllm_adapter.scheduler_view import SchedulerView, key_bytes_of

BLOCK, BLOCKS_PER_CHUNK = 16, 2
CHUNK = BLOCK * BLOCKS_PER_CHUNK


class State:
    """vLLM's state of a request: its keys follow its tokens."""

    def __init__(self, request: Any) -> None:
        self.req = request
        self.req_context = None
        self.transfer_jobs: set[int] = set()
        self.group_states = (SimpleNamespace(offload_keys=[]),)

    def update_offload_keys(self) -> None:
        count = self.req.num_tokens // CHUNK
        self.group_states[0].offload_keys[:] = [b"key %d" % i for i in range(count)]


def _view(request: Any, hit: bool = True, cached: tuple[bytes, ...] = ()) -> SchedulerView:
    """Of a scheduler with one request. cached: block hashes that GPU memory has."""
    group = SimpleNamespace(
        tokens_per_block=BLOCK, tokens_per_chunk=CHUNK, hashes_per_chunk=BLOCKS_PER_CHUNK
    )
    found = LookupResult.HIT if hit else LookupResult.MISS
    scheduler = SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=(group,), tokens_per_hash=BLOCK),
        _req_status={"a": State(request)},
        _chunks_being_loaded=set(),
        manager=SimpleNamespace(lookup=lambda key, context: found),
    )
    pool = SimpleNamespace(get_cached_block=lambda key, groups: [1] if key in cached else None)
    return SchedulerView(scheduler, lambda: SimpleNamespace(block_pool=pool))


def _rest(num_tokens: int, local: int, computed: int, hit: bool = True) -> int:
    """Ask for a request's rest of a chunk; `computed` is the reported number of computed tokens."""
    hashes = [b"%d" % i for i in range(num_tokens // BLOCK)]
    request = SimpleNamespace(request_id="a", num_tokens=num_tokens, block_hashes=hashes)
    waiting: Any = SimpleNamespace(resumes=SimpleNamespace(computed=lambda request_id: computed))
    return _view(request, hit).rest_of_a_chunk(request, local, waiting)


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
    """A chunk that was known earlier may have lost its tokens since: it is not in GPU memory."""
    request = SimpleNamespace(request_id="a", num_tokens=64, block_hashes=[b"0", b"1", b"2", b"3"])
    is_cached = _view(request, cached=(b"0", b"3")).queue(by_priority=False).is_cached
    assert [is_cached(request, chunk) for chunk in range(2)] == [False, True]
    del request.block_hashes[3:]
    assert not is_cached(request, 1)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_length_of_keys_follows_from_the_hash_algorithm(algorithm: str) -> None:
    if algorithm.startswith("xxhash"):
        pytest.importorskip("xxhash", reason="vLLM hashes with it")
    key = make_offload_key(get_hash_fn_by_name(algorithm)((b"parent", (1, 2, 3), None)), 7)
    assert key_bytes_of(algorithm) == len(key) == (36 if algorithm.startswith("sha") else 20)
