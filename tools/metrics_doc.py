# SPDX-License-Identifier: Apache-2.0
"""Write the metrics of `metrics.py` into docs/metrics.md; run this after changing them.

.venv/bin/python tools/metrics_doc.py            # write the file
.venv/bin/python tools/metrics_doc.py --check    # exit with code 1 if it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from documents import Document, item

from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, METRICS, Label, Metric

DOCUMENT = Document("metrics.md", "metrics_doc.py")


def values_of(label: Label) -> str:
    """Return a label as a Prometheus matcher, or its name if it has no fixed values."""
    return f'`{label.name}=~"{"|".join(label.values)}"`' if label.values else f"`{label.name}`"


def entries(metrics: Iterable[Metric]) -> list[str]:
    out = []
    for metric in metrics:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        facts = [metric.unit, *map(values_of, metric.labels)]
        out.append(item(f"`{name}` ({', '.join(facts)}): {metric.help}"))
    return out


def labels() -> list[str]:
    """Return a list item per source of labels whose values depend on the deployment."""
    names: dict[str, list[str]] = {}
    for label in (label for metric in METRICS.values() for label in metric.labels):
        if label.source and label.name not in names.setdefault(label.source, []):
            names[label.source].append(label.name)
    return [
        item(f"{', '.join(f'`{name}`' for name in some)}: {source}")
        for source, some in names.items()
    ]


def lists() -> str:
    counters, gauges = entries(COUNTERS.values()), entries(GAUGES.values())
    parts = ["## Counters\n", *counters, "\n## Gauges\n", *gauges]
    return "\n".join([*parts, "\n## Labels without fixed values\n", *labels()])


if __name__ == "__main__":
    sys.exit(DOCUMENT.main(lists(), sys.argv[1:]))
