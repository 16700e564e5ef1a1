# SPDX-License-Identifier: Apache-2.0
"""Random and mutated bytes for every parser of on-disk data.

There are two kinds of mutants: the CRC must catch plain ones; the rules of the fields must catch
those whose CRC was recomputed, as if a broken writer had signed them. No parser may raise an
undocumented exception.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.slots import seal
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, PoolFormatError
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    KEY_BYTES_MAX,
    Keyspace,
    SlotPlace,
    Stamp,
    StoredGroup,
    Superblock,
    decode_table,
    encode_entry,
    is_superblock,
    parse_header,
    read_superblock,
    verify,
)
from vllm_nvmeof_offload.pool.survey import model_name, read_facts
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes

# -- mutations of bytes, for hypothesis -----------------------------------------------

#: Mutations, applied one after the other: (operation, offset, bytes).
flips = st.tuples(st.just("xor"), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8))
overwrites = st.tuples(st.just("put"), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=80))
cuts = st.tuples(st.just("cut"), st.integers(0, 1 << 16), st.just(b""))
growths = st.tuples(st.just("grow"), st.just(0), st.binary(min_size=1, max_size=600))
edits = st.lists(st.one_of(flips, overwrites), min_size=1, max_size=6)
changes = st.lists(st.one_of(flips, overwrites, cuts, growths), min_size=1, max_size=6)


def mutated(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    result = bytearray(data)
    for kind, place, what in mutations:
        at = place % max(len(result), 1)
        if kind == "cut":
            del result[at:]
        elif kind == "grow":
            result += what
        else:
            for index, byte in enumerate(what[: len(result) - at]):
                result[at + index] = byte ^ (result[at + index] if kind == "xor" else 0)
    return bytes(result)


def of_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


same_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


PAYLOAD = bytes(range(256)) * 20
ONE, OTHER = SlotIdentity(b"one" * 12, 7), SlotIdentity(b"other" * 7, 8)
PLACE = SlotPlace(bytes(range(16)), 5, 6)
TAG = bytes(range(90, 106))
STAMP = Stamp(3, TAG)
#: The fields of a header; the bytes between and after them are zeros and the CRC.
FIELDS = [*range(83), *range(84, 90), *range(96, 150), *range(160, 164)]
BLOCK = Superblock(
    *(bytes(range(16)), "0f" * 16, 8192, 4096, 9, 1, 2, 3, 4, 5),
    tag=TAG,
    sequence=12,
    groups=(
        StoredGroup(0, GroupKind.FULL, 4096, 2, 2048),
        StoredGroup(1, GroupKind.STATE, 1000, 2, 1000),
    ),
)


def sealed(identity: SlotIdentity = ONE) -> bytes:
    slot = bytearray(slot_stride_bytes(len(PAYLOAD)))
    slot[HEADER_BYTES : HEADER_BYTES + len(PAYLOAD)] = PAYLOAD
    seal(memoryview(slot), identity, len(PAYLOAD), STAMP, PLACE, GroupKind.FULL)
    return bytes(slot)


def signed(page: bytes) -> bytes:
    """The 4 KiB page with its last four bytes replaced by the CRC of the others."""
    return page[: HEADER_BYTES - 4] + struct.pack("<I", crc32c(page[: HEADER_BYTES - 4]))


SEALED = sealed()
MATTERS = HEADER_BYTES + len(PAYLOAD)  # padding follows


@given(changes)
def test_a_mutated_slot_is_never_accepted(mutations: list[tuple[str, int, bytes]]) -> None:
    slot = mutated(SEALED, mutations)
    outcome = verify(memoryview(slot), ONE, len(PAYLOAD), PLACE, TAG)
    if slot[:MATTERS] == SEALED[:MATTERS]:
        assert outcome == OK
    else:
        assert outcome in (CHECKSUM_MISMATCH, STALE)


@given(st.lists(st.tuples(st.just("put"), st.sampled_from(FIELDS), st.binary(max_size=1))))
@example([])
@example([("put", 8, b"\1")])  # version
@example([("put", 10, b"\1")])  # flags
@example([("put", 10, b"\2")])
@example([("put", 10, b"\4")])
@example([("put", 10, b"\x08")])
@example([("put", 82, b"\3")])  # kind of the group
@example([("put", 82, b"\4")])
@example([("put", 84, b"x")])  # group id
@example([("put", 88, b"\1")])  # block CRCs
@example([("put", 10, b"\4"), ("put", 88, b"\1"), ("put", 160, b"x")])
@example([("put", 96, b"x")])  # share tag
@example([("put", 112, b"x")])  # MAC
@example([("put", 11, b"\0")])  # key length
@example([("put", 11, b"\x2f")])
@example([("put", 24, b"\xff" * 8)])  # payload length
@example([("put", 36 + KEY_BYTES_MAX - 1, b"x")])  # padding of the key
@example([("put", 128, b"x")])  # uuid of the region
@example([("put", 144, b"x")])  # slot
@example([("put", 148, b"x")])  # rank
def test_a_signed_invalid_header_is_refused_or_stale(
    mutations: list[tuple[str, int, bytes]],
) -> None:
    page = signed(mutated(SEALED[:HEADER_BYTES], mutations))
    slot = page + SEALED[HEADER_BYTES:]
    header = parse_header(page)
    outcome = verify(memoryview(slot), ONE, len(PAYLOAD), PLACE, TAG)
    if header is None:
        assert outcome == CHECKSUM_MISMATCH
        return
    # An accepted header encodes to the same fields again.
    assert 0 < len(header.identity.key) <= KEY_BYTES_MAX
    again = bytearray(SEALED)
    stamp, kind = header.stamp, GroupKind(page[82])
    seal(memoryview(again), header.identity, len(PAYLOAD), stamp, header.place, kind)
    same = header.identity == ONE and header.payload_bytes == len(PAYLOAD)
    if not same or header.place != PLACE or stamp.tag != TAG:
        assert outcome == STALE
    elif page[32:36] == SEALED[32:36]:
        assert outcome == OK
        unused = page[10] or any(page[160:164])  # flags and CRCs of later releases
        assert unused or page == bytes(again[:HEADER_BYTES])
    else:
        assert outcome == CHECKSUM_MISMATCH


@given(st.binary(max_size=3 * HEADER_BYTES), st.integers(0, 3 * HEADER_BYTES))
@example(b"", 0)
@example(SEALED[:HEADER_BYTES], len(PAYLOAD))  # an intact header without a payload
def test_random_bytes_never_verify(data: bytes, payload_bytes: int) -> None:
    assert verify(memoryview(data), ONE, payload_bytes, PLACE, TAG) in (CHECKSUM_MISMATCH, STALE)


def test_a_header_in_another_slot_is_stale() -> None:
    """A misdirected write: a whole slot, or only its header page."""
    other = sealed(OTHER)
    assert verify(memoryview(other), ONE, len(PAYLOAD), PLACE, TAG) == STALE
    assert verify(memoryview(other), OTHER, len(PAYLOAD), PLACE, TAG) == OK
    spliced = other[:HEADER_BYTES] + SEALED[HEADER_BYTES:-1] + b"x"
    assert verify(memoryview(spliced), ONE, len(PAYLOAD), PLACE, TAG) == STALE
    half = SEALED[:HEADER_BYTES] + bytes(len(SEALED) - HEADER_BYTES)
    assert verify(memoryview(half), ONE, len(PAYLOAD), PLACE, TAG) == CHECKSUM_MISMATCH


# ---- the table ----------------------------------------------------------------------------


def table_of(*slots: int) -> bytes:
    return b"".join(encode_entry(slot, ONE, 3) for slot in slots)


TABLE = table_of(*range(8))


def decode(raw: bytes) -> object:
    count = len(raw) // ENTRY_BYTES
    return decode_table(np.frombuffer(raw[: count * ENTRY_BYTES], np.uint8), np.arange(count))


@given(changes)
def test_a_mutated_entry_is_invalid_and_the_others_stay_valid(
    mutations: list[tuple[str, int, bytes]],
) -> None:
    raw = mutated(TABLE, mutations)
    table = decode(raw)
    for index in range(len(raw) // ENTRY_BYTES):
        here = slice(index * ENTRY_BYTES, (index + 1) * ENTRY_BYTES)
        unchanged = index < 8 and raw[here] == TABLE[here]
        assert table.valid[index] == unchanged  # type: ignore[attr-defined]
        assert table.damaged[index] == (any(raw[here]) and not unchanged)  # type: ignore[attr-defined]


@given(st.integers(0, 255), st.integers(0, 255), st.binary(min_size=46, max_size=46))
@example(8, 36, ONE.key.ljust(46, b"\0"))
@example(0, 0, bytes(46))
@example(0, 47, bytes(46))
@example(1, 36, ONE.key.ljust(46, b"\0"))
def test_a_signed_invalid_entry_is_damaged(flags: int, length: int, key: bytes) -> None:
    body = struct.pack("<IQBB46s", 3, 7, flags, length, key)
    raw = struct.pack("<I", crc32c(struct.pack("<I", 0) + body)) + body
    table = decode(raw)
    # An entry is a hint: the bytes after its key are ignored.
    sound = flags in (0, 8) and 0 < length <= KEY_BYTES_MAX
    assert (table.valid[0], table.damaged[0]) == (sound, not sound)  # type: ignore[attr-defined]


# ---- the superblock -----------------------------------------------------------------------


@given(changes)
def test_a_mutated_superblock_is_refused(mutations: list[tuple[str, int, bytes]]) -> None:
    page = mutated(BLOCK.encode(), mutations)
    if page == BLOCK.encode():
        assert Superblock.decode(page) == BLOCK
        return
    with pytest.raises(PoolFormatError):
        Superblock.decode(page)


@given(edits)
@example([("put", 8, b"\1")])  # version
@example([("put", 28, b"\xff")])  # keyspace
@example([("put", 104, b"\1")])  # what is always zero
@example([("put", 144, b"\1")])
@example([("put", 173, b"\1")])
@example([("put", 174, b"\0")])  # number of groups
@example([("put", 174, b"\1")])
@example([("put", 174, b"\3")])
@example([("put", 174, b"\x41")])
@example([("put", 175, b"\1")])
@example([("put", 196, b"\4")])  # kind of a group
@example([("put", 198, b"\1")])  # zero in a group
@example([("put", 192, b"\1")])  # the id of another group
@example([("put", 240, b"\1")])  # behind the groups
@example([("put", 4060, b"\1")])
def test_a_signed_invalid_superblock_is_refused_or_read_as_written(
    mutations: list[tuple[str, int, bytes]],
) -> None:
    page = signed(mutated(BLOCK.encode(), mutations))
    try:
        found = Superblock.decode(page)
    except PoolFormatError:
        assert page != BLOCK.encode()
        return
    assert found.encode() == page
    assert (found == BLOCK) == (page == BLOCK.encode())


@same_directory
@given(st.one_of(st.binary(max_size=5000), changes.map(lambda m: mutated(BLOCK.encode(), m))))
@example(BLOCK.encode() + b"x")
def test_a_file_that_is_not_a_superblock_is_refused(tmp_path: Path, data: bytes) -> None:
    of_file(tmp_path / "superblock", data)
    assert is_superblock(tmp_path / "superblock") == data.startswith(b"vNVMeSB\0")
    if data == BLOCK.encode():
        assert read_superblock(tmp_path) == BLOCK
    else:
        with pytest.raises(PoolFormatError):
            read_superblock(tmp_path)


def test_every_mutation_changes_the_bytes() -> None:
    """Control of these tests: each kind of mutation changes the bytes it should."""
    assert mutated(b"abc", [("xor", 1, b"\1")]) == b"acc"
    assert mutated(b"abc", [("put", 4, b"xyz")]) == b"axy"
    assert mutated(b"abc", [("cut", 1, b"")]) == b"a"
    assert mutated(b"abc", [("grow", 0, b"d")]) == b"abcd"
    assert signed(SEALED[:HEADER_BYTES]) == SEALED[:HEADER_BYTES]
    assert signed(BLOCK.encode()) == BLOCK.encode()
    broken: Callable[[bytes], bytes] = lambda page: page[:8] + b"\3" + page[9:]  # noqa: E731
    assert parse_header(broken(SEALED)) is None


# -- JSON -----------------------------------------------------------------------------

numbers = st.one_of(st.integers(), st.floats())
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
records = st.fixed_dictionaries({}, optional=dict.fromkeys(("model", "layers", "dtype"), values))
jsons = st.one_of(values, records).map(lambda value: json.dumps(value).encode())
DEEP = b"[" * 200_000


def any_bytes(valid: bytes) -> st.SearchStrategy[bytes]:
    damaged = changes.map(lambda mutations: mutated(valid, mutations))
    return st.one_of(st.binary(max_size=600), jsons, damaged)


FACTS = json.loads(Keyspace.of({"model": "m", "layers": [1, 2], "dtype": "bf16"}).canonical)
#: The facts that an earlier release wrote, whose slots did not name their place.
OLD_FACTS: dict[str, object] = {"model": "m", "layers": [1, 2]}


@same_directory
@given(any_bytes(Keyspace.of(FACTS).canonical.encode()))
@example(DEEP)
@example(b'{"model": NaN}')
def test_facts_of_another_digest_are_not_believed(tmp_path: Path, data: bytes) -> None:
    space = tmp_path / Keyspace.of(FACTS).digest
    space.mkdir(exist_ok=True)
    of_file(space / "keyspace.json", data)
    facts = read_facts(space)
    assert facts is None or facts == FACTS
    assert model_name(space) == ("?" if facts is None else "m")


@pytest.mark.parametrize("facts", [FACTS, OLD_FACTS])
def test_facts_are_read_back(tmp_path: Path, facts: dict[str, object]) -> None:
    space = tmp_path / Keyspace.exactly(facts).digest
    space.mkdir()
    assert read_facts(space) is None
    of_file(space / "keyspace.json", json.dumps(facts, indent=2).encode())
    assert read_facts(space) == facts
