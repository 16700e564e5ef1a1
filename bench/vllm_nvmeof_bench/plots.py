# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmarks (PNG): lines and bars over medians, in colours that all readers can tell
apart. matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_nvmeof_bench.results import BenchError, Spread, size_name
from vllm_nvmeof_bench.tables import machine_in, vllm_in

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PINK, GREY, BLACK = "#D55E00", "#CC79A7", "#999999", "#000000"
FONT = 12
_DPI = 110
Key = TypeVar("Key")


@dataclass(frozen=True)
class Style:
    """How an arm is drawn, the same in every panel of a picture; the names are matplotlib's."""

    color: str
    marker: str = "o"
    label: str = ""
    linestyle: str = "-"
    linewidth: float = 1.5


@contextmanager
def picture(
    path: Path,
    title: str,
    mosaic: str | list[list[str]],
    size: tuple[float, float] = (6.8, 5.6),
    **grid: Any,
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its panels in the order of the mosaic; written at the end.

    mosaic: the name of the panel in each cell, as matplotlib takes it: `AB;AC`. size: of one cell,
    in inches. grid: `width_ratios`.

    Raises:
        BenchError: no matplotlib, or the picture cannot be written.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None
    plt.switch_backend("Agg")
    rows = mosaic.split(";") if isinstance(mosaic, str) else mosaic
    inches = (size[0] * len(rows[0]), size[1] * len(rows))
    figure, panels = plt.subplot_mosaic(mosaic, figsize=inches, layout="constrained", **grid)
    figure.suptitle(title, fontsize=FONT)
    try:
        yield figure, list(panels.values())
        _save(figure, path)
    finally:
        plt.close(figure)


def mosaic(count: int, columns: int) -> list[list[str]]:
    """Names of so many panels in rows; what stays empty is a dot, as matplotlib takes it."""
    columns = min(count, columns)
    names = [str(number) for number in range(count)] + ["."] * (-count % columns)
    return [names[start : start + columns] for start in range(0, len(names), columns)]


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_DPI, facecolor="white")
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot be written ({error})") from None


def where_measured(conditions: Mapping[str, Any]) -> str:
    """Machine and versions, for a title's second line."""
    kernel = (conditions.get("versions") or {}).get("kernel", "?")
    return f"{machine_in(conditions)}, Linux {kernel}, vLLM {vllm_in(conditions, 'none')}"


def lines(
    panel: Any,
    styles: Mapping[Key, Style],
    at: Sequence[float],
    spread: Callable[[Key, Any], Spread | None],
    scale: float = 1.0,
    band: bool = False,
) -> None:
    """A line per style through the medians `at` each place, with whiskers or a band from low to
    high; no point where the spread is None.
    """
    for key, style in styles.items():
        places, found = _known(at, [spread(key, one) for one in at])
        if not found:
            continue
        look = asdict(style)
        middles = [one.median / scale for one in found]
        if not band:
            panel.errorbar(places, middles, yerr=_whiskers(found, scale), capsize=3, **look)
            continue
        panel.plot(places, middles, **look)
        low, high = [one.low / scale for one in found], [one.high / scale for one in found]
        panel.fill_between(places, low, high, color=style.color, alpha=0.13, linewidth=0)


def bars(
    panel: Any,
    styles: Mapping[Key, Style],
    groups: Mapping[str, Any],
    spread: Callable[[Key, Any], Spread | None],
    scale: float = 1.0,
    form: str = "{:.1f}",
) -> None:
    """A bar per group and style, side by side, with whiskers and the median's number.

    groups: the name below each group → what `spread` is called with. A style without any spread
    has no place.
    """
    spreads = {key: [spread(key, one) for one in groups.values()] for key in styles}
    series = [(styles[key], found) for key, found in spreads.items() if any(found)]
    width, highest = 0.8 / max(1, len(series)), 0.0
    for index, (style, all_spreads) in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width
        places, found = _known([group + shift for group in range(len(groups))], all_spreads)
        middles = [one.median / scale for one in found]
        look = {"color": style.color, "label": style.label, "capsize": 3}
        made = panel.bar(places, middles, width * 0.9, yerr=_whiskers(found, scale), **look)
        panel.bar_label(made, map(form.format, middles), padding=3, fontsize=FONT - 2)
        highest = max(highest, *(one.high / scale for one in found))
    if not highest:
        panel.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
    panel.set_xticks(range(len(groups)), groups, fontsize=FONT)
    panel.set_xlim(-0.6, len(groups) - 0.4)
    panel.set_ylim(0, highest * 1.15 or 1.0)


def _known(
    at: Iterable[float], spreads: Iterable[Spread | None]
) -> tuple[list[float], list[Spread]]:
    """The places and the spreads of those that were measured."""
    known = [(place, one) for place, one in zip(at, spreads, strict=True) if one is not None]
    return [place for place, _ in known], [one for _, one in known]


def _whiskers(spreads: Sequence[Spread], scale: float) -> list[list[float]]:
    """Lengths below and above the medians, as matplotlib takes them."""
    below = [(one.median - one.low) / scale for one in spreads]
    return [below, [(one.high - one.median) / scale for one in spreads]]


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
