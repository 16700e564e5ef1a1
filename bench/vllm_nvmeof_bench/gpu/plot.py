# SPDX-License-Identifier: Apache-2.0
"""The samples as one picture (PNG); matplotlib is imported only for it.

Lines are medians over rounds, bands reach from the smallest to the largest sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.gpu.report import arms_of
from vllm_nvmeof_bench.gpu.samples import Sample, median_of
from vllm_nvmeof_bench.picture import pyplot, save
from vllm_nvmeof_bench.pool.samples import size_name
from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["plot"]

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
_STYLES = {
    "contiguous": ("#000000", "", "one contiguous copy"),
    "dma": ("#0072B2", "o", "DMA"),
    "dma_overlap": ("#56B4E9", "s", "DMA, overlap hint"),
    "kernel": ("#D55E00", "v", "kernel"),
    "auto": ("#009E73", "D", "auto"),
    "vllm": ("#999999", "^", "vLLM's own code"),
}
_LOOP_ARMS = ("dma", "dma_overlap", "kernel")


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Draw the picture, of the cases that have samples.

    Raises:
        BenchError: nothing to draw, no matplotlib, or the file cannot be written.
    """
    plt = pyplot()
    if not samples:
        raise BenchError("there is nothing to draw: the file has no samples")
    figure, axes = plt.subplots(2, 2, figsize=(13.6, 10), layout="constrained")
    for panel, direction in zip(axes[0], ("store", "load"), strict=True):
        _sizes_panel(panel, samples, direction)
    _mix_panel(axes[1][0], samples)
    _loops_panel(axes[1][1], samples)
    figure.suptitle(_title(conditions), fontsize=11)
    save(figure, path)


def _title(conditions: Mapping[str, Any]) -> str:
    gpu, versions = conditions.get("gpu", {}), conditions.get("versions", {})
    return (
        f"Copies between {gpu.get('name', '?')} and pinned memory, driver "
        f"{conditions.get('driver', '?')}; vLLM {versions.get('vllm', 'none')}"
    )


def _sizes_panel(panel: Any, samples: Sequence[Sample], direction: str) -> None:
    chosen = [s for s in samples if s.case == "transfer" and s.direction == direction]
    for arm in arms_of(chosen, "transfer"):
        _line(panel, [s for s in chosen if s.arm == arm], arm, lambda one: one.block_bytes)
    sizes = sorted({one.block_bytes for one in chosen})
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [size_name(size) for size in sizes], rotation=45, ha="right")
    panel.minorticks_off()
    panel.set_xlabel("bytes of a block")
    way = "GPU to CPU" if direction == "store" else "CPU to GPU"
    panel.set_title(f"{direction} ({way}): one transfer of many blocks")
    _finish(panel, "GB/s", bool(chosen))


def _mix_panel(panel: Any, samples: Sequence[Sample]) -> None:
    chosen = [s for s in samples if _loads_percent(s) is not None]
    for arm in arms_of(chosen, "both"):
        _line(panel, [s for s in chosen if s.arm == arm], arm, _loads_percent)
    panel.set_xlabel("share of loads, per cent of the blocks")
    panel.set_title("both directions at once")
    _finish(panel, "GB/s, both together", bool(chosen))


def _loads_percent(one: Sample) -> int | None:
    """Where a sample of `both` or `mix` stands; None: none of these."""
    if one.case == "mix":
        return int(one.direction.removeprefix("load ").removesuffix("%"))
    if one.case == "both":
        return {"store": 0, "both": 50, "load": 100}[one.direction]
    return None


def _loops_panel(panel: Any, samples: Sequence[Sample]) -> None:
    """Steps/s beside copies, of what the loop does alone."""
    loops = sorted({s.case for s in samples if s.case.startswith("loop_")})
    for at, loop in enumerate(loops):
        alone = median_of(samples, case=loop, arm="alone")
        for number, arm in enumerate(_LOOP_ARMS):
            value = median_of(samples, case=loop, arm=arm)
            if alone and value is not None:
                colour, _, label = _STYLES[arm]
                place = at + 0.26 * (number - 1)
                panel.bar(place, value / alone, 0.24, color=colour, label="" if at else label)
                note = {"xytext": (0, -12), "textcoords": "offset points", "fontsize": 9}
                top = (place, value / alone)
                panel.annotate(f"{top[1]:.3f}", top, ha="center", color="white", **note)
    panel.axhline(1, color="#000000", linewidth=1, linestyle=":")
    names = {"matrix": "bf16 matrix product", "memory": "adding arrays"}
    shown = [loop.removeprefix("loop_") for loop in loops]
    panel.set_xticks(range(len(loops)), [names.get(name, name) for name in shown])
    panel.set_title("compute beside full-rate copies both ways")
    _finish(panel, "steps/s, of those alone", bool(loops), {"loc": "upper center", "ncol": 3})
    panel.set_ylim(top=1.2)


def _line(panel: Any, samples: Sequence[Sample], arm: str, where: Any) -> None:
    colour, marker, label = _STYLES.get(arm, ("#CC79A7", "x", arm))
    places = sorted({where(one) for one in samples})
    values = [[one.value for one in samples if where(one) == place] for place in places]
    middles = [median_of([s for s in samples if where(s) == place]) for place in places]
    style = {"linestyle": "--"} if arm == "contiguous" else {"marker": marker}
    panel.plot(places, middles, color=colour, label=label, markersize=5, **style)
    panel.fill_between(
        places, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15
    )


def _finish(panel: Any, unit: str, measured: bool, legend: Mapping[str, Any] | None = None) -> None:
    panel.set_ylabel(unit)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    if measured:
        panel.legend(fontsize=9, **(legend or {}))
    else:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
