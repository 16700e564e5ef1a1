# SPDX-License-Identifier: Apache-2.0
"""The index table: one 64-byte entry a pool slot, beside the slab.

Entry, little endian; an entry that was never written is all zero::

    0   u32  CRC-32C of (u32 pool slot, bytes 4..63)     16  u8   flags (1: adoptable)
    4   u32  epoch                                       17  u8   key length
    8   u64  generation                                  18  46s  offload key, zero padded

The pool slot is part of the CRC, so that an entry that landed in another's place is seen.
An entry is a hint: the slot's header is what proves the content (PROTOCOL rule 6).
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.layout import FLAG_ADOPTABLE, KEY_BYTES_MAX, Stamp, check_key

if TYPE_CHECKING:
    from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = ["ENTRY_BYTES", "DecodedTable", "crcs_in_python", "decode_table", "encode_entry"]

ENTRY_BYTES = 64

_BODY = struct.Struct(f"<IQBB{KEY_BYTES_MAX}s")
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
    body = _BODY.pack(stamp.epoch, identity.generation, flags, len(identity.key), identity.key)
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
