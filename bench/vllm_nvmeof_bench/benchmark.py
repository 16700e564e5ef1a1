# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: each has a report, which needs only its file, and a command, which does the work.

A module of `reports` has `REPORTS`; the module `measure` of a package has `COMMANDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.report import Report
from vllm_nvmeof_bench.results import BenchError

_PACKAGE = "vllm_nvmeof_bench"
#: Benchmark → the module of its report, and the package that measures it; in the page's order.
BENCHMARKS = {
    "ttft": ("serve", "serve"),
    "hits": ("serve", "serve"),
    "turns": ("serve", "serve"),
    "replay": ("replay", "replay"),
    "simulate": ("simulate", "simulate"),
    "latency": ("latency", "latency"),
    "pool": ("pool", "pool"),
    "stream": ("stream", "stream"),
    "stall": ("stall", "stall"),
    "hotpath": ("hotpath", "hotpath"),
    "follow": ("follow", "follow"),
    "moving": ("moving", "moving"),
    "alone": ("alone", "alone"),
    "borrow": ("borrow", "borrow"),
    "peers": ("peers", "peers"),
    "cost": ("cost", "cost"),
    "copy": ("copy", "gpu"),
}


@dataclass(frozen=True)
class Command:
    """`bench NAME`. help: the command's. settings: a dataclass with options (`settings`).

    measure: takes the settings, the JSON file to write and what else the settings ask for.
    """

    name: str
    help: str
    settings: type[Any]
    measure: Callable[[Any, Path], None]


def report_of(name: str) -> Report:
    """Raises: BenchError: no benchmark has this name, or it is not in this installation."""
    found: Report = _find(name, "reports." + _modules(name)[0], "REPORTS")
    return found


def command(name: str) -> Command:
    """As `report_of`."""
    found: Command = _find(name, _modules(name)[1] + ".measure", "COMMANDS")
    return found


def _modules(name: str) -> tuple[str, str]:
    if name not in BENCHMARKS:
        raise BenchError(f"no benchmark is called {name!r}")
    return BENCHMARKS[name]


def _find(name: str, module_name: str, attribute: str) -> Any:
    try:
        module = importlib.import_module(f"{_PACKAGE}.{module_name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        raise BenchError(f"`bench {name}` is not in this installation") from None
    return next(one for one in getattr(module, attribute) if one.name == name)
