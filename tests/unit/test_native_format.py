# SPDX-License-Identifier: Apache-2.0
"""The native core and `pool.layout`/`pool.table` write and accept the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE
from vllm_nvmeof_offload.native import WHY_NOT, core
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    SlotPlace,
    Stamp,
    crcs_in_python,
    decode_table,
    encode_entry,
    seal,
    verify,
)
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import slot_stride_bytes

assert core is not None, WHY_NOT

OUTCOMES = {0: OK, 2: CHECKSUM_MISMATCH, 3: STALE}
KEYS = st.binary(min_size=1, max_size=46)
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
PLACES = st.builds(SlotPlace, st.binary(min_size=16, max_size=16), st.integers(0, 2**16 - 1), U32)
PLACE = SlotPlace(bytes(range(16)), 5, 6)


def slot_of(payload: bytes) -> np.ndarray:
    slot = np.full(slot_stride_bytes(len(payload)), 0xAA, np.uint8)
    slot[4096 : 4096 + len(payload)] = np.frombuffer(payload, np.uint8)
    return slot


@given(KEYS, U64, st.builds(Stamp, U32, st.booleans()), PLACES, st.binary(max_size=20_000))
def test_a_sealed_slot_is_the_same(
    key: bytes, generation: int, stamp: Stamp, place: SlotPlace, payload: bytes
) -> None:
    ours, theirs = slot_of(payload), slot_of(payload)
    identity = SlotIdentity(key, generation)
    seal(ours.data, identity, len(payload), stamp, place)
    core.seal(theirs, key, generation, len(payload), stamp.epoch, stamp.adoptable, *place)
    assert ours.tobytes() == theirs.tobytes()
    assert verify(theirs.data, identity, len(payload), place) == OK
    assert core.verify(ours, key, generation, len(payload), *place) == 0


@given(PLACES, PLACES)
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(16), 1, 2))
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(15) + b"x", 1, 2))
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(16), 3, 2))
@example(SlotPlace(bytes(16), 1, 2), SlotPlace(bytes(16), 1, 3))
def test_both_judge_a_slot_of_another_place_alike(one: SlotPlace, other: SlotPlace) -> None:
    slot = slot_of(b"payload")
    seal(slot.data, SlotIdentity(b"key", 1), 7, Stamp(1, True), one)
    found = OUTCOMES[core.verify(slot, b"key", 1, 7, *other)]
    assert found == (OK if one == other else STALE)
    assert verify(slot.data, SlotIdentity(b"key", 1), 7, other) == found


@given(KEYS, KEYS, U64, st.integers(0, 8191), st.integers(0, 255), st.integers(0, 1))
def test_both_judge_a_damaged_or_foreign_slot_alike(
    key: bytes, asked: bytes, generation: int, at: int, mask: int, later: int
) -> None:
    slot = slot_of(bytes(range(250)) * 16)
    seal(slot.data, SlotIdentity(key, generation), 4000, Stamp(1, True), PLACE)
    slot[at] ^= mask
    generation = (generation + later) % 2**64
    ours = verify(slot.data, SlotIdentity(asked, generation), 4000, PLACE)
    assert OUTCOMES[core.verify(slot, asked, generation, 4000, *PLACE)] == ours


@given(U32, KEYS, U64, U32, st.booleans())
def test_a_table_entry_is_the_same(
    pool_slot: int, key: bytes, generation: int, epoch: int, adoptable: bool
) -> None:
    ours = encode_entry(pool_slot, SlotIdentity(key, generation), Stamp(epoch, adoptable))
    assert core.encode_entry(pool_slot, key, generation, epoch, adoptable) == ours
    decoded = decode_table(np.frombuffer(ours, np.uint8).copy(), np.array([pool_slot], np.int64))
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
        core.seal(np.zeros(8192, np.uint8), key, 1, 4096, 1, True, *PLACE)
