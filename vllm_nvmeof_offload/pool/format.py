# SPDX-License-Identifier: Apache-2.0
"""The format of a rank directory: slots in a slab, an index table beside it, a superblock.

A slot is a 4 KiB header page, then the payload, padded to 4 KiB. Header page, little endian::

    0   8s  magic "vNVMeKV\0"      16  u64  generation
    8   u16 format version          24  u64  payload length, bytes
    10  u8  flags (1: adoptable)    32  u32  payload CRC-32C
    11  u8  key length              36  46s  offload key, zero padded
    12  u32 epoch                   82  zero
    128 16s uuid of the pool        144 u32  pool slot
    148 u16 rank                    150 zero
    4092 u32 CRC-32C of bytes 0..4091

Key and generation are equal on all ranks of an engine. The place (uuid, rank, pool slot) proves
that the bytes belong here: a misdirected read or write, or a file in the wrong directory, brings
those of another place. The header's CRC covers the whole page, so that any damaged bit is found.
The padding has no CRC. The native engine shares the format: a change is a new `FORMAT_VERSION` or
`SLOT_LAYOUT` and a line in the changelog.

The table has one 64-byte entry per pool slot, little endian; an entry never written is zero::

    0   u32  CRC-32C of (u32 pool slot, bytes 4..63)     16  u8   flags (1: adoptable)
    4   u32  epoch                                       17  u8   key length
    8   u64  generation                                  18  46s  offload key, zero padded

The CRC covers the pool slot, so that an entry in another's place is found. An entry is a hint:
the slot's header proves the content (PROTOCOL rule 6).

The superblock is one 4 KiB page that describes slab and table. It is replaced as a whole
(temporary file, fsync, rename, fsync of the directory), so it is either the old one or the new
one. A directory whose superblock is missing or damaged is empty.

The directory's name is the digest of a keyspace: the facts under which KV bytes are
interchangeable. Two servers share a pool directory only if every fact is equal. Facts describe
the model and the geometry; nothing of a prompt reaches a name on disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, Outcome, PoolFormatError
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

#: The files of a rank directory.
SLAB_FILE = "slab"
TABLE_FILE = "table"
SUPERBLOCK_FILE = "superblock"
SUPERBLOCK_TEMPORARY = "superblock.new"
LOCK_FILE = "lock"

FORMAT_VERSION = 1
#: A fact of every keyspace: 2 since headers name their place. Older pools have no such fact.
SLOT_LAYOUT = 2
KEY_BYTES_MAX = 46
FLAG_ADOPTABLE = 1
EPOCH_MAX = (1 << 32) - 1

_SLOT_MAGIC = b"vNVMeKV\0"
_HEADER = struct.Struct(f"<8sHBBIQQI{KEY_BYTES_MAX}s46x16sIH")
_CRC = struct.Struct("<I")  # or any u32
_SLOT_CRC_AT = HEADER_BYTES - _CRC.size
_ZEROS = bytes(_SLOT_CRC_AT - _HEADER.size)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The mark of a write, fixed when the write is submitted.

    A write that a reset overtakes must not be marked with the new epoch, in its table entry
    either. epoch: a reset starts a new one, which voids all earlier ones. adoptable: whether a
    later start of this pool may adopt the chunk.
    """

    epoch: int
    adoptable: bool


class SlotPlace(NamedTuple):
    """The place that a slot belongs to.

    pool_uuid: 16 bytes, of one rank's pool over all its targets. pool_slot: its number in that
    pool, which determines the target.
    """

    pool_uuid: bytes
    rank: int
    pool_slot: int


#: The place in every header of a pool without the fact `slot_layout`.
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
    """Raise ValueError for a key that is empty or longer than `KEY_BYTES_MAX`."""
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
    payload_crc: int | None = None,
) -> None:
    """Fill the header page of `slot` (uint8, header page + payload); ValueError: `check_key`.

    payload_crc: the payload's CRC-32C if it is known; None: made here.
    """
    key = identity.key
    check_key(key)
    assert 0 <= stamp.epoch <= EPOCH_MAX
    assert len(place.pool_uuid) == len(NOWHERE.pool_uuid)
    assert 0 <= identity.generation < 1 << 64
    assert len(slot) >= HEADER_BYTES + payload_bytes
    if payload_crc is None:
        payload_crc = crc32c(slot[HEADER_BYTES : HEADER_BYTES + payload_bytes])
    flags = FLAG_ADOPTABLE if stamp.adoptable else 0
    head = _SLOT_MAGIC, FORMAT_VERSION, flags, len(key), stamp.epoch, identity.generation
    content = payload_bytes, payload_crc, key
    _HEADER.pack_into(slot, 0, *head, *content, place.pool_uuid, place.pool_slot, place.rank)
    slot[_HEADER.size : _SLOT_CRC_AT] = _ZEROS
    _CRC.pack_into(slot, _SLOT_CRC_AT, crc32c(slot[:_SLOT_CRC_AT]))


def parse_header(page: bytes | bytearray | memoryview) -> SlotHeader | None:
    """Return the header in `page` (at least 4 KiB), or None if it is not an intact one."""
    view = memoryview(page)
    if len(view) < HEADER_BYTES or view[: len(_SLOT_MAGIC)] != _SLOT_MAGIC:
        return None
    if crc32c(view[:_SLOT_CRC_AT]) != _CRC.unpack_from(view, _SLOT_CRC_AT)[0]:
        return None
    _, version, flags, key_bytes, epoch, generation, *rest = _HEADER.unpack_from(view)
    payload_bytes, payload_crc, key, pool_uuid, pool_slot, rank = rest
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
    """Check that `slot` (uint8, header page + payload) holds `identity` at `place`.

    CHECKSUM_MISMATCH: header or payload damaged, or never written. STALE: an intact header of
    another key, generation, length or place. OK: the payload has the bytes that were sealed.
    """
    header = parse_header(slot[:HEADER_BYTES])
    if header is None:
        return CHECKSUM_MISMATCH
    if (header.identity, header.payload_bytes, header.place) != (identity, payload_bytes, place):
        return STALE
    if len(slot) < HEADER_BYTES + payload_bytes:
        return CHECKSUM_MISMATCH
    crc = crc32c(slot[HEADER_BYTES : HEADER_BYTES + payload_bytes])
    return OK if crc == header.payload_crc else CHECKSUM_MISMATCH


ENTRY_BYTES = 64

_ENTRY_BODY = struct.Struct(f"<IQBB{KEY_BYTES_MAX}s")
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


def encode_entry(pool_slot: int, identity: SlotIdentity, stamp: Stamp) -> bytes:
    """Return the 64 bytes of an entry; ValueError if the key does not fit (`check_key`)."""
    key = identity.key
    check_key(key)
    flags = FLAG_ADOPTABLE if stamp.adoptable else 0
    body = _ENTRY_BODY.pack(stamp.epoch, identity.generation, flags, len(key), key)
    return _CRC.pack(crc32c(_CRC.pack(pool_slot) + body)) + body


@dataclass(frozen=True)
class DecodedTable:
    """Entries of one table, in the order of the `pool_slots` given to `decode_table`.

    valid: bool[n], intact. damaged: bool[n], written but not intact. The others are defined only
    where `valid`: epochs: uint32[n], adoptable: bool[n], generations: uint64[n],
    key_bytes: uint8[n], keys: uint8[n, 46].
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
    flags = entries["flags"]
    valid = (key_bytes > 0) & (key_bytes <= KEY_BYTES_MAX)
    valid &= (flags & ~np.uint8(FLAG_ADOPTABLE)) == 0
    if core is None:
        rows = np.flatnonzero(valid)
        crcs = crcs_in_python(raw.reshape(count, ENTRY_BYTES)[rows], pool_slots[rows])
        valid[rows] = crcs == entries["crc"][rows]
    elif valid.any():
        crcs = np.empty(count, np.uint32)
        core.entry_crcs(raw, np.ascontiguousarray(pool_slots), crcs)
        valid &= crcs == entries["crc"]
    damaged = np.zeros(count, bool)
    others = np.flatnonzero(~valid)
    damaged[others] = raw.view(np.uint64).reshape(count, ENTRY_BYTES // 8)[others].any(axis=1)
    return DecodedTable(
        valid=valid,
        damaged=damaged,
        epochs=entries["epoch"],
        adoptable=(flags & FLAG_ADOPTABLE) != 0,
        generations=entries["generation"],
        key_bytes=key_bytes,
        keys=entries["key"],
    )


def crcs_in_python(
    entries: npt.NDArray[np.uint8], pool_slots: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Return uint32[n], the CRCs of `entries` (uint8[n, 64], a copy), without the native core."""
    entries[:, :4] = pool_slots.astype("<u4").view(np.uint8).reshape(-1, 4)
    rows = entries.view(f"V{ENTRY_BYTES}").ravel().tolist()
    return np.fromiter((crc32c(row) for row in rows), np.uint32, len(rows))


#: Changes with every change of superblock, slot or table; older directories are then rebuilt.
SUPERBLOCK_VERSION = 1

_SUPERBLOCK_MAGIC = b"vNVMeSB\0"
_SUPERBLOCK_BODY = struct.Struct("<8sI16s32sQQQIIIIIB")
_SUPERBLOCK_CRC_AT = PAGE_BYTES - _CRC.size


@dataclass(frozen=True, slots=True)
class Superblock:
    """The content of one rank directory on one target, in the order of its fields on disk.

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

    def place(self, pool_slot: int) -> SlotPlace:
        """Return the place that the header of a pool slot must name."""
        return SlotPlace(self.uuid, self.rank, pool_slot)

    def encode(self) -> bytes:
        """Return the 4 KiB page."""
        page = bytearray(PAGE_BYTES)
        uuid, keyspace, *rest = astuple(self)
        assert len(uuid) == 16
        assert len(keyspace) == 32
        head = _SUPERBLOCK_MAGIC, SUPERBLOCK_VERSION, uuid, keyspace.encode("ascii")
        _SUPERBLOCK_BODY.pack_into(page, 0, *head, *rest)
        _CRC.pack_into(page, _SUPERBLOCK_CRC_AT, crc32c(memoryview(page)[:_SUPERBLOCK_CRC_AT]))
        return bytes(page)

    @staticmethod
    def decode(page: bytes) -> Superblock:
        """Parse a page; PoolFormatError if it is no superblock, of another version or damaged."""
        if len(page) != PAGE_BYTES or not page.startswith(_SUPERBLOCK_MAGIC):
            raise PoolFormatError("not a superblock of this program")
        crc = crc32c(memoryview(page)[:_SUPERBLOCK_CRC_AT])
        if crc != _CRC.unpack_from(page, _SUPERBLOCK_CRC_AT)[0]:
            raise PoolFormatError("damaged: its checksum does not match")
        _, version, uuid, keyspace, *rest = _SUPERBLOCK_BODY.unpack_from(page)
        if version != SUPERBLOCK_VERSION:
            raise PoolFormatError(
                f"format version {version}, this program writes {SUPERBLOCK_VERSION}"
            )
        if not keyspace.isascii():
            raise PoolFormatError("damaged: keyspace is not text")
        rest[-1] = bool(rest[-1])
        return Superblock(uuid, keyspace.decode("ascii"), *rest)


def read_superblock(directory: Path) -> Superblock | None:
    """Read the directory's superblock; None if there is none; PoolFormatError if not intact."""
    page = _read_start(directory / SUPERBLOCK_FILE, PAGE_BYTES + 1)
    return None if page is None else Superblock.decode(page)


def is_superblock(path: Path) -> bool:
    """Return whether the file starts like a superblock of any version, damaged or not."""
    return _read_start(path, len(_SUPERBLOCK_MAGIC)) == _SUPERBLOCK_MAGIC


def _read_start(path: Path, size: int) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def write_superblock(directory: Path, superblock: Superblock) -> None:
    """Replace the directory's superblock durably; after an OSError the old one is still there."""
    temporary = directory / SUPERBLOCK_TEMPORARY
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
    temporary.rename(directory / SUPERBLOCK_FILE)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable (fsync)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


DIGEST_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Canonical JSON of the facts. Build it with `of`; equal facts give equal digests."""

    canonical: str

    @staticmethod
    def of(facts: Mapping[str, object]) -> Keyspace:
        """Freeze `facts` with the layout of slots; TypeError, ValueError: not JSON (or NaN)."""
        return Keyspace.exactly({"slot_layout": SLOT_LAYOUT, **facts})

    @staticmethod
    def exactly(facts: Mapping[str, object]) -> Keyspace:
        """Freeze facts read from disk, which an earlier release may have written."""
        return Keyspace(json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @property
    def digest(self) -> str:
        """32 hex digits: the name of the keyspace's directory; superblocks repeat it."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:DIGEST_HEX_DIGITS]
