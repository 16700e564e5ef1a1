# SPDX-License-Identifier: Apache-2.0
"""Slots that a test plants and reads by itself, by calls of `os` that a simulated disk can catch.

The I/O engine writes them in the same order: header page and payload, then the table's entry.
"""

from __future__ import annotations

import errno
import os

from tests.chunks import place_in
from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.pool.format import Stamp, encode_entry, seal, verify
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import slot_stride_bytes


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
    seal(slot, identity, size, stamp, place, pool.kind_of(identity.key), single_copy=single_copy)
    entry = encode_entry(place.slot, identity, stamp.epoch, single_copy=single_copy)
    slab_fd, slab_offset = pool.slab_fd(at)
    table_fd, table_offset = pool.table_fd(at)
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
    fd, offset = elsewhere or pool.slab_fd(at)
    try:
        if not os.preadv(fd, [slot[: slot_stride_bytes(size)]], offset):
            return io_error(0)
    except OSError as error:
        return io_error(error.errno or errno.EIO)
    return verify(slot, identity, size, pool.slot_place(at), tag)
