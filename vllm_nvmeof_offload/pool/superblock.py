# SPDX-License-Identifier: Apache-2.0
"""The superblock: one 4 KiB page a rank directory, that says what its slab and table are.

It is replaced as a whole (temporary file, fsync, rename, fsync of the directory), so it is
either the old one or the new one. A missing or damaged one means an empty directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from crc32c import crc32c

from vllm_nvmeof_offload.errors import PoolFormatError
from vllm_nvmeof_offload.units import PAGE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "SUPERBLOCK_VERSION",
    "Superblock",
    "is_superblock",
    "read_superblock",
    "sync_directory",
    "write_superblock",
]

#: Changes whenever superblock, slot or table change: an older directory is then rebuilt.
SUPERBLOCK_VERSION = 1

_MAGIC = b"vNVMeSB\0"
_BODY = struct.Struct("<8sI16s32sQQQIIIIIB")
_CRC = struct.Struct("<I")
_CRC_AT = PAGE_BYTES - _CRC.size


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
        _BODY.pack_into(
            page,
            0,
            _MAGIC,
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
        _CRC.pack_into(page, _CRC_AT, crc32c(memoryview(page)[:_CRC_AT]))
        return bytes(page)

    @staticmethod
    def decode(page: bytes) -> Superblock:
        """Parse a page.

        Raises:
            PoolFormatError: it is not a superblock, of another version, or damaged.
        """
        if len(page) != PAGE_BYTES or not page.startswith(_MAGIC):
            raise PoolFormatError("not a superblock of this program")
        if crc32c(memoryview(page)[:_CRC_AT]) != _CRC.unpack_from(page, _CRC_AT)[0]:
            raise PoolFormatError("damaged: its checksum does not match")
        _, version, uuid, keyspace, *rest = _BODY.unpack_from(page)
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
        return os.read(fd, len(_MAGIC)) == _MAGIC
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
