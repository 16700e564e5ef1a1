# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmarks (PNG): lines and bars over medians, in colours that all readers can tell
apart. matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.results import BenchError, Spread, size_name
from vllm_nvmeof_bench.tables import machine_in, vllm_in

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PINK, GREY, BLACK = "#D55E00", "#CC79A7", "#999999", "#000000"
FONT = 12
_DPI = 110


@dataclass(frozen=True)
class Style:
    """How an arm is drawn, the same in every panel of a picture."""

    colour: str
    marker: str = "o"
    label: str = ""
    dashes: str = "-"
    width: float = 1.5


def pyplot() -> Any:
    """matplotlib's pyplot, without a display.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None
    plt.switch_backend("Agg")
    return plt


def save(figure: Any, path: Path) -> None:
    """Write the PNG, make its directory, and release the figure.

    Raises:
        BenchError: the picture cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_DPI, facecolor="white")
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot be written ({error})") from None
    finally:
        pyplot().close(figure)


@contextmanager
def picture(
    path: Path, title: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.8, 5.6)
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its panels, row by row; written at the end. size: of one panel, in inches.

    Raises:
        BenchError: no matplotlib, or the picture cannot be written.
    """
    figure, axes = pyplot().subplots(
        rows,
        columns,
        figsize=(size[0] * columns, size[1] * rows),
        layout="constrained",
        squeeze=False,
    )
    figure.suptitle(title, fontsize=FONT)
    try:
        yield figure, list(axes.flat)
    except BaseException:
        pyplot().close(figure)
        raise
    save(figure, path)


def where_measured(conditions: Mapping[str, Any]) -> str:
    """Machine and versions, for a title's second line."""
    kernel = (conditions.get("versions") or {}).get("kernel", "?")
    return f"{machine_in(conditions)}, Linux {kernel}, vLLM {vllm_in(conditions, 'none')}"


def line(
    panel: Any,
    style: Style,
    at: Iterable[float],
    spreads: Iterable[Spread | None],
    scale: float = 1.0,
    band: bool = False,
) -> None:
    """A line through medians, with whiskers, or a band, from low to high; no point at None."""
    known = [(x, one) for x, one in zip(at, spreads, strict=True) if one is not None]
    if not known:
        return
    places = [x for x, _ in known]
    found = [one for _, one in known]
    look = {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.dashes,
        "linewidth": style.width,
        "label": style.label,
    }
    middles = [one.median / scale for one in found]
    if not band:
        panel.errorbar(places, middles, yerr=whiskers(found, scale), capsize=3, **look)
        return
    panel.plot(places, middles, **look)
    low, high = [one.low / scale for one in found], [one.high / scale for one in found]
    panel.fill_between(places, low, high, color=style.colour, alpha=0.13, linewidth=0)


def whiskers(spreads: Sequence[Spread], scale: float = 1.0) -> list[list[float]]:
    """Lengths below and above the medians, as matplotlib takes them."""
    below = [(one.median - one.low) / scale for one in spreads]
    return [below, [(one.high - one.median) / scale for one in spreads]]


def bars(
    panel: Any,
    groups: Sequence[str],
    series: Sequence[tuple[Style, Sequence[Spread | None]]],
    scale: float = 1.0,
    form: str = "{:.1f}",
) -> None:
    """One bar per group and style, side by side, with whiskers and the median's number."""
    width, highest = 0.8 / max(1, len(series)), 0.0
    for index, (style, spreads) in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width
        for group, spread in enumerate(spreads):
            if spread is not None:
                reach, middle = whiskers([spread], scale), spread.median / scale
                look = {"color": style.colour, "yerr": reach, "capsize": 3}
                made = panel.bar(group + shift, middle, width * 0.9, **look)
                panel.bar_label(made, [form.format(middle)], padding=3, fontsize=FONT - 2)
                highest = max(highest, spread.high / scale)
    if not highest:
        panel.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
    panel.set_xticks(range(len(groups)), groups, fontsize=FONT)
    panel.set_xlim(-0.6, len(groups) - 0.4)
    panel.set_ylim(0, highest * 1.15 or 1.0)


def finish(panel: Any, title: str = "", legend: bool = False, **labels: Any) -> None:
    """Title, grid and, by matplotlib's names, labels and limits: `ylabel="GB/s"`."""
    if title:
        panel.set_title(title, fontsize=FONT)
    panel.set(**labels)
    panel.grid(alpha=0.3)
    if legend:
        panel.legend(fontsize=FONT - 3)


def size_axis(panel: Any, sizes: Sequence[float], name: Callable[[Any], str] = size_name) -> None:
    """A logarithmic x axis with a tick at each size."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [name(size) for size in sizes], rotation=30)
    panel.minorticks_off()


def legend_below(
    figure: Any, panels: Iterable[Any], columns: int = 0, name: Callable[[str], str] = str
) -> None:
    """One legend for all panels, below them; each label once. columns: 0: all in one row."""
    found: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(
        found.values(),
        [name(label) for label in found],
        loc="outside lower center",
        ncols=columns or max(1, len(found)),
        fontsize=FONT,
    )
