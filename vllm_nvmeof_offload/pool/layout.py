# SPDX-License-Identifier: Apache-2.0
"""The format of one pool slot: a 4 KiB header page, then the payload padded to 4 KiB.

Header page, little endian::

    0   8s  magic "vNVMeKV\\0"      16  u64  generation
    8   u16 format version          24  u64  payload length, bytes
    10  u8  flags (1: adoptable)    32  u32  payload CRC-32C
    11  u8  key length              36  46s  offload key, zero padded
    12  u32 epoch                   82  zero
    128 16s uuid of the pool        144 u32  pool slot
    148 u16 rank                    150 zero
    4092 u32 CRC-32C of bytes 0..4091

Key and generation are equal on all ranks of an engine. The place (uuid, rank, pool slot) tells
bytes that lie in another's place, after a misdirected read or write or a file put into the wrong
directory, from those that belong there.

The header's CRC covers the whole page, so that any damaged bit of it is seen. The padding
after the payload carries no information and no CRC. The format is shared with the native
engine: a change here is a new `FORMAT_VERSION` or `SLOT_LAYOUT` and a line in the changelog.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, Outcome
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

__all__ = [
    "FLAG_ADOPTABLE",
    "FORMAT_VERSION",
    "KEY_BYTES_MAX",
    "NOWHERE",
    "SLOT_LAYOUT",
    "SlotHeader",
    "SlotPlace",
    "Stamp",
    "check_key",
    "parse_header",
    "seal",
    "verify",
]

FORMAT_VERSION = 1
#: A fact of every keyspace: 2 since headers name their place. A pool of before has no such fact.
SLOT_LAYOUT = 2
KEY_BYTES_MAX = 46
FLAG_ADOPTABLE = 1
EPOCH_MAX = (1 << 32) - 1

_MAGIC = b"vNVMeKV\0"
_HEADER = struct.Struct(f"<8sHBBIQQI{KEY_BYTES_MAX}s46x16sIH")
_CRC = struct.Struct("<I")
_CRC_AT = HEADER_BYTES - _CRC.size
_ZEROS = bytes(_CRC_AT - _HEADER.size)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a write is marked with, fixed when it is submitted.

    epoch: a later reset voids everything of an earlier epoch. adoptable: may a later start
    of this pool adopt it?
    """

    epoch: int
    adoptable: bool


class SlotPlace(NamedTuple):
    """Where a slot belongs.

    pool_uuid: 16 bytes, of one rank's pool over all its targets. pool_slot: its number there,
    which names the target too.
    """

    pool_uuid: bytes
    rank: int
    pool_slot: int


#: What a header of a pool without the fact `slot_layout` says of its place.
NOWHERE = SlotPlace(bytes(16), 0, 0)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """An intact header page."""

    identity: SlotIdentity
    place: SlotPlace
    payload_bytes: int
    payload_crc: int
    stamp: Stamp


def check_key(key: bytes) -> None:
    """Refuse a key that no header and no table entry can hold.

    Raises:
        ValueError: `key` is empty or longer than `KEY_BYTES_MAX`.
    """
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise ValueError(
            f"offload key has {len(key)} bytes; the pool's format holds 1 to {KEY_BYTES_MAX}"
        )


def seal(
    slot: memoryview,
    identity: SlotIdentity,
    payload_bytes: int,
    stamp: Stamp,
    place: SlotPlace,
) -> None:
    """Fill the header page of `slot` (uint8, header page + payload), whose payload is there.

    Raises:
        ValueError: the key does not fit (`check_key`).
    """
    check_key(identity.key)
    assert 0 <= stamp.epoch <= EPOCH_MAX
    assert len(place.pool_uuid) == len(NOWHERE.pool_uuid)
    assert 0 <= identity.generation < 1 << 64
    assert len(slot) >= HEADER_BYTES + payload_bytes
    payload_crc = crc32c(slot[HEADER_BYTES : HEADER_BYTES + payload_bytes])
    _HEADER.pack_into(
        slot,
        0,
        _MAGIC,
        FORMAT_VERSION,
        FLAG_ADOPTABLE if stamp.adoptable else 0,
        len(identity.key),
        stamp.epoch,
        identity.generation,
        payload_bytes,
        payload_crc,
        identity.key,
        place.pool_uuid,
        place.pool_slot,
        place.rank,
    )
    slot[_HEADER.size : _CRC_AT] = _ZEROS
    _CRC.pack_into(slot, _CRC_AT, crc32c(slot[:_CRC_AT]))


def parse_header(page: bytes | bytearray | memoryview) -> SlotHeader | None:
    """Return the header in `page` (at least 4 KiB), or None if it is not an intact one."""
    view = memoryview(page)
    if len(view) < HEADER_BYTES:
        return None
    magic, version, flags, key_bytes, epoch, generation, payload_bytes, payload_crc, *rest = (
        _HEADER.unpack_from(view)
    )
    key, pool_uuid, pool_slot, rank = rest
    if magic != _MAGIC or crc32c(view[:_CRC_AT]) != _CRC.unpack_from(view, _CRC_AT)[0]:
        return None
    if version != FORMAT_VERSION or flags & ~FLAG_ADOPTABLE:
        return None
    if not 0 < key_bytes <= KEY_BYTES_MAX or any(key[key_bytes:]):
        return None
    return SlotHeader(
        SlotIdentity(key[:key_bytes], generation),
        SlotPlace(pool_uuid, rank, pool_slot),
        payload_bytes,
        payload_crc,
        Stamp(epoch, bool(flags & FLAG_ADOPTABLE)),
    )


def verify(
    slot: memoryview, identity: SlotIdentity, payload_bytes: int, place: SlotPlace
) -> Outcome:
    """Say whether `slot` (uint8, header page + payload) proves to hold `identity` for `place`.

    CHECKSUM_MISMATCH: header or payload damaged, or never written. STALE: an intact header of
    another key, generation, length or place. OK: every byte of the payload is what was sealed.
    """
    header = parse_header(slot[:HEADER_BYTES])
    if header is None:
        return CHECKSUM_MISMATCH
    if header.identity != identity or header.payload_bytes != payload_bytes:
        return STALE
    if header.place != place:
        return STALE
    if len(slot) < HEADER_BYTES + payload_bytes:
        return CHECKSUM_MISMATCH
    crc = crc32c(slot[HEADER_BYTES : HEADER_BYTES + payload_bytes])
    return OK if crc == header.payload_crc else CHECKSUM_MISMATCH
