# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine over the stub: its calls, threads, fences, the lifetime of its objects, its
order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.process import wait_until
from tests.unit.copies.fake_cuda import MODEL_STREAM, WAITING_CALLS, FakeCuda
from tests.unit.copies.rig import BLOCKS, Rig, Signals
from vllm_nvmeof_offload.copy import cuda as dma
from vllm_nvmeof_offload.copy.base import DESCRIPTORS_MAX, Backend, Direction
from vllm_nvmeof_offload.copy.driver import ORDER_ANY
from vllm_nvmeof_offload.copy.pinning import Readiness


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
    cuda = _LateWaiters()
    rig = Rig(cuda, 1, waker=Signals())
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
    stores = rig.engine._streams[Direction.STORE]
    assert stores.waiter is not None
    # The fence's thread wakes the engine too, so the wake-ups do not tell whose threads are over.
    wait_until("the waiters", lambda: stores.waiter.is_over(stores.waiter.newest))
    run(3)
    assert cuda.calls["create_event"] == made + 3
    rig.engine.close()


directions = pytest.mark.parametrize("direction", list(Direction))


def _submit(rig: Rig, direction: Direction, chunk: int, fence: object) -> int:
    pieces = rig.pieces([2 * chunk, 2 * chunk + 1], [chunk])
    return rig.engine.submit(direction, pieces, fence)


def _fences(rig: Rig, count: int) -> list[object]:
    """Tickets that each follow a separate forward pass, which runs when the test releases it."""
    found = []
    for _ in range(count):
        rig.cuda.on_model(lambda: None)
        found.append(rig.engine.record_fence())
    return found


def _pass_one(rig: Rig) -> None:
    """One forward pass, and the fence behind it."""
    assert rig.cuda.step(MODEL_STREAM) and rig.cuda.step(MODEL_STREAM)


def _run_copies(rig: Rig) -> set[int]:
    """Run everything except the model until nothing moves; return the ended tickets."""
    done: set[int] = set()
    while True:
        found = {ticket for ticket, outcome in rig.engine.poll() if outcome.ok}
        done |= found
        ran = [rig.cuda.step(s) for s in list(rig.cuda.streams) if s != MODEL_STREAM]
        if not found and not any(ran):
            return done


@directions
@given(order=st.permutations(range(4)), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_each_ticket_ends_with_its_own_fence(
    direction: Direction, order: list[int], seed: int
) -> None:
    """All fences are open when the tickets come, in any order."""
    rig = Rig(FakeCuda(seed), 1)
    fences = _fences(rig, 4)
    tickets = {number: _submit(rig, direction, number, fences[number]) for number in order}
    assert _run_copies(rig) == set()
    for number in range(4):
        _pass_one(rig)
        assert _run_copies(rig) == {tickets[number]}
    rig.engine.close()


def test_the_engine_has_two_streams_however_many_fences_are_open() -> None:
    rig = Rig(FakeCuda(), 1)
    for fence in _fences(rig, 50):
        _submit(rig, Direction.LOAD, 0, fence)
    assert len(rig.cuda.streams) == 1 + len(Direction)
    assert len(rig.finish()) == 50
    rig.engine.close()


def test_a_ticket_that_waits_for_its_memory_delays_no_other() -> None:
    rig = Rig(FakeCuda(), 1)
    fence = rig.passed_fence()
    rig.pins.state = Readiness.WAITING
    waiting = _submit(rig, Direction.LOAD, 0, fence)
    rig.pins.state = Readiness.READY
    other = _submit(rig, Direction.LOAD, 1, fence)
    rig.pins.state = Readiness.WAITING
    assert _run_copies(rig) == {other}
    rig.pins.state = Readiness.READY
    assert _run_copies(rig) == {waiting}
    rig.engine.close()


@directions
def test_an_empty_ticket_ends_after_all_earlier_ones_of_its_direction(
    direction: Direction,
) -> None:
    """This includes tickets with a younger fence: callers rely on it to wait for all of them."""
    rig = Rig(FakeCuda(), 1)
    old, young = _fences(rig, 2)
    _pass_one(rig)
    before = _submit(rig, direction, 0, young)
    nothing = rig.engine.submit(direction, np.empty((0, 3), np.uint64), old)
    after = _submit(rig, direction, 1, old)
    assert _run_copies(rig) == {after}
    _pass_one(rig)
    assert _run_copies(rig) == {before, nothing}
    rig.engine.close()


def test_an_older_fence_is_signalled_while_a_younger_one_is_awaited() -> None:
    """No poll runs in between: the older ticket ended while the waiter thread had the younger."""
    signals = Signals()
    rig = Rig(FakeCuda(), 1, waker=signals)
    old, young = _fences(rig, 2)
    younger = _submit(rig, Direction.LOAD, 0, young)
    older = _submit(rig, Direction.LOAD, 1, old)
    _pass_one(rig)
    assert signals.acquire(timeout=20), "no signal for the older fence"
    assert _run_copies(rig) == {older}
    _pass_one(rig)
    done: set[int] = set()
    while not done:
        assert signals.acquire(timeout=20), "no signal for the younger fence"
        done = _run_copies(rig)
    assert done == {younger}
    rig.engine.close()


def test_a_fence_has_passed_when_the_model_is_behind_it() -> None:
    rig = Rig(FakeCuda(), 1)
    old, young = _fences(rig, 2)
    assert [rig.engine.has_passed(fence) for fence in (old, young)] == [False, False]
    _pass_one(rig)
    assert [rig.engine.has_passed(fence) for fence in (young, old)] == [False, True]
    _pass_one(rig)
    assert [rig.engine.has_passed(fence) for fence in (young, old)] == [True, True]
    rig.engine.close()


def test_a_fence_is_asked_while_a_graph_is_captured() -> None:
    rig = Rig(FakeCuda(), 1)
    (fence,) = _fences(rig, 1)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(rig.engine.has_passed(fence)))
    rig.cuda.capturing = True
    asking.start()
    asking.join()
    rig.cuda.capturing = False
    assert (answers, rig.cuda.spoilt) == ([False], [])
    rig.finish()
    rig.engine.close()


@directions
def test_a_ticket_without_a_fence_waits_for_none(direction: Direction) -> None:
    rig = Rig(FakeCuda(), 1)
    (open_fence,) = _fences(rig, 1)
    behind = _submit(rig, direction, 0, open_fence)
    free = _submit(rig, direction, 1, None)
    assert _run_copies(rig) == {free}
    _pass_one(rig)
    assert _run_copies(rig) == {behind}
    rig.engine.close()


def test_a_ticket_without_a_fence_that_is_held_is_copied_at_the_close() -> None:
    rig = Rig(FakeCuda(), 1)
    rig.cache[:] = rig.fresh(rig.cache.shape)
    rig.pins.state = Readiness.WAITING
    _submit(rig, Direction.STORE, 0, None)
    rig.pins.state = Readiness.READY
    threading.Thread(target=rig.cuda.drain).start()
    rig.engine.close()
    assert (rig.staging[0] == rig.in_slot_order([0, 1], rig.cache)[0]).all()


def test_a_fence_that_cannot_be_asked_is_open_and_its_tickets_fail_and_signal() -> None:
    signals = Signals()
    rig = Rig(FakeCuda(), 1, waker=signals)
    (fence,) = _fences(rig, 1)
    rig.cuda.fail["event_is_done"] = rig.cuda.calls["event_is_done"]
    assert not rig.engine.has_passed(fence)
    ticket = _submit(rig, Direction.LOAD, 0, fence)
    assert signals.acquire(timeout=20)
    assert [(number, outcome.ok) for number, outcome in rig.engine.poll()] == [(ticket, False)]
    rig.cuda.drain()
    rig.engine.close()


backends = st.sampled_from(list(Backend))


def _submit_stores(rig: Rig, rng: random.Random) -> Iterator[tuple[int, list[int], np.ndarray]]:
    """(ticket, slots, what they must hold): each just behind a kernel that writes its blocks."""
    blocks = rng.sample(range(BLOCKS), BLOCKS) if rng.random() < 0.5 else list(range(BLOCKS))
    slots = rng.sample(range(BLOCKS // 2), BLOCKS // 2)
    cut = rng.randrange(1, len(slots))
    for part in (slice(None, cut), slice(cut, None)):
        mine, into = blocks[2 * (part.start or 0) :][: 2 * len(slots[part])], slots[part]
        fresh = rig.fresh(rig.cache.shape)

        def write(mine: list[int] = mine, fresh: np.ndarray = fresh) -> None:
            rig.cache[:, mine] = fresh[:, mine]

        rig.cuda.on_model(write)
        ticket = rig.store(mine, into)
        yield ticket, into, rig.in_slot_order(mine, fresh)
        for _ in range(rng.randrange(6)):
            rig.cuda.step()


def _submit_loads(rig: Rig, rng: random.Random) -> Iterator[tuple[int, list[int], np.ndarray]]:
    """(ticket, blocks, what they must hold): each just behind a kernel that zeroes its blocks."""
    blocks = rng.sample(range(BLOCKS), BLOCKS)
    slots = rng.sample(range(BLOCKS // 2, BLOCKS), BLOCKS // 2)
    for at, slot in enumerate(slots):
        mine = blocks[2 * at : 2 * at + 2]
        rig.staging[slot] = content = rig.fresh(rig.staging[slot].shape)

        def zero(mine: list[int] = mine) -> None:
            rig.cache[:, mine] = 0

        rig.cuda.on_model(zero)
        yield rig.load(mine, [slot]), mine, content
        for _ in range(rng.randrange(4)):
            rig.cuda.step()


def _round(rig: Rig, rng: random.Random) -> bool:
    """Stores beside each other, then loads; True if every byte is where it belongs."""
    expected = dict[int, tuple[list[int], np.ndarray]]()
    for ticket, slots, content in _submit_stores(rig, rng):
        expected[ticket] = slots, content
    right = True
    while expected:
        ran = rig.cuda.step()
        for ticket, outcome in rig.engine.poll():  # checked at once: later may be too late
            slots, content = expected.pop(ticket)
            right &= outcome.ok and bool((rig.staging[slots] == content).all())
        assert ran or not (expected and rig.cuda.is_idle), "a store never ends"
    for ticket, blocks, content in _submit_loads(rig, rng):
        expected[ticket] = blocks, content
    while expected:
        ran = rig.cuda.step()
        for ticket, outcome in rig.engine.poll():
            blocks, content = expected.pop(ticket)
            found = rig.in_slot_order(blocks, rig.cache)
            right &= outcome.ok and bool((found == content).all())
        assert ran or not (expected and rig.cuda.is_idle), "a load never ends"
    assert rig.finish() == []
    return right


@given(
    seed=st.integers(0, 2**32),
    layers=st.integers(1, 3),
    backend=backends,
    batch=st.booleans(),
    rounds=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_byte_arrives_in_any_allowed_order(
    seed: int, layers: int, backend: Backend, batch: bool, rounds: int
) -> None:
    rig = Rig(FakeCuda(seed, batch=batch), layers, backend)
    rng = random.Random(seed)
    assert all(_round(rig, rng) for _ in range(rounds))
    rig.engine.close()
    assert rig.pins.closed
    assert not rig.cuda.events and not rig.cuda.allocated
    assert list(rig.cuda.streams) == [0], "a stream was left"


def _is_seen(make: type[FakeCuda] | None = None, ignore: tuple[str, ...] = ()) -> bool:
    """Whether some seed shows wrong bytes."""
    for seed in range(60):
        rig = Rig((make or FakeCuda)(seed, ignore=ignore), 2)
        rng = random.Random(seed)
        if not all(_round(rig, rng) for _ in range(2)):
            return True
    return False


class _FencesPassAtOnce(FakeCuda):
    """A mutant that never queries whether a fence has passed."""

    def event_is_done(self, event: int) -> bool:
        return event in self.of_the_model or super().event_is_done(event)

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        if stream == MODEL_STREAM:
            self.of_the_model.add(event)

    @property
    def of_the_model(self) -> set[int]:
        found: set[int] = self.__dict__.setdefault("_of_the_model", set())
        return found


def test_the_stub_detects_a_fence_without_a_wait() -> None:
    assert _is_seen(_FencesPassAtOnce)


def test_the_stub_detects_a_missing_copy() -> None:
    assert _is_seen(ignore=("copy_batch",))


def _is_seen_at_the_end(ignore: tuple[str, ...] = ()) -> bool:
    """The same for a store that still waits for its fence when the engine is closed."""
    for seed in range(20):
        rig = Rig(FakeCuda(seed, ignore=ignore), 2)
        fresh = rig.fresh(rig.cache.shape)
        rig.cuda.on_model(partial(np.copyto, rig.cache, fresh))
        rig.store([0, 1], [0])
        rig.engine.close()
        if not (rig.staging[0] == rig.in_slot_order([0, 1], fresh)[0]).all():
            return True
    return False


def test_the_stub_detects_a_store_that_may_be_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dma, "ORDER_STREAM", ORDER_ANY)
    assert _is_seen_at_the_end()


def test_the_stub_detects_a_close_that_waits_for_no_fence() -> None:
    assert _is_seen_at_the_end(ignore=("wait_event",))


def test_the_stub_accepts_the_real_close() -> None:
    assert not _is_seen_at_the_end()


class _RecordsFirst(FakeCuda):
    """A mutant that records the event of a ticket before its copy."""

    def copy_batch(self, *arguments: object, **named: object) -> None:
        _tables, _count, stream, *_rest = arguments
        super().copy_batch(*arguments, **named)  # type: ignore[arg-type]
        late = self.streams[stream].pop()  # type: ignore[index]
        self._late = stream, late

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        if stream and (late := self.__dict__.pop("_late", None)):
            self.streams[late[0]].append(late[1])


def test_the_stub_detects_a_ticket_that_ends_before_its_copy() -> None:
    assert _is_seen(_RecordsFirst)


def test_loads_may_be_read_early_and_stores_may_not() -> None:
    rig = Rig(FakeCuda(), 1)
    rig.store([0, 1], [0])
    rig.load([2, 3], [5])
    rig.finish()
    assert rig.cuda.orders == [dma.ORDER_STREAM, dma.ORDER_ANY]
    rig.engine.close()
