# SPDX-License-Identifier: Apache-2.0
"""Gates: order on one slot, exclusion, identity (rule 1), and no waiting on a hung fill."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import chunks
from tests.unit.pipeline.bench import PIECES, Bench, identity
from vllm_nvmeof_offload.copy.base import Pieces
from vllm_nvmeof_offload.errors import CANCELLED, OK, STALE, io_error
from vllm_nvmeof_offload.protocol import LoadCommand, SlotIdentity, StoreCommand, Urgency

A, B = 1, 2  # numbers of chunks


class Slot:
    """Cache slot 0: stores fill it, loads read it, and their copies last as long as the test
    likes. A store or load is known by its op.
    """

    def __init__(self) -> None:
        self.bench = Bench()
        self._seen = 0  # copies
        self._tickets: dict[int, int] = {}  # op → its copy

    def ask(self, op: int, number: int, *, fill: bool) -> list[tuple[int, bool]]:
        batch = chunks.batch_of((identity(number), 0, None))
        if fill:
            self.bench.pipeline.store(StoreCommand(op, batch), Pieces.of(PIECES), op)
        else:
            self.bench.pipeline.load(LoadCommand(op, batch), Pieces.of(PIECES), op)
        return self.granted()

    def end(self, op: int, *, ok: bool = True) -> list[tuple[int, bool]]:
        """The copy of a store or load ends."""
        self.bench.copy.finish(self._tickets.pop(op), OK if ok else io_error(5))
        return self.granted()

    def granted(self) -> list[tuple[int, bool]]:
        """The stores and loads that go on now, each with whether it is stale, in their order."""
        self.bench.pipeline.step()
        new, self._seen = self.bench.copy.submitted[self._seen :], len(self.bench.copy.submitted)
        found = []
        for ticket, _, _, op in new:
            assert isinstance(op, int)
            self._tickets[op] = ticket
            found.append((op, False))
        ended = self.bench.finished()
        return sorted(found + [(op, True) for op, failures in ended if failures == ((0, STALE),)])

    def idle(self) -> bool:
        return self.bench.idle()


def test_reads_wait_for_the_fill_before_them_and_share() -> None:
    slot = Slot()
    assert slot.ask(1, A, fill=True) == [(1, False)]
    assert not slot.ask(2, A, fill=False)
    assert not slot.ask(3, A, fill=False)
    assert slot.end(1) == [(2, False), (3, False)]
    assert not slot.ask(4, B, fill=True)
    assert not slot.ask(5, B, fill=False)
    assert not slot.end(2)
    assert slot.end(3) == [(4, False)]
    assert slot.end(4) == [(5, False)]
    slot.end(5)
    assert slot.idle()


def test_the_generation_is_part_of_the_content() -> None:
    slot = Slot()
    slot.ask(1, A, fill=True)
    slot.end(1)
    older = SlotIdentity(identity(A).key, identity(A).generation - 1)
    load = LoadCommand(2, chunks.batch_of((older, 0, None)))
    with pytest.raises(AssertionError, match="no such fill"):
        slot.bench.pipeline.load(load, Pieces.of(PIECES), 2)


def test_what_was_in_the_slot_before_its_last_fill_cannot_be_read() -> None:
    slot = Slot()
    with pytest.raises(AssertionError, match="no such fill"):
        slot.ask(1, A, fill=False)
    slot.ask(2, A, fill=True)
    slot.end(2)
    slot.ask(3, B, fill=True)
    with pytest.raises(AssertionError, match="no such fill"):
        slot.ask(4, A, fill=False)


def test_a_failed_fill_leaves_nothing_to_read() -> None:
    slot = Slot()
    slot.ask(1, A, fill=True)
    slot.ask(2, A, fill=False)
    assert slot.end(1, ok=False) == [(2, True)]
    assert slot.ask(3, A, fill=False) == [(3, True)]
    assert slot.idle()


def test_readers_of_a_hung_fill_fail_at_once_and_the_next_fill_waits() -> None:
    slot = Slot()
    slot.bench.fetch(1, A, pool=0, cache=0)
    assert not slot.ask(2, A, fill=False)
    slot.bench.hang()
    assert slot.granted() == [(2, True)]
    assert slot.ask(3, A, fill=False) == [(3, True)]
    assert not slot.ask(4, B, fill=True)
    assert not slot.idle()
    slot.bench.io.complete(slot.bench.io_of(0))
    assert slot.granted() == [(4, False)], "its bytes are not trusted"
    slot.end(4)
    assert slot.ask(5, B, fill=False) == [(5, False)]


def test_what_a_hung_fill_brings_late_is_not_read() -> None:
    slot = Slot()
    slot.bench.fetch(1, A, pool=0, cache=0)
    slot.granted()
    slot.bench.hang()
    slot.granted()
    slot.bench.io.complete(slot.bench.io_of(0))
    slot.granted()
    assert slot.ask(2, A, fill=False) == [(2, True)]
    assert slot.idle()


def test_a_withdrawn_task_does_not_block_the_next() -> None:
    slot = Slot()
    slot.ask(1, A, fill=True)
    slot.ask(3, A, fill=False)
    slot.bench.fetch(2, B, pool=0, cache=0)
    slot.ask(4, B, fill=False)
    for _ in range(2):
        slot.bench.cancel(2)
    assert slot.bench.reports() == [chunks.Reported(2, 0, CANCELLED)]
    assert slot.end(1) == [(3, False), (4, True)]
    assert not slot.bench.io.started


def test_a_load_promotes_the_fills_of_its_slot_wherever_they_wait() -> None:
    """The one under way, those behind it in their order, and none of another slot."""
    slot = Slot()
    bench = slot.bench
    slot.ask(1, A, fill=True)
    bench.fetch(2, B, pool=2, cache=0)
    bench.fetch(3, A, pool=3, cache=0)
    bench.fetch(4, 7, pool=4, cache=1)
    assert not slot.ask(5, A, fill=False)
    bench.cancel(2)
    slot.end(1)
    found = [(bench.number(op), op.urgency) for op in bench.io.started]
    assert sorted(found) == [(3, Urgency.DEMAND), (4, Urgency.PREFETCH)]
    bench.io.complete(bench.io_of(3))
    assert slot.granted() == [(5, False)]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([A, B])), max_size=12), st.data())
def test_slots_are_granted_in_the_order_of_requests(asks, data) -> None:  # type: ignore[no-untyped-def]
    """Any interleaving of asks and ends: order is kept, fills are exclusive, reads match.

    A read names what the last fill before it brings.
    """
    numbers: list[int] = []
    for fill, number in asks:
        numbers.append(number if fill or not numbers else numbers[-1])
    asks = [(fill or not at, numbers[at]) for at, (fill, _) in enumerate(asks)]
    slot = Slot()
    granted: list[int] = []
    running: set[int] = set()
    held: int | None = None
    waiting = deque(range(len(asks)))

    def take(grants: list[tuple[int, bool]]) -> None:
        nonlocal held
        for task, stale in grants:
            fill, number = asks[task]
            granted.append(task)
            assert not any(asks[other][0] for other in running), "a fill is exclusive"
            if fill:
                assert not running
                assert not stale
                held = None
            else:
                assert stale == (held != number)
            if not stale:
                running.add(task)

    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            task = waiting.popleft()
            take(slot.ask(task, asks[task][1], fill=asks[task][0]))
            continue
        task = data.draw(st.sampled_from(sorted(running)))
        running.remove(task)
        ok = not asks[task][0] or data.draw(st.booleans())
        if asks[task][0]:
            held = asks[task][1] if ok else None
        take(slot.end(task, ok=ok))
    assert granted == list(range(len(asks)))
    assert slot.idle()
