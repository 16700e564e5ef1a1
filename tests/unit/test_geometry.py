# SPDX-License-Identifier: Apache-2.0
"""Chunks of several blocks over per-layer and packed layouts, really copied by the host engine."""

from __future__ import annotations

import select

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.copy.base import Direction, Pieces
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import Waker

BLOCKS = 12


def _copy(engine: HostCopyEngine, waker: Waker, direction: Direction, pieces: np.ndarray) -> None:
    ticket = engine.submit(direction, pieces, engine.record_fence())
    poller = select.poll()
    poller.register(waker.fd, select.POLLIN)
    assert poller.poll(10_000), "the copy engine did not wake us"
    waker.clear()
    assert [(t, o.ok) for t, o in engine.poll()] == [(ticket, True)]


def _tensors(layers: int, page: int, padding: int) -> tuple[list[np.ndarray], list[CacheTensor]]:
    arrays = [
        np.arange(BLOCKS * (page + padding), dtype=np.uint32).astype(np.uint8) + np.uint8(layer)
        for layer in range(layers)
    ]
    return arrays, [CacheTensor(a.ctypes.data, page + padding, page, BLOCKS) for a in arrays]


@given(
    layers=st.integers(1, 5),
    page=st.sampled_from([1, 24, 512, 4096]),
    padding=st.sampled_from([0, 8]),
    blocks_per_chunk=st.integers(1, 4),
    skip=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=40)
def test_a_chunk_comes_back_into_other_blocks(
    layers: int, page: int, padding: int, blocks_per_chunk: int, skip: int, data: st.DataObject
) -> None:
    skip %= blocks_per_chunk
    arrays, tensors = _tensors(layers, page, padding)
    geometry = ChunkGeometry(tensors, blocks_per_chunk)
    order = data.draw(st.permutations(range(BLOCKS)))
    source = np.array(order[:blocks_per_chunk], np.int32)
    # A load may begin inside a chunk: only the blocks from `skip` on, into different places.
    target = np.array(order[blocks_per_chunk : 2 * blocks_per_chunk - skip], np.int32)
    staging = np.zeros(geometry.payload_bytes, np.uint8)
    base = np.uint64(staging.ctypes.data)
    waker = Waker()
    engine = HostCopyEngine(on_done=waker.wake)
    try:
        store = geometry.pieces(source, 0)
        store[:, 1] += base
        _copy(engine, waker, Direction.STORE, store)
        expected = [a.reshape(BLOCKS, -1)[source[skip:], :page].copy() for a in arrays]
        for a in arrays:
            a.reshape(BLOCKS, -1)[target] = 0xEE
        untouched = [np.delete(a.reshape(BLOCKS, -1), target, axis=0).copy() for a in arrays]
        load = geometry.pieces(target, skip)
        load[:, 1] += base
        _copy(engine, waker, Direction.LOAD, load)
    finally:
        engine.close()
    for a, want, rest in zip(arrays, expected, untouched, strict=True):
        assert (a.reshape(BLOCKS, -1)[target, :page] == want).all()
        assert (np.delete(a.reshape(BLOCKS, -1), target, axis=0) == rest).all()
        assert (a.reshape(BLOCKS, -1)[target, page:] == 0xEE).all(), "padding is not ours"


def test_blocks_are_cut_at_chunk_boundaries() -> None:
    _, tensors = _tensors(1, 16, 0)
    geometry = ChunkGeometry(tensors, 4)
    blocks = np.arange(9, dtype=np.int32)
    assert [p.tolist() for p in geometry.split(blocks, 0, 3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8],
    ]
    assert [p.tolist() for p in geometry.split(blocks, 3, 3)] == [
        [0],
        [1, 2, 3, 4],
        [5, 6, 7, 8],
    ]
    with pytest.raises(AssertionError, match="9 blocks over 2 chunks"):
        geometry.split(blocks, 0, 2)


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
    geometry = ChunkGeometry(_tensors(layers, 24, 8)[1], blocks_per_chunk)
    blocks = np.array(order[:count], np.int32)
    chunks = -(-(skip + count) // blocks_per_chunk)
    together = geometry.pieces_by_chunk(blocks, skip, chunks)
    parts = geometry.split(blocks, skip, chunks)
    alone = [geometry.pieces(part, 0 if i else skip) for i, part in enumerate(parts)]
    assert together.first.tolist() == Pieces.of(alone).first.tolist()
    assert together.rows.tolist() == Pieces.of(alone).rows.tolist()
    with pytest.raises(AssertionError, match=f"{count} blocks over {chunks + 1} chunks"):
        geometry.pieces_by_chunk(blocks, skip, chunks + 1)


def test_a_block_outside_the_cache_is_refused() -> None:
    _, tensors = _tensors(2, 16, 0)
    with pytest.raises(AssertionError):
        ChunkGeometry(tensors, 4).pieces(np.array([BLOCKS], np.int32), 0)


def test_a_copy_that_raises_stops_the_engine_instead_of_hanging() -> None:
    waker = Waker()
    engine = HostCopyEngine(on_done=waker.wake)
    try:
        engine.submit(Direction.STORE, np.zeros((1, 2), np.uint64), None)  # a piece without a size
        poller = select.poll()
        poller.register(waker.fd, select.POLLIN)
        assert poller.poll(10_000), "the copy engine did not wake us"
        with pytest.raises(EngineError, match="a copy in host memory stopped"):
            engine.poll()
    finally:
        engine.close()
