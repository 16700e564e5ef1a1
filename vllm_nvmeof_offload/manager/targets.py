# SPDX-License-Identifier: Apache-2.0
"""The pool's slots over its targets: which target takes the next write, and who makes room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.manager.policy import MakePolicy
from vllm_nvmeof_offload.manager.recency import Recency
from vllm_nvmeof_offload.manager.slots import SlotPool
from vllm_nvmeof_offload.protocol import VERDICTS, RateReport, VerdictReport

__all__ = ["Targets"]

#: The least share of the fastest target's rate that counts: what has been slow must get a
#: write now and then, or nobody would see that it is fast again.
_SPEED_MIN = 1 / 32
#: How many times the shortest queue another one may be, and still be added to.
_PATIENCE = 2.0


class Targets:
    """Pool slot p lies on target `p % count`. Each target has an eviction policy of its own:
    with one suspect, the others go on evicting theirs."""

    def __init__(self, slots: int, count: int, policy: MakePolicy) -> None:
        self.count = count
        self.slots = SlotPool(slots, count)
        #: By pool slot: when what is there was last used. Without credit: see `recency`.
        self.recency = Recency(slots)
        #: By target: writes sent and not reported by every rank.
        self.pending = [0] * count
        self._rates: list[dict[int, float]] = [{} for _ in range(count)]  # by rank, bytes/s
        #: By target: bytes/s at which its slowest rank reads; 0: unknown.
        self.read_rates = [0.0] * count
        self.write_rates = [0.0] * count  # the same for writes
        self._reads: list[dict[int, float]] = [{} for _ in range(count)]  # by rank, bytes/s
        self._speeds = [0.0] * count  # of each one's slowest rank, as shares of the fastest; 0: ?
        self._passes = [0.0] * count  # by target: how much it was given, over its rate
        self._pass = 0.0  # the least of those that could be chosen
        self._turn = 0  # the target that goes first where nothing else decides
        self._make_policy = policy
        #: Targets that some rank finds suspect, and which ranks do.
        self.suspects: dict[int, set[int]] = {}
        self._verdicts: list[dict[int, int]] = [{} for _ in range(count)]  # by rank
        self.forget()

    def forget(self) -> None:
        """Nothing is evictable."""
        self.recency.forget_all()
        used = memoryview(self.recency.used)
        self._policies = [self._make_policy(used[t :: self.count]) for t in range(self.count)]

    # -- verdicts ---------------------------------------------------------------------

    def verdict(self, report: VerdictReport) -> bool:
        """Returns whether the target became usable, or stopped to be, for all ranks together."""
        was_usable = report.target not in self.suspects
        self._verdicts[report.target][report.rank] = VERDICTS.index(report.verdict)
        ranks = self.suspects.setdefault(report.target, set())
        if report.usable:
            ranks.discard(report.rank)
        else:
            ranks.add(report.rank)
        if not ranks:
            del self.suspects[report.target]
        return was_usable != report.usable if was_usable else not ranks

    def worst_verdicts(self) -> list[int]:
        """By target, an index of `protocol.VERDICTS`."""
        return [max(verdicts.values(), default=0) for verdicts in self._verdicts]

    def usable(self, slot: int) -> bool:
        return not self.suspects or slot % self.count not in self.suspects

    # -- placement --------------------------------------------------------------------

    def rate(self, report: RateReport) -> None:
        self._reads[report.target][report.rank] = report.read_bytes_per_s
        self.read_rates[report.target] = min(self._reads[report.target].values())
        self._rates[report.target][report.rank] = report.write_bytes_per_s
        slowest = self.write_rates = [min(r.values(), default=0.0) for r in self._rates]
        fastest = max(slowest)
        self._speeds = [max(rate / fastest, _SPEED_MIN) if rate else 0.0 for rate in slowest]

    def choose(self) -> int | None:
        """The target of the next write, which has a free slot or an evictable one; or None.

        The rule: a target whose queue takes much longer than the shortest one's (twice, in
        time) gets nothing. Of the others one with a free slot goes before one that must evict:
        a hit from a slower target is better than none. Of those the one that was given least
        for its rate: shares follow the rates even while every queue is empty. Queues are
        writes pending over the slowest rank's measured rate; while any is unknown, all count as
        equal, and the targets take turns.
        """
        ready = [
            target
            for target, policy in enumerate(self._policies)
            if (self.slots.free_in(target) or len(policy)) and target not in self.suspects
        ]
        if len(ready) < 2:
            return ready[0] if ready else None
        speeds, passes, count = self._speeds, self._passes, self.count
        if not all(speeds[target] for target in ready):
            speeds = [1.0] * count
        # One that was away does not catch up: it begins where the others are.
        self._pass = max(self._pass, min(passes[target] for target in ready))
        longest = _PATIENCE * min(self.pending[target] / speeds[target] for target in ready)
        _, reached, _, chosen = min(
            (
                not self.slots.free_in(target),
                max(passes[target], self._pass),
                (target - self._turn) % count,
                target,
            )
            for target in ready
            if self.pending[target] / speeds[target] <= longest
        )
        passes[chosen] = reached + 1 / speeds[chosen]
        self._turn = (chosen + 1) % count
        return chosen

    # -- eviction ---------------------------------------------------------------------

    def adopt(self, slots: npt.NDArray[np.int64]) -> None:
        """These slots, ascending, hold chunks from before: take them, evictable."""
        self.slots.take_numbered(slots)
        for target, policy in enumerate(self._policies):
            for index in (slots[slots % self.count == target] // self.count).tolist():
                policy.admit(index)

    def place(self, slot: int, *, evictable: bool) -> None:
        """`slot` is evictable, or is not."""
        index, target = divmod(slot, self.count)
        if evictable:
            self._policies[target].admit(index)
        else:
            self._policies[target].withdraw(index)

    def touch(self, slot: int, now: int, *, ended: bool = False) -> None:
        """See `Recency.use`."""
        self.recency.use(slot, now, ended=ended)
        index, target = divmod(slot, self.count)
        self._policies[target].touch(index)

    def victim(self, target: int) -> int | None:
        """Which slot of this target to evict next."""
        index = self._policies[target].victim()
        return None if index is None else index * self.count + target
