# SPDX-License-Identifier: Apache-2.0
"""Everything that `vllm-nvmeof doctor` examines on one target, in an order that cannot hang.

sysfs comes first: a target without a live path is judged, and never touched.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_nvmeof_offload.commands.doctor.host import (
    Nic,
    Places,
    check_target,
    link_bytes_per_s,
    nics_of,
)
from vllm_nvmeof_offload.commands.doctor.judge import (
    can_do_io,
    judge_mount,
    judge_numa,
    judge_paths,
    judge_pcie,
)
from vllm_nvmeof_offload.commands.doctor.measure import Measured, MeasureError, Progress, measure
from vllm_nvmeof_offload.fabric.discover import discover
from vllm_nvmeof_offload.fabric.findings import Finding, Severity
from vllm_nvmeof_offload.fabric.machine import Machine
from vllm_nvmeof_offload.fabric.topology import TargetFabric
from vllm_nvmeof_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class Examined:
    """link_bytes_per_s: of all paths together, in one direction; None is unknown."""

    fabric: TargetFabric
    nics: dict[str, Nic]
    findings: list[Finding]
    link_bytes_per_s: float | None
    measured: Measured | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.fabric.to_json(),
            "interfaces": {name: asdict(nic) for name, nic in self.nics.items()},
            "link_bytes_per_s": self.link_bytes_per_s,
            "measured": asdict(self.measured) if self.measured else None,
        }


def examine_target(
    target: str, machine: Machine, places: Places, on_progress: Progress | None = None
) -> Examined:
    """Examine `target`, and touch it if that cannot hang; measure it if `on_progress` is given.

    A missing directory is created, as a server's start would.
    """
    fabric = discover(os.path.abspath(target), places.sysfs, places.mountinfo)
    touched: list[Finding] = []
    if _may_touch(fabric):
        touched = check_target(target)
        # Only now may links in its path be followed: they may lead to another mount.
        real = discover(os.path.realpath(target), places.sysfs, places.mountinfo)
        fabric = replace(real, target=target)
    if not _may_touch(fabric):
        evidence = "not touched: no live path leads to it, and I/O on it may hang"
        remedy = "bring a path back first: see the controllers"
        touched = [Finding("target", target, Severity.ERROR, evidence, remedy)]
    nics = nics_of(fabric, places)
    allowed = link_bytes_per_s(fabric, nics)
    findings = [
        *judge_paths(fabric),
        *judge_mount(fabric),
        *judge_pcie(fabric, nics),
        *judge_numa(fabric, nics, machine),
        *touched,
    ]
    measured = None
    works = all(finding.severity is not Severity.ERROR for finding in touched)
    if on_progress is not None and works:
        try:
            measured = measure(target, on_progress)
            findings.append(_judge_measured(target, measured, allowed))
        except MeasureError as error:
            findings.append(Finding("measured", target, Severity.ERROR, str(error)))
    findings = [replace(one, subject=target) for one in findings]
    return Examined(fabric, nics, findings, allowed, measured)


def _may_touch(fabric: TargetFabric) -> bool:
    return can_do_io(fabric) and not fabric.device_gone


def _judge_measured(target: str, measured: Measured, allowed: float | None) -> Finding:
    """Never a warning: only the target's operator knows which rate is right for it."""
    evidence = (
        f"write {_rate(measured.write_bytes_per_s, allowed)}, "
        f"read {_rate(measured.read_bytes_per_s, allowed)}; "
        f"one {format_bytes(measured.chunk_bytes)} chunk is read in "
        f"{measured.read_latency_s_median * 1e3:.2f} ms (median of {measured.singles}, "
        f"at most {measured.read_latency_s_max * 1e3:.2f}); "
        + (
            "the rate that its links allow is unknown"
            if allowed is None
            else f"its links allow {format_bytes(allowed)}/s"
        )
        + f"; {measured.engine}"
    )
    return Finding("measured", target, Severity.OK, evidence)


def _rate(bytes_per_s: float, allowed: float | None) -> str:
    share = f" ({bytes_per_s / allowed:.0%} of the links)" if allowed else ""
    return f"{format_bytes(bytes_per_s)}/s{share}"
