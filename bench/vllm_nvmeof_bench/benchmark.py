# SPDX-License-Identifier: Apache-2.0
"""The `bench` commands and their cases. Modules in `reports` define `REPORTS`; modules that measure
define `COMMANDS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.report import Report
from vllm_nvmeof_bench.results import BenchError

_PACKAGE = "vllm_nvmeof_bench"
SERVERS, MACHINE, DEVELOPERS = "For your servers", "For this machine", "For developers"
#: Benchmark name in results files → report module and measuring module, in page order.
BENCHMARKS = {
    "ttft": ("serve", "serve.measure"),
    "hits": ("serve", "serve.measure"),
    "turns": ("serve", "serve.measure"),
    "replay": ("replay", "replay"),
    "simulate": ("simulate", "simulate"),
    "latency": ("latency", "latency"),
    "pool": ("pool", "pool"),
    "stall": ("stall", "serve.stall"),
    "hotpath": ("hotpath", "chunks"),
    "moving": ("moving", "serve.moving"),
    "peers": ("peers", "peers"),
    "copy": ("copy", "copy"),
    "demo": ("demo", "demo"),
}


@dataclass(frozen=True)
class Group:
    """One `bench` command. panel: the help panel that lists it. cases: the benchmarks that are its
    subcommands; empty if the command itself is a benchmark. help: the help text with cases."""

    panel: str
    cases: tuple[str, ...] = ()
    help: str = ""


GROUPS = {
    "serve": Group(
        SERVERS,
        ("ttft", "hits", "turns", "stall", "moving"),
        "Measure whole servers: those given by URL, or small ones that the command starts.",
    ),
    "replay": Group(SERVERS),
    "simulate": Group(SERVERS),
    "pool": Group(MACHINE),
    "latency": Group(MACHINE),
    "copy": Group(MACHINE),
    "hotpath": Group(DEVELOPERS),
    "peers": Group(DEVELOPERS),
}


@dataclass(frozen=True)
class Command:
    """A benchmark's command. settings: a dataclass of options (`settings.option`). measure: runs
    the benchmark with these settings and writes the JSON file."""

    name: str
    help: str
    settings: type[Any]
    measure: Callable[[Any, Path], None]


def report_of(name: str) -> Report:
    """Return a benchmark's report; raise BenchError if it is unknown or not installed."""
    found: Report = _find(name, "reports." + _modules(name)[0], "REPORTS")
    return found


def command(name: str) -> Command:
    """Return a benchmark's command; raise BenchError as `report_of` does."""
    found: Command = _find(name, _modules(name)[1], "COMMANDS")
    return found


def words_of(name: str) -> str:
    """Return the words that select a benchmark on the command line, after `bench`."""
    above = [f"{command_name} " for command_name, group in GROUPS.items() if name in group.cases]
    return "".join(above) + name


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
        raise BenchError(f"the benchmark {name} is not in this installation") from None
    return next(one for one in getattr(module, attribute) if one.name == name)
