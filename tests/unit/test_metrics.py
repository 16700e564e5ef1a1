# SPDX-License-Identifier: Apache-2.0
"""Metrics follow Prometheus' conventions, and docs/METRICS.md has exactly the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, PREFIX, Metric

ROOT = Path(__file__).parents[2]
EVERY = [*COUNTERS.values(), *GAUGES.values()]
#: Words that Prometheus' conventions replace by base units, or by suffixes of their own.
NOT_BASE_UNITS = re.compile(r"_(ms|us|milliseconds|microseconds|kib|mib|gib|kb|mb|gb|percent)(_|$)")


def table() -> dict[str, list[str]]:
    """Name → the cells of its row."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "METRICS.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith(f"`{PREFIX}"):
            assert cells[0] not in found, f"{cells[0]} twice"
            found[cells[0].strip("`")] = cells
    return found


def test_the_table_has_every_metric_and_no_other() -> None:
    expected = {f"{m.name}_total" for m in COUNTERS.values()} | {m.name for m in GAUGES.values()}
    assert set(table()) == expected, "run tools/metrics_doc.py"


@pytest.mark.parametrize("metric", EVERY, ids=lambda m: m.name.removeprefix(PREFIX))
def test_the_table_says_what_the_code_says(metric: Metric) -> None:
    counter = metric in COUNTERS.values()
    _, kind, unit, labels, meaning = table()[metric.name + ("_total" if counter else "")]
    assert (kind, unit, meaning) == ("counter" if counter else "gauge", metric.unit, metric.help)
    assert tuple(re.findall(r"`(\w+)`:", labels)) == metric.label_names


def test_the_tables_tool_has_nothing_to_change(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "metrics_doc.py"), "--check"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize("metric", EVERY, ids=lambda m: m.name.removeprefix(PREFIX))
def test_names_follow_the_conventions(metric: Metric) -> None:
    name = metric.name.removeprefix(PREFIX)
    assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
    assert not name.endswith("_total"), "vLLM's client adds it"
    assert not NOT_BASE_UNITS.search(name)
    for unit in ("bytes", "seconds"):
        if metric.unit == unit:
            assert name.endswith(f"_{unit}"), f"a metric in {unit} says so at its end"
    assert metric.help.endswith(".")
    assert len(set(metric.label_names)) == len(metric.labels)
    for label in metric.labels:
        assert bool(label.values) != bool(label.source), "bounded: by the code, or by what it says"
