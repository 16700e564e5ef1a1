# SPDX-License-Identifier: Apache-2.0
"""Every counter that the source counts is declared, and every declared counter is counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_nvmeof_offload
from vllm_nvmeof_offload.metrics import COUNTERS, exported, first_counts

PACKAGE = Path(vllm_nvmeof_offload.__file__).parent


def counts() -> Iterator[tuple[str, list[ast.expr]]]:
    """The place, name and labels of every `counters[…] += …` in the product, and of what the native
    core counts."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        tuples = {
            ast.unparse(node.targets[0]): node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_NATIVE_COUNTS":
                assert isinstance(node.value, ast.Tuple)
                for one in node.value.elts:
                    yield path.name, one.elts if isinstance(one, ast.Tuple) else [one]
            if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Subscript):
                continue
            if ast.unparse(node.target.value).endswith("counters"):
                key = tuples.get(ast.unparse(node.target.slice), node.target.slice)
                parts = key.elts if isinstance(key, ast.Tuple) else [key]
                yield f"{path.name}:{node.lineno}", parts


def test_every_counted_name_is_declared_with_its_labels() -> None:
    for where, (name, *values) in counts():
        assert isinstance(name, ast.Constant) and name.value in COUNTERS, where
        labels = COUNTERS[name.value].labels
        assert len(values) == len(labels), where
        for label, value in zip(labels, values, strict=True):
            literal = isinstance(value, ast.Constant) and label.values
            assert not literal or value.value in label.values, f"{where}: {label.name}"


def test_every_declared_counter_is_counted_somewhere() -> None:
    counted = {name.value for _, (name, *_) in counts() if isinstance(name, ast.Constant)}
    assert counted == COUNTERS.keys()


def test_an_undeclared_series_is_not_exported() -> None:
    assert exported("resets") == ("vllm:nvmeof_resets", ())
    assert exported(("evictions", "cpu")) == ("vllm:nvmeof_evictions", ("cpu",))
    with pytest.raises(KeyError):
        exported("reset")
    for series in ("evictions", ("resets", "cpu")):
        with pytest.raises(AssertionError):
            exported(series)


def test_series_are_exported_as_0_at_first() -> None:
    zeros = first_counts(3)
    assert zeros["resets"] == zeros["evictions", "cpu"] == 0
    written = [series for series in zeros if series[0] == "target_written_bytes"]
    assert written == [("target_written_bytes", number) for number in "012"]
    assert sum(series[0] == "transfer_bytes" for series in zeros) == 4
    failed = {series[3] for series in zeros if series[:2] == ("failed_chunks", "load")}
    assert failed == {"none", "0", "1", "2"}
