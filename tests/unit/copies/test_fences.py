# SPDX-License-Identifier: Apache-2.0
"""No chunk waits for another job's fence, in whatever order tickets come: over the stub."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
from tests.unit.copies.rig import Rig, Signals
from vllm_nvmeof_offload.copy.base import Backend, Direction
from vllm_nvmeof_offload.copy.pinning import Readiness

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
def test_older_jobs_finish_while_a_younger_fence_stays_open(direction: Direction) -> None:
    rig = Rig(FakeCuda(), 2)
    old, young = _fences(rig, 2)
    _pass_one(rig)
    younger = _submit(rig, direction, 0, young)
    older = [_submit(rig, direction, chunk, old) for chunk in (1, 2)]
    assert _run_copies(rig) == set(older)
    _pass_one(rig)
    assert _run_copies(rig) == {younger}
    rig.engine.close()


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


@pytest.mark.parametrize("backend", list(Backend))
def test_copies_behind_a_late_fence_have_the_right_bytes(backend: Backend) -> None:
    """A store of blocks that the forward pass writes, submitted while an older store is pending."""
    rig = Rig(FakeCuda(), 2, backend)
    before, after = rig.fresh(rig.cache.shape), rig.fresh(rig.cache.shape)
    rig.cache[:] = before
    old = rig.engine.record_fence()
    rig.cuda.on_model(lambda: rig.cache.__setitem__((slice(None), slice(4, 8)), after[:, 4:8]))
    young = rig.engine.record_fence()
    assert rig.cuda.step(MODEL_STREAM)
    _submit(rig, Direction.STORE, 2, young)
    _submit(rig, Direction.STORE, 0, old)
    rig.finish()
    assert (rig.staging[0] == rig.in_slot_order([0, 1], before)[0]).all()
    assert (rig.staging[2] == rig.in_slot_order([4, 5], after)[0]).all()
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


def test_a_fence_whose_query_fails_fails_its_tickets_and_signals() -> None:
    signals = Signals()
    rig = Rig(FakeCuda(), 1, waker=signals)
    rig.cuda.fail["event_is_done"] = rig.cuda.calls["event_is_done"]
    ticket = _submit(rig, Direction.LOAD, 0, rig.engine.record_fence())
    assert signals.acquire(timeout=20)
    assert [(number, outcome.ok) for number, outcome in rig.engine.poll()] == [(ticket, False)]
    rig.cuda.drain()
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
    rig.cuda.capturing = True
    assert not rig.engine.has_passed(fence)
    rig.cuda.capturing = False
    assert rig.cuda.spoilt == []
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


def test_a_fence_that_cannot_be_asked_is_open_and_its_tickets_fail() -> None:
    rig = Rig(FakeCuda(), 1)
    (fence,) = _fences(rig, 1)
    rig.cuda.fail["event_is_done"] = rig.cuda.calls["event_is_done"]
    assert not rig.engine.has_passed(fence)
    ticket = _submit(rig, Direction.LOAD, 0, fence)
    assert [(number, outcome.ok) for number, outcome in rig.engine.poll()] == [(ticket, False)]
    rig.cuda.drain()
    rig.engine.close()
