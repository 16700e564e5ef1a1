# SPDX-License-Identifier: Apache-2.0
"""The calls of the CUDA engine, their threads and the lifetime of its objects, over the stub."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.unit.copies.fake_cuda import MODEL_STREAM, WAITING_CALLS, FakeCuda
from tests.unit.copies.fake_work import Work
from tests.unit.copies.rig import BLOCKS, Rig, Signals
from vllm_nvmeof_offload.copy.base import DESCRIPTORS_MAX, Backend, Direction
from vllm_nvmeof_offload.copy.pinning import Readiness


def test_a_ticket_is_a_copy_and_a_recording_behind_its_fence() -> None:
    rig = Rig(FakeCuda(), 2)
    rig.store([4, 1], [0])
    assert list(_work_of_ours(rig)) == []
    assert rig.engine.poll() == [] and list(_work_of_ours(rig)) == [], "the fence is open"
    rig.cuda.drain(MODEL_STREAM)
    assert rig.engine.poll() == []
    copy, record = _work_of_ours(rig)
    assert copy.moves and record.record is not None
    assert rig.finish() == [(1, True)]
    rig.engine.close()


def _work_of_ours(rig: Rig) -> Iterator[Work]:
    """The pending work of the engine's streams."""
    for stream, queue in rig.cuda.streams.items():
        if stream != MODEL_STREAM:
            yield from queue


def test_nothing_is_reported_before_the_gpu_has_done_it() -> None:
    rig = Rig(FakeCuda(), 2)
    ticket = rig.store([0, 1], [0])
    assert rig.engine.poll() == []
    rig.cuda.drain(MODEL_STREAM)
    assert rig.engine.poll() == []
    while not rig.cuda.is_idle:
        assert rig.engine.poll() == []
        rig.cuda.step()
    assert [t for t, _ in rig.engine.poll()] == [ticket]
    rig.engine.close()


def test_the_directions_do_not_wait_for_each_other() -> None:
    rig = Rig(FakeCuda(), 1)
    store, load = rig.store([0, 1], [0]), rig.load([2, 3], [5])
    rig.cuda.drain(MODEL_STREAM)
    assert rig.engine.poll() == []
    load_stream = max(rig.cuda.streams)
    rig.cuda.drain(load_stream)
    assert [t for t, _ in rig.engine.poll()] == [load]
    assert [t for t, _ in rig.finish()] == [store]
    rig.engine.close()


@pytest.mark.parametrize("backend", list(Backend))
def test_only_close_waits(backend: Backend) -> None:
    rig = Rig(FakeCuda(), 2, backend)
    for _ in range(3):
        rig.store([0, 1], [0])
        rig.load([2, 3], [5])
        rig.finish()
    assert not WAITING_CALLS & set(rig.cuda.calls)
    rig.engine.close()


def test_a_fence_is_one_recording_and_costs_no_new_event_later() -> None:
    rig = Rig(FakeCuda(), 1)
    for _ in range(5):
        rig.store([0, 1], [0])
        rig.finish()
    assert rig.cuda.calls["create_event"] == 2, "one for the fence, one for the ticket"
    rig.engine.close()


def test_a_fence_that_is_recorded_again_does_not_move_an_earlier_wait() -> None:
    rig = Rig(FakeCuda(), 1)
    fresh = rig.fresh(rig.cache.shape)
    rig.cuda.on_model(lambda: rig.cache.__setitem__(slice(None), fresh))
    rig.store([0, 1], [0])
    rig.cuda.drain(MODEL_STREAM)
    rig.cuda.on_model(lambda: None)
    rig.engine.record_fence()  # on a stream that goes on only at the end
    assert rig.engine.poll() == []
    for stream in rig.cuda.streams.keys() - {MODEL_STREAM}:
        rig.cuda.drain(stream)
    assert [ok.ok for _, ok in rig.engine.poll()] == [True]
    assert (rig.staging[0] == rig.in_slot_order([0, 1], fresh)[0]).all()
    rig.cuda.drain()
    rig.engine.close()


def test_neighbours_are_one_descriptor_and_registrations_two() -> None:
    rig = Rig(FakeCuda(), 1)
    rig.store([2, 3], [0])
    # Slots 3 and 4 are neighbours of two registrations; so are blocks 5 and 6, 7 and 4.
    rig.store([4, 5, 6, 7], [3, 4])
    rig.finish()
    assert rig.cuda.batches == [1, 2]
    rig.engine.close()


def test_two_tensors_side_by_side_are_not_one_descriptor() -> None:
    rig = Rig(FakeCuda(), 2)
    pieces = rig.pieces([BLOCKS - 1, 0], [0])
    # The last block of the first tensor, then the first of the second, next to each other.
    chain = np.stack([pieces[0], pieces[3]])
    chain[1, 1] = chain[0, 1] + chain[0, 2]
    assert chain[0, 0] + chain[0, 2] == chain[1, 0]
    rig.engine.submit(Direction.STORE, chain, rig.engine.record_fence())
    rig.finish()
    assert rig.cuda.batches == [2]
    rig.engine.close()


def test_many_pieces_are_submitted_in_calls_that_grow() -> None:
    rig = Rig(FakeCuda(), 1)
    rig.cuda.regions = None
    cache, staging = np.arange(20_000, dtype=np.uint16), np.zeros(20_000, np.uint16)
    count = 10_000  # every second word: nothing to merge
    pieces = np.empty((count, 3), np.uint64)
    pieces[:, 0] = cache.ctypes.data + 4 * np.arange(count)
    pieces[:, 1] = staging.ctypes.data + 4 * np.arange(count)
    pieces[:, 2] = 2
    rig.engine.submit(Direction.STORE, pieces, rig.engine.record_fence())
    assert rig.finish() == [(1, True)]
    assert rig.cuda.batches == [16, 64, 256, 1024, 4096, 4096, 448]
    assert max(rig.cuda.batches) <= DESCRIPTORS_MAX
    assert (staging[::2] == cache[::2]).all()
    assert not staging[1::2].any()
    rig.engine.close()


def test_kernel_tables_come_back_only_when_the_gpu_is_done() -> None:
    rig = Rig(FakeCuda(), 1, Backend.KERNEL)
    fence = rig.passed_fence()
    for _ in range(40):
        rig.engine.submit(Direction.STORE, rig.pieces([0, 1], [0]), fence)
    launched = rig.cuda.calls["launch"]
    assert 0 < launched < 40
    assert launched + rig.cuda.calls["copy_batch"] == 40, "without a table it goes by DMA"
    assert len(rig.finish()) == 40
    rig.store([0, 1], [0])
    rig.finish()
    assert rig.cuda.calls["launch"] == launched + 1
    rig.engine.close()


def test_copies_wait_for_their_staging_to_be_registered() -> None:
    rig = Rig(FakeCuda(), 1)
    rig.pins.state = Readiness.WAITING
    ticket = rig.store([0, 1], [0])
    assert rig.finish() == [] and not rig.cuda.batches
    rig.pins.state = Readiness.READY
    assert rig.finish() == [(ticket, True)]
    rig.pins.state = Readiness.FAILED
    ticket = rig.store([0, 1], [0])
    assert [(t, o.ok) for t, o in rig.engine.poll()] == [(ticket, False)]
    rig.engine.close()


@pytest.mark.parametrize("call", ["copy_batch", "record_event", "event_is_done", "create_event"])
def test_an_error_of_cuda_is_an_outcome(call: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(FakeCuda(), 1)
    good = rig.store([0, 1], [0])
    assert rig.finish() == [(good, True)]
    fence = rig.engine.record_fence()
    held = rig.cuda.create_event()  # the engine's own events are all in use then
    rig.engine.submit(Direction.STORE, rig.pieces([0, 1], [0]), fence)
    rig.cuda.fail[call] = rig.cuda.calls[call]
    ticket = rig.engine.submit(Direction.STORE, rig.pieces([2, 3], [1]), fence)
    outcomes = dict(rig.finish())
    assert outcomes[ticket] is False
    assert f"{call}: CUDA_ERROR_STUB" in caplog.text
    rig.cuda.fail.clear()
    rig.cuda.destroy_event(held)
    again = rig.store([0, 1], [0])
    assert rig.finish() == [(again, True)]
    rig.engine.close()


def test_a_ticket_that_failed_half_way_ends_after_its_other_half() -> None:
    rig = Rig(FakeCuda(), 1)
    rig.cuda.regions = None
    cache, staging = np.ones(5000, np.uint16), np.zeros(10_000, np.uint16)
    pieces = np.empty((5000, 3), np.uint64)
    pieces[:, 0] = cache.ctypes.data + 2 * np.arange(5000)
    pieces[:, 1] = staging.ctypes.data + 4 * np.arange(5000)
    pieces[:, 2] = 2
    rig.cuda.fail["copy_batch"] = 1
    ticket = rig.engine.submit(Direction.STORE, pieces, rig.passed_fence())
    assert rig.engine.poll() == [], "the first 16 are under way"
    assert rig.finish() == [(ticket, False)]
    assert staging.sum() == 16
    rig.engine.close()


def test_close_waits_for_work_in_flight_and_frees_everything() -> None:
    rig = Rig(FakeCuda(), 2, Backend.KERNEL)
    rig.cache[:] = rig.fresh(rig.cache.shape)
    rig.store([0, 1], [0])
    rig.engine.close()
    assert (rig.staging[0] == rig.in_slot_order([0, 1], rig.cache)[0]).all()
    assert rig.pins.closed and not rig.cuda.allocated and not rig.cuda.events


class _LateWaiters(FakeCuda):
    """Threads that wait for an event look at it only when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def synchronize_event(self, event: int) -> None:
        assert self.gate.wait(20)
        super().synchronize_event(event)


def test_an_event_is_not_recorded_again_while_a_waiter_thread_needs_it() -> None:
    signals = Signals()
    cuda = _LateWaiters()
    rig = Rig(cuda, 1, waker=signals)
    fence = rig.engine.record_fence()
    pieces = rig.pieces([0, 1], [0])

    def run(count: int) -> None:
        for _ in range(count):
            rig.engine.submit(Direction.STORE, pieces, fence)
            assert [ok for _, ok in rig.finish()] == [True]

    made = cuda.calls["create_event"]
    run(3)
    assert cuda.calls["create_event"] == made + 3
    cuda.gate.set()
    for _ in range(3):
        assert signals.acquire(timeout=120)
    run(3)
    assert cuda.calls["create_event"] == made + 3
    rig.engine.close()


def test_waiter_threads_signal_every_ticket() -> None:
    signals = Signals()
    rig = Rig(FakeCuda(), 1, waker=signals)
    me = threading.get_ident()
    for _ in range(20):
        store, load = rig.store([0, 1], [0]), rig.load([2, 3], [5])
        seen: set[int] = set()
        while seen != {store, load}:
            rig.cuda.drain()
            assert signals.acquire(timeout=120)
            seen |= {ticket for ticket, _ in rig.engine.poll()}
    assert me not in rig.cuda.callers["synchronize_event"]
    rig.engine.close()
