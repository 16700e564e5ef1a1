# SPDX-License-Identifier: Apache-2.0
"""A follower without its process: a thread's scans, called by the test, by the test's clock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.unit.pool.kit import make_spec
from vllm_nvmeof_offload.follow.follower import DISCOVERY_S, Scope, TargetScan
from vllm_nvmeof_offload.follow.owners import SLOTS_MAX, Owners
from vllm_nvmeof_offload.native import Foreign, ForeignReader, ForeignWriter, OwnerRecord
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, owned_by, place_of

KEYSPACE = Keyspace.of({"model": "m"}).digest
NONE, SCANNING, COMPLETE, DEAD = range(4)
OURS = 0


class Following:
    """The engine with index `OURS` follows the others on `targets`. fd: an empty memfd."""

    def __init__(
        self, fd: int, targets: Sequence[Path], ranks: int = 1, slots_max: int = SLOTS_MAX
    ) -> None:
        self.now_s = 1000.0
        table = ForeignWriter(fd, 10)
        scope = Scope(tuple(targets), KEYSPACE, OURS, ranks)
        owners = Owners(table, ranks, self.clock, slots_max)
        self.reader = ForeignReader(fd)
        self.scans = [
            TargetScan(scope, target, table, owners, self.clock) for target in range(len(targets))
        ]

    def clock(self) -> float:
        return self.now_s

    def scan(self, seconds: float = DISCOVERY_S) -> None:
        """Let time pass, then scan all targets twice: each learns what the others have found."""
        self.now_s += seconds
        for scan in [*self.scans, *self.scans]:
            scan.scan()

    def owner(self, number: int) -> OwnerRecord:
        return self.reader.owner(number)

    def state(self, number: int) -> int:
        return self.owner(number).state

    def rows(self, key: bytes) -> set[tuple[int, int]]:
        """Places and generations."""
        found = self.reader.rows_of(key)
        assert len(set(found)) == len(found)
        return set(found)


def open_engine(index: int, *targets: Path, **changes: object) -> Pool:
    return Pool.open(make_spec(*targets, engine_index=index, **changes))


def row(owner: int, slot: int, generation: int, target: int = 0) -> tuple[int, int]:
    """A row of a chunk of which every rank has its part."""
    return owned_by(owner, place_of(target, slot)), generation


def stop_clock_of(path: Path) -> None:
    """Give a file a time that is long ago, as if nothing had been written since."""
    os.utime(path, (1, 1))


# A foreign table that the test writes, as the follower does, and the manager's view of it.


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
