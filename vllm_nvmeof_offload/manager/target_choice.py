# SPDX-License-Identifier: Apache-2.0
"""The ranks' verdicts on targets and the targets' measured rates, which determine the target of
each write. Pure.

The choice itself runs per chunk in `native/tiers/tiers.cpp` (`choose`). A target whose queue takes
more than twice as long as the shortest queue gets no writes. Among the others, a target with a free
slot precedes one that must evict, because a hit on a slower target is better than a miss. Among
equals, the target with the fewest writes so far, relative to its rate, is chosen. The targets'
shares therefore follow their rates even while all queues are empty. A queue's time is its pending
writes divided by the slowest rank's measured rate. While any rate is unknown, all targets count as
equal and alternate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_nvmeof_offload.protocol import RateReport, VerdictReport

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native import Tiers

#: A target's rate counts as at least this share of the fastest target's. Even a slow target must
#: get some writes, because only a write can show that it is fast again.
_SPEED_MIN = 1 / 32


class Targets:
    """The ranks' verdicts and rates by target. The tiers get the combined results."""

    def __init__(self, tiers: Tiers, count: int) -> None:
        #: By target: the read and write rates of the slowest rank, in bytes/s; 0 if unknown.
        self.read_rates = [0.0] * count
        self.write_rates = [0.0] * count
        self.suspects: set[int] = set()  # targets that some rank cannot use
        self._tiers = tiers
        self._rates: list[dict[int, RateReport]] = [{} for _ in range(count)]  # by rank
        self._verdicts: list[dict[int, VerdictReport]] = [{} for _ in range(count)]  # by rank

    def verdict(self, report: VerdictReport) -> bool:
        """Record a verdict. Return whether the target's combined usability changed."""
        verdicts, target = self._verdicts[report.target], report.target
        verdicts[report.rank] = report
        usable = all(one.verdict.usable for one in verdicts.values())
        if usable is (target not in self.suspects):
            return False
        (self.suspects.discard if usable else self.suspects.add)(target)
        self._tiers.set_usable(target, usable)
        return True

    def worst_verdicts(self) -> list[int]:
        """Return the number of the worst `Verdict` by target."""
        by_target = ((int(one.verdict) for one in ranks.values()) for ranks in self._verdicts)
        return [max(numbers, default=0) for numbers in by_target]

    def rate(self, report: RateReport) -> None:
        ranks, target = self._rates[report.target], report.target
        ranks[report.rank] = report
        self.read_rates[target] = min(one.read_bytes_per_s for one in ranks.values())
        self.write_rates[target] = min(one.write_bytes_per_s for one in ranks.values())
        fastest = max(self.write_rates)
        for target, rate in enumerate(self.write_rates):
            self._tiers.set_speed(target, max(rate / fastest, _SPEED_MIN) if rate else 0.0)
