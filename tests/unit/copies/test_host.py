# SPDX-License-Identifier: Apache-2.0
"""Chunks in per-layer and packed layouts, copied and checksummed by the host's engine."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.chunks import Pieces, pieces_of
from vllm_nvmeof_offload.copy.base import Descriptors, Direction, Payloads
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor, ChunkGeometry, joined
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import OK, EngineError
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import Waker

BLOCKS = 12


def _tensors(layers: int, page: int, padding: int) -> list[CacheTensor]:
    return [CacheTensor(layer << 20, page + padding, page, BLOCKS) for layer in range(layers)]


@given(
    layers=st.integers(1, 3),
    blocks_per_chunk=st.integers(1, 4),
    skip=st.integers(0, 3),
    order=st.permutations(range(BLOCKS)),
    count=st.integers(1, BLOCKS),
)
def test_many_chunks_in_one_call_equal_single_calls(
    layers: int, blocks_per_chunk: int, skip: int, order: list[int], count: int
) -> None:
    skip %= blocks_per_chunk
    geometry = ChunkGeometry(_tensors(layers, 24, 8), blocks_per_chunk)
    blocks = np.array(order[:count], np.int32)
    chunks = -(-(skip + count) // blocks_per_chunk)
    together = pieces_of(geometry, blocks, skip, chunks)
    parts = geometry.split(blocks, skip, chunks)
    alone = [pieces_of(geometry, part, 0 if i else skip).rows for i, part in enumerate(parts)]
    assert together.first.tolist() == [0, *np.cumsum([len(rows) for rows in alone])]
    assert together.rows.tolist() == np.concatenate(alone).tolist()
    with pytest.raises(AssertionError, match=f"{count} blocks do not match {chunks + 1} chunks"):
        pieces_of(geometry, blocks, skip, chunks + 1)
    with pytest.raises(AssertionError, match=f"{count} blocks do not match {chunks + 1} chunks"):
        geometry.split(blocks, skip, chunks + 1)


# -- several groups -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([(0, 96, 32), (32, 96, 16), (48, 96, 48)], [(0, 96, 96)]),
        ([(0, 96, 32), (48, 96, 16), (64, 96, 16)], [(0, 96, 32), (48, 96, 32)]),  # padded pages
        ([(0, 96, 32), (32, 64, 16)], [(0, 96, 32), (32, 64, 16)]),  # other strides
        ([(0, 32, 32), (32, 32, 32)], [(0, 32, 32), (32, 32, 32)]),  # a tensor of one block each
        ([(32, 96, 16), (0, 96, 32)], [(32, 96, 16), (0, 96, 32)]),  # in another order
        ([], []),
    ],
)
def test_pages_that_are_neighbours_in_each_block_are_one_piece(
    tensors: list[tuple[int, int, int]], expected: list[tuple[int, int, int]]
) -> None:
    made = [CacheTensor(*one, block_count=1) for one in tensors]
    assert joined(made) == [CacheTensor(*one, block_count=1) for one in expected]


def _group(number: int, per_chunk: int, kind: GroupKind = GroupKind.FULL) -> Group:
    return Group(number, kind, 16 * per_chunk, per_chunk)


def _three_groups(per_chunk: int) -> CacheGeometry:
    """Full attention, a group without layers on this rank, and states."""
    return CacheGeometry(
        [
            (_group(0, per_chunk), [CacheTensor(0, 64, 64, BLOCKS)]),
            (_group(2, per_chunk), []),
            (_group(3, per_chunk, GroupKind.STATE), [CacheTensor(0, 64, 24, BLOCKS)]),
        ]
    )


def _pieces(
    geometry: CacheGeometry,
    ids: list[int],
    sizes: list[int],
    firsts: list[int],
    chunks: list[int],
    *,
    is_store: bool = True,
) -> Pieces:
    groups = b"".join(bytes([group]) * count for group, count in enumerate(chunks))
    found = geometry.native.pieces(is_store, np.array(ids, np.int32), sizes, firsts, groups)
    return Pieces(*found)


def test_each_group_has_its_own_length_and_a_state_is_one_block() -> None:
    geometry = _three_groups(4)
    assert geometry.group_bytes == (256, 0, 24)
    assert geometry.payload_bytes == 256
    assert [one.payload_bytes for one in geometry.groups] == [256, 0, 24]
    pieces = _pieces(geometry, [0, 1, 2, 3, 7, 8, 5], [4, 2, 1], [4, 0, 3], [1, 1, 1])
    # The two blocks of the group without layers are half a chunk, but there is nothing to miss.
    assert pieces.first.tolist() == [0, 4, 4, 5]
    assert pieces.rows[-1].tolist() == [5 * 64, 0, 24]


def test_a_load_may_begin_and_end_inside_a_chunk_of_each_group() -> None:
    geometry = _three_groups(4)
    blocks = [1, 2, 3, 4, 5, 9], [5, 0, 1], [6, 0, 9], [2, 0, 1]
    pieces = _pieces(geometry, *blocks, is_store=False)
    assert pieces.first.tolist() == [0, 2, 5, 6]
    assert pieces.rows[:, 1].tolist() == [128, 192, 0, 64, 128, 0]
    with pytest.raises(AssertionError, match="5 blocks do not match 3 chunks"):
        _pieces(geometry, [1, 2, 3, 4, 5], [5, 0, 0], [6, 0, 0], [3, 0, 0], is_store=False)
    with pytest.raises(AssertionError, match="1 blocks belong to a group without chunks"):
        _pieces(geometry, [1], [0, 0, 1], [0, 0, 0], [0, 0, 0], is_store=False)


@pytest.mark.parametrize(
    ("size", "first", "whole"),
    [
        (9, 0, [True, True, True]),
        (8, 1, [False, True, True]),  # vLLM had given away the first block
        (7, 2, [False, True, True]),
        (8, 0, [False, False, False]),  # one of the others is missing, and nothing says which
        (7, 1, [False, False, False]),
        (0, 0, [False, False, False]),
    ],
)
def test_a_chunk_without_all_of_its_blocks_has_no_pieces(
    size: int, first: int, whole: list[bool]
) -> None:
    geometry = CacheGeometry([(_group(0, 3), [CacheTensor(0, 64, 64, BLOCKS)])])
    ids = list(range(size))
    pieces = _pieces(geometry, ids, [size], [30 + first], [3])
    assert np.diff(pieces.first).tolist() == [3 if one else 0 for one in whole]
    kept = ids[3 - first :] if first and any(whole) else ids if any(whole) else []
    assert (pieces.rows[:, 0] // 64).tolist() == kept
    assert pieces.rows[:, 1].tolist() == [64 * (at % 3) for at in range(len(kept))]


def test_a_single_chunk_without_its_head_has_no_pieces() -> None:
    geometry = CacheGeometry([(_group(0, 3), [CacheTensor(0, 64, 64, BLOCKS)])])
    pieces = _pieces(geometry, [5, 6], [2], [31], [1])
    assert pieces.first.tolist() == [0, 0]
    assert pieces.rows.shape == (0, 3)


@given(
    per_chunk=st.integers(1, 4),
    chunks=st.integers(1, 5),
    present=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_no_block_of_a_store_is_taken_for_its_neighbour(
    per_chunk: int, chunks: int, present: list[bool]
) -> None:
    """vLLM leaves out the blocks that it has given away, wherever they lie, and numbers none."""
    geometry = CacheGeometry([(_group(0, per_chunk), [CacheTensor(0, 64, 64, 100)])])
    there = [at for at in range(per_chunk * chunks) if present[at]]
    firsts = [there[0] if there else 0]
    pieces = _pieces(geometry, there, [len(there)], firsts, [chunks])
    for chunk in range(chunks):
        rows = pieces.rows[pieces.first[chunk] : pieces.first[chunk + 1]]
        if len(rows):
            assert (rows[:, 0] // 64).tolist() == list(
                range(chunk * per_chunk, (chunk + 1) * per_chunk)
            )


def test_a_block_outside_the_cache_is_refused() -> None:
    with pytest.raises(AssertionError):
        pieces_of(ChunkGeometry(_tensors(2, 16, 0), 4), np.array([BLOCKS], np.int32))


def test_a_copy_that_raises_stops_the_engine_instead_of_hanging() -> None:
    waker = Waker()
    engine = HostCopyEngine(on_done=waker.wake)
    try:
        engine.submit(Direction.STORE, np.zeros((1, 2), np.uint64), None)  # a piece without a size
        poller = select.poll()
        poller.register(waker.fd, select.POLLIN)
        assert poller.poll(10_000), "the copy engine did not wake us"
        with pytest.raises(EngineError, match="a copy in host memory failed"):
            engine.poll()
    finally:
        engine.close()


WAIT_S = 30.0


def copied(
    parts: Sequence[Descriptors],
    addresses: Sequence[int],
    size: int,
    direction: Direction = Direction.STORE,
) -> list[int | None]:
    """Copy these pieces, whose second column is offsets; return the checksums."""
    done = threading.Event()
    engine = HostCopyEngine(on_done=done.set)
    counts = np.array([len(part) for part in parts], np.uint32)
    payloads = Payloads.of(
        counts, np.array(addresses, np.uint64), np.full(len(counts), size, np.uint64)
    )
    assert engine.makes_checksums
    pieces = np.concatenate(parts)
    pieces[:, 1] += np.repeat(np.array(addresses, np.uint64), counts)
    ticket = engine.submit(direction, pieces, None, payloads)
    assert done.wait(WAIT_S)
    assert engine.poll() == [(ticket, OK)]
    engine.close()
    return [None if crc < 0 else crc for crc in payloads.crcs.tolist()]


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=12), st.integers(0, 63))
def test_a_payload_of_any_pieces_has_its_checksum(sizes: list[int], shift: int) -> None:
    total = sum(sizes)
    source = np.random.default_rng(total).integers(0, 256, total + 1, np.uint8)
    target = np.full(total + shift + 1, 0xEE, np.uint8)
    base, at = target.ctypes.data + shift, np.cumsum([0, *sizes[:-1]])
    pieces = np.array([at + source.ctypes.data, at, sizes], np.uint64).T
    (crc,) = copied([pieces], [base], total)
    assert crc == crc32c(source[:total].tobytes())
    assert (target[shift : shift + total] == source[:total]).all()
    assert target[-1] == 0xEE


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=8), st.randoms())
def test_a_loaded_payload_has_its_checksum_wherever_its_pieces_go(
    sizes: list[int], dice: random.Random
) -> None:
    total = sum(sizes)
    payload = np.random.default_rng(total).integers(0, 256, total, np.uint8)
    cache = [np.zeros(size, np.uint8) for size in sizes]
    dice.shuffle(cache)  # so that neighbours in the payload are none in the KV cache
    sizes = [len(page) for page in cache]
    at = np.cumsum([0, *sizes[:-1]])
    pieces = np.array([[page.ctypes.data for page in cache], at, sizes], np.uint64).T
    (crc,) = copied([pieces], [payload.ctypes.data], total, Direction.LOAD)
    assert crc == crc32c(payload.tobytes())
    assert (np.concatenate(cache) == payload).all()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "rows",
    [[(0, 0, 2000), (2000, 2001, 2000)], [(2000, 2000, 2000), (0, 0, 2000)], [(0, 0, 3999)], []],
    ids=["gap", "order", "short", "none"],
)
def test_only_a_payload_that_is_covered_in_order_has_a_checksum(
    rows: list[tuple[int, int, int]], direction: Direction
) -> None:
    cache, staging = np.zeros(9000, np.uint8), np.zeros(9000, np.uint8)
    source, target = (cache, staging) if direction is Direction.STORE else (staging, cache)
    source[:] = np.arange(9000) % 251
    parts = [np.array(part, np.uint64).reshape(-1, 3) for part in (rows, [(5000, 0, 4000)])]
    for part in parts:
        part[:, 0] += np.uint64(cache.ctypes.data)
    places = [staging.ctypes.data, staging.ctypes.data + 5000]
    crcs = copied(parts, places, 4000, direction)
    assert crcs == [None, crc32c(source[5000:].tobytes())]
    for in_cache, offset, count in rows:
        of_cache, of_staging = slice(in_cache, in_cache + count), slice(offset, offset + count)
        assert (cache[of_cache] == staging[of_staging]).all()
        assert source[of_cache].any() and target[of_cache].any()
