# SPDX-License-Identifier: Apache-2.0
"""Format 1, for the offline tools: servers neither open nor migrate its pools.

Its slots are numbered over all targets of a rank: slot i of target t of n is number i * n + t.
Headers name the pool's uuid, that number and the rank; those of the first release name nothing.
It has no groups and no share tags. Flag 1 of a header or an entry, and one byte of the superblock,
allow adoption; epochs count up. They are translated to format 2: a chunk that may be adopted
has the tag of its keyspace, any other has none, and a superblock's sequence is its epoch.
"""

from __future__ import annotations

import struct

from vllm_nvmeof_offload.errors import PoolFormatError
from vllm_nvmeof_offload.pool.format import (
    KEY_BYTES_MAX,
    SLOT_MAGIC,
    UUID_BYTES,
    SlotHeader,
    SlotPlace,
    Stamp,
    Superblock,
    is_intact_page,
    share_tag,
    version_of,
)
from vllm_nvmeof_offload.protocol import TAG_BYTES, SlotIdentity

VERSION = 1
FLAG_ADOPTABLE = 1
NO_TAG = bytes(TAG_BYTES)
#: The place in every header of the first release, whose keyspaces lack the fact `slot_layout`.
NOWHERE = SlotPlace(bytes(UUID_BYTES), 0, 0)

_SUPERBLOCK = struct.Struct("<8sI16s32sQQQIIIIIB")
_FIELDS = (
    *("uuid", "keyspace", "slot_bytes", "payload_bytes", "slots", "target_index"),
    *("target_count", "rank", "world_size", "epoch", "adoptable"),
)
_HEADER = struct.Struct(f"<8sHBBIQQI{KEY_BYTES_MAX}s46x16sIH")


def decode_superblock(page: bytes) -> Superblock:
    """Parse a page of format 1 or 2; raises as `Superblock.decode`."""
    if version_of(page) != VERSION:
        return Superblock.decode(page)
    found = dict(zip(_FIELDS, _SUPERBLOCK.unpack_from(page)[2:], strict=True))
    if not found["keyspace"].isascii():
        raise PoolFormatError("damaged: keyspace is not text")
    found["keyspace"] = keyspace = found["keyspace"].decode("ascii")
    tag = share_tag(keyspace) if found.pop("adoptable") else NO_TAG
    return Superblock(**found, tag=tag, sequence=found["epoch"], groups=(), version=VERSION)


def parse_header(page: bytes | memoryview, tag: bytes) -> SlotHeader | None:
    """Return the header in a page; None: not an intact one. tag: of its keyspace."""
    view = memoryview(page)
    if not is_intact_page(view, SLOT_MAGIC):
        return None
    _, version, flags, key_bytes, epoch, generation, *rest = _HEADER.unpack_from(view)
    payload_bytes, payload_crc, key, pool_uuid, number, rank = rest
    if version != VERSION or flags & ~FLAG_ADOPTABLE:
        return None
    if not 0 < key_bytes <= KEY_BYTES_MAX or any(key[key_bytes:]):
        return None
    return SlotHeader(
        SlotIdentity(key[:key_bytes], generation),
        SlotPlace(pool_uuid, rank, number),
        payload_bytes,
        payload_crc,
        Stamp(epoch, tag if flags & FLAG_ADOPTABLE else NO_TAG),
    )
