# SPDX-License-Identifier: Apache-2.0
"""Writes `build/fabric-report.md`: the time line of every scenario that was played."""

from __future__ import annotations

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
