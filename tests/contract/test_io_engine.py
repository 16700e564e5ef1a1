# SPDX-License-Identifier: Apache-2.0
"""The contract of `io.base.IoEngine`, checked on every engine."""

from __future__ import annotations

import errno
import os
import random
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from tests.chunks import entries_of, number_in
from tests.logs import Kind, LogRecord, decode_page
from tests.process import wait_until
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    OK,
    STALE,
    Outcome,
    OutcomeKind,
    io_error,
)
from vllm_nvmeof_offload.io.base import Completion, ForeignSlab, IoOp
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    FLAG_SINGLE_COPY,
    TABLE_FILE,
    decode_table,
    parse_header,
    read_superblock,
)
from vllm_nvmeof_offload.pool.log import RECORDS_PER_PAGE, LogHead
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import SlotIdentity, Urgency
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES, slot_stride_bytes

from .rig import PAYLOAD_BYTES, STAGING_SLOTS, Rig, content, name

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


@pytest.mark.parametrize("header_only", [False, True])
def test_a_slot_that_was_never_written_proves_nothing(make_rig: MakeRig, header_only: bool) -> None:
    rig = make_rig()
    found = rig.run(rig.read(9, 0, name(1), header_only=header_only))
    assert found == [Completion(rig.tokens, CHECKSUM_MISMATCH)]


@pytest.mark.parametrize("at", [0, 20, 4095, HEADER_BYTES, HEADER_BYTES + 23_999])
def test_a_damaged_byte_is_detected(make_rig: MakeRig, at: int) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    rig.damage(3, at)
    for header_only in (False, True) if at < HEADER_BYTES else (False,):
        found = rig.run(rig.read(3, 1, name(1), header_only=header_only))
        assert found == [Completion(rig.tokens, CHECKSUM_MISMATCH)]


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
def test_header_and_table_entry_say_whose_the_chunk_is_and_whether_the_only_copy(
    make_rig: MakeRig, single_copy: bool
) -> None:
    rig = make_rig()
    rig.fill(0, name(1))
    rig.run(rig.write(3, 0, name(1), single_copy=single_copy, client=0xC11E47 + single_copy))
    rig.zero(0)
    assert rig.run(rig.read(3, 0, name(1)))[0].outcome == OK
    header = parse_header(rig.memory[:HEADER_BYTES])
    assert header is not None and header.single_copy == single_copy
    assert header.client == 0xC11E47 + single_copy
    path, offset = rig.pool.directories[0] / TABLE_FILE, 3 * ENTRY_BYTES
    decoded = decode_table(np.fromfile(path, np.uint8, ENTRY_BYTES, offset=offset), np.array([3]))
    assert decoded.valid.all()
    assert decoded.flags.tolist() == [FLAG_SINGLE_COPY if single_copy else 0]
    assert decoded.clients().tolist() == [header.client]
    assert header.entry() == path.read_bytes()[offset : offset + ENTRY_BYTES]


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


# -- each operation has a length of its own, and a write may bring its CRC ------------

SLOTS = 16
#: None, one byte, around a page, and all of the slot; the others by chance.
LENGTHS = [0, 1, 4095, 4096, 4097, PAYLOAD_BYTES]


def staged_bytes(rig: Rig, staging_slot: int) -> bytes:
    start = staging_slot * rig.pool.slot_bytes
    return bytes(rig.memory[start : start + rig.pool.slot_bytes])


@pytest.mark.parametrize("seed", range(3))
def test_operations_of_different_lengths_run_side_by_side(make_rig: MakeRig, seed: int) -> None:
    """They bring back what was written, and nothing behind it is touched."""
    dice = random.Random(seed)
    rig = make_rig(targets=2)
    lengths = LENGTHS + [dice.randrange(PAYLOAD_BYTES) for _ in range(SLOTS - len(LENGTHS))]
    dice.shuffle(lengths)
    writes = []
    for slot, length in enumerate(lengths):
        rig.fill(slot, name(slot))
        crc = crc32c(content(name(slot))[:length]) if dice.random() < 0.5 else None
        write = rig.write(slot, slot, name(slot), payload_bytes=length, payload_crc=crc)
        writes.append(write)
    assert [c.outcome for c in rig.run(*writes)] == [OK] * SLOTS
    order = dice.sample(range(SLOTS), SLOTS)
    reads = []
    for staging, slot in enumerate(order, SLOTS):
        rig.zero(staging)
        reads.append(rig.read(slot, staging, name(slot), payload_bytes=lengths[slot]))
    assert [c.outcome for c in rig.run(*reads)] == [OK] * SLOTS
    for staging, slot in enumerate(order, SLOTS):
        found = staged_bytes(rig, staging)
        end = HEADER_BYTES + lengths[slot]
        assert found[HEADER_BYTES:end] == content(name(slot))[: lengths[slot]]
        assert not any(found[slot_stride_bytes(lengths[slot]) :])


@pytest.mark.parametrize("asked", [PAYLOAD_BYTES - 1, 4096, 5001, 0])
def test_an_intact_slot_of_another_length_is_stale(make_rig: MakeRig, asked: int) -> None:
    rig = make_rig()
    rig.fill(0, name(1))
    assert rig.run(rig.write(5, 0, name(1), payload_bytes=5000))[0].outcome == OK
    assert rig.run(rig.read(5, 1, name(1), payload_bytes=asked))[0].outcome == STALE
    assert rig.run(rig.read(5, 1, name(1), payload_bytes=5000))[0].outcome == OK


def test_a_write_seals_the_same_bytes_with_and_without_a_crc(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.fill(0, name(1))
    rig.fill(1, name(1))
    crc = crc32c(content(name(1)))
    assert rig.run(rig.write(3, 0, name(1)))[0].outcome == OK
    assert rig.run(rig.write(3, 1, name(1), payload_crc=crc))[0].outcome == OK
    assert staged_bytes(rig, 0) == staged_bytes(rig, 1)


def test_a_crc_of_other_bytes_is_found_by_the_next_read(make_rig: MakeRig) -> None:
    """Bytes that change between the copy and the write are not signed: they never verify."""
    rig = make_rig()
    crc = crc32c(content(name(1)))
    rig.fill(0, name(2))
    assert rig.run(rig.write(3, 0, name(1), payload_crc=crc))[0].outcome == OK
    assert rig.run(rig.read(3, 1, name(1)))[0].outcome == CHECKSUM_MISMATCH


# -- reads that check the header alone ------------------------------------------------


def _crc(number: int) -> int:
    return crc32c(content(name(number)))


def test_an_intact_slot_names_the_checksum_of_its_payload(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    (found,) = rig.run(rig.read(3, 1, name(1), header_only=True))
    assert found == Completion(rig.tokens, OK, payload_crc=_crc(1))
    assert rig.payload(1) == content(name(1))


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1])
def test_a_damaged_payload_is_left_to_its_copy(make_rig: MakeRig, at: int) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    rig.damage(3, at)
    (found,) = rig.run(rig.read(3, 1, name(1), header_only=True))
    assert found == Completion(rig.tokens, OK, payload_crc=_crc(1))
    assert crc32c(rig.payload(1)) != _crc(1)


def test_an_intact_slot_of_another_identity_or_length_is_stale(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(3, name(1))
    reads = [
        rig.read(3, 1, name(2), header_only=True),
        rig.read(3, 2, name(1, generation=2), header_only=True),
        rig.read(3, 3, name(1), payload_bytes=PAYLOAD_BYTES - 1, header_only=True),
    ]
    assert [(one.outcome, one.payload_crc) for one in rig.run(*reads)] == [(STALE, None)] * 3


def test_other_reads_check_the_payload(make_rig: MakeRig) -> None:
    """Beside one of the same slot that does not."""
    rig = make_rig()
    rig.store(3, name(1))
    rig.damage(3, HEADER_BYTES + 100)
    alone, whole = rig.run(rig.read(3, 1, name(1), header_only=True), rig.read(3, 2, name(1)))
    assert whole.outcome == CHECKSUM_MISMATCH
    assert alone.outcome == OK


# -- intact bytes that belong in another place are STALE ------------------------------

IDENTITY = name(7, 3)
#: The slot that is read; with two targets it is on the first one.
READ_SLOT = 2


def whole_slot(pool: Pool, number: int) -> bytes:
    index, target = divmod(number, pool.target_count)
    slab = (pool.directories[target] / "slab").read_bytes()
    return slab[index * pool.slot_bytes :][: pool.slot_bytes]


def put_whole_slot(pool: Pool, number: int, data: bytes) -> None:
    index, target = divmod(number, pool.target_count)
    with (pool.directories[target] / "slab").open("r+b") as slab:
        slab.seek(index * pool.slot_bytes)
        slab.write(data)


@pytest.mark.parametrize(
    ("where", "options", "number"),
    [
        ("slot", None, READ_SLOT + 2),
        ("target", None, READ_SLOT + 1),
        ("rank", {"rank": 1}, READ_SLOT),
        ("server", {}, READ_SLOT),
    ],
)
def test_a_slot_that_belongs_in_another_place_is_stale(
    make_rig: MakeRig, where: str, options: dict[str, int] | None, number: int
) -> None:
    """Key, generation and length are equal on all ranks of an engine, so only the place in a slot's
    header tells them apart."""
    rig = make_rig(targets=2)
    other = rig if options is None else make_rig(targets=2, **options)
    rig.store(READ_SLOT, IDENTITY)
    other.store(number, IDENTITY)
    ours, theirs = whole_slot(rig.pool, READ_SLOT), whole_slot(other.pool, number)
    assert (rig.pool.directories == other.pool.directories) is (where in ("slot", "target"))
    put_whole_slot(rig.pool, READ_SLOT, theirs)
    rig.zero(1)
    assert rig.run(rig.read(READ_SLOT, 1, IDENTITY))[0].outcome == STALE, where
    assert other.run(other.read(number, 1, IDENTITY))[0].outcome == OK
    put_whole_slot(rig.pool, READ_SLOT, ours)
    assert rig.run(rig.read(READ_SLOT, 1, IDENTITY))[0].outcome == OK
    assert rig.payload(1) == content(IDENTITY)


# -- RESET voids what was written before it, target by target -------------------------


def test_a_reset_voids_only_the_writes_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4)
    for number in range(3):
        rig.store(number, name(1 + number))
    rig.reset()
    rig.store(3, name(4))
    assert rig.reopen().adopt().keys == name(4).key


def test_a_reset_goes_on_beside_reads(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(1, name(1))
    before = len(rig.gate.started)
    rig.gate.shut([1])
    read = rig.read(1, 5, name(1))
    rig.submit(read)
    rig.gate.wait_started(before + 1)
    rig.reset()
    rig.gate.open_all()
    assert rig.wait(bool) == [Completion(read.token, OK)], "its caller knows what it is worth"


def test_writes_that_no_superblock_names_are_not_adopted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(0, name(1))
    rig.reset(named=False)
    rig.store(1, name(2))
    rig.zero(5)
    assert [c.outcome for c in rig.run(rig.read(1, 5, name(2)))] == [OK]
    assert rig.payload(5) == content(name(2))
    assert rig.reopen().adopt().keys == b""


def test_a_read_accepts_the_tag_of_its_submission_only(make_rig: MakeRig) -> None:
    """Chunks of other weights, for which somebody asks nevertheless."""
    rig = make_rig()
    rig.store(0, name(1))
    ours = rig.pool.stamp.tag
    for tag, outcome in ((bytes(range(16)), STALE), (ours, OK)):
        rig.reset(tag)
        rig.zero(5)
        assert [c.outcome for c in rig.run(rig.read(0, 5, name(1)))] == [outcome]
    assert rig.payload(5) == content(name(1))


def test_writes_between_two_resets_are_voided(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4)
    for number in range(6):
        rig.store(number, name(number))
        rig.reset()
    rig.store(20, name(20))
    assert rig.reopen().adopt().keys == name(20).key


def test_a_hung_write_delays_neither_a_reset_nor_the_writes_after_it(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4, targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    rig.gate.shut([2])
    hung = rig.write(2, 1, name(3))
    rig.fill(1, name(3))
    rig.submit(hung)
    rig.gate.wait_started(3)
    assert rig.engine.cancel([hung.token]) == []
    rig.reset()
    rig.store(3, name(4), staging_slot=2)
    found = [read_superblock(directory) for directory in rig.pool.directories]
    assert {one.epoch for one in found if one is not None} == {rig.pool.stamp.epoch}
    rig.gate.open_all()
    assert rig.wait(bool) == [Completion(hung.token, CANCELLED)]
    pool = rig.reopen()
    assert pool.adopt().keys == name(4).key
    # Its header has the earlier epoch, so the slot is void even if the table is lost.
    pool.close()
    for directory in pool.directories:
        (directory / "table").write_bytes(b"")
    rig.pool = Pool.open(rig.spec)
    assert rig.pool.adopt().keys == name(4).key


def test_each_target_gets_its_superblock_on_its_own(make_rig: MakeRig) -> None:
    rig = make_rig(targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    before = rig.pool.stamp.epoch
    away, other = rig.resets()
    assert [c.outcome for c in rig.run(other)] == [OK]
    epochs = [one.epoch for one in map(read_superblock, rig.pool.directories) if one]
    assert epochs == [before, rig.pool.stamp.epoch]
    rig.pool.exchange(0, None, None)()
    rig.engine.replace_target(0)
    assert [c.outcome for c in rig.run(away)] == [io_error(errno.ENODEV)]
    assert rig.reopen().adopt().keys == b"", "one of them is enough"


# -- replace_target: later operations go to the new files -----------------------------


def exchange(rig: Rig, target: int, slab: Slab | None) -> Callable[[], None]:
    close = rig.pool.exchange(target, slab, None)
    rig.engine.replace_target(target)
    return close


def copy_of(rig: Rig, target: int, path: Path) -> Slab:
    """Copy the target's current files to another directory."""
    path.mkdir()
    for file in ("slab", "table"):
        (path / file).write_bytes((rig.pool.directories[target] / file).read_bytes())
    slab = Slab(path)
    if rig.pool.is_direct[target]:
        slab.use_direct()
    return slab


def holds(directory: Path, identity: SlotIdentity) -> tuple[bool, bool]:
    """Whether its slab has the payload, and its table the key."""
    slab, table = (directory / file for file in ("slab", "table"))
    return content(identity) in slab.read_bytes(), identity.key in table.read_bytes()


def test_new_operations_go_to_new_files_and_none_is_torn(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    old, new = rig.pool.directories[0], tmp_path / "copy"
    slab = copy_of(rig, 0, new)
    rig.gate.shut([2])
    rig.fill(3, name(3))
    rig.submit(rig.write(2, 3, name(3)))
    rig.gate.wait_started(3)
    close = exchange(rig, 0, slab)
    rig.store(4, name(4), staging_slot=4)  # while the other one is under way
    rig.gate.open_all()
    assert [c.outcome for c in rig.wait(bool)] == [OK]
    close()
    for slot, identity in ((0, name(1)), (1, name(2)), (4, name(4))):
        rig.zero(5)
        assert rig.run(rig.read(slot, 5, identity))[0].outcome == OK
        assert rig.payload(5) == content(identity)
    assert (holds(old, name(4)), holds(new, name(4))) == ((False, False), (True, True))
    assert sorted([holds(old, name(3)), holds(new, name(3))]) == [(False, False), (True, True)]


def test_without_files_a_target_fails_at_once_and_its_descriptors_are_closed(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    there = copy_of(rig, 0, tmp_path / "copy")
    exchange(rig, 0, None)()
    rig.fill(3, name(3))
    gone = [rig.read(0, 2, name(1)), rig.write(2, 3, name(3))]
    assert {c.outcome for c in rig.run(*gone)} == {io_error(errno.EBADF)}
    assert rig.run(rig.read(1, 2, name(2)))[0].outcome == OK
    exchange(rig, 0, there)()
    assert rig.run(rig.read(0, 2, name(1)))[0].outcome == OK
    assert rig.payload(2) == content(name(1))


def test_a_queued_operation_keeps_the_files_of_its_submission_over_two_exchanges(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """Its files stay open until it is released; files of later attachments may be closed
    earlier.
    """
    rig = make_rig(targets=1, threads=2)
    first = rig.pool.directories[0]
    second, third = copy_of(rig, 0, tmp_path / "second"), copy_of(rig, 0, tmp_path / "third")
    for slot in (1, 3):
        rig.store(slot, name(slot))
    started = len(rig.gate.started)
    rig.gate.shut([1, 2, 3])
    rig.submit(rig.read(1, 1, name(1)), rig.read(3, 3, name(3)))  # as many as there are threads
    rig.gate.wait_started(started + 2)
    rig.fill(2, name(2))
    rig.submit(rig.write(2, 2, name(2)))
    close_first = exchange(rig, 0, second)
    close_second = exchange(rig, 0, third)
    numbers = {second.fd, second.table_fd}
    close_second()
    with files_with(numbers, tmp_path) as strangers:
        rig.gate.open_all()
        done = rig.wait(lambda found: len(found) == 3)
        sizes = [os.path.getsize(path) for path in strangers]
    assert sizes == [0] * len(sizes), "a foreign file was written"
    assert [completion.outcome for completion in done] == [OK] * 3
    close_first()
    assert holds(first, name(2)) == (True, True)
    assert holds(tmp_path / "second", name(2)) == (False, False)
    assert holds(tmp_path / "third", name(2)) == (False, False)


@contextmanager
def files_with(numbers: set[int], place: Path) -> Iterator[list[Path]]:
    """New empty files that have got the descriptors `numbers`, among others."""
    opened: dict[int, Path] = {}
    try:
        while not numbers <= set(opened):
            path = place / f"stranger-{len(opened)}"
            opened[os.open(path, os.O_RDWR | os.O_CREAT)] = path
        yield list(opened.values())
    finally:
        for number in opened:
            os.close(number)


# -- another engine's region is read with its own files and place ---------------------

TARGETS, OWNER = 2, 7
OURS_SLOTS, THEIR_SLOTS = 8, 64
#: Beyond the end of our own slabs, on the second target.
SLOT = 41
NO_FILES = io_error(errno.EBADF)


def region_of(pool: Pool, target: int, direct: bool) -> ForeignSlab:
    """Open a region of theirs, on the target of this number, for reading."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    place = pool.superblocks[target].place(0)
    fd = os.open(pool.directories[target] / "slab", flags)
    return ForeignSlab(fd, place.region_uuid, place.rank)


class Neighbours:
    """Two engines, each with a pool on the same targets. We read theirs."""

    def __init__(self, make_rig: MakeRig) -> None:
        self.theirs = make_rig(targets=TARGETS, slots=THEIR_SLOTS)
        self.ours = make_rig(targets=TARGETS, slots=OURS_SLOTS)
        self.regions = [
            region_of(self.theirs.pool, target, self.ours.pool.is_direct[target])
            for target in range(TARGETS)
        ]
        for target, region in enumerate(self.regions):
            self.ours.engine.attach_region(OWNER, target, region)

    def borrow(self, slot: int, identity: SlotIdentity, owner: int = OWNER) -> Outcome:
        self.ours.zero(1)
        return self.ours.run(self.ours.read(slot, 1, identity, owner=owner))[0].outcome

    def close(self) -> None:
        for region in self.regions:
            os.close(region.fd)


@pytest.fixture
def neighbours(make_rig: MakeRig) -> Iterator[Neighbours]:
    both = Neighbours(make_rig)
    yield both
    both.close()


def test_their_slots_and_ours_of_the_same_number_are_read_apart(neighbours: Neighbours) -> None:
    for slot in (2, 3):
        neighbours.theirs.store(slot, name(slot))
        neighbours.ours.store(slot, name(100 + slot))
    neighbours.theirs.store(SLOT, name(SLOT))
    for slot in (2, 3, SLOT):
        assert neighbours.borrow(slot, name(slot)) == OK
        assert neighbours.ours.payload(1) == content(name(slot))
    for slot in (2, 3):
        ours = neighbours.ours.read(slot, 2, name(100 + slot))
        assert neighbours.ours.run(ours)[0].outcome == OK
        assert neighbours.ours.payload(2) == content(name(100 + slot))


@pytest.mark.parametrize("what", ["key", "generation", "slot", "region", "tag"])
def test_what_is_not_the_chunk_that_was_asked_for_is_stale(
    neighbours: Neighbours, what: str
) -> None:
    neighbours.theirs.store(SLOT, name(1))
    assert neighbours.borrow(SLOT, name(1)) == OK
    identity, slot = name(1), SLOT
    match what:
        case "key":
            identity = name(2)
        case "generation":
            identity = name(1, generation=2)
        case "slot":
            slot = SLOT + TARGETS
            put_whole_slot(neighbours.theirs.pool, slot, whole_slot(neighbours.theirs.pool, SLOT))
        case "region":  # a chunk of ours, in their file
            slot = 3
            neighbours.ours.store(slot, identity)
            put_whole_slot(neighbours.theirs.pool, slot, whole_slot(neighbours.ours.pool, slot))
        case "tag":  # of other weights
            neighbours.theirs.reset(bytes(range(16)))
            neighbours.theirs.store(SLOT, name(1))
    assert neighbours.borrow(slot, identity) == STALE


def test_damaged_bytes_are_a_checksum_mismatch(neighbours: Neighbours) -> None:
    neighbours.theirs.store(SLOT, name(1))
    slot = bytearray(whole_slot(neighbours.theirs.pool, SLOT))
    slot[5000] ^= 1
    put_whole_slot(neighbours.theirs.pool, SLOT, bytes(slot))
    assert neighbours.borrow(SLOT, name(1)) == CHECKSUM_MISMATCH
    assert neighbours.borrow(SLOT + TARGETS, name(1)) == CHECKSUM_MISMATCH, "never written"


def test_without_files_a_read_fails_alone(neighbours: Neighbours) -> None:
    neighbours.theirs.store(SLOT, name(1))
    neighbours.theirs.store(0, name(2))
    neighbours.ours.store(SLOT % TARGETS, name(3))
    assert neighbours.borrow(SLOT, name(1), owner=OWNER + 1) == NO_FILES
    neighbours.ours.engine.detach_region(OWNER, SLOT % TARGETS)
    assert neighbours.borrow(SLOT, name(1)) == NO_FILES
    assert neighbours.borrow(0, name(2)) == OK, "the other target's files are there"
    ours = neighbours.ours.read(SLOT % TARGETS, 2, name(3))
    assert neighbours.ours.run(ours)[0].outcome == OK
    neighbours.ours.engine.attach_region(OWNER, 1, neighbours.regions[1])
    assert neighbours.borrow(SLOT, name(1)) == OK


def test_a_slab_that_was_cut_short_moves_no_bytes(neighbours: Neighbours) -> None:
    neighbours.theirs.store(SLOT, name(1))
    os.truncate(neighbours.theirs.pool.directories[SLOT % TARGETS] / "slab", 0)
    assert neighbours.borrow(SLOT, name(1)) == io_error(0)


def test_a_read_keeps_the_files_of_its_submission(neighbours: Neighbours) -> None:
    theirs, ours = neighbours.theirs, neighbours.ours
    slots = range(1, 2 * 12, TARGETS)
    for slot in slots:
        theirs.store(slot, name(slot))
    reads = [ours.read(slot, slot // TARGETS, name(slot), owner=OWNER) for slot in slots]
    ours.gate.shut(slots, OWNER)
    ours.submit(*reads)
    ours.engine.attach_region(OWNER, 1, ForeignSlab(-1, bytes(16), 0))
    ours.gate.open_all()
    found = ours.wait(lambda done: len(done) == len(reads))
    assert {one.outcome for one in found} == {OK}
    for slot in slots:
        assert ours.payload(slot // TARGETS) == content(name(slot))
    assert neighbours.borrow(slots[0], name(slots[0])) == NO_FILES


def test_their_region_is_never_written(neighbours: Neighbours) -> None:
    write = neighbours.ours.write(SLOT % TARGETS, 1, name(1), owner=OWNER)
    with pytest.raises(AssertionError):
        neighbours.ours.engine.submit([write])
    assert not any((neighbours.theirs.pool.directories[1] / "slab").read_bytes())


# The contract of the log: it agrees with the table, whatever the engine has written.


PAGES = 16


def pages_of(directory: Path) -> list[tuple[LogHead, list[LogRecord | None]]]:
    """The log's pages by their numbers."""
    raw = (directory / "log").read_bytes()
    pages = [decode_page(raw[at : at + PAGE_BYTES]) for at in range(0, len(raw), PAGE_BYTES)]
    return sorted((page for page in pages if page is not None), key=lambda page: page[0].sequence)


def records_of(directory: Path) -> list[LogRecord | None]:
    return [record for _, records in pages_of(directory) for record in records]


def await_records(directory: Path, count: int) -> list[LogRecord | None]:
    """The log's records, once there are so many: no operation waits for them."""
    wait_until("the log's records", lambda: len(records_of(directory)) >= count)
    found = records_of(directory)
    assert len(found) == count
    return found


def table_of(directory: Path) -> dict[int, tuple[bytes, int, int, int]]:
    """Slot → key, generation, epoch, flags."""
    raw = np.fromfile(directory / "table", np.uint8)
    table = decode_table(raw, np.arange(raw.size // 64))
    return {
        slot: (
            table.keys[slot, : int(table.key_bytes[slot])].tobytes(),
            int(table.generations[slot]),
            int(table.epochs[slot]),
            int(table.flags[slot]),
        )
        for slot in np.flatnonzero(table.valid).tolist()
    }


def replayed(records: list[LogRecord | None]) -> dict[int, tuple[bytes, int, int, int]]:
    """The table that the records make, from an empty one."""
    slots = {}
    for record in records:
        assert record is not None
        if record.kind is Kind.PUT:
            slots[record.slot] = record.key, record.generation, record.epoch, record.flags
    return slots


@pytest.mark.parametrize("seed", range(3))
def test_a_replayed_log_is_the_table(make_rig: MakeRig, seed: int) -> None:
    rig = make_rig(targets=2, log_pages=PAGES)
    dice = random.Random(seed)
    logged = [0, 0]
    epochs: list[list[int]] = [[], []]
    for generation in range(1, 200):
        if dice.random() < 0.03:
            rig.reset()
            for target in (0, 1):
                epochs[target].append(rig.pool.superblocks[target].epoch)
            continue
        slot, single = dice.randrange(rig.pool.slots), dice.random() < 0.2
        identity = name(dice.randrange(40), generation)
        rig.fill(0, identity)
        (done,) = rig.run(rig.write(slot, 0, identity, single_copy=single))
        assert done.outcome == OK
        logged[slot % 2] += 1
    for target, directory in enumerate(rig.pool.directories):
        records = await_records(directory, logged[target] + len(epochs[target]))
        assert replayed(records) == table_of(directory)
        assert any(entry[3] == FLAG_SINGLE_COPY for entry in table_of(directory).values())
        resets = [one.epoch for one in records if one is not None and one.kind is Kind.RESET]
        assert resets == epochs[target]
        sequences = [head.sequence for head, _ in pages_of(directory)]
        assert sequences == list(range(PAGES, PAGES + len(sequences))), "pages follow each other"


def test_a_reset_is_logged_before_what_its_epoch_marks(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    rig.store(1, name(1))
    old = rig.engine.stamp.epoch
    rig.reset()
    new = rig.engine.stamp.epoch
    rig.store(1, name(2))
    records = await_records(rig.pool.directories[0], 3)
    assert [(one.kind, one.epoch) for one in records if one is not None] == [
        (Kind.PUT, old),
        (Kind.RESET, new),
        (Kind.PUT, new),
    ]


def test_many_writes_at_a_time_are_logged_each_once(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    count = 5 * 24
    ops = []
    for number in range(count):
        if number and number % 24 == 0:
            assert {one.outcome for one in rig.run(*ops)} == {OK}
            ops = []
        identity = name(number, number + 1)
        rig.fill(number % 24, identity)
        ops.append(rig.write(number % 64, number % 24, identity))
    assert {one.outcome for one in rig.run(*ops)} == {OK}
    records = await_records(rig.pool.directories[0], count)
    found = sorted(one.generation for one in records if one is not None)
    assert found == list(range(1, count + 1))


def test_a_write_that_was_given_up_is_not_logged(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    rig.gate.shut([5])
    rig.fill(0, name(1))
    write = rig.write(5, 0, name(1))
    rig.submit(write)
    rig.gate.wait_started(1)
    rig.engine.cancel([write.token])
    rig.gate.open_all()
    rig.wait(bool)
    rig.store(6, name(2))
    (record,) = await_records(rig.pool.directories[0], 1)
    assert record is not None
    assert record.slot == 6


def test_a_key_that_is_too_long_is_logged_without_itself(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    identity = SlotIdentity(b"k" * 42 + bytes(4), 9)
    rig.store(3, identity)
    (record,) = await_records(rig.pool.directories[0], 1)
    assert record is not None and (record.key, record.key_bytes) == (b"", 46)
    assert (record.slot, record.generation, record.epoch) == (3, 9, rig.engine.stamp.epoch)


def test_the_next_start_goes_on_a_lap_later(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    directory = rig.pool.directories[0]
    for number in range(RECORDS_PER_PAGE + 1):
        rig.store(number % 64, name(number, number + 1))
    await_records(directory, RECORDS_PER_PAGE + 1)
    rig.reopen()
    assert rig.pool.log(0).next == PAGES + 1 + PAGES


def test_a_target_that_comes_back_is_logged_a_lap_later(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(log_pages=PAGES)
    directory = rig.pool.directories[0]
    rig.store(1, name(1))
    await_records(directory, 1)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ("slab", "table", "log"):
        (copy / file).write_bytes((directory / file).read_bytes())
    for slab in (None, Slab(copy)):
        if slab is not None and rig.pool.is_direct[0]:
            slab.use_direct()
        close = rig.pool.exchange(0, slab, None)
        rig.engine.replace_target(0)
        close()
    rig.store(2, name(2))
    wait_until("the record after the exchange", lambda: pages_of(copy)[-1][0].sequence > PAGES)
    (head, records) = pages_of(copy)[-1]
    assert head.sequence % PAGES == 0, "where a reader of the page before waits"
    assert [record.slot for record in records if record is not None] == [2]
    assert [record.slot for record in records_of(directory) if record is not None] == [1]


def test_a_gone_target_keeps_no_descriptor_of_its_log(make_rig: MakeRig) -> None:
    """Its file system cannot be unmounted while one is open."""
    rig = make_rig(log_pages=PAGES)
    log = rig.pool.directories[0] / "log"
    rig.store(1, name(1))

    def is_open() -> bool:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue
        return str(log) in links

    assert is_open()
    close = rig.pool.exchange(0, None, None)
    rig.engine.replace_target(0)
    close()
    wait_until("the log to be closed", lambda: not is_open())
