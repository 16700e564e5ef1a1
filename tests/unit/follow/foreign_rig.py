# SPDX-License-Identifier: Apache-2.0
"""A foreign table that the test writes, as the follower does, and the manager's view of it."""

from __future__ import annotations

import os

from vllm_nvmeof_offload.native import Foreign, ForeignWriter, OwnerRecord
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, owned_by, place_of

NONE, SCANNING, COMPLETE, DEAD = range(4)


class Others:
    """Other engines of our weights, whose share tag is `tag`."""

    def __init__(self, tag: bytes) -> None:
        fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
        self.writer = ForeignWriter(fd, 1)
        self.foreign = Foreign(fd)
        os.close(fd)  # both have their own
        self.foreign.set_time(0.0)
        self._tag = tag

    def owner(
        self,
        number: int = 1,
        *,
        version: int = 0,
        tag: bytes | None = None,
        uuid: bytes = b"u" * 16,
        state: int = COMPLETE,
        rows: int = 0,
    ) -> None:
        """The owner's record is this from now on."""
        tag = self._tag if tag is None else tag
        engine_index = 10 + number
        self.writer.set_owner(number, OwnerRecord(version, tag, uuid, engine_index, state, rows))

    def offer(
        self,
        key: bytes,
        slot: int,
        generation: int = 1,
        *,
        owner: int = 1,
        target: int = 0,
        member: int = EVERY_MEMBER,
    ) -> int:
        """The owner has a chunk; return its place."""
        place = owned_by(owner, place_of(target, slot, member))
        self.writer.put(key, place, generation)
        return place
