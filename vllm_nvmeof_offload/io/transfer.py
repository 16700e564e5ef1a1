# SPDX-License-Identifier: Apache-2.0
"""One whole slot between memory and the pool, synchronously: what an I/O thread does."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NamedTuple

from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.pool.layout import Stamp, seal, verify
from vllm_nvmeof_offload.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_nvmeof_offload.pool.pool import Pool
    from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = ["SlotFiles", "read_slot", "write_slot"]


class SlotFiles(NamedTuple):
    """A pool slot, and the descriptors and byte offsets where it lies at a moment.

    Take it when an operation is submitted: a target's files may be exchanged before it runs, and
    only those of its submission stay open until it is released.
    """

    pool_slot: int
    slab_fd: int
    slab_offset: int
    table_fd: int
    table_offset: int

    @staticmethod
    def of(pool: Pool, pool_slot: int) -> SlotFiles:
        """Of the attachment that serves `pool_slot` now."""
        return SlotFiles(pool_slot, *pool.slab_fd(pool_slot), *pool.table_fd(pool_slot))


def read_slot(pool: Pool, slot: memoryview, files: SlotFiles, identity: SlotIdentity) -> Outcome:
    """Read the pool slot into `slot` (uint8[slot_bytes]) and verify it."""
    place = pool.place(files.pool_slot)
    try:
        _transfer(os.preadv, files.slab_fd, slot, files.slab_offset)
    except OSError as error:
        return _failure(error)
    return verify(slot, identity, pool.payload_bytes, place)


def write_slot(
    pool: Pool,
    slot: memoryview,
    files: SlotFiles,
    identity: SlotIdentity,
    stamp: Stamp,
    wanted: Callable[[], bool],
) -> Outcome:
    """Seal `slot` (uint8[slot_bytes]), write it whole, and then its table entry.

    wanted: asked between the two. Nobody waits for a write that was given up meanwhile, and
    its pool slot may be another's soon: it gets no table entry.
    """
    seal(slot, identity, pool.payload_bytes, stamp, pool.place(files.pool_slot))
    entry = pool.encode_entry(files.pool_slot, identity, stamp)
    try:
        _transfer(os.pwritev, files.slab_fd, slot, files.slab_offset)
        if not wanted():
            return io_error(errno.ECANCELED)
        if os.pwrite(files.table_fd, entry, files.table_offset) != len(entry):
            return io_error(errno.EIO)
    except OSError as error:
        return _failure(error)
    return OK


def _failure(error: OSError) -> Outcome:
    return io_error(errno.EIO if error.errno is None else error.errno)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, slot: memoryview, offset: int
) -> None:
    """Repeat `preadv`/`pwritev` until all of `slot` is done (Python itself repeats on EINTR).

    What is left after a short transfer starts on a page boundary again, as O_DIRECT asks for.

    Raises:
        OSError: the kernel's error; if a call makes no progress EIO, or 0 where it moved nothing.
    """
    done = 0
    while done < len(slot):
        count = moved = call(fd, [slot[done:]], offset + done)
        if done + count < len(slot):
            count -= (done + count) % PAGE_BYTES
        if count <= 0:
            raise OSError(errno.EIO if moved else 0, f"no progress at {done} of {len(slot)} bytes")
        done += count
