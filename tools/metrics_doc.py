# SPDX-License-Identifier: Apache-2.0
"""Writes the metrics into docs/metrics.md from `metrics.py`; run it after a change there.

.venv/bin/python tools/metrics_doc.py            # writes the file
.venv/bin/python tools/metrics_doc.py --check    # exit code 1 if it is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from documents import Document, item

from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, METRICS, Label, Metric

DOCUMENT = Document("metrics.md", "metrics_doc.py")


def values_of(label: Label) -> str:
    """The label as a matcher of Prometheus, or only its name if its values are not fixed."""
    return f'`{label.name}=~"{"|".join(label.values)}"`' if label.values else f"`{label.name}`"


def entries(metrics: Iterable[Metric]) -> list[str]:
    out = []
    for metric in metrics:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        facts = [metric.unit, *map(values_of, metric.labels)]
        out.append(item(f"`{name}` ({', '.join(facts)}): {metric.help}"))
    return out


def labels() -> list[str]:
    """The labels whose values depend on the deployment, by what they are."""
    names: dict[str, list[str]] = {}
    for label in (label for metric in METRICS.values() for label in metric.labels):
        if label.source and label.name not in names.setdefault(label.source, []):
            names[label.source].append(label.name)
    return [
        item(f"{', '.join(f'`{name}`' for name in some)}: {source}")
        for source, some in names.items()
    ]


def lists() -> str:
    """All metrics, counters first, as Markdown lists; in brackets the unit and the labels."""
    counters, gauges = entries(COUNTERS.values()), entries(GAUGES.values())
    parts = ["## Counters\n", *counters, "\n## Gauges\n", *gauges]
    return "\n".join([*parts, "\n## Labels without fixed values\n", *labels()])


if __name__ == "__main__":
    sys.exit(DOCUMENT.main(lists(), sys.argv[1:]))
