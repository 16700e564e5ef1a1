# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal: medians of every case, the models of vLLM's table, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.gpu.models import model_blocks
from vllm_nvmeof_bench.gpu.samples import Sample, median_of
from vllm_nvmeof_bench.tier.report import number_table, print_targets
from vllm_nvmeof_offload.units import format_bytes

__all__ = ["arms_of", "print_conditions", "print_samples", "print_targets"]

_ORDER = ("contiguous", "dma", "dma_overlap", "kernel", "auto", "vllm")
_TITLES = {
    "transfer": "One transfer of many blocks, GB/s",
    "few": "Few small fragments, GB/s",
    "both": "Both directions at once, and each alone, GB/s",
    "mix": "Both directions at once, by the share of loads, GB/s",
    "submit": "Host time of one submit, µs",
    "sweep": "The copy kernel by its thread blocks, GB/s",
    "sweep_matrix": "bf16 matrix products beside the kernel by its thread blocks, steps/s",
    "crc": "CRC-32C by the GPU, GB/s; blocks: the pieces of a chunk",
    "crc_join": "Host time to join the parts of one chunk's CRC, µs",
    "crc_matrix": "bf16 matrix products beside the CRC, steps/s",
}


def arms_of(samples: Sequence[Sample], case: str) -> list[str]:
    """Those that were measured, the known ones in their order."""
    found = dict.fromkeys(one.arm for one in samples if one.case == case)
    return [arm for arm in _ORDER if arm in found] + [arm for arm in found if arm not in _ORDER]


def print_samples(console: Console, samples: Sequence[Sample]) -> None:
    """A table a case that has samples."""
    rounds = max((one.round for one in samples), default=-1) + 1
    for case, title in _TITLES.items():
        if any(one.case == case for one in samples):
            console.print(_case_table(samples, case, f"{title}; median of {rounds} rounds"))
    if any(one.case == "model" for one in samples):
        console.print(_model_table(samples))
    for case in ("disk", *sorted({s.case for s in samples if s.case.startswith("loop_")})):
        chosen = [one for one in samples if one.case == case]
        if chosen:
            console.print(_arm_table(chosen, case))


def _cell(value: float | None, form: str = "{:.1f}") -> str:
    return "–" if value is None else form.format(value)


def _case_table(samples: Sequence[Sample], case: str, title: str) -> Table:
    arms = arms_of(samples, case)
    table = number_table(title, "direction", "block", "blocks", *arms)
    keys = {(s.direction, s.block_bytes, s.count) for s in samples if s.case == case}
    before = ""
    for direction, size, count in sorted(keys):
        wanted = {"case": case, "direction": direction, "block_bytes": size, "count": count}
        cells = [_cell(median_of(samples, arm=arm, **wanted)) for arm in arms]
        shown = direction if direction != before else ""
        table.add_row(shown, format_bytes(size), str(count), *cells)
        before = direction
    return table


def _model_table(samples: Sequence[Sample]) -> Table:
    """Two rows a model. Fragment: a tensor a layer, keys and values apart; block: all layers."""
    arms = arms_of(samples, "model")
    names = [f"{direction} {arm}" for direction in ("store", "load") for arm in arms]
    title = "Transfers of the models of vLLM's table, GB/s; fragments: a tensor a layer"
    table = number_table(title, "model", "TP", "", "bytes", *names)
    for one in model_blocks():
        name = one.name.split("/")[-1]
        for what, size in (("fragment", one.fragment_bytes), ("block", one.block_bytes)):
            cells = [
                _cell(
                    median_of(samples, case="model", arm=arm, direction=direction, block_bytes=size)
                )
                for direction in ("store", "load")
                for arm in arms
            ]
            table.add_row(name, str(one.tensor_parallel), what, format_bytes(size), *cells)
            name = ""
    return table


def _arm_table(chosen: Sequence[Sample], case: str) -> Table:
    """Loops: steps/s, and against alone. Disk: GB/s of payload."""
    if case == "disk":
        title, first = "Loads from disk to the GPU, GB/s", "of"
    else:
        title, first = f"{case.removeprefix('loop_')}: steps/s of a loop beside copies", "loop"
    arms = list(dict.fromkeys(one.arm for one in chosen))
    table = number_table(title, first, *arms)
    for count in sorted({one.count for one in chosen}):
        size = next(one.block_bytes for one in chosen if one.count == count)
        values = [median_of(chosen, arm=arm, count=count) for arm in arms]
        alone = median_of(chosen, arm="alone", count=count)
        cells = [
            _cell(value, "{:.2f}") + (f" [dim]{value / alone:.3f}[/]" if alone and value else "")
            for value in values
        ]
        table.add_row(f"{count} × {format_bytes(size)}" if size else "steps/s", *cells)
    return table


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """The GPU, its link and driver, what vLLM's arm was, failed arms: a few lines."""
    gpu, link = conditions.get("gpu", {}), conditions.get("pcie") or {}
    pcie = f", PCIe {link.get('speed')} GT/s x{link.get('width')}" if link else ""
    driver = conditions.get("driver", "?")
    console.print(
        f"{gpu.get('name', '?')} ({gpu.get('arch', '?')}){pcie}, driver {driver}, NUMA node "
        f"{gpu.get('numa_node')}",
        highlight=False,
    )
    console.print(f"vLLM's own code: {conditions.get('vllm_arm', '?')}", highlight=False)
    for arm, error in conditions.get("failed_arms", {}).items():
        console.print(f"left out: {arm}: {error}", highlight=False, markup=False)
    took = conditions.get("seconds", {})
    words = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items())
    load = conditions.get("load_average_at_end", ["?"])[0]
    console.print(f"set-up: {words}; load average at the end {load}", highlight=False)
