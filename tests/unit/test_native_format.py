# SPDX-License-Identifier: Apache-2.0
"""The native core and `pool.format` write and accept the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.native import WHY_NOT, core
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    FLAG_SINGLE_COPY,
    Known,
    SlotPlace,
    Stamp,
    crcs_in_python,
    decode_table,
    encode_entry,
    parse_header,
    seal,
    verify,
)
from vllm_nvmeof_offload.pool.log import LogRecord
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import slot_stride_bytes

assert core is not None, WHY_NOT

OUTCOMES = {0: OK, 2: CHECKSUM_MISMATCH, 3: STALE}
KEYS = st.binary(min_size=1, max_size=46)
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
PLACES = st.builds(SlotPlace, st.binary(min_size=16, max_size=16), st.integers(0, 2**16 - 1), U32)
PLACE = SlotPlace(bytes(range(16)), 5, 6)
SIXTEEN = st.binary(min_size=16, max_size=16)
TAG = bytes(range(70, 86))
STAMP = Stamp(1, TAG)
KINDS = st.sampled_from(GroupKind)


def slot_of(payload: bytes) -> np.ndarray:
    slot = np.full(slot_stride_bytes(len(payload)), 0xAA, np.uint8)
    slot[4096 : 4096 + len(payload)] = np.frombuffer(payload, np.uint8)
    return slot


@given(
    KEYS,
    U64,
    st.builds(Stamp, U32, SIXTEEN),
    PLACES,
    KINDS,
    st.booleans(),
    st.binary(max_size=20_000),
)
def test_a_sealed_slot_is_the_same(
    key: bytes,
    generation: int,
    stamp: Stamp,
    place: SlotPlace,
    kind: GroupKind,
    single_copy: bool,
    payload: bytes,
) -> None:
    ours, theirs = slot_of(payload), slot_of(payload)
    identity = SlotIdentity(key, generation)
    seal(ours.data, identity, len(payload), stamp, place, kind, Known(single_copy=single_copy))
    mark = stamp.epoch, stamp.tag, *place, int(kind), single_copy
    core.seal(theirs, key, generation, len(payload), *mark)
    assert ours.tobytes() == theirs.tobytes()
    assert verify(theirs.data, identity, len(payload), place, stamp.tag) == OK
    assert core.verify(ours, key, generation, len(payload), *place, stamp.tag) == 0
    header = parse_header(theirs[:4096].data)
    assert header is not None and header.single_copy == single_copy


@given(KEYS, U64, U32, U32, st.booleans(), U64, st.integers(0, 62))
def test_a_record_of_the_log_is_the_same(
    key: bytes,
    generation: int,
    epoch: int,
    slot: int,
    single_copy: bool,
    sequence: int,
    index: int,
) -> None:
    put = LogRecord.put(slot, SlotIdentity(key, generation), epoch, single_copy=single_copy)
    native = core.encode_put(sequence, index, slot, key, generation, epoch, single_copy)
    assert native == put.encode(sequence, index)


@given(PLACES, PLACES, SIXTEEN)
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(16), 1, 2), TAG)
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(16), 1, 2), TAG[:15] + b"x")
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(15) + b"x", 1, 2), TAG)
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(16), 3, 2), TAG)
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(16), 1, 3), TAG)
def test_both_judge_a_slot_of_another_place_or_tag_alike(
    one: SlotPlace, other: SlotPlace, tag: bytes
) -> None:
    slot = slot_of(b"payload")
    seal(slot.data, SlotIdentity(b"key", 1), 7, STAMP, one, GroupKind.FULL)
    found = OUTCOMES[core.verify(slot, b"key", 1, 7, *other, tag)]
    assert found == (OK if (one, TAG) == (other, tag) else STALE)
    assert verify(slot.data, SlotIdentity(b"key", 1), 7, other, tag) == found


@given(KEYS, KEYS, U64, st.integers(0, 8191), st.integers(0, 255), st.integers(0, 1))
def test_both_judge_a_damaged_or_foreign_slot_alike(
    key: bytes, asked: bytes, generation: int, at: int, mask: int, later: int
) -> None:
    slot = slot_of(bytes(range(250)) * 16)
    seal(slot.data, SlotIdentity(key, generation), 4000, STAMP, PLACE, GroupKind.FULL)
    slot[at] ^= mask
    generation = (generation + later) % 2**64
    ours = verify(slot.data, SlotIdentity(asked, generation), 4000, PLACE, TAG)
    assert OUTCOMES[core.verify(slot, asked, generation, 4000, *PLACE, TAG)] == ours


#: Offsets of a header's fields and the bytes between them; block CRCs and zeros follow.
FIELDS = range(164)


@given(st.lists(st.tuples(st.sampled_from(FIELDS), st.integers(0, 255)), min_size=1, max_size=3))
@example([(10, 1)])  # flags
@example([(10, 2)])
@example([(10, 4)])
@example([(10, 8)])
@example([(10, 16)])
@example([(82, 3)])  # kind
@example([(82, 4)])
@example([(84, 1)])  # group id
@example([(88, 1)])  # block CRCs
@example([(10, 4), (88, 1)])
@example([(10, 12), (88, 0xD7), (89, 3)])  # 983 of them
@example([(10, 12), (88, 0xD8), (89, 3)])
@example([(112, 1)])  # MAC
def test_both_judge_a_signed_header_alike(changes: list[tuple[int, int]]) -> None:
    """As if a later release, or a broken one, had written it."""
    slot = slot_of(b"payload")
    seal(slot.data, SlotIdentity(b"key" * 12, 1), 7, STAMP, PLACE, GroupKind.FULL)
    for at, value in changes:
        slot[at] = value
    slot[4092:4096] = np.frombuffer(crc32c(slot[:4092].tobytes()).to_bytes(4, "little"), np.uint8)
    ours = verify(slot.data, SlotIdentity(b"key" * 12, 1), 7, PLACE, TAG)
    assert OUTCOMES[core.verify(slot, b"key" * 12, 1, 7, *PLACE, TAG)] == ours


@given(U32, KEYS, U64, U32, st.booleans())
def test_a_table_entry_is_the_same(
    slot: int, key: bytes, generation: int, epoch: int, single_copy: bool
) -> None:
    flags = FLAG_SINGLE_COPY if single_copy else 0
    ours = encode_entry(slot, SlotIdentity(key, generation), epoch, flags)
    assert core.encode_entry(slot, key, generation, epoch, single_copy) == ours
    decoded = decode_table(np.frombuffer(ours, np.uint8).copy(), np.array([slot], np.int64))
    assert decoded.valid.tolist() == [True]


def test_the_checksums_of_many_entries_are_the_same() -> None:
    dice = np.random.default_rng(20261121)
    entries = dice.integers(0, 256, 5000 * ENTRY_BYTES, np.uint8)
    pool_slots = dice.integers(0, 2**32, 5000, np.int64)
    theirs = np.empty(5000, np.uint32)
    core.entry_crcs(entries, pool_slots, theirs)
    ours = crcs_in_python(entries.reshape(-1, ENTRY_BYTES).copy(), pool_slots)
    assert (ours == theirs).all()
    with pytest.raises(ValueError, match="do not fit"):
        core.entry_crcs(entries, pool_slots[1:].copy(), theirs)


@pytest.mark.parametrize("key", [b"", bytes(47)])
def test_a_key_that_does_not_fit_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 46 bytes"):
        core.seal(np.zeros(8192, np.uint8), key, 1, 4096, 1, TAG, *PLACE, 0, False)
