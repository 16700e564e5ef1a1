# SPDX-License-Identifier: Apache-2.0
"""Verdicts on targets as reports to the manager: each change once."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_nvmeof_offload.protocol import VerdictReport
from vllm_nvmeof_offload.targets.health import TargetHealth, Verdict

__all__ = ["VerdictNews"]


class VerdictNews:
    """Of one rank. Every target begins as ok."""

    def __init__(self, rank: int, health: Sequence[TargetHealth]) -> None:
        self._rank = rank
        self._health = health
        self._told = [Verdict.OK] * len(health)

    def take(self) -> list[VerdictReport]:
        """What has changed since the last call."""
        news = []
        for target, health in enumerate(self._health):
            verdict = health.verdict
            if verdict is not self._told[target]:
                self._told[target] = verdict
                news.append(VerdictReport(self._rank, target, verdict.value))
        return news
