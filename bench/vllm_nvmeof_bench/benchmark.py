# SPDX-License-Identifier: Apache-2.0
"""What every benchmark has: how its file is read, printed, judged and drawn, and how it is run.

A benchmark is a package of two modules. `report` has `BENCHES`, a `Benchmark` each, and needs
only the file; `measure` has `COMMANDS`, a `Command` each, and does the work.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_nvmeof_bench.results import BenchError, Goal, load, missed
from vllm_nvmeof_bench.tables import Table, goals_table, show

_PACKAGE = "vllm_nvmeof_bench"
#: Command → the package of the benchmark.
PACKAGES = {
    "pool": "pool",
    "copy": "gpu",
    "cost": "cost",
    "latency": "latency",
    "ttft": "serve",
    "hits": "serve",
    "turns": "serve",
    "replay": "replay",
    "stream": "stream",
    "simulate": "simulate",
    "hotpath": "hotpath",
    "follow": "follow",
    "stall": "stall",
    "moving": "moving",
    "alone": "alone",
    "borrow": "borrow",
    "peers": "peers",
}

Samples = Sequence[Any]
Conditions = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """sample: the dataclass of the file's samples.

    lines: of the conditions. tables: of the samples. plot: writes the PNG. goals: None if there
    are none. published: our text for a published figure, by its key. columns: width of a table
    that goes to a file.
    """

    name: str
    sample: type[Any]
    lines: Callable[[Conditions], Iterable[str]]
    tables: Callable[[Samples, Conditions], Iterable[Table | str]]
    plot: Callable[[Path, Samples, Conditions], None]
    goals: Callable[[Samples, Conditions], list[Goal]] | None = None
    goals_title: str = "Goals"
    published: Callable[[Samples], dict[str, str]] = lambda samples: {}
    columns: int = 130

    def read(self, path: Path) -> tuple[list[Any], dict[str, Any], list[Goal]]:
        """Samples, conditions, goals.

        Raises:
            BenchError: not a file of this benchmark.
        """
        samples, conditions = load(path, self.name, self.sample)
        return samples, conditions, self.goals(samples, conditions) if self.goals else []

    def parts(
        self, samples: Samples, conditions: Conditions, goals: Sequence[Goal]
    ) -> Iterable[Table | str]:
        """All that is printed: conditions, samples, goals."""
        yield from self.lines(conditions)
        yield from self.tables(samples, conditions)
        if goals:
            yield goals_table(goals, self.goals_title)

    def draw(self, path: Path, samples: Samples, conditions: Conditions) -> None:
        """Write the PNG.

        Raises:
            BenchError: no samples, no matplotlib, or the picture cannot be written.
        """
        if not samples:
            raise BenchError("there is nothing to draw: the file has no samples")
        self.plot(path, samples, conditions)

    def show(self, json_path: Path, plot_path: Path | None, with_goals: bool = True) -> bool:
        """Print, and draw, a file; True unless a goal is missed.

        Raises:
            BenchError: not a file of this benchmark, or no matplotlib.
        """
        samples, conditions, goals = self.read(json_path)
        goals = goals if with_goals else []
        console = Console()
        if not console.is_terminal:
            console = Console(width=self.columns)
        show(console, self.parts(samples, conditions, goals))
        show(console, [f"{len(samples)} samples in {json_path}"])
        if plot_path is not None:
            self.draw(plot_path, samples, conditions)
            show(console, [f"picture in {plot_path}"])
        return not missed(goals)


@dataclass(frozen=True)
class Command:
    """`bench NAME`. help: the command's. settings: a dataclass with options (`settings`).

    measure: takes the settings, the JSON file to write and what else the settings ask for.
    """

    name: str
    help: str
    settings: type[Any]
    measure: Callable[[Any, Path], None]


def benchmark(name: str) -> Benchmark:
    """Raises: BenchError: no benchmark has this name, or it is not in this installation."""
    found: Benchmark = _find(name, "report", "BENCHES")
    return found


def command(name: str) -> Command:
    """As `benchmark`."""
    found: Command = _find(name, "measure", "COMMANDS")
    return found


def _find(name: str, module_name: str, attribute: str) -> Any:
    if name not in PACKAGES:
        raise BenchError(f"no benchmark is called {name!r}")
    try:
        module = importlib.import_module(f"{_PACKAGE}.{PACKAGES[name]}.{module_name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        raise BenchError(f"`bench {name}` is not in this installation") from None
    return next(one for one in getattr(module, attribute) if one.name == name)
