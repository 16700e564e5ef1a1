# SPDX-License-Identifier: Apache-2.0
"""Makes claimed directories into one pool: what to keep, how much space, which epoch.

A superblock is written last, and removed first where a directory is started anew, so that a
crash in between leaves either the old pool or an empty directory.
"""

from __future__ import annotations

import errno
import logging
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.layout import EPOCH_MAX
from vllm_nvmeof_offload.pool.slab import NO_SPACE, Slab, probe_o_direct, read_o_direct
from vllm_nvmeof_offload.pool.superblock import Superblock, sync_directory, write_superblock
from vllm_nvmeof_offload.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_nvmeof_offload.pool.claim import Claim
    from vllm_nvmeof_offload.pool.spec import PoolSpec

__all__ = ["Prepared", "choose_direct", "next_epoch", "prepare"]

logger = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True, slots=True)
class Prepared:
    """superblocks: as written, one a target. slots_per_target: for which there is space.
    adopt_slots: how many of them, by target, may hold what an earlier process stored.
    """

    superblocks: list[Superblock]
    slots_per_target: int
    adopt_slots: list[int]


def next_epoch(epoch: int) -> int:
    """Epochs are compared for equality; at the end of 32 bits they start over."""
    return epoch + 1 if epoch < EPOCH_MAX else 1


def prepare(spec: PoolSpec, claim: Claim, slabs: Sequence[Slab]) -> Prepared:
    """Wipe what is of another pool, reserve space, write the superblocks.

    Raises:
        PoolError: no space for one slot.
        OSError: a file cannot be read, written or resized.
    """
    kept = _keep_or_wipe(spec, claim, slabs)
    count = _allocate(spec, slabs)
    living = [superblock for superblock in kept if superblock is not None]
    pool_uuid = living[0].uuid if living else uuid.uuid4().bytes
    # The highest one: a reset that reached only some of the targets has voided all.
    epoch = max((superblock.epoch for superblock in living), default=1)
    adopt_slots = [min(superblock.slots, count) if superblock else 0 for superblock in kept]
    if living and not (spec.adopt and all(superblock.adoptable for superblock in living)):
        adopt_slots = [0] * len(kept)
        epoch = next_epoch(epoch)
    superblocks = [
        replace(
            _geometry(spec, index),
            uuid=pool_uuid,
            epoch=epoch,
            slots=count,
            adoptable=spec.adoptable,
        )
        for index in range(len(kept))
    ]
    for slab, superblock, found in zip(slabs, superblocks, kept, strict=True):
        if superblock == found:
            # A full disk has no room for a second one. A kill may have kept this one from
            # becoming durable.
            sync_directory(slab.directory)
        else:
            write_superblock(slab.directory, superblock)
    return Prepared(superblocks, count, adopt_slots)


def _geometry(spec: PoolSpec, index: int) -> Superblock:
    """The facts that must agree, with the others blank."""
    return Superblock(
        uuid=bytes(16),
        keyspace=spec.keyspace.digest,
        slot_bytes=spec.slot_bytes,
        payload_bytes=spec.payload_bytes,
        slots=0,
        target_index=index,
        target_count=len(spec.targets),
        rank=spec.rank,
        world_size=spec.world_size,
        epoch=0,
        adoptable=True,
    )


def _keep_or_wipe(spec: PoolSpec, claim: Claim, slabs: Sequence[Slab]) -> list[Superblock | None]:
    """Wipe every directory whose superblock is not of this pool; return the others'.

    The number of slots may differ (a pool that was given more or less space): the slots that
    both have stay where they are. Anything else that differs makes it another pool.
    """
    kept: list[Superblock | None] = []
    pool_uuid: bytes | None = None
    for index, slab in enumerate(slabs):
        found = claim.read_superblock(index)
        if found is not None:
            blank = replace(found, uuid=bytes(16), slots=0, epoch=0, adoptable=True)
            if blank != _geometry(spec, index) or found.uuid != (pool_uuid or found.uuid):
                logger.warning("%s holds a pool of another shape: starting empty", slab.directory)
                found = None
        if found is None:
            slab.wipe()
        else:
            pool_uuid = found.uuid
        kept.append(found)
    return kept


def _allocate(spec: PoolSpec, slabs: Sequence[Slab]) -> int:
    """Reserve space on all targets; return the slots of each, equal on all."""
    wanted = spec.slots_per_target
    counts = [slab.allocate(wanted, spec.slot_bytes) for slab in slabs]
    count = min(counts)
    full = slabs[counts.index(count)].directory
    if count < 1:
        raise PoolError(
            f"{full}: no space for one slot of {format_bytes(spec.slot_bytes)}; "
            f"free some, or choose another target"
        )
    if count < wanted:
        logger.warning(
            "%s has no space for %d slots of %s: %d on each target are used",
            full,
            wanted,
            format_bytes(spec.slot_bytes),
            count,
        )
    for slab in slabs:
        slab.cut(count, spec.slot_bytes)
        slab.sync()
    return count


def choose_direct(spec: PoolSpec, slabs: Sequence[Slab]) -> tuple[str, ...]:
    """Open slabs for O_DIRECT where it really works; return the fallbacks, for people.

    Raises:
        PoolError: it does not work and the specification says "on".
    """
    fallbacks: list[str] = []
    for slab in slabs if spec.o_direct != "off" else ():
        try:
            _probe_direct(slab)
            slab.use_direct()
        except OSError as error:
            if spec.o_direct == "on":
                raise PoolError(
                    f"{slab.directory}: O_DIRECT does not work there ({error}); "
                    f'set o_direct to "auto" or "off", or use xfs or ext4'
                ) from error
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            fallbacks.append(f"o_direct→buffered on {slab.directory}: {name}")
            logger.warning("%s", fallbacks[-1])
    return tuple(fallbacks)


def _probe_direct(slab: Slab) -> None:
    """Raise OSError unless O_DIRECT works; a full disk, with no room for a probe, says nothing."""
    try:
        probe_o_direct(slab.directory)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        read_o_direct(slab.directory / "slab")
