# SPDX-License-Identifier: Apache-2.0
"""The format of one pool slot: a 4 KiB header page, then the payload padded to 4 KiB.

Header page, little endian::

    0   8s  magic "vNVMeKV\0"      16  u64  generation
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

The index table: one 64-byte entry a pool slot, beside the slab.

Entry, little endian; an entry that was never written is all zero::

    0   u32  CRC-32C of (u32 pool slot, bytes 4..63)     16  u8   flags (1: adoptable)
    4   u32  epoch                                       17  u8   key length
    8   u64  generation                                  18  46s  offload key, zero padded

The pool slot is part of the CRC, so that an entry that landed in another's place is seen.
An entry is a hint: the slot's header is what proves the content (PROTOCOL rule 6).

The superblock: one 4 KiB page a rank directory, that says what its slab and table are.

It is replaced as a whole (temporary file, fsync, rename, fsync of the directory), so it is
either the old one or the new one. A missing or damaged one means an empty directory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, Outcome, PoolFormatError
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = [
    "ENTRY_BYTES",
    "FLAG_ADOPTABLE",
    "FORMAT_VERSION",
    "KEY_BYTES_MAX",
    "NOWHERE",
    "SLOT_LAYOUT",
    "SUPERBLOCK_VERSION",
    "DecodedTable",
    "SlotHeader",
    "SlotPlace",
    "Stamp",
    "Superblock",
    "check_key",
    "crcs_in_python",
    "decode_table",
    "encode_entry",
    "is_superblock",
    "parse_header",
    "read_superblock",
    "seal",
    "sync_directory",
    "verify",
    "write_superblock",
]


FORMAT_VERSION = 1
#: A fact of every keyspace: 2 since headers name their place. A pool of before has no such fact.
SLOT_LAYOUT = 2
KEY_BYTES_MAX = 46
FLAG_ADOPTABLE = 1
EPOCH_MAX = (1 << 32) - 1

_SLOT_MAGIC = b"vNVMeKV\0"
_HEADER = struct.Struct(f"<8sHBBIQQI{KEY_BYTES_MAX}s46x16sIH")
_CRC = struct.Struct("<I")
_SLOT_CRC_AT = HEADER_BYTES - _CRC.size
_ZEROS = bytes(_SLOT_CRC_AT - _HEADER.size)


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
        _SLOT_MAGIC,
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
    slot[_HEADER.size : _SLOT_CRC_AT] = _ZEROS
    _CRC.pack_into(slot, _SLOT_CRC_AT, crc32c(slot[:_SLOT_CRC_AT]))


def parse_header(page: bytes | bytearray | memoryview) -> SlotHeader | None:
    """Return the header in `page` (at least 4 KiB), or None if it is not an intact one."""
    view = memoryview(page)
    if len(view) < HEADER_BYTES:
        return None
    magic, version, flags, key_bytes, epoch, generation, payload_bytes, payload_crc, *rest = (
        _HEADER.unpack_from(view)
    )
    key, pool_uuid, pool_slot, rank = rest
    if (
        magic != _SLOT_MAGIC
        or crc32c(view[:_SLOT_CRC_AT]) != _CRC.unpack_from(view, _SLOT_CRC_AT)[0]
    ):
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


ENTRY_BYTES = 64

_TABLE_BODY = struct.Struct(f"<IQBB{KEY_BYTES_MAX}s")
_U32 = struct.Struct("<I")
_ENTRY = np.dtype(
    [
        ("crc", "<u4"),
        ("epoch", "<u4"),
        ("generation", "<u8"),
        ("flags", "u1"),
        ("key_bytes", "u1"),
        ("key", "u1", (KEY_BYTES_MAX,)),
    ]
)
_COLUMNS = ENTRY_BYTES // 2
#: Entries decoded at a time: their columns and the CRC tables then stay in the L2 cache.
_BATCH = 1 << 15


def encode_entry(pool_slot: int, identity: SlotIdentity, stamp: Stamp) -> bytes:
    """Return the 64 bytes of an entry.

    Raises:
        ValueError: the key does not fit (`check_key`).
    """
    check_key(identity.key)
    flags = FLAG_ADOPTABLE if stamp.adoptable else 0
    body = _TABLE_BODY.pack(
        stamp.epoch, identity.generation, flags, len(identity.key), identity.key
    )
    return _U32.pack(crc32c(_U32.pack(pool_slot) + body)) + body


@dataclass(frozen=True)
class DecodedTable:
    """Entries of one table, in the order of `pool_slots` given to `decode_table`.

    valid: bool[n], intact. damaged: bool[n], written but not intact. epochs: uint32[n],
    adoptable: bool[n], generations: uint64[n], key_bytes: uint8[n], keys: uint8[n, 46];
    the last five mean something only where `valid`.
    """

    valid: npt.NDArray[np.bool_]
    damaged: npt.NDArray[np.bool_]
    epochs: npt.NDArray[np.uint32]
    adoptable: npt.NDArray[np.bool_]
    generations: npt.NDArray[np.uint64]
    key_bytes: npt.NDArray[np.uint8]
    keys: npt.NDArray[np.uint8]


def decode_table(raw: npt.NDArray[np.uint8], pool_slots: npt.NDArray[np.int64]) -> DecodedTable:
    """Decode `raw` (uint8[n * 64], C-contiguous); entry i belongs to `pool_slots[i]`."""
    count = len(pool_slots)
    assert raw.size == count * ENTRY_BYTES
    entries = raw.view(_ENTRY)
    key_bytes = entries["key_bytes"]
    written = raw.view(np.uint64).reshape(count, ENTRY_BYTES // 8).any(axis=1)
    plausible = (key_bytes > 0) & (key_bytes <= KEY_BYTES_MAX)
    plausible &= (entries["flags"] & ~np.uint8(FLAG_ADOPTABLE)) == 0
    valid = np.zeros(count, np.bool_)
    candidates = np.flatnonzero(written & plausible)
    if core is not None and len(candidates):
        crcs = np.empty(count, np.uint32)
        core.entry_crcs(raw, np.ascontiguousarray(pool_slots), crcs)
        valid = written & plausible & (crcs == entries["crc"])
        candidates = candidates[:0]
    for start in range(0, len(candidates), _BATCH):
        batch = candidates[start : start + _BATCH]
        crc = crcs_in_python(raw.reshape(count, ENTRY_BYTES)[batch], pool_slots[batch])
        valid[batch] = crc == entries["crc"][batch]
    return DecodedTable(
        valid=valid,
        damaged=written & ~valid,
        epochs=entries["epoch"],
        adoptable=(entries["flags"] & FLAG_ADOPTABLE) != 0,
        generations=entries["generation"],
        key_bytes=key_bytes,
        keys=entries["key"],
    )


@functools.cache
def _crc_tables() -> tuple[int, npt.NDArray[np.uint32]]:
    """CRC-32C of a 64-byte message as XOR of one look-up a 16-bit column.

    CRC is affine: crc(m) = crc(0) ^ (effect of column 0) ^ … ^ (effect of column 31), and the
    effect of a column is the XOR of the effects of its bits. uint32[32, 65536].
    """
    zero = crc32c(bytes(ENTRY_BYTES))
    tables = np.zeros((_COLUMNS, 1 << 16), np.uint32)
    for column in range(_COLUMNS):
        for bit in range(16):
            message = bytearray(ENTRY_BYTES)
            message[column * 2 + bit // 8] = 1 << (bit % 8)
            effect = np.uint32(crc32c(bytes(message)) ^ zero)
            half = 1 << bit
            tables[column, half : 2 * half] = tables[column, :half] ^ effect
    return zero, tables


def crcs_in_python(
    entries: npt.NDArray[np.uint8], pool_slots: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Return uint32[n], the CRC each of `entries` (uint8[n, 64], a copy) should carry.

    Where the native core is not there: it takes ten times as long.
    """
    zero, tables = _crc_tables()
    entries[:, :4] = pool_slots.astype("<u4").view(np.uint8).reshape(-1, 4)
    columns = np.ascontiguousarray(entries.view("<u2").T)
    crc = np.full(len(entries), zero, np.uint32)
    for column in range(_COLUMNS):
        crc ^= tables[column].take(columns[column])
    return crc


#: Changes whenever superblock, slot or table change: an older directory is then rebuilt.
SUPERBLOCK_VERSION = 1

_SUPERBLOCK_MAGIC = b"vNVMeSB\0"
_SUPERBLOCK_BODY = struct.Struct("<8sI16s32sQQQIIIIIB")
_SUPERBLOCK_CRC_AT = PAGE_BYTES - _CRC.size


@dataclass(frozen=True, slots=True)
class Superblock:
    """What one rank directory on one target holds.

    uuid: of the pool, the same on all its targets. keyspace: 32 hex digits. slots: pool slots
    on this target. epoch: entries of any other epoch are void. adoptable: False voids all.
    """

    uuid: bytes
    keyspace: str
    slot_bytes: int
    payload_bytes: int
    slots: int
    target_index: int
    target_count: int
    rank: int
    world_size: int
    epoch: int
    adoptable: bool

    def encode(self) -> bytes:
        """Return the 4 KiB page."""
        page = bytearray(PAGE_BYTES)
        keyspace = self.keyspace.encode("ascii")
        assert len(self.uuid) == 16
        assert len(keyspace) == 32
        _SUPERBLOCK_BODY.pack_into(
            page,
            0,
            _SUPERBLOCK_MAGIC,
            SUPERBLOCK_VERSION,
            self.uuid,
            keyspace,
            self.slot_bytes,
            self.payload_bytes,
            self.slots,
            self.target_index,
            self.target_count,
            self.rank,
            self.world_size,
            self.epoch,
            self.adoptable,
        )
        _CRC.pack_into(page, _SUPERBLOCK_CRC_AT, crc32c(memoryview(page)[:_SUPERBLOCK_CRC_AT]))
        return bytes(page)

    @staticmethod
    def decode(page: bytes) -> Superblock:
        """Parse a page.

        Raises:
            PoolFormatError: it is not a superblock, of another version, or damaged.
        """
        if len(page) != PAGE_BYTES or not page.startswith(_SUPERBLOCK_MAGIC):
            raise PoolFormatError("not a superblock of this program")
        if (
            crc32c(memoryview(page)[:_SUPERBLOCK_CRC_AT])
            != _CRC.unpack_from(page, _SUPERBLOCK_CRC_AT)[0]
        ):
            raise PoolFormatError("damaged: its checksum does not match")
        _, version, uuid, keyspace, *rest = _SUPERBLOCK_BODY.unpack_from(page)
        if version != SUPERBLOCK_VERSION:
            raise PoolFormatError(
                f"format version {version}, this program writes {SUPERBLOCK_VERSION}"
            )
        if not keyspace.isascii():
            raise PoolFormatError("damaged: keyspace is not text")
        names = [field.name for field in fields(Superblock)][2:]
        numbers = dict(zip(names, rest, strict=True))
        numbers["adoptable"] = bool(numbers["adoptable"])
        return Superblock(uuid=uuid, keyspace=keyspace.decode("ascii"), **numbers)


def read_superblock(directory: Path) -> Superblock | None:
    """Read the directory's superblock; None if there is none.

    Raises:
        PoolFormatError: there is one, but not ours or not intact.
        OSError: it cannot be read.
    """
    try:
        fd = os.open(directory / "superblock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return Superblock.decode(os.read(fd, PAGE_BYTES + 1))
    finally:
        os.close(fd)


def is_superblock(path: Path) -> bool:
    """True if the file starts like a superblock of any version, damaged or not.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return os.read(fd, len(_SUPERBLOCK_MAGIC)) == _SUPERBLOCK_MAGIC
    finally:
        os.close(fd)


def write_superblock(directory: Path, superblock: Superblock) -> None:
    """Replace the directory's superblock; when this returns it is durable.

    Raises:
        OSError: it could not be written; the old one is then still there.
    """
    temporary = directory / "superblock.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        page = superblock.encode()
        if os.write(fd, page) != len(page):
            raise OSError(errno.ENOSPC, "short write", str(temporary))
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    temporary.rename(directory / "superblock")
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable (fsync)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
