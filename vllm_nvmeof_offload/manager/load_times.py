# SPDX-License-Identifier: Apache-2.0
"""How long loads take: what they have yet to read, which are overdue, what admission learns.

Admission learns how long a load kept its request waiting beyond what the model had to do anyway.
While others' prompts are computed, this one would not have been, and a step that fills the
processors slows the load itself: that time is no reason to compute the next time.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_nvmeof_offload.errors import OutcomeKind
from vllm_nvmeof_offload.manager.admission import Admission, Taken
from vllm_nvmeof_offload.manager.ledger import Ledger, Op
from vllm_nvmeof_offload.manager.limits import LoadLimits
from vllm_nvmeof_offload.manager.tiers import Tiers

__all__ = ["LoadTimes"]

#: What a read that was read to its end may have come to.
_READ = frozenset({OutcomeKind.OK, OutcomeKind.CHECKSUM_MISMATCH, OutcomeKind.STALE})


class LoadTimes:
    """Of one core, which tells it of each load, from its plan to its end."""

    def __init__(
        self, tiers: Tiers, ledger: Ledger, admission: Admission, clock: Callable[[], float]
    ) -> None:
        self.limits = LoadLimits(clock)
        #: By target: chunks that loads have yet to read there.
        self.reading = [0]
        self._tiers, self._ledger = tiers, ledger
        self._admission = admission

    def attach(self, target_count: int) -> None:
        self.reading = [0] * target_count

    def planned(self, op: Op, limit_s: float | None) -> None:
        """The load goes to the workers. limit_s: what takes longer is cut off; None: nothing is."""
        op.queued = tuple(self.reading)
        for slot in op.pool_slots:
            if slot is not None:
                self.reading[self._tiers.pool.lane(slot)] += 1
        if limit_s is not None:
            self.limits.planned(op.number, limit_s)

    def loaded(self, op: Op) -> None:
        """Every rank has said what came of the load."""
        was_cut = self.limits.over(op.number)
        for slot in op.pool_slots:
            if slot is not None:
                self.reading[self._tiers.pool.lane(slot)] -= 1
        if any(slot is not None for slot in op.pool_slots):
            self.learn(op, was_cut)

    def learn(self, op: Op, was_cut: bool) -> None:
        """How long this took that read from the pool, and what came of it by then."""
        read, missed = [0] * len(self.reading), 0
        for index, slot in enumerate(op.pool_slots):
            if slot is None:
                continue
            kind = op.failures[index].kind if index in op.failures else OutcomeKind.OK
            if kind in _READ:
                read[self._tiers.pool.lane(slot)] += 1
            elif kind is OutcomeKind.DEADLINE or (was_cut and kind is OutcomeKind.CANCELLED):
                missed += 1
        if missed or any(read):  # what failed at once says nothing of time
            queued = op.queued or [0] * len(read)
            seconds = max(0.0, op.seconds - (self._ledger.prompts_s() - op.prompts_s))
            self._admission.took(Taken(seconds, read, queued, missed, probe=op.probe))
