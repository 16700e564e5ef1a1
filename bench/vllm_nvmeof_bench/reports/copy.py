# SPDX-License-Identifier: Apache-2.0
"""The `bench copy` report: tables, and goals for medians over rounds. The worst size, count or
direction decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench.report import (
    Column,
    Report,
    Table,
    arm_columns,
    by,
    compared,
    ratios_of,
    rows_of,
)
from vllm_nvmeof_bench.results import Figure, Goal, bound, distinct, median_of, select, worst
from vllm_nvmeof_offload.copy.calibration import KERNEL_MARGIN
from vllm_nvmeof_offload.units import KIB, format_bytes


@dataclass(frozen=True)
class Sample:
    """One arm, case and round. direction: store, load or both. value: µs for `submit` and
    `crc_join`, steps/s for `loop_…` and `…_matrix`, otherwise GB/s (1e9 bytes/s)."""

    case: str
    arm: str
    direction: str
    block_bytes: int
    count: int
    round: int
    value: float


_LARGE = 512 * KIB
_SMALL = (16 * KIB, 64 * KIB)
#: Launches are paced at a 100 Gbit/s link's rate; at least the minimum counts as reaching it.
_BESIDE_CRC = "bf16 matrix products beside CRC-32C at 12.5 GB/s / alone"
_CRC_GB_PER_S_MIN = 12.4
_Key = tuple[str, str, int, int]  # case, direction, bytes per block, blocks


def goals(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals; a figure's `where` names the size, count and direction that decided."""
    keys = _keys(samples)

    def value(key: _Key, arm: str) -> float | None:
        return median_of(samples, "value", arm=arm, **_fields(key))

    def figure(key: _Key, above: float | None, below: float | None = 1.0) -> Figure | None:
        rounds = len(distinct(select(samples, **_fields(key)), "round"))
        return Figure(above / below, rounds, _where(key)) if above is not None and below else None

    def over(key: _Key, above: str, below: str) -> Figure | None:
        return figure(key, value(key, above), value(key, below))

    def better(key: _Key) -> Figure | None:
        """Compare auto with DMA or the kernel's rate / `KERNEL_MARGIN`, whichever is higher."""
        dma, kernel = value(key, "dma"), value(key, "kernel")
        known = dma is not None and kernel is not None
        return figure(key, value(key, "auto"), max(dma, kernel / KERNEL_MARGIN) if known else None)

    def both(key: _Key) -> Figure | None:
        """Compare concurrent copies in both directions with the mean of each direction alone."""
        case, _, size, count = key
        alone = [value((case, one, size, count // 2), "dma") for one in ("store", "load")]
        return figure(key, value(key, "dma"), None if None in alone else sum(alone) / 2)

    def deciding(found: Iterable[Figure | None], by: Callable[..., Figure] = min) -> Figure | None:
        return worst([one for one in found if one is not None], by)

    transfers = [key for key in keys if key[0] == "transfer"]
    large = [key for key in transfers if key[2] >= _LARGE]
    small = [key for key in transfers if _SMALL[0] <= key[2] <= _SMALL[1]]
    choices = [key for key in keys if key[0] in ("transfer", "few")]
    two_ways = deciding(both(key) for key in keys if key[:2] == ("both", "both"))
    took = deciding((figure(key, value(key, "dma")) for key in keys if key[0] == "submit"), max)
    chosen = deciding(map(better, choices))
    one_copy = deciding(over(key, "dma", "contiguous") for key in large)
    theirs = deciding(over(key, "auto", "vllm") for key in small)
    loop = over(("loop_matrix", "both", 0, 0), "dma", "alone")
    auto = f"auto / the better of DMA and kernel ÷ {KERNEL_MARGIN:g}"
    return [
        bound("DMA of blocks ≥ 512 KiB / one contiguous copy", "≥", 0.97, one_copy),
        bound("both directions at once / one direction, 2 MiB", "≥", 1.6, two_ways),
        bound(auto, "≥", 0.95, chosen),
        bound("auto / vLLM's own code, 16 to 64 KiB", "≥", 1.0, theirs),
        bound("bf16 matrix products beside copies by DMA / alone", "≥", 0.97, loop),
        bound(_BESIDE_CRC, "≥", 0.99, _beside_crc(samples)),
        bound("host time to submit 1000 blocks", "≤", 50, took, " µs"),
    ]


def _beside_crc(samples: Sequence[Sample]) -> Figure | None:
    """Return the best ratio of the matrix product's rate during a fast enough launch to its rate
    alone."""
    beside = select(samples, case="crc_beside")
    products = select(samples, case="crc_matrix")
    alone = median_of(products, "value", arm="alone")
    found = []
    for arm in distinct(beside, "arm"):
        rate = median_of(beside, "value", arm=arm)
        steps = median_of(products, "value", arm=arm)
        if rate is not None and rate >= _CRC_GB_PER_S_MIN and steps is not None and alone:
            rounds = len(distinct(select(products, arm=arm), "round"))
            found.append(Figure(steps / alone, rounds, arm))
    return worst(found, max)


def _keys(samples: Iterable[Sample]) -> list[_Key]:
    return sorted({(one.case, one.direction, one.block_bytes, one.count) for one in samples})


def _fields(key: _Key) -> dict[str, object]:
    return dict(zip(("case", "direction", "block_bytes", "count"), key, strict=True))


def _where(key: _Key) -> str:
    _, direction, size, count = key
    return f"{count} × {format_bytes(size)}, {direction}" if count else direction


_ORDER = ("contiguous", "dma", "dma_overlap", "kernel", "auto", "vllm")
_TITLES = {
    "transfer": "One transfer of many blocks, GB/s",
    "few": "Few small fragments, GB/s",
    "both": "Both directions at once, and each alone, GB/s",
    "mix": "Both directions at once, by the share of loads, GB/s",
    "submit": "Host time of one submit, µs",
    "crc": "CRC-32C by the GPU, GB/s; blocks: the pieces of a chunk",
    "crc_join": "Host time to join the parts of one chunk's CRC, µs",
    "crc_beside": "CRC-32C by the GPU at the rate of a fast link, beside a product, GB/s",
    "crc_matrix": "bf16 matrix products beside CRC-32C at that rate, steps/s",
}


def arms_of(samples: Iterable[Sample]) -> list[str]:
    """Return the measured arms: first the known ones in a fixed order, then others."""
    found = distinct(samples, "arm")
    return [arm for arm in _ORDER if arm in found] + [arm for arm in found if arm not in _ORDER]


def _tables(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Iterator[Table]:
    rounds = max((one.round for one in samples), default=-1) + 1
    for case, title in _TITLES.items():
        chosen = select(samples, case=case)
        columns = [
            by("direction"),
            by("block_bytes", "block", format_bytes),
            by("count", "blocks"),
            *arm_columns(chosen, arms_of(chosen), "value", "{:.1f}"),
        ]
        rows = rows_of(chosen, "direction", "block_bytes", "count")
        yield Table(f"{title}; median of {rounds} rounds", columns, rows, grouped=True)
    transfers = select(samples, case="transfer")
    yield compared(
        "GB/s, paired by round",
        [
            row
            for _, direction, size, count in _keys(transfers)
            for row in ratios_of(
                transfers, "value", "auto", "vllm", False, f"{direction}, {format_bytes(size)}",
                direction=direction, block_bytes=size, count=count,
            )
        ],
    )  # fmt: skip
    for case in ("disk", *sorted({s.case for s in samples if s.case.startswith("loop_")})):
        if chosen := select(samples, case=case):
            yield _arm_table(chosen, case)


def _arm_table(chosen: Sequence[Sample], case: str) -> Table:
    """Return a table of loops, in steps/s and as ratios to "alone", or of disk loads, in GB/s."""
    title, first = f"{case.removeprefix('loop_')}: steps/s of a loop beside copies", "loop"
    if case == "disk":
        title, first = "Loads from disk to the GPU, GB/s", "of"

    def size_of(row: dict[str, Any]) -> str:
        size = select(chosen, **row)[0].block_bytes
        return f"{row['count']} × {format_bytes(size)}" if size else "steps/s"

    def of_alone(arm: str) -> Callable[[Any], float | None]:
        def get(row: dict[str, Any]) -> float | None:
            value, alone = (median_of(chosen, "value", arm=one, **row) for one in (arm, "alone"))
            return value / alone if value is not None and alone else None

        return get

    arms = distinct(chosen, "arm")
    columns = [Column(first, size_of), *arm_columns(chosen, arms, "value", "{:.2f}")]
    if "alone" in arms:
        columns += [Column(f"{arm} / alone", of_alone(arm), "{:.3f}") for arm in arms]
    return Table(title, columns, rows_of(chosen, "count"))


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    gpu, link = conditions.get("gpu", {}), conditions.get("pcie") or {}
    pcie = f", PCIe {link.get('speed')} GT/s x{link.get('width')}" if link else ""
    number = conditions.get("driver")  # 13.0 is 13000
    cuda = "?" if number is None else f"{number // 1000}.{number % 1000 // 10}"
    yield (
        f"{gpu.get('name', '?')} ({gpu.get('arch', '?')}){pcie}, driver for CUDA {cuda}, NUMA node "
        f"{gpu.get('numa_node')}; vLLM's own code: {conditions.get('vllm_arm', '?')}"
    )
    for arm, error in conditions.get("failed_arms", {}).items():
        yield f"left out: {arm}: {error}"
    took = conditions.get("seconds", {})
    yield "set-up: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items())


REPORTS = (
    Report(
        "copy",
        "Copies between a GPU and pinned memory",
        Sample,
        _tables,
        lines=_lines,
        goals=goals,
        goals_title="Goals: the worst size, count or direction decides",
    ),
)
