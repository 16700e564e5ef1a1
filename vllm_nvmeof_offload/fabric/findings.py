# SPDX-License-Identifier: Apache-2.0
"""Findings of checks: what was seen, how bad that is, and the remedy."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOST = "host"


class Severity(enum.IntEnum):
    """The severities, from good to bad. The value is the exit code of a command that found it."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `check` is a stable word for what was checked. `subject` is a
    target's path, "GPU 0" or `HOST`. `evidence` has the numbers and names that were seen. `remedy`
    is empty if there is nothing to do."""

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
