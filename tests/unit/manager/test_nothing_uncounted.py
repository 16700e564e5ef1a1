# SPDX-License-Identifier: Apache-2.0
"""No counter is declared and never counted, none is counted and never told: by the source."""

from __future__ import annotations

import ast
from pathlib import Path

import vllm_nvmeof_offload
from vllm_nvmeof_offload.manager import telemetry
from vllm_nvmeof_offload.metrics import COUNTERS

PACKAGE = Path(vllm_nvmeof_offload.__file__).parent
#: Their names are put together, by `pipeline` of "read" and "written".
PUT_TOGETHER = {"read_bytes"}
#: Of the core alone: for its tests and its own decisions.
UNTOLD = {"load_chunks_cpu", "load_chunks_pool", "verdicts_told", "write_failed"}


def _strings(tree: ast.AST) -> set[str]:
    """Constants, and what f-strings begin with; up to a colon, behind which labels stand."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {str(node.value).partition(":")[0] for node in nodes if isinstance(node.value, str)}


def test_every_declared_counter_is_counted_somewhere() -> None:
    tables = {"metrics.py", "gauges.py"}
    files = (path for path in PACKAGE.rglob("*.py") if path.name not in tables)
    said = set[str]().union(*(_strings(ast.parse(path.read_text())) for path in files))
    assert not COUNTERS.keys() - said - PUT_TOGETHER


def test_every_counter_of_the_core_is_told() -> None:
    counted = set()
    for path in (PACKAGE / "manager").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("counters"):
                counted |= _strings(node.slice)
    assert telemetry._CORE_COUNTERS.keys() | {"prefetches"} <= counted, "told, and never counted"
    told = telemetry._CORE_COUNTERS.keys() | COUNTERS.keys() | {"failed_load_chunks"}
    assert counted - told == UNTOLD
