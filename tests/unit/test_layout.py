# SPDX-License-Identifier: Apache-2.0
"""The formats: written data is read back, damage is detected, nothing crashes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, PoolFormatError
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    KEY_BYTES_MAX,
    SlotPlace,
    Stamp,
    Superblock,
    decode_table,
    encode_entry,
    parse_header,
    seal,
    verify,
)
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes

keys = st.binary(min_size=1, max_size=KEY_BYTES_MAX)
generations = st.integers(0, (1 << 64) - 1)
identities = st.builds(SlotIdentity, keys, generations)
stamps = st.builds(Stamp, st.integers(0, (1 << 32) - 1), st.booleans())
places = st.builds(
    SlotPlace,
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 16) - 1),
    st.integers(0, (1 << 32) - 1),
)
STAMP = Stamp(1, True)
PLACE = SlotPlace(bytes(range(16)), 3, 77)
IDENTITY = SlotIdentity(b"k" * 36, 0x1234_5678_9ABC_DEF0)


def sealed(
    identity: SlotIdentity, payload: bytes, stamp: Stamp = STAMP, place: SlotPlace = PLACE
) -> bytearray:
    # The earlier content of the page must not matter.
    slot = bytearray(b"\xa5" * slot_stride_bytes(len(payload)))
    slot[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    seal(memoryview(slot), identity, len(payload), stamp, place)
    return slot


@given(identities, st.binary(min_size=1, max_size=9000), stamps, places)
@example(SlotIdentity(b"\0" * 36, 0), b"\0", Stamp(0, False), PLACE)
@example(SlotIdentity(b"a\0\0", 5), b"x" * 4096, Stamp(1, True), PLACE)
def test_a_sealed_slot_proves_itself(
    identity: SlotIdentity, payload: bytes, stamp: Stamp, place: SlotPlace
) -> None:
    slot = sealed(identity, payload, stamp, place)
    header = parse_header(slot)
    assert header is not None
    assert (header.identity, header.payload_bytes, header.stamp) == (identity, len(payload), stamp)
    assert slot[HEADER_BYTES : HEADER_BYTES + len(payload)] == payload
    assert header.place == place
    assert verify(memoryview(slot), identity, len(payload), place) == OK


@given(places, places)
@example(PLACE, PLACE)
@example(PLACE, PLACE._replace(rank=4))
@example(PLACE, PLACE._replace(pool_slot=78))
@example(PLACE, PLACE._replace(pool_uuid=bytes(16)))
def test_only_the_place_of_a_slot_is_ok(one: SlotPlace, other: SlotPlace) -> None:
    slot = memoryview(sealed(IDENTITY, b"payload", place=one))
    assert verify(slot, IDENTITY, 7, other) == (OK if one == other else STALE)


def test_the_place_is_at_the_offset_of_the_format() -> None:
    slot = sealed(IDENTITY, b"payload")
    assert slot[82:128] == bytes(46)
    assert slot[128:150] == bytes(range(16)) + (77).to_bytes(4, "little") + b"\3\0"
    assert slot[150:4092] == bytes(4092 - 150)


@given(identities, identities, st.integers(1, 100), st.integers(1, 100))
def test_only_the_right_identity_and_length_are_ok(
    one: SlotIdentity, other: SlotIdentity, length: int, other_length: int
) -> None:
    slot = memoryview(sealed(one, bytes(length)))
    same = one == other and length == other_length
    assert verify(slot, other, other_length, PLACE) == (OK if same else STALE)


def test_every_single_bit_flip_is_detected() -> None:
    payload = random.Random(1).randbytes(5000)
    slot = sealed(IDENTITY, payload)
    view = memoryview(slot)
    size = len(payload)
    # Every bit of the header page; every bit of a sample of the payload's bytes.
    places = [*range(HEADER_BYTES), *range(HEADER_BYTES, HEADER_BYTES + size, 61)]
    for at in [*places, HEADER_BYTES + size - 1]:
        for bit in range(8):
            slot[at] ^= 1 << bit
            assert verify(view, IDENTITY, size, PLACE) == CHECKSUM_MISMATCH, (at, bit)
            slot[at] ^= 1 << bit
    assert verify(view, IDENTITY, size, PLACE) == OK


@given(st.binary(max_size=2 * HEADER_BYTES))
@example(b"")
@example(bytes(HEADER_BYTES))
def test_random_bytes_are_no_header_and_no_superblock(page: bytes) -> None:
    assert parse_header(page) is None
    with pytest.raises(PoolFormatError):
        Superblock.decode(page[:HEADER_BYTES])


@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255)), min_size=1))
def test_mutated_headers_are_refused_or_unchanged(mutations: list[tuple[int, int]]) -> None:
    slot = sealed(IDENTITY, b"payload")
    before = bytes(slot)
    for at, mask in mutations:
        slot[at] ^= mask
    if bytes(slot) == before:
        return
    # CRC-32C misses one in four billion, and never up to five flipped bits.
    assert parse_header(slot) is None


@pytest.mark.parametrize("length", [0, KEY_BYTES_MAX + 1])
def test_a_key_that_does_not_fit_is_refused(length: int) -> None:
    identity = SlotIdentity(b"x" * length, 1)
    with pytest.raises(ValueError, match=f"{length} bytes"):
        sealed(identity, b"payload")
    with pytest.raises(ValueError, match=f"{length} bytes"):
        encode_entry(0, identity, Stamp(1, True))


def decode_one(raw: bytes, pool_slot: int) -> SlotIdentity | None:
    table = decode_table(np.frombuffer(raw, np.uint8), np.array([pool_slot]))
    if not table.valid[0]:
        return None
    key = table.keys[0, : int(table.key_bytes[0])].tobytes()
    return SlotIdentity(key, int(table.generations[0]))


@given(st.integers(0, (1 << 32) - 1), identities, stamps)
def test_a_table_entry_is_read_back(pool_slot: int, identity: SlotIdentity, stamp: Stamp) -> None:
    raw = encode_entry(pool_slot, identity, stamp)
    assert len(raw) == ENTRY_BYTES
    assert decode_one(raw, pool_slot) == identity
    table = decode_table(np.frombuffer(raw, np.uint8), np.array([pool_slot]))
    assert (int(table.epochs[0]), bool(table.adoptable[0])) == (stamp.epoch, stamp.adoptable)
    # It is not valid in another slot's place.
    assert decode_one(raw, pool_slot ^ 1) is None


def test_every_bit_flip_of_a_table_entry_is_detected() -> None:
    raw = bytearray(encode_entry(77, IDENTITY, Stamp(3, True)))
    for at in range(ENTRY_BYTES):
        for bit in range(8):
            raw[at] ^= 1 << bit
            table = decode_table(np.frombuffer(raw, np.uint8), np.array([77]))
            assert (table.valid.tolist(), table.damaged.tolist()) == ([False], [True])
            raw[at] ^= 1 << bit


@given(st.binary(min_size=0, max_size=ENTRY_BYTES * 4))
def test_random_table_bytes_are_not_valid(raw: bytes) -> None:
    count = len(raw) // ENTRY_BYTES
    table = decode_table(np.frombuffer(raw[: count * ENTRY_BYTES], np.uint8), np.arange(count))
    assert not table.valid.any()


def test_a_large_table_is_decoded_alike_whatever_the_batch() -> None:
    dice = random.Random(5)
    count = 100_000  # several batches
    raw = bytearray(count * ENTRY_BYTES)
    wanted = {}
    for slot in dice.sample(range(count), 3000):
        wanted[slot] = SlotIdentity(dice.randbytes(dice.choice([8, 36, 46])), dice.getrandbits(64))
        start = slot * ENTRY_BYTES
        raw[start : start + ENTRY_BYTES] = encode_entry(slot, wanted[slot], Stamp(2, True))
    table = decode_table(np.frombuffer(raw, np.uint8), np.arange(count))
    assert set(np.flatnonzero(table.valid).tolist()) == set(wanted)
    assert not table.damaged.any()
    for slot, identity in wanted.items():
        assert int(table.generations[slot]) == identity.generation


SUPERBLOCK = Superblock(bytes(range(16)), "0f" * 16, 8192, 4096, 9, 1, 2, 3, 4, 5, True)


def test_a_superblock_is_read_back() -> None:
    assert Superblock.decode(SUPERBLOCK.encode()) == SUPERBLOCK


def test_a_damaged_superblock_is_refused() -> None:
    page = bytearray(SUPERBLOCK.encode())
    for at in [*range(140), 2000, 4095]:
        page[at] ^= 0x10
        with pytest.raises(PoolFormatError):
            Superblock.decode(bytes(page))
        page[at] ^= 0x10
