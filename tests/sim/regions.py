# SPDX-License-Identifier: Apache-2.0
"""How a rank opens other engines' regions: late, sometimes in vain, and never of another pool."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Iterable, Sequence

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind
from vllm_nvmeof_offload.io.base import ForeignSlab
from vllm_nvmeof_offload.protocol import AttachCommand
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.worker.regions import FoundPool, OpenRegions

from .base import Clock, Knobs, Violation
from .owners import Owner, Owners

#: Errors that speak against another engine's files, and not against the target: removed, closed,
#: replaced, cut short.
REGION_ERRNOS = (errno.ENOENT, errno.EBADF, errno.ESTALE, 0)


class SimOpener:
    """Implements `RegionOpener` for one rank. A descriptor is a number that is never used again."""

    def __init__(
        self, owners: Owners, rank: int, knobs: Knobs, clock: Clock, rng: random.Random
    ) -> None:
        self._owners = owners
        self._rank = rank
        self._knobs = knobs
        self._clock = clock
        self._rng = rng
        self._opening: list[tuple[float, OpenRegions]] = []
        self._files: dict[int, Owner] = {}
        self._fds = 0
        self.counts: Counter[str] = Counter()

    def open(self, command: AttachCommand, targets: Sequence[int]) -> None:
        owner = self._owners.engines[command.engine_index]
        late_s = self._knobs.attach_s * self._rng.choice((0.0, self._rng.random(), 3.0))
        due_s = self._clock() + late_s
        wrong = owner.gone or owner.pool_uuid != command.pool_uuid
        if wrong or not targets or self._rng.random() < self._knobs.attach_fails:
            self.counts["failed_attaches"] += 1
            error = errno.ENOENT if wrong or not targets else errno.EIO
            self._opening.append((due_s, OpenRegions(command, error=error)))
            return
        found = {target: self._open(owner) for target in targets}
        self._opening.append((due_s, OpenRegions(command, found)))

    def _open(self, owner: Owner) -> ForeignSlab:
        self._fds += 1
        self._files[self._fds] = owner
        self.counts["opened_regions"] += 1
        return ForeignSlab(self._fds, owner.pool_uuid, self._rank)

    def take(self) -> list[OpenRegions]:
        now_s = self._clock()
        due = [answer for due_s, answer in self._opening if due_s <= now_s]
        self._opening = [late for late in self._opening if late[0] > now_s]
        return due

    def close(self, regions: Iterable[ForeignSlab]) -> None:
        for region in regions:
            del self._files[region.fd]
            self.counts["closed_regions"] += 1

    def look_for(self, region_uuid: bytes) -> None:
        """Peers name only what is open here, or nowhere."""

    def take_found(self) -> list[FoundPool]:
        return []

    def files(self, region: ForeignSlab) -> Owner:
        """What a descriptor leads to, also after the directory was removed."""
        if region.fd not in self._files:
            raise Violation("files", f"rank {self._rank}: {region} was closed while it was read")
        return self._files[region.fd]

    @property
    def open_count(self) -> int:
        """Descriptors, without those that nobody has been given."""
        waiting = sum(len(answer.by_target) for _, answer in self._opening)
        return len(self._files) - waiting


class SimHealth(TargetHealth):
    """A target's health, which may not learn of errors of other engines' files."""

    def __init__(self) -> None:
        super().__init__(can_return=False)

    def ended(self, attachment: int, outcome: Outcome, place: int, *, is_write: bool) -> None:
        if outcome.kind is OutcomeKind.IO_ERROR and outcome.errno in REGION_ERRNOS:
            raise Violation("19", f"{outcome} of another engine's region counts for the target")
        super().ended(attachment, outcome, place, is_write=is_write)
