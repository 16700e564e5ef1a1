# SPDX-License-Identifier: Apache-2.0
"""The contract of `io.base.IoEngine`, checked on every engine."""

from __future__ import annotations

import os
import random
import select
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.chunks import entries_of
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    OK,
    STALE,
    OutcomeKind,
)
from vllm_nvmeof_offload.io.base import Completion
from vllm_nvmeof_offload.protocol import SlotIdentity, Urgency
from vllm_nvmeof_offload.units import HEADER_BYTES

from .rig import STAGING_SLOTS, Rig, content, name

MakeRig = Callable[..., Rig]


def test_a_written_payload_is_read_back_into_another_slot(make_rig: MakeRig) -> None:
    rig = make_rig(targets=2)
    for number in range(8):
        rig.store(number, name(number), staging_slot=number)
    for number in range(8):
        rig.zero(16 + number)
    ops = [rig.read(number, 16 + number, name(number)) for number in range(8)]
    assert [c.outcome for c in rig.run(*ops)] == [OK] * 8
    for number in range(8):
        assert rig.payload(16 + number) == content(name(number))


@pytest.mark.parametrize("other", [name(2), name(1, generation=2)], ids=["key", "generation"])
def test_an_intact_slot_of_another_identity_is_stale(
    make_rig: MakeRig, other: SlotIdentity
) -> None:
    rig = make_rig()
    rig.store(5, name(1))
    assert rig.run(rig.read(5, 1, other)) == [Completion(rig.tokens, STALE)]


def test_a_slot_that_was_never_written_proves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.run(rig.read(9, 0, name(1))) == [Completion(rig.tokens, CHECKSUM_MISMATCH)]


@pytest.mark.parametrize("at", [0, 20, 4095, HEADER_BYTES, HEADER_BYTES + 23_999])
def test_a_damaged_byte_is_detected(make_rig: MakeRig, at: int) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    with (rig.pool.directories[0] / "slab").open("r+b") as slab:
        slab.seek(3 * rig.pool.slot_bytes + at)
        byte = slab.read(1)[0]
        slab.seek(-1, os.SEEK_CUR)
        slab.write(bytes([byte ^ 0x40]))
        slab.flush()
        os.fsync(slab.fileno())
    assert rig.run(rig.read(3, 1, name(1))) == [Completion(rig.tokens, CHECKSUM_MISMATCH)]


def test_a_read_beyond_the_end_is_an_io_error(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    os.truncate(rig.pool.directories[0] / "slab", 3 * rig.pool.slot_bytes + 8192)
    (completion,) = rig.run(rig.read(3, 1, name(1)))
    assert completion.outcome is not None
    assert completion.outcome.kind is OutcomeKind.IO_ERROR
    assert completion.released


def test_a_completed_write_is_adopted_by_the_next_process(make_rig: MakeRig) -> None:
    rig = make_rig(targets=2)
    for number in range(5):
        rig.store(number * 3, name(number, generation=number + 7))
    adopted = rig.reopen().adopt()
    assert entries_of(adopted, targets=2) == {
        number * 3: name(number, generation=number + 7) for number in range(5)
    }
    assert adopted.places.tolist() == sorted(adopted.places.tolist())


def test_fileno_is_readable_exactly_when_a_completion_waits(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert select.select([rig.engine.fileno()], [], [], 0)[0] == []
    rig.submit(rig.read(0, 0, name(1)))
    assert select.select([rig.engine.fileno()], [], [], 20)[0] == [rig.engine.fileno()]
    assert len(rig.engine.poll()) == 1
    assert select.select([rig.engine.fileno()], [], [], 0)[0] == []


def test_busy_accepts_the_first_ones(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2, queue_max=4)
    rig.gate.shut(range(64))
    running = [rig.read(number, number, name(1)) for number in range(2)]
    rig.submit(*running)
    rig.gate.wait_started(2)
    queued = [rig.read(number, number, name(1)) for number in range(2, 10)]
    assert rig.engine.submit(queued) == 4
    assert rig.engine.submit(queued[4:]) == 0
    rig.gate.open_all()
    found = rig.wait(lambda completions: len(completions) == 6)
    assert {c.token for c in found} == {op.token for op in (*running, *queued[:4])}


def test_cancel_ends_operations_that_have_not_started(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    rig.gate.shut([0, 1])
    running = [rig.read(0, 0, name(1)), rig.read(1, 1, name(2))]
    queued = rig.read(2, 2, name(3))
    rig.submit(*running)
    rig.gate.wait_started(4)
    rig.submit(queued)
    rig.engine.cancel([queued.token, running[0].token, 12345])
    assert rig.wait(lambda found: len(found) == 1) == [Completion(queued.token, CANCELLED)]
    rig.gate.open_all()
    found = rig.wait(lambda completions: len(completions) == 2)
    assert {(c.token, c.outcome) for c in found} == {(op.token, OK) for op in running}


def test_a_deadline_gives_the_outcome_at_once_and_the_release_later(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.store(0, name(1))
    rig.gate.shut([0])
    op = rig.read(0, 1, name(1), deadline_s=rig.clock() + 3600)
    rig.submit(op)
    rig.gate.wait_started(2)
    assert rig.engine.poll() == []
    rig.clock.advance(3601)
    assert rig.engine.poll() == [Completion(op.token, DEADLINE, released=False)]
    assert rig.engine.poll() == []
    rig.gate.open_all()
    assert rig.wait(bool) == [Completion(op.token, None, released=True)]


def test_a_deadline_wakes_the_caller(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.gate.shut([0])
    rig.submit(rig.read(0, 1, name(1), deadline_s=rig.clock() + 0.05))
    assert [c.outcome for c in rig.wait(bool)] == [DEADLINE]


def test_a_queued_operation_past_its_deadline_is_released_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.gate.shut([0, 1])
    rig.submit(rig.read(0, 0, name(1)), rig.read(1, 1, name(1)))
    rig.gate.wait_started(2)
    op = rig.read(2, 2, name(1), deadline_s=rig.clock() + 3600)
    rig.submit(op)
    rig.clock.advance(3601)
    assert rig.engine.poll() == [Completion(op.token, DEADLINE, released=True)]


def test_a_write_past_its_deadline_leaves_no_table_entry(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.gate.shut([4])
    rig.fill(0, name(1))
    op = rig.write(4, 0, name(1), deadline_s=rig.clock() + 3600)
    rig.submit(op)
    rig.gate.wait_started(1)
    rig.clock.advance(3601)
    assert rig.engine.poll() == [Completion(op.token, DEADLINE, released=False)]
    rig.gate.open_all()
    assert rig.wait(bool) == [Completion(op.token, None)]
    assert len(rig.reopen().adopt()) == 0


def test_hanging_operations_do_not_stop_others(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.store(40, name(9))
    rig.gate.shut(range(6))
    deadline_s = rig.clock() + 3600
    hung = [rig.read(number, number, name(1), deadline_s=deadline_s) for number in range(3)]
    hung += [rig.write(3 + n, 3 + n, name(1), deadline_s=deadline_s) for n in range(2)]
    rig.submit(*hung)
    rig.gate.wait_started(3)
    rig.clock.advance(3601)
    found = rig.engine.poll()
    assert {c.outcome for c in found} == {DEADLINE}
    assert len(found) == len(hung)
    late = {c.token for c in found if not c.released}
    held = {op.token for op in hung if op.pool_slot in rig.gate.started}
    assert 2 <= len(held) < len(hung)
    sealing = late - held  # a write that was being sealed completes by itself
    assert held <= late
    assert {c.token for c in rig.wait(lambda f: len(f) == len(sealing))} == sealing
    assert [c.outcome for c in rig.run(rig.read(40, 10, name(9)))] == [OK]
    assert [c.outcome for c in rig.run(rig.write(41, 10, name(9)))] == [OK]
    rig.gate.open_all()
    found = rig.wait(lambda completions: len(completions) == len(held))
    assert {c.token for c in found} == held
    assert {(c.outcome, c.released) for c in found} == {(None, True)}


def test_writes_leave_a_thread_for_reads(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4)
    rig.store(40, name(9))
    rig.gate.shut(range(10))
    rig.submit(*(rig.write(number, number, name(number)) for number in range(10)))
    rig.gate.wait_started(4)
    assert [c.outcome for c in rig.run(rig.read(40, 20, name(9)))] == [OK]
    assert set(rig.gate.started[1:4]) == {0, 1, 2}
    rig.gate.open_all()
    assert len(rig.wait(lambda found: len(found) == 10)) == 10


def test_demand_reads_start_before_prefetches(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.gate.shut([0, 1])
    rig.submit(rig.read(0, 0, name(1)), rig.read(1, 1, name(1)))
    rig.gate.wait_started(2)
    low = [rig.read(10 + n, 2 + n, name(1), urgency=Urgency.PREFETCH) for n in range(8)]
    high = [rig.read(20 + n, 10 + n, name(1)) for n in range(8)]
    rig.submit(*low, *high)
    rig.gate.open_all()
    rig.wait(lambda found: len(found) == 18)
    # Two threads note their starts one after the other: neighbours may be swapped.
    assert set(rig.gate.started[2:9]) <= set(range(20, 28))


def test_close_does_not_wait_for_hung_operations(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.gate.shut([0])
    running, queued = rig.read(0, 0, name(1)), rig.read(1, 1, name(2))
    rig.submit(running, rig.read(0, 2, name(1)), queued)
    rig.gate.wait_started(2)
    start_s = time.monotonic()
    assert not rig.engine.close(timeout_s=0.05)
    assert time.monotonic() - start_s < 5
    assert Completion(queued.token, CANCELLED) in rig.engine.poll()
    rig.gate.open_all()
    assert rig.engine.close(timeout_s=20)
    assert running.token in {c.token for c in rig.engine.poll()}


def test_every_operation_of_a_random_mix_completes_once_and_correctly(make_rig: MakeRig) -> None:
    rig = make_rig(targets=2, threads=4)
    dice = random.Random(20261121)
    stored: dict[int, SlotIdentity] = {}
    for generation in range(1, 25):
        slots = dice.sample(range(rig.pool.slots), STAGING_SLOTS)
        ops, wanted = [], {}
        for place, slot in enumerate(slots):
            if slot in stored and dice.random() < 0.6:
                rig.zero(place)
                urgency = dice.choice([Urgency.DEMAND, Urgency.PREFETCH])
                ops.append(rig.read(slot, place, stored[slot], urgency=urgency))
                wanted[place] = stored[slot]
            else:
                identity = name(slot, generation)
                rig.fill(place, identity)
                ops.append(rig.write(slot, place, identity))
                stored[slot] = identity
        rig.submit(*ops)
        count = len(ops)
        found = rig.wait(lambda completions, count=count: len(completions) >= count)
        assert Counter(c.token for c in found) == Counter(op.token for op in ops)
        assert {(c.outcome, c.released) for c in found} == {(OK, True)}
        for place, identity in wanted.items():
            assert rig.payload(place) == content(identity)
    assert rig.engine.poll() == []


def test_a_completion_carries_the_time_at_which_the_engine_had_it(make_rig: MakeRig) -> None:
    """Time in the caller's thread does not count: a busy model must not look like a slow disk."""
    rig = make_rig()
    before_s = time.monotonic()
    assert rig.engine.submit([rig.write(1, 0, name(1))]) == 1
    select.select([rig.engine.fileno()], [], [], 10.0)
    heard_s = time.monotonic()
    (completion,) = rig.engine.poll()
    assert completion.ended_s is not None
    assert before_s <= completion.ended_s <= heard_s
