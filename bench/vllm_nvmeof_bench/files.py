# SPDX-License-Identifier: Apache-2.0
"""Samples of a benchmark as a JSON file, and back: `{"schema", "bench", "samples", "conditions"}`.

It holds no verdict: what follows from the samples is computed by whoever reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["bench_of", "dump", "load"]

SCHEMA = 1
_DIGITS = 6
Sample = TypeVar("Sample")


def dump(path: Path, bench: str, samples: Sequence[Any], conditions: dict[str, Any]) -> None:
    """Write dataclass objects of numbers and strings, one a line, making the file's directory.

    Raises:
        BenchError: it cannot be written.
    """
    rows = [{name: _short(value) for name, value in asdict(one).items()} for one in samples]
    lines = ",\n".join(json.dumps(row) for row in rows)
    rest = json.dumps({"conditions": conditions}, indent=1).removeprefix("{")
    head = f'{{"schema": {SCHEMA}, "bench": {json.dumps(bench)}, "samples": ['
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{head}\n{lines}],{rest}\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None


def load(path: Path, bench: str, kind: type[Sample]) -> tuple[list[Sample], dict[str, Any]]:
    """Read (samples, conditions) back.

    Raises:
        BenchError: the file cannot be read, or is not one of `bench`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["bench"] != bench or content["schema"] != SCHEMA:
            raise ValueError(f"it is of {content['bench']!r}, schema {content['schema']}")
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        samples = [kind(**{name: row[name] for name in names}) for row in content["samples"]]
        return samples, dict(content["conditions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of `bench {bench} --json`: {error!r}") from None


def bench_of(path: Path) -> str:
    """Which benchmark a file is of.

    Raises:
        BenchError: the file cannot be read, or does not say.
    """
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["bench"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of a benchmark: {error!r}") from None


def _short(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value
