# SPDX-License-Identifier: Apache-2.0
"""What a check of a pool found: findings, how bad they are, and an exit code.

The codes are fsck(8)'s: 0 whole, 1 damaged and repaired, 4 damage is left, 8 the pool cannot
be used or was not checked.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_nvmeof_offload.pool.survey import Surveyed

__all__ = ["FINDINGS_LISTED_MAX", "Finding", "Report", "Severity", "exit_code", "settled"]

#: Of one directory; all are counted.
FINDINGS_LISTED_MAX = 1000


def settled(repair: bool) -> Severity:
    """Of damage that a repair, if it was asked for, has undone."""
    return Severity.REPAIRED if repair else Severity.DAMAGE


class Severity(enum.IntEnum):
    """The values are exit codes."""

    NOTE = 0
    REPAIRED = 1
    DAMAGE = 4
    UNUSABLE = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """pool_slot: None where it is about the directory."""

    kind: str
    severity: Severity
    pool_slot: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "severity": self.severity.name.lower(), "slot": self.pool_slot}


@dataclass
class Report:
    """One rank directory's.

    checked: entries whose slots were looked at. read_bytes, seconds, direct: of a scrub.
    """

    surveyed: Surveyed
    checked: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    direct: bool | None = None
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    worst: Severity = Severity.NOTE

    def add(self, finding: Finding) -> None:
        self.worst = max(self.worst, finding.severity)
        self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        if len(self.findings) < FINDINGS_LISTED_MAX:
            self.findings.append(finding)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; sizes in bytes, time in seconds."""
        total = sum(self.counts.values())
        found: dict[str, Any] = {
            "directory": str(self.surveyed.path),
            "live": self.surveyed.lock.live,
            "verdict": "whole" if self.worst is Severity.NOTE else self.worst.name.lower(),
            "checked": self.checked,
            "counts": self.counts,
            "findings": [finding.as_json() for finding in self.findings],
            "findings_left_off": total - len(self.findings),
        }
        if self.direct is not None:
            found |= {
                "read_bytes": self.read_bytes,
                "seconds": self.seconds,
                "direct": self.direct,
            }
        return found


def exit_code(reports: Sequence[Report]) -> int:
    """The worst finding's."""
    return int(max((report.worst for report in reports), default=Severity.NOTE))
