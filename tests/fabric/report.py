# SPDX-License-Identifier: Apache-2.0
"""Writes `build/fabric-report.md`: the time line of every scenario that was played."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = """# The pool's behaviour when its fabric fails

Played by the real pool, engine and pipeline against the kernel's target and initiator of NVMe/TCP
and, where a name ends with `rdma`, of NVMe/RDMA over soft-RoCE (two paths, native multipath, ANA,
xfs), in an emulated guest, by `pytest tests/fabric`. Times are the guest's, in seconds; *miss*
means that a request recomputes a chunk. Read deadline 2 s, write deadline 3 s. The pool served no
wrong bytes in any scenario marked *passed*.
"""


def render(results: dict[str, dict[str, Any]], kernel: str) -> str:
    """The report as Markdown. results: by NAME:ENGINE, as `run.play` returns them."""
    passed = sum(one["ok"] for one in results.values())
    rows = [
        HEAD,
        f"Kernel of the guest: {kernel}. Played: {len(results)} scenarios, passed: {passed}.",
        "",
        "| scenario | | guest s | worst load s | worst write s | about |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        worst = one["worst_s"]
        rows.append(
            f"| [{name}](#{_anchor(name)}) | {_word(one)} | {one['seconds']:.0f} "
            f"| {worst.get('load', '')} | {worst.get('write', '')} | {one['about']} |"
        )
    for name, one in results.items():
        rows += _section(name, one)
    return "\n".join(rows) + "\n"


def _section(name: str, one: dict[str, Any]) -> list[str]:
    rows = ["", f"## {name}", "", f"{one['about']} **{_word(one)}**.", ""]
    if one["counts"]:
        counts = ", ".join(f"{count} {what}" for what, count in one["counts"].items())
        verdicts = ", ".join(
            f"{at_s:.1f} s {verdict} (target {target})" for at_s, target, verdict in one["verdicts"]
        )
        rows += [
            f"Outcomes: {counts}.",
            f"Verdicts: {verdicts or 'none reported: ok all the time'}.",
            "",
        ]
    rows += ["| t | event |", "|---|---|"]
    rows += [f"| {at_s:.2f} | {_cell(text)} |" for at_s, text in one["timeline"]]
    return rows


def _word(one: dict[str, Any]) -> str:
    return "passed" if one["ok"] else "FAILED"


def _anchor(name: str) -> str:
    return name.replace(":", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# The parameters of a load, and its report on each operation.


@dataclass(frozen=True)
class LoadSpec:
    """A load. interval_s: between operations; deadlines as in `TransferLimits`, in seconds."""

    targets: tuple[Path, ...]
    engine: str = "uring"
    interval_s: float = 0.1
    slots: int = 48  # over all targets
    read_deadline_s: float = 2.0
    write_deadline_s: float = 3.0
    #: False: only writes, as fast as the bounds allow, on targets chosen by the manager's rule.
    loads: bool = True


@dataclass(frozen=True)
class OpEnd:
    """kind: store, write or load. outcome: "ok", "miss" with its reason, or "WRONG BYTES".

    target: -1 where a store's chunk has no place in the pool yet.
    """

    kind: str
    target: int
    began_s: float
    ended_s: float
    outcome: str

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s
