# SPDX-License-Identifier: Apache-2.0
"""What must be reached, computed from samples alone: medians over rounds, ratios of medians.

Where a target covers several block sizes, the worst one decides and is named. "The best of
fio, threads and ring" is the largest of their medians at that block size. A target whose
samples are not all there is neither reached nor missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vllm_nvmeof_bench.pool.samples import Sample, median_of, select, size_name
from vllm_nvmeof_offload.units import KIB, MIB

__all__ = ["Row", "evaluate", "missed"]

_RIVALS = ("fio", "ours_threads", "ring")
_LARGE = 512 * KIB


@dataclass(frozen=True)
class Row:
    """One target. at_least: else `limit` is an upper bound. n: samples of the arm with the
    fewest. where: the block size and rival that decided.
    """

    target: str
    at_least: bool
    limit: float
    unit: str = ""
    measured: float | None = None
    n: int = 0
    where: str = ""

    @property
    def required(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{self.unit}"

    @property
    def reached(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass(frozen=True)
class _Ratio:
    value: float
    n: int
    where: str


def evaluate(samples: Sequence[Sample], manager: Mapping[str, Any] | None) -> list[Row]:
    """The table, in the order of the requirements."""
    rows = [
        _of(
            Row(
                f"{case.replace('_', ' ')} ≥ 512 KiB / best of fio, threads, ring",
                True,
                0.94,
            ),
            _worst(_best_ratios(samples, case)),
        )
        for case in ("batch_read", "batch_write")
    ]
    rows += [
        _of(
            Row(f"batch write of {size_name(block)} / fs tier", True, limit),
            _against_fs(samples, "batch_write", block),
        )
        for block, limit in ((2 * MIB, 1.8), (64 * KIB, 4.0))
    ]
    large = [_against_fs(samples, "batch_read", block) for block in _large_blocks(samples)]
    rows.append(_of(Row("batch read ≥ 512 KiB / fs tier", True, 1.0), _worst(large)))
    for case, what, limit in (("single_write", "write", 3.0), ("single_read", "read", 1.2)):
        row = Row(f"one 128 MiB job of 2 MiB blocks, {what} / fs tier", True, limit)
        rows.append(_of(row, _against_fs(samples, case, 2 * MIB)))
    for case, what, limit in (("batch_write", "write", 0.1), ("batch_read", "read", 0.5)):
        row = Row(f"CPU s/GiB, 2 MiB batch {what} / fs tier", False, limit)
        rows.append(_of(row, _against_fs(samples, case, 2 * MIB, "cpu_s_per_gib")))
    row = Row("p99 of a read beside writes / fs tier", False, 0.5)
    rows.append(_of(row, _against_fs(samples, "read_beside_writes", 2 * MIB, "p99_us")))
    row = Row("our writes beside reads / alone", True, 0.7)
    beside = ("ours", "writes_beside_read"), ("ours", "writes_alone")
    rows.append(_of(row, _ratio(samples, *beside, 2 * MIB, "mib_per_s")))
    return rows + _manager_rows(manager)


class _Judged(Protocol):
    @property
    def reached(self) -> bool | None: ...


_J = TypeVar("_J", bound=_Judged)


def missed(rows: Sequence[_J]) -> list[_J]:
    """Of any benchmark's targets, those that were measured and not reached."""
    return [row for row in rows if row.reached is False]


def _of(row: Row, ratio: _Ratio | None) -> Row:
    if ratio is None:
        return row
    return Row(row.target, row.at_least, row.limit, "", ratio.value, ratio.n, ratio.where)


def _ratio(
    samples: Sequence[Sample],
    ours: tuple[str, str],
    theirs: tuple[str, str],
    block_bytes: int,
    field: str,
) -> _Ratio | None:
    above = median_of(samples, *ours, block_bytes, field)
    below = median_of(samples, *theirs, block_bytes, field)
    if above is None or not below:
        return None
    n = min(len(select(samples, *one, block_bytes)) for one in (ours, theirs))
    return _Ratio(above / below, n, f"{size_name(block_bytes)}, {theirs[0]}")


def _against_fs(
    samples: Sequence[Sample], case: str, block_bytes: int, field: str = "mib_per_s"
) -> _Ratio | None:
    return _ratio(samples, ("ours", case), ("vllm_fs", case), block_bytes, field)


def _best_ratios(samples: Sequence[Sample], case: str) -> list[_Ratio | None]:
    """Ours over the fastest rival, a block size at a time; None where one is missing."""
    found = []
    for block_bytes in _large_blocks(samples):
        ratios = [
            _ratio(samples, ("ours", case), (rival, case), block_bytes, "mib_per_s")
            for rival in _RIVALS
        ]
        whole = [ratio for ratio in ratios if ratio is not None]
        found.append(_worst(whole) if len(whole) == len(_RIVALS) else None)
    return found


def _worst(ratios: Sequence[_Ratio | None]) -> _Ratio | None:
    whole = [ratio for ratio in ratios if ratio is not None]
    if not whole or len(whole) < len(ratios):
        return None
    return min(whole, key=lambda ratio: ratio.value)


def _large_blocks(samples: Sequence[Sample]) -> list[int]:
    return sorted({one.block_bytes for one in samples if one.block_bytes >= _LARGE})


def _manager_rows(manager: Mapping[str, Any] | None) -> list[Row]:
    given = manager or {}
    rows = []
    for target, key, limit, unit in (
        ("manager: time per key looked up", "lookup_us", 1.0, " µs"),
        ("manager: memory per entry, 1 M entries", "bytes_per_entry", 400.0, " B"),
        ("manager: longest collection pause", "gc_pause_ms_max", 20.0, " ms"),
    ):
        value = given.get(key)
        n = 0 if value is None else 1
        rows.append(Row(target, False, limit, unit, value, n))
    return rows
