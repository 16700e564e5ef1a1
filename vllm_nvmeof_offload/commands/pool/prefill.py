# SPDX-License-Identifier: Apache-2.0
"""Writes zeros where a slab was never written, so that the first real write there is fast.

The first write into preallocated space also changes the file system's extents, which takes
it to about half the speed of later ones. Only holes are written, and a hole reads as zeros: no
byte that anyone can read changes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_nvmeof_offload.commands.pool.offline import OfflineRank, Progress, held_survey, open_rank
from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.recovery import written_slots
from vllm_nvmeof_offload.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed

__all__ = ["Prefilled", "prefill"]

_WRITE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Prefilled:
    """slots: of this directory. filled: how many of them were written with zeros now."""

    path: Path
    slots: int
    filled: int
    written_bytes: int


def prefill(
    directories: Sequence[RankDirectory], on_progress: Progress | None = None
) -> list[Prefilled]:
    """Fill the never-written slots of `directories`; on_progress counts bytes.

    Raises:
        PoolLockedError: a live process holds one of them.
        PoolError: one has no usable superblock, or cannot be written (no space, say).
    """
    with held_survey(directories, writable=True) as all_surveyed:
        return [_prefill(one, on_progress) for one in all_surveyed]


def _prefill(surveyed: Surveyed, on_progress: Progress | None) -> Prefilled:
    with open_rank(surveyed) as rank:
        slots = min(rank.superblock.slots, rank.slab_slots)
        indices = np.arange(slots)
        holes = np.setdiff1d(
            indices, written_slots(rank.slab_fd, indices, rank.superblock.slot_bytes)
        ).tolist()
        written_bytes = len(holes) * rank.superblock.slot_bytes
        try:
            _fill(rank, holes, on_progress)
        except OSError as error:
            raise PoolError(f"cannot fill {surveyed.path / 'slab'}: {error}") from error
    return Prefilled(surveyed.path, slots, len(holes), written_bytes)


def _fill(rank: OfflineRank, holes: Sequence[int], on_progress: Progress | None) -> None:
    slot_bytes = rank.superblock.slot_bytes
    zeros = memoryview(mmap.mmap(-1, min(slot_bytes, _WRITE_BYTES)))
    with contextlib.closing(_Writer(rank.surveyed.path / "slab")) as writer:
        for done, index in enumerate(holes, 1):
            end = (index + 1) * slot_bytes
            position = index * slot_bytes
            while position < end:
                position += writer.write(zeros[: end - position], position)
            if on_progress is not None:
                on_progress(rank.surveyed.directory, done * slot_bytes, len(holes) * slot_bytes)
        if holes:
            writer.sync()


class _Writer:
    """The slab for writing: O_DIRECT, or buffered where that does not work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = self._open(os.O_DIRECT)
        if self._fd < 0:
            self._fd = self._open(0)

    def _open(self, flags: int) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)

    def write(self, zeros: memoryview, position: int) -> int:
        """Write some of `zeros`; return how much, never 0."""
        try:
            count = os.pwritev(self._fd, [zeros], position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._fd)
            self._fd = -1
            self._fd = self._open(0)
            count = os.pwritev(self._fd, [zeros], position)
        if count == 0:
            raise OSError(errno.EIO, "no progress", str(self._path))
        return count

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
