# SPDX-License-Identifier: Apache-2.0
"""Chooses the target of each write, by measured rates; tracks verdicts on targets. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.manager.eviction import MakePolicy, Recency
from vllm_nvmeof_offload.manager.slots import SlotPool
from vllm_nvmeof_offload.protocol import VERDICTS, RateReport, VerdictReport

#: The least share of the fastest target's rate that counts: a slow target must get a write now
#: and then, because only a write shows that it is fast again.
_SPEED_MIN = 1 / 32
#: A queue may be this many times as long as the shortest one, in time, and still be added to.
_PATIENCE = 2.0


class Targets:
    """The pool's slots over its targets: pool slot p is on target `p % count`.

    Each target has an eviction policy of its own: with one suspect, the others go on evicting.
    A target without slots has none.
    """

    def __init__(self, slots: int, count: int, policy: MakePolicy) -> None:
        self.count = count
        self.slots = SlotPool(slots, count)
        #: By pool slot: when its chunk was last used. Returns do not count here (`Recency`).
        self.recency = Recency(slots)
        #: By target: writes that were sent and not reported by every rank.
        self.pending = [0] * count
        #: By target: bytes/s at which its slowest rank reads, and writes; 0: unknown.
        self.read_rates = [0.0] * count
        self.write_rates = [0.0] * count
        self._rates: list[dict[int, RateReport]] = [{} for _ in range(count)]  # by rank
        self._speeds = [0.0] * count  # write rates as shares of the fastest one's; 0: unknown
        self._passes = [0.0] * count  # by target: writes that it was given, over its speed
        self._pass = 0.0  # the least of those that could be chosen
        self._turn = 0  # the target that is chosen where nothing else decides
        self._make_policy = policy
        #: Targets that some rank finds unusable.
        self.suspects: set[int] = set()
        self._verdicts: list[dict[int, VerdictReport]] = [{} for _ in range(count)]  # by rank
        self.forget()

    def forget(self) -> None:
        """Nothing is evictable."""
        self.recency.forget_all()
        used = memoryview(self.recency.used)
        targets = range(min(self.count, self.slots.capacity))
        self._policies = [self._make_policy(used[t :: self.count]) for t in targets]

    def verdict(self, report: VerdictReport) -> bool:
        """Returns whether the target became usable, or unusable, for all ranks together."""
        verdicts, before = self._verdicts[report.target], len(self.suspects)
        verdicts[report.rank] = report
        usable = all(one.usable for one in verdicts.values())
        (self.suspects.discard if usable else self.suspects.add)(report.target)
        return len(self.suspects) != before

    def worst_verdicts(self) -> list[int]:
        """By target, an index of `protocol.VERDICTS`."""
        by_target = ([VERDICTS.index(v.verdict) for v in one.values()] for one in self._verdicts)
        return [max(indices, default=0) for indices in by_target]

    def usable(self, slot: int) -> bool:
        return not self.suspects or slot % self.count not in self.suspects

    def rate(self, report: RateReport) -> None:
        """One rank has measured one target."""
        ranks, target = self._rates[report.target], report.target
        ranks[report.rank] = report
        self.read_rates[target] = min(one.read_bytes_per_s for one in ranks.values())
        self.write_rates[target] = min(one.write_bytes_per_s for one in ranks.values())
        fastest = max(self.write_rates)
        self._speeds = [max(r / fastest, _SPEED_MIN) if r else 0.0 for r in self.write_rates]

    def choose(self) -> int | None:
        """The target of the next write, with a free slot or an evictable one; None: there is none.

        A target whose queue takes much longer than the shortest one's (twice, in time) gets
        nothing. Among the others, one with a free slot comes before one that must evict, because
        a hit from a slower target is better than none. Among equals, the one that was given the
        fewest writes for its rate is chosen, so that shares follow the rates even while every
        queue is empty. Queues are pending writes over the slowest rank's measured rate; while any
        rate is unknown, all count as equal, and the targets take turns.
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
        # A target that was away does not catch up: it begins where the others are.
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

    def adopt(self, slots: npt.NDArray[np.int64]) -> None:
        """Take these slots, which are ascending and hold adopted chunks, as evictable."""
        self.slots.take_numbered(slots)
        for target, policy in enumerate(self._policies):
            for index in (slots[slots % self.count == target] // self.count).tolist():
                policy.admit(index)

    def place(self, slot: int, *, evictable: bool) -> None:
        """`slot` is evictable, or is not."""
        index, target = divmod(slot, self.count)
        policy = self._policies[target]
        (policy.admit if evictable else policy.withdraw)(index)

    def touch(self, slot: int, now: int, *, ended: bool = False) -> None:
        """See `Recency.use`."""
        self.recency.use(slot, now, ended=ended)
        index, target = divmod(slot, self.count)
        self._policies[target].touch(index)

    def victim(self, target: int) -> int | None:
        """The slot of this target to evict next."""
        index = self._policies[target].victim()
        return None if index is None else index * self.count + target
