# SPDX-License-Identifier: Apache-2.0
"""Gates: order on one slot, exclusion, identity (rule 1), and no waiting on a hung fill."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.worker.slots import SlotGates

A, B = SlotIdentity(b"a", 1), SlotIdentity(b"a", 2)


def _names(grants) -> list[tuple[str, bool]]:  # type: ignore[no-untyped-def]
    return [(grant.task, grant.stale) for grant in grants]


def test_reads_wait_for_the_fill_before_them_and_share() -> None:
    gates: SlotGates[str] = SlotGates()
    assert _names(gates.ask(0, "fill", A, fill=True)) == [("fill", False)]
    assert not gates.ask(0, "read 1", A, fill=False)
    assert not gates.ask(0, "read 2", A, fill=False)
    assert _names(gates.filled(0, ok=True)) == [("read 1", False), ("read 2", False)]
    assert not gates.ask(0, "next", B, fill=True)
    assert not gates.ask(0, "behind it", A, fill=False)
    assert not gates.read(0)
    assert _names(gates.read(0)) == [("next", False)]
    assert _names(gates.filled(0, ok=True)) == [("behind it", True)]
    assert gates.idle()


def test_a_failed_fill_leaves_nothing_to_read() -> None:
    gates: SlotGates[str] = SlotGates()
    gates.ask(0, "fill", A, fill=True)
    gates.ask(0, "read", A, fill=False)
    assert _names(gates.filled(0, ok=False)) == [("read", True)]
    assert _names(gates.ask(0, "later", A, fill=False)) == [("later", True)]
    assert gates.idle()


def test_readers_of_a_hung_fill_fail_at_once_and_the_next_fill_waits() -> None:
    gates: SlotGates[str] = SlotGates()
    gates.ask(0, "fill", A, fill=True)
    gates.ask(0, "read", A, fill=False)
    assert _names(gates.abandon(0)) == [("read", True)]
    assert _names(gates.ask(0, "late read", A, fill=False)) == [("late read", True)]
    assert not gates.ask(0, "next fill", B, fill=True)
    assert not gates.idle()
    assert _names(gates.filled(0, ok=True)) == [("next fill", False)], "its bytes are not trusted"
    gates.filled(0, ok=True)
    assert _names(gates.ask(0, "read", A, fill=False)) == [("read", True)]


def test_a_withdrawn_task_does_not_block_the_next() -> None:
    gates: SlotGates[str] = SlotGates()
    gates.ask(0, "fill", A, fill=True)
    gates.ask(0, "other fill", B, fill=True)
    gates.ask(0, "read", A, fill=False)
    assert gates.withdraw(0, "other fill") == (True, [])
    assert gates.withdraw(0, "other fill") == (False, [])
    assert _names(gates.filled(0, ok=True)) == [("read", False)]


def test_a_slot_names_its_waiting_fills_in_order() -> None:
    gates: SlotGates[str] = SlotGates()
    assert gates.fillers(0) == ()
    gates.ask(0, "fill", A, fill=True)
    gates.ask(0, "read", A, fill=False)
    gates.ask(0, "second fill", B, fill=True)
    gates.ask(0, "third fill", A, fill=True)
    assert gates.fillers(0) == ("fill", "second fill", "third fill")
    gates.withdraw(0, "second fill")
    assert gates.fillers(0) == ("fill", "third fill")
    gates.filled(0, ok=True)
    assert gates.fillers(0) == ("third fill",)
    assert gates.fillers(1) == ()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([A, B])), max_size=12), st.data())
def test_slots_are_granted_in_the_order_of_requests(asks, data) -> None:  # type: ignore[no-untyped-def]
    """Any interleaving of asks and ends: order is kept, fills are exclusive, reads match."""
    gates: SlotGates[int] = SlotGates()
    granted: list[int] = []
    running: set[int] = set()
    held: SlotIdentity | None = None
    waiting = deque(range(len(asks)))

    def take(grants) -> None:  # type: ignore[no-untyped-def]
        nonlocal held
        for grant in grants:
            fill, identity = asks[grant.task]
            granted.append(grant.task)
            assert not any(asks[other][0] for other in running), "a fill is exclusive"
            if fill:
                assert not running
                held = None
            else:
                assert grant.stale == (held != identity)
            if not grant.stale:
                running.add(grant.task)

    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            task = waiting.popleft()
            take(gates.ask(0, task, asks[task][1], fill=asks[task][0]))
            continue
        task = data.draw(st.sampled_from(sorted(running)))
        running.remove(task)
        if asks[task][0]:
            ok = data.draw(st.booleans())
            held = asks[task][1] if ok else None
            take(gates.filled(0, ok=ok))
        else:
            take(gates.read(0))
    assert granted == list(range(len(asks)))
    assert gates.idle()
