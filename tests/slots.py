# SPDX-License-Identifier: Apache-2.0
"""Slots that a test writes and reads itself, with calls of `os` that a simulated disk intercepts.

The I/O engine writes them in the same order: header page and payload, then the table's entry.
"""

from __future__ import annotations

import errno
import os

import numpy as np

from tests.chunks import place_in
from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.groups import GroupKind, group_id_of
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    SlotPlace,
    Stamp,
    encode_entry,
    verify,
)
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import SlotIdentity, slot_of, target_of
from vllm_nvmeof_offload.units import slot_stride_bytes


def seal(
    slot: memoryview,
    identity: SlotIdentity,
    payload_bytes: int,
    stamp: Stamp,
    place: SlotPlace,
    kind: GroupKind,
    *,
    payload_crc: int | None = None,
    single_copy: bool = False,
) -> None:
    """Fill the header page of `slot` (uint8, header page + payload). Raises ValueError if the key
    does not fit.

    `kind` is the kind of the key's group. If `payload_crc` is None, it is computed here.
    """
    what = identity.key, identity.generation, payload_bytes
    crc = -1 if payload_crc is None else payload_crc
    where = place.region_uuid, place.rank, place.slot
    core.seal(
        np.frombuffer(slot, np.uint8), *what, crc, stamp.epoch, stamp.tag, *where, kind, single_copy
    )


def slab_at(pool: Pool, place: int) -> tuple[int, int]:
    """Descriptor and byte offset of a slot's header page."""
    return pool.files(target_of(place))[0], slot_of(place) * pool.slot_bytes


def table_at(pool: Pool, place: int) -> tuple[int, int]:
    """Descriptor and byte offset of a slot's table entry."""
    return pool.files(target_of(place))[1], slot_of(place) * ENTRY_BYTES


def write_slot(
    pool: Pool,
    slot: memoryview,
    number: int,
    identity: SlotIdentity,
    stamp: Stamp | None = None,
    payload_bytes: int | None = None,
    *,
    single_copy: bool = False,
) -> Outcome:
    """Seal `slot` (uint8[slot_bytes]) and write it. number: as in `place_in`.

    stamp, payload_bytes: None: the pool's.
    """
    size = pool.payload_bytes if payload_bytes is None else payload_bytes
    at = place_in(number, pool.target_count)
    stamp, place = stamp or pool.stamp, pool.slot_place(at)
    # A group that the pool does not know may have any kind: no start adopts such a chunk.
    kind = pool.kinds.get(group_id_of(identity.key), GroupKind.FULL)
    seal(slot, identity, size, stamp, place, kind, single_copy=single_copy)
    entry = encode_entry(place.slot, identity, stamp.epoch, single_copy=single_copy)
    slab_fd, slab_offset = slab_at(pool, at)
    table_fd, table_offset = table_at(pool, at)
    whole = slot[: slot_stride_bytes(size)]
    try:
        if os.pwritev(slab_fd, [whole], slab_offset) != len(whole):
            return io_error(errno.EIO)
        if os.pwrite(table_fd, entry, table_offset) != len(entry):
            return io_error(errno.EIO)
    except OSError as error:
        return io_error(error.errno or errno.EIO)
    return OK


def read_slot(
    pool: Pool,
    slot: memoryview,
    number: int,
    identity: SlotIdentity,
    tag: bytes,
    payload_bytes: int | None = None,
    elsewhere: tuple[int, int] | None = None,
) -> Outcome:
    """Read into `slot` (uint8[slot_bytes]) and verify it. elsewhere: from this descriptor and
    offset, as a misdirected read does."""
    size = pool.payload_bytes if payload_bytes is None else payload_bytes
    at = place_in(number, pool.target_count)
    fd, offset = elsewhere or slab_at(pool, at)
    try:
        if not os.preadv(fd, [slot[: slot_stride_bytes(size)]], offset):
            return io_error(0)
    except OSError as error:
        return io_error(error.errno or errno.EIO)
    return verify(slot, identity, size, pool.slot_place(at), tag)
