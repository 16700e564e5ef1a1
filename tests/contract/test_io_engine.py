# SPDX-License-Identifier: Apache-2.0
"""The contract of `io.base.IoEngine`, checked on every engine."""

from __future__ import annotations

import os
import random
import select
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.chunks import entries_of, number_in
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, OK, STALE, OutcomeKind
from vllm_nvmeof_offload.io.base import Completion, IoOp
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    FLAG_SINGLE_COPY,
    TABLE_FILE,
    decode_table,
    parse_header,
)
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
    rig.damage(3, at)
    assert rig.run(rig.read(3, 1, name(1))) == [Completion(rig.tokens, CHECKSUM_MISMATCH)]


def test_a_read_beyond_the_end_is_an_io_error(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    os.truncate(rig.pool.directories[0] / "slab", 3 * rig.pool.slot_bytes + 8192)
    (completion,) = rig.run(rig.read(3, 1, name(1)))
    assert completion.outcome.kind is OutcomeKind.IO_ERROR


def test_a_completed_write_is_adopted_by_the_next_process(make_rig: MakeRig) -> None:
    rig = make_rig(targets=2)
    for number in range(5):
        rig.store(number * 3, name(number, generation=number + 7))
    adopted = rig.reopen().adopt()
    assert entries_of(adopted, targets=2) == {
        number * 3: name(number, generation=number + 7) for number in range(5)
    }
    assert adopted.places.tolist() == sorted(adopted.places.tolist())


@pytest.mark.parametrize("single_copy", [False, True])
def test_header_and_table_entry_say_that_there_is_one_copy(
    make_rig: MakeRig, single_copy: bool
) -> None:
    rig = make_rig()
    rig.fill(0, name(1))
    rig.run(rig.write(3, 0, name(1), single_copy=single_copy))
    rig.zero(0)
    assert rig.run(rig.read(3, 0, name(1)))[0].outcome == OK
    header = parse_header(rig.memory[:HEADER_BYTES])
    assert header is not None and header.single_copy == single_copy
    path, offset = rig.pool.directories[0] / TABLE_FILE, 3 * ENTRY_BYTES
    decoded = decode_table(np.fromfile(path, np.uint8, ENTRY_BYTES, offset=offset), np.array([3]))
    assert decoded.valid.all()
    assert decoded.flags.tolist() == [FLAG_SINGLE_COPY if single_copy else 0]


def test_fileno_is_readable_exactly_when_a_completion_waits(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert select.select([rig.engine.fileno()], [], [], 0)[0] == []
    rig.submit(rig.read(0, 0, name(1)))
    assert select.select([rig.engine.fileno()], [], [], 20)[0] == [rig.engine.fileno()]
    assert len(rig.engine.poll()) == 1
    assert select.select([rig.engine.fileno()], [], [], 0)[0] == []


def test_the_room_shrinks_with_what_the_engine_has(make_rig: MakeRig) -> None:
    """With two threads there are four reads, with or without a thread; a ring has its bound."""
    rig = make_rig(threads=2, operations_max=4)
    empty = rig.engine.room()
    assert empty.reads == 4
    rig.gate.shut(range(64))
    ops = [rig.read(number, number, name(1)) for number in range(4)]
    rig.submit(*ops)
    assert rig.engine.room().reads == 0
    rig.gate.open_all()
    found = rig.wait(lambda completions: len(completions) == 4)
    assert {c.token for c in found} == {op.token for op in ops}
    assert rig.engine.room() == empty


def test_operations_of_a_kind_start_in_the_order_of_their_submission(make_rig: MakeRig) -> None:
    """Urgency is the caller's affair."""
    rig = make_rig(threads=8)
    before = len(rig.gate.started)
    classes = (Urgency.PREFETCH, Urgency.DEMAND, Urgency.URGENT, Urgency.DEMAND)
    for number, urgency in enumerate(classes):
        rig.submit(rig.read(10 + number, number, name(1), urgency=urgency))
        rig.gate.wait_started(before + number + 1)
    assert rig.gate.started[before:] == [10, 11, 12, 13]
    rig.wait(lambda found: len(found) == 4)


def _fill_engine(rig: Rig) -> list[IoOp]:
    """Submit reads of slots 0 to 3, which stay at the gate; threads have room for no more."""
    rig.gate.shut(range(4))
    before = len(rig.gate.started)
    running = [rig.read(number, number, name(1)) for number in range(4)]
    rig.submit(*running)
    rig.gate.wait_started(before + 2)
    return running


def test_cancel_takes_back_what_has_not_started(make_rig: MakeRig) -> None:
    """Nothing follows for it; what has started ends, however late."""
    rig = make_rig(threads=2)
    ops = _fill_engine(rig)
    started = {slot for slot in range(4) if slot in rig.gate.started}
    withdrawn = rig.engine.cancel([op.token for op in ops] + [12345])
    # A ring starts at once what it gets.
    assert {op.token for op in ops if number_in(op.place) not in rig.gate.started} == set(withdrawn)
    assert started
    rig.gate.open_all()
    left = [op.token for op in ops if op.token not in withdrawn]
    found = rig.wait(lambda completions: len(completions) == len(left))
    assert sorted(c.token for c in found) == left
    assert rig.engine.poll() == []


def test_what_is_cancelled_after_its_start_ends_once_and_late(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    rig.store(0, name(1))
    before = len(rig.gate.started)
    rig.gate.shut([0])
    op = rig.read(0, 1, name(1))
    rig.submit(op)
    rig.gate.wait_started(before + 1)
    for _ in range(2):
        assert rig.engine.cancel([op.token]) == []
    assert rig.engine.poll() == []
    rig.gate.open_all()
    assert [c.token for c in rig.wait(bool)] == [op.token]
    assert rig.engine.poll() == []


def test_a_write_that_was_given_up_leaves_no_table_entry(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.gate.shut([4])
    rig.fill(0, name(1))
    op = rig.write(4, 0, name(1))
    rig.submit(op)
    rig.gate.wait_started(1)
    assert rig.engine.cancel([op.token]) == []
    rig.gate.open_all()
    assert rig.wait(bool) == [Completion(op.token, CANCELLED)]
    assert len(rig.reopen().adopt()) == 0


def test_hanging_operations_do_not_stop_others(make_rig: MakeRig) -> None:
    """Once they are given up; more of them than there are threads."""
    rig = make_rig(threads=2)
    rig.store(40, name(9))
    rig.gate.shut(range(6))
    hung = [rig.read(number, number, name(1)) for number in range(3)]
    hung.append(rig.write(3, 3, name(1)))
    held: list[int] = []
    for op in hung:
        before = len(rig.gate.started)
        rig.submit(op)
        rig.gate.wait_started(before + 1)
        assert rig.engine.cancel([op.token]) == []
        held.append(op.token)
    assert [c.outcome for c in rig.run(rig.read(40, 10, name(9)))] == [OK]
    assert [c.outcome for c in rig.run(rig.write(41, 10, name(9)))] == [OK]
    rig.gate.open_all()
    found = rig.wait(lambda completions: len(completions) == len(held))
    assert sorted(c.token for c in found) == held


def test_as_many_writes_as_there_is_room_for_leave_a_way_for_reads(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4, operations_max=16)
    rig.store(40, name(9))
    rig.gate.shut(range(10))
    writes = min(10, rig.engine.room().writes)
    assert writes >= 3
    rig.submit(*(rig.write(number, number, name(number)) for number in range(writes)))
    rig.gate.wait_started(4)
    assert [c.outcome for c in rig.run(rig.read(40, 20, name(9)))] == [OK]
    rig.gate.open_all()
    assert len(rig.wait(lambda found: len(found) == writes)) == writes


def test_close_does_not_wait_for_hung_operations(make_rig: MakeRig) -> None:
    rig = make_rig(threads=2)
    ops = _fill_engine(rig)
    start_s = time.monotonic()
    assert not rig.engine.close(timeout_s=0.05)
    assert time.monotonic() - start_s < 5
    # None starts after that. On a busy machine one may have started since the first two.
    started = {slot for slot in range(4) if slot in rig.gate.started}
    ended = rig.wait(lambda found: len(found) == len(ops) - len(started))
    assert {c.outcome for c in ended} <= {CANCELLED}
    assert sorted(c.token for c in ended) == [
        op.token for op in ops if number_in(op.place) not in started
    ]
    rig.gate.open_all()
    assert rig.engine.close(timeout_s=20)
    ended += rig.engine.poll()
    assert sorted(c.token for c in ended) == [op.token for op in ops]


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
        assert {c.outcome for c in found} == {OK}
        for place, identity in wanted.items():
            assert rig.payload(place) == content(identity)
    assert rig.engine.poll() == []


def test_a_completion_carries_the_time_at_which_the_engine_had_it(make_rig: MakeRig) -> None:
    """Time in the caller's thread does not count: a busy model must not look like a slow disk."""
    rig = make_rig()
    before_s = time.monotonic()
    rig.engine.submit([rig.write(1, 0, name(1))])
    select.select([rig.engine.fileno()], [], [], 10.0)
    heard_s = time.monotonic()
    (completion,) = rig.engine.poll()
    assert completion.ended_s is not None
    assert before_s <= completion.ended_s <= heard_s
