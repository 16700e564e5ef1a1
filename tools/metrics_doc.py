# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/METRICS.md from `metrics.py`; run it after a change there.

.venv/bin/python tools/metrics_doc.py            # writes the file
.venv/bin/python tools/metrics_doc.py --check    # exit code 1 if it is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, Metric

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "METRICS.md"
BEGIN, END = "<!-- made by tools/metrics_doc.py: begin -->", "<!-- end -->"


def exported(metric: Metric, kind: str) -> str:
    """The name in `/metrics`."""
    return metric.name + ("_total" if kind == "counter" else "")


def rows(metrics: Mapping[str, Metric], kind: str) -> list[str]:
    out = []
    for metric in metrics.values():
        labels = "; ".join(
            f"`{one.name}`: {', '.join(one.values) or one.source}" for one in metric.labels
        )
        name = exported(metric, kind)
        out.append(f"| `{name}` | {kind} | {metric.unit} | {labels or '–'} | {metric.help} |")
    return out


def table() -> str:
    """All metrics, counters first, as Markdown."""
    head = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows(COUNTERS, "counter"), *rows(GAUGES, "gauge")])


def document(text: str) -> str:
    """`text` with its table written again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    text = DOCUMENT.read_text()
    made = document(text)
    if "--check" in arguments:
        return int(made != text)
    DOCUMENT.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
