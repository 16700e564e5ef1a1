# SPDX-License-Identifier: Apache-2.0
"""The formats: written data is read back, damage is detected, nothing crashes; keyspaces."""

from __future__ import annotations

import json
import random
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from tests.slots import seal
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, PoolFormatError
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    FLAG_SINGLE_COPY,
    FORMAT_VERSION,
    KEY_BYTES_MAX,
    LEASED,
    Keyspace,
    SlotPlace,
    Stamp,
    StoredGroup,
    Superblock,
    client_of,
    decode_table,
    encode_entry,
    parse_header,
    share_tag,
    verify,
)
from vllm_nvmeof_offload.protocol import SESSION, SavedSessions, SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes

keys = st.binary(min_size=1, max_size=KEY_BYTES_MAX)
generations = st.integers(0, (1 << 64) - 1)
identities = st.builds(SlotIdentity, keys, generations)
sixteen = st.binary(min_size=16, max_size=16)
stamps = st.builds(Stamp, st.integers(0, (1 << 32) - 1), sixteen)
kinds = st.sampled_from(GroupKind)
places = st.builds(
    SlotPlace,
    sixteen,
    st.integers(0, (1 << 16) - 1),
    st.integers(0, (1 << 32) - 1),
)
TAG = bytes(range(50, 66))
STAMP = Stamp(1, TAG)
PLACE = SlotPlace(bytes(range(16)), 3, 77)
IDENTITY = SlotIdentity(b"k" * 36, 0x1234_5678_9ABC_DEF0)


def sealed(
    identity: SlotIdentity,
    payload: bytes,
    stamp: Stamp = STAMP,
    place: SlotPlace = PLACE,
    kind: GroupKind = GroupKind.FULL,
) -> bytearray:
    # The earlier content of the page must not matter.
    slot = bytearray(b"\xa5" * slot_stride_bytes(len(payload)))
    slot[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    seal(memoryview(slot), identity, len(payload), stamp, place, kind)
    return slot


@given(identities, st.binary(max_size=9000), stamps, places, kinds)
@example(SlotIdentity(b"\0" * 36, 0), b"\0", Stamp(0, bytes(16)), PLACE, GroupKind.FULL)
@example(SlotIdentity(b"a\0\0", 5), b"x" * 4096, STAMP, PLACE, GroupKind.STATE)
@example(SlotIdentity(b"a\0\0", 5), b"", STAMP, PLACE, GroupKind.FULL)
def test_a_sealed_slot_proves_itself(
    identity: SlotIdentity, payload: bytes, stamp: Stamp, place: SlotPlace, kind: GroupKind
) -> None:
    slot = sealed(identity, payload, stamp, place, kind)
    header = parse_header(slot)
    assert header is not None
    assert (header.identity, header.payload_bytes, header.stamp) == (identity, len(payload), stamp)
    assert slot[HEADER_BYTES : HEADER_BYTES + len(payload)] == payload
    assert header.place == place
    assert verify(memoryview(slot), identity, len(payload), place, stamp.tag) == OK


@given(places, places)
@example(PLACE, PLACE)
@example(PLACE, PLACE._replace(rank=4))
@example(PLACE, PLACE._replace(slot=78))
@example(PLACE, PLACE._replace(region_uuid=bytes(16)))
def test_only_the_place_of_a_slot_is_ok(one: SlotPlace, other: SlotPlace) -> None:
    slot = memoryview(sealed(IDENTITY, b"payload", place=one))
    assert verify(slot, IDENTITY, 7, other, TAG) == (OK if one == other else STALE)


@given(sixteen, sixteen)
@example(TAG, TAG)
@example(TAG, bytes(16))
def test_only_the_tag_of_a_slot_is_ok(one: bytes, other: bytes) -> None:
    slot = memoryview(sealed(IDENTITY, b"payload", Stamp(1, one)))
    assert verify(slot, IDENTITY, 7, PLACE, other) == (OK if one == other else STALE)


def test_each_field_is_at_the_offset_of_the_format() -> None:
    identity = SlotIdentity(b"k" * 32 + (0x01020304).to_bytes(4, "big"), 0x1122334455667788)
    slot = sealed(identity, b"payload", Stamp(0xA1B2C3D4, TAG), kind=GroupKind.LOCAL)
    assert slot[:12] == b"vNVMeKV\0\2\0\0" + bytes([36])
    assert slot[12:24] == bytes.fromhex("d4c3b2a1 8877665544332211")
    assert slot[24:32] == (7).to_bytes(8, "little")
    assert slot[32:36] == crc32c(b"payload").to_bytes(4, "little")
    assert slot[36:82] == identity.key.ljust(46, b"\0")
    assert slot[82:84] == b"\2\0"
    assert slot[84:88] == bytes([4, 3, 2, 1])
    assert slot[88:96] == bytes(8)
    assert slot[96:112] == TAG
    assert slot[112:128] == bytes(16)
    assert slot[128:150] == bytes(range(16)) + (77).to_bytes(4, "little") + b"\3\0"
    assert slot[150:4092] == bytes(4092 - 150)
    assert slot[4092:4096] == crc32c(slot[:4092]).to_bytes(4, "little")


def test_a_single_copy_and_a_known_crc_are_noted() -> None:
    slot = bytearray(2 * HEADER_BYTES)
    at = memoryview(slot)
    seal(at, IDENTITY, 7, STAMP, PLACE, GroupKind.FULL, payload_crc=99, single_copy=True)
    header = parse_header(slot)
    assert header is not None and header.single_copy and header.payload_crc == 99
    assert slot[10] == FLAG_SINGLE_COPY


#: Changes of a header's bytes, and whether it is still one of this format.
SIGNED = [
    ({10: 1}, False),  # flags
    ({10: 2}, False),
    ({10: 4}, False),
    ({10: 8}, True),
    ({10: 16}, False),
    ({11: 0}, False),  # key length
    ({11: 35}, False),
    ({11: 47}, False),
    ({82: 3}, True),  # kind
    ({82: 4}, False),
    ({84: 1}, False),  # group id
    ({88: 1}, False),  # block CRCs
    ({10: 4, 88: 1}, True),
    ({10: 12, 88: 0xD7, 89: 3}, True),  # 983 of them
    ({10: 12, 88: 0xD8, 89: 3}, False),
    ({112: 1}, False),  # MAC
]


@pytest.mark.parametrize(("changes", "is_header"), SIGNED)
def test_a_signed_header_is_judged_by_its_fields(changes: dict[int, int], is_header: bool) -> None:
    """As if a later release, or a broken one, had written it."""
    slot = sealed(IDENTITY, b"payload")
    for at, value in changes.items():
        slot[at] = value
    slot[4092:4096] = crc32c(slot[:4092]).to_bytes(4, "little")
    assert (parse_header(slot) is not None) == is_header
    found = verify(memoryview(slot), IDENTITY, 7, PLACE, TAG)
    assert found == (OK if is_header else CHECKSUM_MISMATCH)


@given(identities, identities, st.integers(1, 100), st.integers(1, 100))
def test_only_the_right_identity_and_length_are_ok(
    one: SlotIdentity, other: SlotIdentity, length: int, other_length: int
) -> None:
    slot = memoryview(sealed(one, bytes(length)))
    same = one == other and length == other_length
    assert verify(slot, other, other_length, PLACE, TAG) == (OK if same else STALE)


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
            assert verify(view, IDENTITY, size, PLACE, TAG) == CHECKSUM_MISMATCH, (at, bit)
            slot[at] ^= 1 << bit
    assert verify(view, IDENTITY, size, PLACE, TAG) == OK


@pytest.mark.parametrize("length", [0, KEY_BYTES_MAX + 1])
def test_a_key_that_does_not_fit_is_refused(length: int) -> None:
    identity = SlotIdentity(b"x" * length, 1)
    with pytest.raises(ValueError, match=f"{length} bytes"):
        sealed(identity, b"payload")
    with pytest.raises(ValueError, match=f"{length} bytes"):
        encode_entry(0, identity, 1)


def decode_one(raw: bytes, slot: int) -> SlotIdentity | None:
    table = decode_table(np.frombuffer(raw, np.uint8), np.array([slot]))
    if not table.valid[0]:
        return None
    key = table.keys[0, : int(table.key_bytes[0])].tobytes()
    return SlotIdentity(key, int(table.generations[0]))


@given(
    st.integers(0, (1 << 32) - 1),
    identities,
    st.integers(0, (1 << 32) - 1),
    st.booleans(),
)
def test_a_table_entry_is_read_back(
    slot: int, identity: SlotIdentity, epoch: int, single_copy: bool
) -> None:
    raw = encode_entry(slot, identity, epoch, single_copy=single_copy)
    assert len(raw) == ENTRY_BYTES
    assert decode_one(raw, slot) == identity
    table = decode_table(np.frombuffer(raw, np.uint8), np.array([slot]))
    flags = FLAG_SINGLE_COPY if single_copy else 0
    assert (int(table.epochs[0]), int(table.flags[0])) == (epoch, flags)
    fields = struct.pack(
        "<IQBB46s", epoch, identity.generation, flags, len(identity.key), identity.key
    )
    assert raw[4:] == fields
    assert raw[:4] == crc32c(struct.pack("<I", slot) + fields).to_bytes(4, "little")
    # It is not valid in another slot's place.
    assert decode_one(raw, slot ^ 1) is None


@pytest.mark.parametrize("key_bytes", [4, 36, 42, 43, 46])
def test_a_client_is_read_back_unless_the_key_is_too_long(key_bytes: int) -> None:
    identity = SlotIdentity(b"\xff" * key_bytes, 7)
    raw = encode_entry(77, identity, 3, client=0xC11E47)
    assert decode_one(raw, 77) == identity
    table = decode_table(np.frombuffer(raw, np.uint8), np.array([77]))
    assert table.clients().tolist() == [0xC11E47 if key_bytes <= 42 else 0]
    assert decode_table(np.frombuffer(raw, np.uint8), np.array([78])).clients().tolist() == [0]


def test_salts_have_numbers_and_none_is_unknown() -> None:
    salts = ["", "a", "b", "\ud800"]
    assert len({client_of(salt) for salt in salts} | {0}) == 5


def saved(*sessions: tuple[int, int, int, list[int], int]) -> SavedSessions:
    rows = [(one, client, until, len(of), high) for one, client, until, of, high in sessions]
    generations = [generation for *_, of, _ in sessions for generation in of]
    return SavedSessions(np.array(rows, SESSION), np.array(generations, np.uint64))


def test_saved_sessions_are_read_back_and_a_file_that_is_not_intact_has_none() -> None:
    content = saved((1 << 63, 7, 1_800_000_000, [5, 1 << 63], 99), (2, 8, 9, [], 1)).encode()
    found = SavedSessions.decode(content)
    assert found.sessions.tolist() == [(1 << 63, 7, 1_800_000_000, 2, 99), (2, 8, 9, 0, 1)]
    assert found.generations.tolist() == [5, 1 << 63]
    flipped = (
        content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in range(len(content))
    )
    longer = (content + bytes(4), content + content, content[:-1], content[4:])
    foreign = b"vNVMeSE\0" + (3).to_bytes(4, "little") + bytes(4)
    signed = foreign + zlib.crc32(foreign).to_bytes(4, "little")
    for raw in (b"", b"x", *flipped, *longer, signed, bytes(100)):
        assert SavedSessions.decode(raw).encode() == SavedSessions.decode(b"").encode()


def test_every_bit_flip_of_a_table_entry_is_detected() -> None:
    raw = bytearray(encode_entry(77, IDENTITY, 3, client=9))
    for at in range(ENTRY_BYTES):
        for bit in range(8):
            raw[at] ^= 1 << bit
            table = decode_table(np.frombuffer(raw, np.uint8), np.array([77]))
            assert (table.valid.tolist(), table.damaged.tolist()) == ([False], [True])
            raw[at] ^= 1 << bit


def test_the_checksums_of_many_entries_need_columns_of_one_length() -> None:
    entries, crcs = np.zeros(5 * ENTRY_BYTES, np.uint8), np.empty(5, np.uint32)
    with pytest.raises(ValueError, match="differ in number"):
        core.entry_crcs(entries, np.arange(4), crcs)


def test_a_large_table_is_decoded_alike_whatever_the_batch() -> None:
    dice = random.Random(5)
    count = 100_000  # several batches
    raw = bytearray(count * ENTRY_BYTES)
    wanted = {}
    for slot in dice.sample(range(count), 3000):
        wanted[slot] = SlotIdentity(dice.randbytes(dice.choice([8, 36, 46])), dice.getrandbits(64))
        start = slot * ENTRY_BYTES
        raw[start : start + ENTRY_BYTES] = encode_entry(slot, wanted[slot], 2)
    table = decode_table(np.frombuffer(raw, np.uint8), np.arange(count))
    assert set(np.flatnonzero(table.valid).tolist()) == set(wanted)
    assert not table.damaged.any()
    for slot, identity in wanted.items():
        assert int(table.generations[slot]) == identity.generation


GROUPS = (
    StoredGroup(7, GroupKind.FULL, 4096, 2, 2048),
    StoredGroup(0xFFFFFFFF, GroupKind.STATE, 1024, 2, 1024, set_size=8),
)
SUPERBLOCK = Superblock(
    *(bytes(range(16)), "0f" * 16, 8192, 4096, 9, 1, 2, 3, 4, 5),
    tag=TAG,
    sequence=1 << 40,
    groups=GROUPS,
)


def test_a_superblock_is_read_back() -> None:
    assert Superblock.decode(SUPERBLOCK.encode()) == SUPERBLOCK
    leased = replace(SUPERBLOCK, lease_generation=1, log_pages=5, shared=1)
    assert Superblock.decode(leased.encode()) == leased
    many = replace(SUPERBLOCK, groups=tuple(replace(GROUPS[0], group_id=at) for at in range(64)))
    assert Superblock.decode(many.encode()) == many


def test_a_lease_does_not_make_it_another_pool() -> None:
    leased = replace(SUPERBLOCK, shared=LEASED, lease_generation=7)
    assert leased.is_alike(SUPERBLOCK) and not SUPERBLOCK.is_leased
    assert Superblock.decode(leased.encode()).is_leased
    assert leased.encode()[136:144] == struct.pack("<Q", 7)
    assert leased.encode()[172] == 2


def test_each_field_of_a_superblock_is_at_the_offset_of_the_format() -> None:
    page = SUPERBLOCK.encode()
    assert page[:12] == b"vNVMeSB\0\2\0\0\0"
    assert page[12:28] == bytes(range(16))
    assert page[28:60] == b"0f" * 16
    numbers = struct.unpack("<QQQIIIII", page[60:104])
    assert numbers == (8192, 4096, 9, 1, 2, 3, 4, 5)
    assert page[104:112] == bytes(8)
    assert page[112:128] == TAG
    assert struct.unpack("<Q", page[128:136]) == (1 << 40,)
    assert page[136:174] == bytes(38)
    assert page[174:176] == b"\2\0"
    assert page[176:192] == bytes(16)
    assert struct.unpack("<IBBHQII", page[192:216]) == (7, 0, 1, 0, 4096, 2, 2048)
    assert struct.unpack("<IBBHQII", page[216:240]) == (0xFFFFFFFF, 3, 8, 0, 1024, 2, 1024)
    assert page[240:4092] == bytes(4092 - 240)


def test_a_region_of_another_target_or_pool_has_another_uuid() -> None:
    others = [replace(SUPERBLOCK, target_index=0), replace(SUPERBLOCK, uuid=bytes(16)), SUPERBLOCK]
    assert len({other.place(3).region_uuid for other in others}) == 3
    assert SUPERBLOCK.place(3)[1:] == (3, 3)


def test_the_length_of_a_chunk_is_that_of_its_group() -> None:
    assert SUPERBLOCK.length_of(b"hash" + (7).to_bytes(4, "big")) == 4096
    assert SUPERBLOCK.length_of(b"hash" + b"\xff" * 4) == 1024
    assert SUPERBLOCK.length_of(b"hash" + (8).to_bytes(4, "big")) is None


def test_the_tag_follows_from_keyspace_and_weights() -> None:
    tags = [share_tag("0f" * 16), share_tag("0e" * 16), share_tag("0f" * 16, b"step 1")]
    assert len({len(tag) for tag in tags}) == 1
    assert len(set(tags)) == 3
    assert share_tag("0f" * 16) == share_tag("0f" * 16)


def test_a_damaged_superblock_is_refused() -> None:
    page = bytearray(SUPERBLOCK.encode())
    for at in range(len(page)):
        page[at] ^= 0x10
        with pytest.raises(PoolFormatError):
            Superblock.decode(bytes(page))
        page[at] ^= 0x10


def test_a_digest_depends_on_every_fact_and_not_on_their_order() -> None:
    digest = Keyspace.of({"dtype": "bf16", "layers": 2}).digest
    assert digest == Keyspace.of({"layers": 2, "dtype": "bf16"}).digest
    assert len(digest) == 32
    assert int(digest, 16) >= 0
    for other in (
        {"dtype": "bf16"},
        {"dtype": "bf16", "layers": "2"},
        {"dtype": "f16", "layers": 2},
    ):
        assert Keyspace.of(other).digest != digest


def test_facts_come_back() -> None:
    facts = {"a": [1, None, "x"]}
    assert json.loads(Keyspace.exactly(facts).canonical) == facts
    assert json.loads(Keyspace.of(facts).canonical) == {**facts, "format": FORMAT_VERSION}


def test_a_pool_whose_slots_do_not_name_their_place_is_another_keyspace() -> None:
    facts = {"model": "m"}
    before = Keyspace.exactly(facts)
    assert before.canonical == '{"model":"m"}'
    assert Keyspace.of(facts).digest != before.digest
    assert Keyspace.of(facts) == Keyspace.exactly(json.loads(Keyspace.of(facts).canonical))
