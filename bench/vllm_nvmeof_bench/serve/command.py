# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench ttft | hits | turns`: run and write; read a file again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.files import dump, load
from vllm_nvmeof_bench.serve import hitrate, tables, ttft, turns
from vllm_nvmeof_bench.serve.arms import arms_of
from vllm_nvmeof_bench.serve.findings import beside_hits, beside_ttft
from vllm_nvmeof_bench.serve.prompts import Tokens
from vllm_nvmeof_bench.serve.run import run

__all__ = ["BENCHES", "Bench", "measure"]


@dataclass(frozen=True)
class Bench:
    """Implements `page.kinds.Bench`. module: with Settings, ARMS_DEFAULT and measure.

    plot: its name in `plots`. beside: our text for a published figure, by its key.
    """

    name: str
    module: Any
    sample: type[Any]
    print_samples: Callable[..., None]
    plot: str
    beside: Callable[[Sequence[Any]], dict[str, str]] = lambda samples: {}
    FILE_COLUMNS: int = 150

    @property
    def report(self) -> Any:
        return SimpleNamespace(
            print_conditions=tables.print_conditions, print_samples=self.print_samples
        )

    def read(self, path: Path) -> tuple[list[Any], dict[str, Any], list[Any]]:
        """Samples, the first arm's first, which others are held to; conditions; no targets."""
        samples, conditions = load(path, self.name, self.sample)
        order = list(conditions.get("arms", {}))
        samples.sort(key=lambda one: order.index(one.arm))
        return samples, conditions, []

    def draw(self, path: Path, samples: Sequence[Any], conditions: dict[str, Any]) -> None:
        """The PNG; matplotlib is imported only for it."""
        from vllm_nvmeof_bench.serve import plots

        getattr(plots, self.plot)(path, samples, conditions)


BENCHES = {
    bench.name: bench
    for bench in (
        Bench("ttft", ttft, ttft.TtftSample, tables.print_ttft, "plot_ttft", beside_ttft),
        Bench("hits", hitrate, hitrate.HitSample, tables.print_hits, "plot_hits", beside_hits),
        Bench("turns", turns, turns.TurnSample, tables.print_turns, "plot_turns"),
    )
}


def measure(
    settings: Mapping[str, Any],
    arms: Sequence[str],
    base_urls: Sequence[str],
    token_ids: str,
    directory: Path,
    json_paths: Mapping[str, Path],
) -> None:
    """Run one benchmark, or several on the same servers, and write a JSON file each.

    settings, json_paths: by name. arms: names, none for the default of the first; not used with
    base_urls. token_ids: LOW:HIGH or empty. The servers' logs stay beside the files if it fails.

    Raises:
        BenchError: it cannot run here, or a server failed.
    """
    first = next(iter(settings))
    chosen = arms_of(arms or BENCHES[first].module.ARMS_DEFAULT, base_urls)
    tokens = Tokens.parse(token_ids) if token_ids else None
    logs = json_paths[first].parent / f"{first}-logs"
    parts = {name: (BENCHES[name].module, one) for name, one in settings.items()}

    def keep(name: str, samples: list[Any], conditions: dict[str, Any]) -> None:
        dump(json_paths[name], name, samples, conditions)

    with progress() as on_progress:
        run(parts, chosen, tokens, directory, logs, keep, on_progress)
