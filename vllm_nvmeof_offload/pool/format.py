# SPDX-License-Identifier: Apache-2.0
"""Format 2 of a rank directory: slots in a slab, an index table, and a superblock.

A directory is a *region*, written by one rank on one target. Slots are numbered within it. A slot
is a 4 KiB header page, then the payload, padded to 4 KiB. Header page, little endian::

    0   8s  magic "vNVMeKV\0"      88  u16  number of block CRCs, at most 983
    8   u16 format version, 2       90  zero, then 92 u32 client
    10  u8  flags                   96  16s  share tag
    11  u8  key length              112 16s  zero, for a MAC
    12  u32 epoch                   128 16s  uuid of the region
    16  u64 generation              144 u32  slot
    24  u64 payload length, bytes   148 u16  rank
    32  u32 payload CRC-32C         150 zero
    36  46s offload key, 0 padded   160 u32  block CRCs
    82  u8  kind of the group       4092 u32 CRC-32C of bytes 0..4091
    84  u32 group id

Flags: 4, the header has block CRCs (not written yet); 8, a single copy: no other rank of its set
(`groups.RankGroup`) has the chunk.

Key and generation are equal on all ranks of an engine. The place (region, rank, slot) proves that
the bytes belong here: after a misdirected read or write, or in a misplaced file, the place differs.
The share tag identifies the weights that computed the chunk. The client is a number that stands for
the salt in the chunk's key (`client_of`), or 0 if unknown; a load does not check it. All chunks of
a group have the same length, which the superblock also states. The header's CRC covers the whole
page, so any damaged bit is detected. Bytes after the payload are not written and have no CRC; an
empty payload has the CRC of no bytes. The native engine shares the format. A change needs a line in
the changelog and, unless earlier releases read the result correctly, a new `FORMAT_VERSION`, which
is one of every keyspace's facts.

The table has one 64-byte entry per slot, little endian; an entry that was never written is zero::

    0   u32  CRC-32C of (u32 slot, bytes 4..63)     16  u8   flags (8: as in the header)
    4   u32  epoch                                  17  u8   key length
    8   u64  generation                             18  46s  offload key, zero padded
                                                    60  u32  client, if the key has at most 42 bytes

The CRC covers the slot number, so a misplaced entry is detected. An entry is a hint: the slot's
header proves the content (docs/protocol.md, rule 6).

The superblock is one 4 KiB page that describes the region and states which chunks are valid::

    0   8s   magic "vNVMeSB\0"     96  u32  ranks
    8   u32  format version, 2     100 u32  epoch
    12  16s  uuid of the pool      112 16s  share tag
    28  32s  keyspace, hex digits  128 u64  sequence
    60  u64  bytes of a slot       136 u64  lease generation
    68  u64  longest payload       168 u32  pages of the log
    76  u64  slots                 172 u8   shared
    84  u32  index of the target   174 u16  number of groups, 1 to 64
    88  u32  targets               192 24s  groups
    92  u32  rank                  4092 u32 CRC-32C of bytes 0..4091

A group is: u32 id, u8 kind, u8 ranks in a set, u16 zero, u64 payload bytes, u32 blocks per chunk,
u32 bytes of a block. All other bytes are zero. A small region has no log. shared is 2 if a group of
hosts uses the region (`pool.lease`); otherwise shared and the lease generation are 0.

The superblock with the highest sequence on any of a rank's targets states the epoch and tag under
which chunks are adopted; all other chunks are ignored. Epochs are random. A superblock is
replaced atomically (temporary file, fsync, rename, fsync of the directory). A directory whose
superblock is missing or damaged counts as empty.

The file `sessions` (`protocol.SavedSessions`), on the first target of rank 0, states which chunks
are retained, as of its last replacement: 8s magic, u32 number of sessions, u32 number of chunks;
per session u64 id, u32 client, u32 end (seconds since 1970), u32 chunks, u8 priority; then the
chunks' u64 generations in that order, and the u32 CRC-32 of everything before it. A generation that
no adopted chunk has is ignored, and so is a file that is not intact.

The directory's name is the digest of a keyspace: the facts under which KV bytes are
interchangeable. Two servers share a pool directory only if all facts are equal. Facts describe the
model and the geometry; names on disk contain no part of a prompt.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vllm_nvmeof_offload.errors import Outcome, PoolFormatError, UnknownFormatError, outcome_of
from vllm_nvmeof_offload.groups import GroupKind, RankGroup, group_id_of
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.protocol import TAG_BYTES, SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

#: The names of the files in a rank directory.
SLAB_FILE = "slab"
TABLE_FILE = "table"
LOG_FILE = "log"  # `pool.log`
SUPERBLOCK_FILE = "superblock"
SUPERBLOCK_TEMPORARY = "superblock.new"
SESSIONS_FILE = "sessions"
SESSIONS_TEMPORARY = "sessions.new"
LOCK_FILE = "lock"
LEASE_FILE = "lease"

FORMAT_VERSION = 2  # the format's version, which is one of every keyspace's facts
KEY_BYTES_MAX = 46
FLAG_SINGLE_COPY = 8
EPOCH_MAX = (1 << 32) - 1
UUID_BYTES = 16
LEASED = 2  # the value of `Superblock.shared` for a region that a group's hosts use

_CRC = struct.Struct("<I")  # also for any other u32
_PAGE_CRC_AT = PAGE_BYTES - _CRC.size
_KINDS = frozenset(GroupKind)
assert HEADER_BYTES == PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Stamp:
    """The epoch and tag of a write, fixed when it is submitted. A write that a reset overtakes must
    not get the new epoch, not even in its table entry. Chunks whose `epoch` is not the newest
    superblock's are ignored. `tag` is the share tag, 16 bytes; a read accepts no other."""

    epoch: int
    tag: bytes


class SlotPlace(NamedTuple):
    """The place of a slot: the region's uuid (16 bytes), the rank, and the slot's number there."""

    region_uuid: bytes
    rank: int
    slot: int


@functools.lru_cache(1024)
def region_uuid(pool_uuid: bytes, target: int) -> bytes:
    """Return the uuid of the region that a rank's pool has on one target."""
    return hashlib.sha256(pool_uuid + target.to_bytes(4, "little")).digest()[:UUID_BYTES]


def share_tag(keyspace: str, weights_version: bytes = b"") -> bytes:
    """Return the tag of the weights that compute a keyspace's chunks. `keyspace` is the keyspace's
    digest, which covers the initial weights. `weights_version` identifies later weights, if any."""
    return hashlib.sha256(keyspace.encode("ascii") + b"\0" + weights_version).digest()[:TAG_BYTES]


def client_of(salt: str) -> int:
    """Return the 32-bit number, never 0, of the client with this `cache_salt` (can be empty)."""
    digest = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4]) or 1


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The content of an intact header page."""

    identity: SlotIdentity
    place: SlotPlace
    payload_bytes: int
    payload_crc: int
    stamp: Stamp
    single_copy: bool = False  # no other rank of the set has the chunk
    client: int = 0  # 0 if unknown

    def entry(self) -> bytes:
        what = self.place.slot, self.identity, self.stamp.epoch
        return encode_entry(*what, single_copy=self.single_copy, client=self.client)


def is_intact_page(page: memoryview, magic: bytes) -> bool:
    """Return whether `page` holds 4 KiB that begin with `magic` and end with their CRC."""
    if len(page) < PAGE_BYTES or page[: len(magic)] != magic:
        return False
    return bool(crc32c(page[:_PAGE_CRC_AT]) == _CRC.unpack_from(page, _PAGE_CRC_AT)[0])


def parse_header(page: bytes | bytearray | memoryview) -> SlotHeader | None:
    """Return the header in `page` (at least 4 KiB), or None if it is not intact."""
    found = core.parse_header(np.frombuffer(page, np.uint8))
    if found is None:
        return None
    identity, place, length, crc, stamp, single_copy, client = found
    who, where = SlotIdentity(*identity), SlotPlace(*place)
    return SlotHeader(who, where, length, crc, Stamp(*stamp), single_copy, client)


Wanted = tuple[SlotIdentity, int, SlotPlace, bytes]  # identity, length, place, share tag


def verify(
    slot: memoryview, identity: SlotIdentity, payload_bytes: int, place: SlotPlace, tag: bytes
) -> Outcome:
    """Check that `slot` (uint8, header page + payload) holds `identity` at `place`. Return OK if
    the payload holds the bytes that were sealed, STALE if the header is intact but has a different
    key, generation, length, place or tag, and CHECKSUM_MISMATCH if the header or the payload is
    damaged, truncated or was never written."""
    what = identity.key, identity.generation, payload_bytes
    return outcome_of(core.verify(np.frombuffer(slot, np.uint8), *what, *place, tag), 0)


ENTRY_BYTES = 64
_CLIENT_AT = KEY_BYTES_MAX - 4  # in the key's bytes

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


def encode_entry(
    slot: int, identity: SlotIdentity, epoch: int, *, single_copy: bool = False, client: int = 0
) -> bytes:
    """Return the 64 bytes of an entry for `slot`. Raises ValueError if the key does not fit."""
    return core.encode_entry(slot, identity.key, identity.generation, epoch, single_copy, client)


@dataclass(frozen=True)
class DecodedTable:
    """The entries of a table, in the order of the `slots` given to `decode_table`.

    `valid` (bool[n]) marks intact entries; `damaged` (bool[n]) marks written entries that are not
    intact. The other columns are meaningful only where `valid`: `epochs` (uint32[n]), `flags`
    (uint8[n]), `generations` (uint64[n]), `key_bytes` (uint8[n]), `keys` (uint8[n, 46]).
    """

    valid: npt.NDArray[np.bool_]
    damaged: npt.NDArray[np.bool_]
    epochs: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint8]
    generations: npt.NDArray[np.uint64]
    key_bytes: npt.NDArray[np.uint8]
    keys: npt.NDArray[np.uint8]

    def clients(self) -> npt.NDArray[np.uint32]:
        """Return uint32[n], the chunks' clients; 0 where unknown."""
        found = np.ascontiguousarray(self.keys[:, _CLIENT_AT:]).view("<u4")[:, 0]
        return np.where(self.valid & (self.key_bytes <= _CLIENT_AT), found, np.uint32(0))


def decode_table(raw: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64]) -> DecodedTable:
    """Decode `raw` (uint8[n * 64], C-contiguous); entry i belongs to `slots[i]`."""
    count = len(slots)
    assert raw.size == count * ENTRY_BYTES
    entries = raw.view(_ENTRY)
    key_bytes = entries["key_bytes"]
    flags = entries["flags"]
    valid = (key_bytes > 0) & (key_bytes <= KEY_BYTES_MAX)
    valid &= (flags & ~np.uint8(FLAG_SINGLE_COPY)) == 0
    if valid.any():
        crcs = np.empty(count, np.uint32)
        core.entry_crcs(raw, np.ascontiguousarray(slots), crcs)
        valid &= crcs == entries["crc"]
    damaged = np.zeros(count, bool)
    others = np.flatnonzero(~valid)
    damaged[others] = raw.view(np.uint64).reshape(count, ENTRY_BYTES // 8)[others].any(axis=1)
    return DecodedTable(
        valid=valid,
        damaged=damaged,
        epochs=entries["epoch"],
        flags=flags,
        generations=entries["generation"],
        key_bytes=key_bytes,
        keys=entries["key"],
    )


SUPERBLOCK_MAGIC = b"vNVMeSB\0"
GROUPS_MAX = 64
_VERSION = struct.Struct("<8sI")
_SUPERBLOCK_BODY = struct.Struct("<8sI16s32sQQQIIIII8x16sQQ24xIBxH16x")
#: The superblock's fields after magic and version, in order. `groups` is a count.
_FIELDS = (
    *("uuid", "keyspace", "slot_bytes", "payload_bytes", "slots", "target_index"),
    *("target_count", "rank", "world_size", "epoch", "tag", "sequence"),
    *("lease_generation", "log_pages", "shared", "groups"),
)
_GROUP = struct.Struct("<IBBHQII")


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A row of the superblock's group table: one rank's part of a KV cache group. `set_size` is the
    number of ranks with equal bytes of the group, which share one copy of a chunk."""

    group_id: int
    kind: GroupKind
    payload_bytes: int
    blocks_per_chunk: int
    block_bytes: int
    set_size: int = 1

    @staticmethod
    def of(one: RankGroup) -> StoredGroup:
        group = one.group
        shape = one.payload_bytes, group.blocks_per_chunk, one.block_bytes
        return StoredGroup(group.group_id, group.kind, *shape, one.set_size)

    def encode(self) -> bytes:
        what = self.group_id, self.kind, self.set_size, 0
        return _GROUP.pack(*what, self.payload_bytes, self.blocks_per_chunk, self.block_bytes)

    @staticmethod
    def decode(row: bytes) -> StoredGroup:
        """Parse a row. Raises PoolFormatError for a kind that this format does not have."""
        group_id, kind, set_size, _, payload_bytes, blocks_per_chunk, block_bytes = _GROUP.unpack(
            row
        )
        if kind not in _KINDS:
            raise PoolFormatError(f"damaged: {kind} is not a kind of group")
        shape = payload_bytes, blocks_per_chunk, block_bytes
        return StoredGroup(group_id, GroupKind(kind), *shape, set_size)


@dataclass(frozen=True, slots=True)
class Superblock:
    """The description of one region.

    `uuid` is the pool's, the same on all its targets. `keyspace` is 32 hex digits. `payload_bytes`
    is the longest group's. `slots` is the number of slots on this target. `epoch` and `tag` are
    those of valid chunks. `sequence` counts the resets of the rank. `log_pages` is the length of
    the log (`pool.log`), or 0. `shared` is `LEASED` or 0. In a group, `lease_generation` is that of
    the lease under which the superblock was written.
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
    tag: bytes
    sequence: int
    groups: tuple[StoredGroup, ...]
    lease_generation: int = 0
    log_pages: int = 0
    shared: int = 0

    def place(self, slot: int) -> SlotPlace:
        """Return the place that the header of a slot must name."""
        return SlotPlace(region_uuid(self.uuid, self.target_index), self.rank, slot)

    def length_of(self, key: bytes) -> int | None:
        """Return the payload bytes of the key's chunk, or None if the region lacks its group."""
        lengths = {group.group_id: group.payload_bytes for group in self.groups}
        return lengths.get(group_id_of(key))

    @property
    def is_leased(self) -> bool:
        """Whether servers on other hosts use the region; hosts' page caches may then differ."""
        return self.shared == LEASED

    def is_alike(self, other: Superblock) -> bool:
        """Return whether chunks of one region can be used in the other: the superblocks are equal
        except for set sizes, log and lease. Set sizes may differ, because ranks that cannot share
        memory at a start store extra copies."""

        def shape(one: Superblock) -> Superblock:
            groups = tuple(replace(group, set_size=1) for group in one.groups)
            return replace(one, groups=groups, log_pages=0, shared=0, lease_generation=0)

        return shape(self) == shape(other)

    def encode(self) -> bytes:
        """Return the 4 KiB page."""
        assert len(self.uuid) == UUID_BYTES
        assert len(self.keyspace) == 32
        assert len(self.tag) == TAG_BYTES
        assert 0 < len(self.groups) <= GROUPS_MAX
        page = bytearray(PAGE_BYTES)
        coded = {"keyspace": self.keyspace.encode("ascii"), "groups": len(self.groups)}
        values = (coded[name] if name in coded else getattr(self, name) for name in _FIELDS)
        _SUPERBLOCK_BODY.pack_into(page, 0, SUPERBLOCK_MAGIC, FORMAT_VERSION, *values)
        groups = b"".join(group.encode() for group in self.groups)
        page[_SUPERBLOCK_BODY.size : _SUPERBLOCK_BODY.size + len(groups)] = groups
        _CRC.pack_into(page, _PAGE_CRC_AT, crc32c(memoryview(page)[:_PAGE_CRC_AT]))
        return bytes(page)

    @staticmethod
    def decode(page: bytes) -> Superblock:
        """Parse a page of format 2. Raises UnknownFormatError for a different format, and
        PoolFormatError if the page is not a superblock or is damaged."""
        if len(page) != PAGE_BYTES or not page.startswith(SUPERBLOCK_MAGIC):
            raise PoolFormatError("not a superblock of this program")
        if not is_intact_page(memoryview(page), SUPERBLOCK_MAGIC):
            raise PoolFormatError("damaged: its checksum does not match")
        version = int(_VERSION.unpack_from(page)[1])
        if version != FORMAT_VERSION:
            raise UnknownFormatError(
                f"format version {version}, this program writes {FORMAT_VERSION}"
            )
        found = dict(zip(_FIELDS, _SUPERBLOCK_BODY.unpack_from(page)[2:], strict=True))
        keyspace, count = found["keyspace"], found["groups"]
        if not keyspace.isascii():
            raise PoolFormatError("damaged: keyspace is not text")
        if not 0 < count <= GROUPS_MAX:
            raise PoolFormatError(f"damaged: it has {count} groups")
        end = _SUPERBLOCK_BODY.size + count * _GROUP.size
        rows = range(_SUPERBLOCK_BODY.size, end, _GROUP.size)
        found["groups"] = tuple(StoredGroup.decode(page[at : at + _GROUP.size]) for at in rows)
        superblock = Superblock(**found | {"keyspace": keyspace.decode("ascii")})
        if superblock.encode() != page:
            raise PoolFormatError("damaged: bytes that format 2 does not use are not zero")
        return superblock


def newest_of(superblocks: Sequence[Superblock]) -> Superblock | None:
    """Return the superblock with the highest sequence, which applies to all of a rank's targets.
    Return None if there is none, or if several differ, because servers that each had only some of
    the targets wrote them in an unknown order."""
    highest = max((one.sequence for one in superblocks), default=0)
    newest = [one for one in superblocks if one.sequence == highest]
    stamps = {Stamp(one.epoch, one.tag) for one in newest}
    return newest[0] if len(stamps) == 1 else None


def read_superblock(directory: Path) -> Superblock | None:
    """Return the directory's superblock, or None. Raises as `Superblock.decode`."""
    page = read_superblock_page(directory)
    return None if page is None else Superblock.decode(page)


def read_superblock_page(directory: Path) -> bytes | None:
    """Read the directory's superblock page, plus one byte if the file is longer."""
    return _read_start(directory / SUPERBLOCK_FILE, PAGE_BYTES + 1)


def is_superblock(path: Path) -> bool:
    """Return whether the file starts like a superblock of any version, damaged or not."""
    return _read_start(path, len(SUPERBLOCK_MAGIC)) == SUPERBLOCK_MAGIC


def _read_start(path: Path, size: int) -> bytes | None:
    try:
        fd = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def write_superblock(directory: Path, superblock: Superblock) -> None:
    """Replace the directory's superblock, as `replace_file` does."""
    replace_file(directory, SUPERBLOCK_FILE, superblock.encode())


def replace_file(directory: Path, name: str, content: bytes) -> None:
    """Durably replace a file in the directory. The old file stays if the new one cannot be written
    (OSError). A writer that was suspended or hung while another one wrote fails with ESTALE,
    because its file is no longer the one at that path."""
    temporary = directory / f"{name}.new"
    temporary.unlink(missing_ok=True)
    fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        if os.write(fd, content) != len(content):
            raise OSError(errno.ENOSPC, "short write", str(temporary))
        os.fsync(fd)
        if not _is_open_at(fd, temporary):
            raise OSError(errno.ESTALE, "another process has just written it", str(temporary))
    except OSError:
        with contextlib.suppress(OSError):
            if _is_open_at(fd, temporary):
                temporary.unlink()
        raise
    finally:
        os.close(fd)
    temporary.rename(directory / name)
    sync_directory(directory)


def _is_open_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


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
    """The canonical JSON of the facts. Build it with `of`; equal facts have equal digests."""

    canonical: str

    @staticmethod
    def of(facts: Mapping[str, object]) -> Keyspace:
        """Freeze `facts` with the pool's format. Raises TypeError or ValueError for non-JSON."""
        return Keyspace.exactly({"format": FORMAT_VERSION, **facts})

    @staticmethod
    def exactly(facts: Mapping[str, object]) -> Keyspace:
        """Freeze facts read from disk, which include the format."""
        return Keyspace(json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @property
    def digest(self) -> str:
        """The 32 hex digits that name the keyspace's directory. Superblocks repeat them."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:DIGEST_HEX_DIGITS]
