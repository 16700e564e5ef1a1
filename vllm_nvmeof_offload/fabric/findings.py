# SPDX-License-Identifier: Apache-2.0
"""Findings: what a check saw, how bad that is, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Finding", "Severity", "worst"]


class Severity(enum.IntEnum):
    """The larger, the worse. The value is the exit code of a command that found it."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at, a stable word. subject: a target's path, or "host".

    evidence: what was seen, in numbers and names. remedy: empty where nothing is to be done.
    """

    check: str
    subject: str
    severity: Severity
    evidence: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.name.lower()}


def worst(findings: list[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)
