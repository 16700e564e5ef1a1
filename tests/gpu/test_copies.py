# SPDX-License-Identifier: Apache-2.0
"""Bytes between a GPU's KV cache and staging: every layout, both directions, both backends; and
while a CUDA graph is captured, which registration of memory and copies do not disturb."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np
import pytest

from tests.gpu.device import Device
from tests.gpu.rig import LAYOUTS, WAIT_S, Rig
from vllm_nvmeof_offload.copy.base import Backend, Direction
from vllm_nvmeof_offload.copy.pinning import Readiness, StagingPinning
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import MIB

POISON = 0xA5
#: Bytes of a block in a layer: odd, so that the kernel goes byte by byte, and by words of 4; FP8
#: and BF16 MLA (576 numbers × 16 tokens), 8 heads × 128 × 16 tokens of BF16.
PAGES = (38, 36, 576 * 16, 2 * 576 * 16, 8 * 128 * 16 * 2)

backends = pytest.mark.parametrize("backend", list(Backend))
layouts = pytest.mark.parametrize("layout", LAYOUTS)


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
    chunks = rig.chunks(rng)
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
        chunks = rig.chunks(rng)
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
    chunks = rig.chunks(rng)
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
    chunks = rig.chunks(rng)
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
    chunks = rig.chunks(rng)
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


ROUNDS = 20
SLOTS, SLOT_BYTES = 32, 4 * MIB


@pytest.mark.parametrize("backend", list(Backend))
def test_copies_run_while_a_graph_is_captured(device: Device, backend: Backend) -> None:
    rng = np.random.default_rng(13)
    rig = Rig(device, "per_layer", backend, 4096)
    original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
    rig.cache.write(original)
    chunk = ([0, 1, 2], 0)
    fences = [rig.engine.record_fence() for _ in range(2 * ROUNDS)]  # on the model's thread
    failed: list[BaseException] = []

    def copies() -> None:
        try:
            for _ in range(ROUNDS):
                for direction in (Direction.STORE, Direction.LOAD):
                    rig.wait(rig.submit(direction, [chunk], fences.pop()))
        except BaseException as error:  # noqa: BLE001 - asserted below, on the test's thread
            failed.append(error)

    device.capture(lambda: _finish(threading.Thread(target=copies)))
    assert not failed
    assert (rig.payload(0) == rig.content_of(original, chunk[0])).all()
    assert (rig.cache.read() == original).all()
    rig.close()


def test_memory_is_registered_while_a_graph_is_captured(device: Device) -> None:
    """As at the start of a server whose CPU tier is large."""
    if device.cuda is None:
        pytest.skip("the host registers nothing")
    memory = mmap.mmap(-1, SLOTS * SLOT_BYTES)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    pins = StagingPinning(
        device.cuda, StagingMap(base, SLOT_BYTES, SLOTS, 0), lambda: None, SLOT_BYTES
    )

    def meanwhile() -> None:
        pins.start()
        pins.wait()

    device.capture(meanwhile)
    slots = np.array([base + n * SLOT_BYTES for n in range(SLOTS)], np.uint64)
    assert pins.readiness(slots) is Readiness.READY
    pins.close()


def _finish(thread: threading.Thread) -> None:
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a copy does not end"
