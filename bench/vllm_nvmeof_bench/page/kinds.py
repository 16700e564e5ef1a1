# SPDX-License-Identifier: Apache-2.0
"""Which benchmarks the page knows: by the name that their files carry.

To add one: a line in `KINDS`. The module that it names (or that module's `BENCHES`, under the
kind's name) is a `Bench`; or, if it has no `read`, the package around it has `samples.load`,
`report` and `plot.plot`. Either may also have `beside(samples)`: our text for a published
figure, by its key.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_nvmeof_bench.benchmark import benchmark
from vllm_nvmeof_bench.page import published
from vllm_nvmeof_bench.page.published import Published
from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["KINDS", "Bench", "Kind", "bench_of"]

_PACKAGE = "vllm_nvmeof_bench"


class Bench(Protocol):
    """What the page asks of a benchmark.

    report: with print_conditions(console, conditions), print_samples(console, samples), which
    may take the conditions third, and, if there are rows of targets, print_targets(console, rows).
    """

    report: Any

    def read(self, path: Path) -> tuple[Sequence[Any], dict[str, Any], Sequence[Any]]:
        """Samples, conditions, rows of targets.

        Raises:
            BenchError: not such a file.
        """

    def draw(self, path: Path, samples: Sequence[Any], conditions: dict[str, Any]) -> None:
        """Write the PNG.

        Raises:
            BenchError: no matplotlib, or nothing to draw.
        """


@dataclass(frozen=True)
class Kind:
    """module: inside the benchmarks' package."""

    title: str
    module: str
    published: Published | None = None


KINDS: dict[str, Kind] = {
    "ttft": Kind("TTFT of one request", "serve.command", published.TTFT),
    "hits": Kind("Throughput against the hit rate", "serve.command", published.HITS),
    "turns": Kind("Conversations of four turns", "serve.command", published.TURNS),
    "replay": Kind("Agentic traces, replayed", "replay.command", published.REPLAY),
    "tiers": Kind("Hit rates over sizes and policies, simulated", "tiers.command"),
    "latency": Kind("Latency of two targets, and of our engine", "latency.report",
                    published.LATENCY),
    "pool": Kind("The pool's I/O beside fio, a bare ring and vLLM's fs tier", "pool.report",
                 published.POOL),
    "tier": Kind("Loads, resumes, prefetch, admission", "tier.command", published.TIER),
    "cost": Kind("What offloading costs where it cannot help", "cost.report", published.COST),
    "copy": Kind("Copies between a GPU and pinned memory", "gpu.report", published.COPY),
}  # fmt: skip


def bench_of(name: str) -> Bench:
    """The benchmark behind a kind.

    Raises:
        BenchError: no kind of that name, or it is not in this installation.
    """
    if name not in KINDS:
        raise BenchError(f"no benchmark is called {name!r}")
    try:
        module = importlib.import_module(f"{_PACKAGE}.{KINDS[name].module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        raise BenchError(f"`bench {name}` is not in this installation") from None
    known: Any = getattr(module, "BENCHES", {})
    if isinstance(known, tuple):
        return benchmark(name)
    bench: Any = known.get(name, module)
    return bench if hasattr(bench, "read") else _Plain(module)


class _Plain:
    """A benchmark by what its package has; its module may have `beside`. No targets.

    Raises:
        BenchError: the package lacks `samples`, `report` or `plot`.
    """

    def __init__(self, module: Any) -> None:
        package = module.__name__.rpartition(".")[0]
        try:
            self._samples, self.report, self._plot = (
                importlib.import_module(f"{package}.{part}")
                for part in ("samples", "report", "plot")
            )
        except ModuleNotFoundError as error:
            raise BenchError(f"{package} has no tables for this page: {error}") from None
        self._module = module

    def read(self, path: Path) -> tuple[Sequence[Any], dict[str, Any], Sequence[Any]]:
        samples, conditions = self._samples.load(path)
        return samples, conditions, []

    def draw(self, path: Path, samples: Sequence[Any], conditions: dict[str, Any]) -> None:
        self._plot.plot(path, samples, conditions)

    def beside(self, samples: Sequence[Any]) -> dict[str, str]:
        found: dict[str, str] = getattr(self._module, "beside", lambda _: {})(samples)
        return found
