# SPDX-License-Identifier: Apache-2.0
"""Metrics follow Prometheus' conventions; generated documents have exactly what the code has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, PREFIX, Metric

ROOT = Path(__file__).parents[2]
EVERY = [*COUNTERS.values(), *GAUGES.values()]
#: Words that Prometheus' conventions replace by base units, or by suffixes of their own.
NOT_BASE_UNITS = re.compile(r"_(ms|us|milliseconds|microseconds|kib|mib|gib|kb|mb|gb|percent)(_|$)")


@pytest.mark.parametrize("tool", ["metrics_doc.py", "config_doc.py"])
def test_the_generated_documents_are_up_to_date(tool: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    done = subprocess.run(command, cwd=tmp_path, check=False)
    assert done.returncode == 0, f"run tools/{tool}"


def test_the_document_has_every_metric_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    listed = re.findall(rf"^- `({PREFIX}\w+)` \(", text, re.M)
    expected = [f"{m.name}_total" for m in COUNTERS.values()] + [m.name for m in GAUGES.values()]
    assert listed == expected


def test_the_document_has_every_key_and_no_other() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert sorted(listed) == sorted(OffloadConfig.model_fields)


def test_names_follow_the_conventions() -> None:
    for metric in EVERY:
        _check(metric)


def _check(metric: Metric) -> None:
    # Routers count a server's engines by the text `engine="` in its figures.
    assert not any(label.name.endswith("engine") for label in metric.labels)
    name = metric.name.removeprefix(PREFIX)
    assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
    assert not name.endswith("_total"), "vLLM's client adds it"
    assert not NOT_BASE_UNITS.search(name)
    for unit in ("bytes", "seconds"):
        if metric.unit == unit:
            assert name.endswith(f"_{unit}"), f"a metric in {unit} ends with it"
    assert metric.help.endswith(".")
    assert len({label.name for label in metric.labels}) == len(metric.labels)
    for label in metric.labels:
        assert bool(label.values) != bool(label.source), (
            "bounded: by fixed values or a stated source"
        )
