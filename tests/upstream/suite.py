# SPDX-License-Identifier: Apache-2.0
"""Runs a release's tests of its offloading connector with our connector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.releases import Release

_SUITE = "tests/v1/kv_connector/unit/offloading_connector"
PLUGIN = Path(__file__).parent / "plugin"
#: Limits against a hang only: a busy machine is several times slower.
_TEST_TIMEOUT_S = 300
_SUITE_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Outcome:
    """passed, failed, skipped: names of tests. calls: our method → number of its calls."""

    passed: list[str]
    failed: list[str]
    skipped: list[str]
    calls: dict[str, int]
    output: str


def environment(release: Release, *first: Path) -> dict[str, str]:
    """Variables for Python to import this release of vLLM, on the CPU, without a model hub."""
    places = [*first, *([release.python] if release.python else [])]
    if os.environ.get("PYTHONPATH"):
        places.append(Path(os.environ["PYTHONPATH"]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_NVMEOF_")}
    # Without compiled bytecode a release's 2,000 modules are compiled at every start.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {
        **kept,
        "VLLM_NVMEOF_ALLOW_ROOT_FILE_SYSTEM": "true",
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def run(
    release: Release,
    scratch: Path,
    timeout_s: float = _SUITE_TIMEOUT_S,
    *,
    plugin: Path = PLUGIN,
) -> Outcome:
    """Run the whole suite once. plugin: the directory of `nvmeof_swap`."""
    report, calls = scratch / "report.xml", scratch / "calls.json"
    options = ["-q", "-p", "no:cacheprovider", "-p", "nvmeof_swap", "-W", "ignore"]
    options += [f"--timeout={_TEST_TIMEOUT_S}", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, _SUITE],
        cwd=release.suite,
        env={**environment(release, plugin), "NVMEOF_SWAP_REPORT": str(calls)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    output = done.stdout[-6000:]
    assert report.exists() and calls.exists(), output
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ET.parse(report).iter("testcase"):
        marks = {child.tag for child in case}
        bad = marks & {"failure", "error"}
        kind = "failed" if bad else "skipped" if "skipped" in marks else "passed"
        names[kind].append(f"{case.get('classname')}::{case.get('name')}")
    return Outcome(**names, calls=json.loads(calls.read_text()), output=output)
