# SPDX-License-Identifier: Apache-2.0
"""An inventory of this machine and of the fabric under its targets, and the findings of checks.

The inventory is read-only. A finding has a severity and, unless all is well, a remedy.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOST = "host"


class Severity(enum.IntEnum):
    """The severities. A command exits with the worst one that it found."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `check` is the check's stable name. `subject` is a target's path,
    "GPU 0" or `HOST`. `evidence` gives the numbers and names found. `remedy` is empty if there is
    nothing to do."""

    check: str
    subject: str
    severity: Severity
    evidence: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.name.lower()}


def ok(check: str, evidence: str, remedy: str = "", subject: str = HOST) -> Finding:
    return Finding(check, subject, Severity.OK, evidence, remedy)


def warning(check: str, evidence: str, remedy: str, subject: str = HOST) -> Finding:
    return Finding(check, subject, Severity.WARNING, evidence, remedy)


def error(check: str, evidence: str, remedy: str = "") -> Finding:
    return Finding(check, HOST, Severity.ERROR, evidence, remedy)


def worst(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)
