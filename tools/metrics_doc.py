# SPDX-License-Identifier: Apache-2.0
"""Writes the metrics into docs/METRICS.md from `metrics.py`; run it after a change there.

.venv/bin/python tools/metrics_doc.py            # writes the file
.venv/bin/python tools/metrics_doc.py --check    # exit code 1 if it is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from documents import Document, item

from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, Label, Metric

DOCUMENT = Document("METRICS.md", "metrics_doc.py")


def values_of(label: Label) -> str:
    return f"`{label.name}`: {', '.join(label.values) or label.source}"


def entries(metrics: Iterable[Metric]) -> list[str]:
    out = []
    for metric in metrics:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        facts = [metric.unit, *(values_of(label) for label in metric.labels)]
        out.append(item(f"`{name}` ({'; '.join(facts)}): {metric.help}"))
    return out


def lists() -> str:
    """All metrics, counters first, as Markdown lists; in brackets the unit and the labels."""
    counters, gauges = entries(COUNTERS.values()), entries(GAUGES.values())
    return "\n".join(["### Counters\n", *counters, "\n### Gauges\n", *gauges])


if __name__ == "__main__":
    sys.exit(DOCUMENT.main(lists(), sys.argv[1:]))
