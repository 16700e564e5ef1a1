# SPDX-License-Identifier: Apache-2.0
"""Right bytes whatever order CUDA's freedoms give: the engine over the stub of its entry points.

The model writes blocks, stores and loads are submitted, and everything runs in an order that a
seed decides. Each mutant drops one of the orderings, and must be seen as wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
from tests.unit.copies.rig import BLOCKS, Rig
from vllm_nvmeof_offload.copy import cuda as dma
from vllm_nvmeof_offload.copy.base import Backend
from vllm_nvmeof_offload.copy.driver import ORDER_ANY

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


def test_the_stub_accepts_the_real_engine() -> None:
    assert not _is_seen()


def test_loads_may_be_read_early_and_stores_may_not() -> None:
    rig = Rig(FakeCuda(), 1)
    rig.store([0, 1], [0])
    rig.load([2, 3], [5])
    rig.finish()
    assert rig.cuda.orders == [dma.ORDER_STREAM, dma.ORDER_ANY]
    rig.engine.close()
