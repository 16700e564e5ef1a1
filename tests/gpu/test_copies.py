# SPDX-License-Identifier: Apache-2.0
"""Bytes between a GPU's KV cache and staging: every layout, both directions, both backends."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.gpu.device import Device
from tests.gpu.rig import LAYOUTS, WAIT_S, Rig
from vllm_nvmeof_offload.copy.base import Backend, Direction

POISON = 0xA5
#: Bytes of a block in a layer: odd, so that the kernel goes byte by byte, and by words of 4; FP8
#: and BF16 MLA (576 numbers × 16 tokens), 8 heads × 128 × 16 tokens of BF16.
PAGES = (38, 36, 576 * 16, 2 * 576 * 16, 8 * 128 * 16 * 2)

backends = pytest.mark.parametrize("backend", list(Backend))
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def _chunks(rig: Rig, rng: np.random.Generator) -> list[tuple[list[int], int]]:
    """All blocks and all slots, in random order."""
    blocks = rng.permutation(rig.blocks).reshape(rig.slots, rig.per_chunk).tolist()
    return list(zip(blocks, rng.permutation(rig.slots).tolist(), strict=True))


@backends
@layouts
@pytest.mark.parametrize("page", PAGES)
def test_chunks_are_loaded_into_other_blocks(
    device: Device, layout: str, backend: Backend, page: int
) -> None:
    rng = np.random.default_rng(page)
    rig = Rig(device, layout, backend, page)
    original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
    rig.cache.write(original)
    rig.staging[:] = POISON
    chunks = _chunks(rig, rng)
    rig.wait(rig.submit(Direction.STORE, chunks))
    for blocks, slot in chunks:
        assert (rig.payload(slot) == rig.content_of(original, blocks)).all()
        header_and_padding = rig.staging[slot].size - rig.payload(slot).size
        untouched = (rig.staging[slot] == POISON).sum() - (rig.payload(slot) == POISON).sum()
        assert untouched == header_and_padding
    poisoned = np.full_like(original, POISON)
    rig.cache.write(poisoned)
    half = [(blocks, slot) for (blocks, _), (_, slot) in zip(chunks, chunks[::-1], strict=True)]
    half = half[: rig.slots // 2]
    rig.wait(rig.submit(Direction.LOAD, half))
    for blocks, slot in half:
        rig.place(poisoned, blocks, rig.payload(slot))
    assert (rig.cache.read() == poisoned).all(), "blocks that were not loaded must not change"
    rig.close()


@backends
def test_overlapping_jobs_in_both_directions_at_once(device: Device, backend: Backend) -> None:
    rng = np.random.default_rng(7)
    rig = Rig(device, "per_layer", backend, 4096)
    for _ in range(20):
        original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
        rig.cache.write(original)
        rig.staging[:] = rng.integers(0, 256, rig.staging.shape, np.uint8)
        chunks = _chunks(rig, rng)
        stores, loads = chunks[: rig.slots // 2], chunks[rig.slots // 2 :]
        tickets = []
        for store, load in zip(stores, loads, strict=True):
            tickets.append(rig.submit(Direction.STORE, [store]))
            tickets.append(rig.submit(Direction.LOAD, [load]))
        rig.wait(*tickets)
        for blocks, slot in stores:
            assert (rig.payload(slot) == rig.content_of(original, blocks)).all()
        for blocks, slot in loads:
            rig.place(original, blocks, rig.payload(slot))
        assert (rig.cache.read() == original).all()
    rig.close()


@backends
def test_the_bytes_of_a_slow_kernel_are_stored(device: Device, backend: Backend) -> None:
    rng = np.random.default_rng(3)
    rig = Rig(device, "contiguous", backend, 4096)
    fresh = rng.integers(1, 256, rig.cache.read().size, np.uint8)
    chunks = _chunks(rig, rng)
    device.later(rig.cache, fresh)
    start_s = time.perf_counter()
    ticket = rig.submit(Direction.STORE, chunks)
    assert time.perf_counter() - start_s < 0.1, "the model's thread waited for the GPU"
    rig.wait(ticket)
    for blocks, slot in chunks:
        assert (rig.payload(slot) == rig.content_of(fresh, blocks)).all()
    rig.close()


@backends
def test_chunks_whose_fences_have_passed_are_stored_in_one_call_without_a_fence(
    device: Device, backend: Backend
) -> None:
    rng = np.random.default_rng(5)
    rig = Rig(device, "contiguous", backend, 4096)
    fresh = rng.integers(1, 256, rig.cache.read().size, np.uint8)
    fences = [rig.engine.record_fence()]
    device.later(rig.cache, fresh)
    fences.append(rig.engine.record_fence())
    end_s = time.monotonic() + WAIT_S
    while not all(rig.engine.has_passed(fence) for fence in fences):
        device.go_on()
        assert time.monotonic() < end_s, "a fence does not pass"
    chunks = _chunks(rig, rng)
    rig.wait(rig.engine.submit(Direction.STORE, rig.pieces(chunks), None))
    for blocks, slot in chunks:
        assert (rig.payload(slot) == rig.content_of(fresh, blocks)).all()
    rig.close()


@backends
def test_a_load_after_a_slow_kernel_zeroes_blocks_keeps_its_bytes(
    device: Device, backend: Backend
) -> None:
    rng = np.random.default_rng(4)
    rig = Rig(device, "contiguous", backend, 4096)
    rig.staging[:] = rng.integers(1, 256, rig.staging.shape, np.uint8)
    chunks = _chunks(rig, rng)
    expected = np.zeros(rig.cache.read().size, np.uint8)
    device.later(rig.cache, expected)
    ticket = rig.submit(Direction.LOAD, chunks)
    rig.wait(ticket)
    for blocks, slot in chunks:
        rig.place(expected, blocks, rig.payload(slot))
    assert (rig.cache.read() == expected).all()
    rig.close()


@backends
def test_an_empty_transfer_ends_after_earlier_ones(device: Device, backend: Backend) -> None:
    rig = Rig(device, "contiguous", backend, 4096)
    content = np.random.default_rng(9).integers(0, 256, rig.cache.read().size, np.uint8)
    rig.cache.write(content)
    before = rig.submit(Direction.STORE, [([0, 1, 2], 0)])
    nothing = rig.engine.submit(
        Direction.STORE, np.empty((0, 3), np.uint64), rig.engine.record_fence()
    )
    rig.wait(nothing)
    assert (rig.payload(0) == rig.content_of(content, [0, 1, 2])).all()
    rig.wait(before)
    rig.close()
