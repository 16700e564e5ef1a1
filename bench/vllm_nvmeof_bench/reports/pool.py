# SPDX-License-Identifier: Apache-2.0
"""The `bench pool` report: tables, and goals for ratios of medians over rounds.

The worst of a goal's block sizes decides and is named. "The best of fio, threads and ring" is the
largest of their medians for that block size. A goal that lacks samples counts as not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Report, Table, arm_columns, by, compared, ratios_of
from vllm_nvmeof_bench.results import Figure, bound, distinct, ratio_of_medians, select, worst
from vllm_nvmeof_offload.units import KIB, MIB

ARMS = ("ours", "ours_threads", "fio", "ring", "ring_slots", "vllm_fs")
#: Kind of measurement → the cases that it measures.
KINDS: dict[str, tuple[str, ...]] = {
    "batch_write": ("batch_write",),
    "batch_read": ("batch_read",),
    "mixed": ("mixed",),
    "single_write": ("single_write",),
    "single_read": ("single_read",),
    "beside": ("read_beside_writes", "writes_beside_read"),
    "writes_alone": ("writes_alone",),
}
CASES = tuple(case for cases in KINDS.values() for case in cases)
_BESIDE = "read_beside_writes"
_RIVALS = ("fio", "ours_threads", "ring")
_FS = "vllm_fs"
_RATE, _CPU = "mib_per_s", "cpu_s_per_gib"
_LARGE = 512 * KIB


@dataclass(frozen=True)
class Sample:
    """One arm, case, block size and round; MiB and GiB count only payload. cpu_s_per_gib: None if
    reads and writes cannot be separated. p50_us, p99_us: None if the arm reports no latency."""

    arm: str
    case: str
    block_bytes: int
    round: int
    mib_per_s: float
    cpu_s_per_gib: float | None
    p50_us: float | None
    p99_us: float | None


def _tables(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Iterator[Table]:
    rounds = max((one.round for one in samples), default=0) + 1
    rates = [one for one in samples if one.case != _BESIDE]
    beside = select(samples, case=_BESIDE)
    for title, some, measure, form in (
        ("MiB/s", rates, _RATE, "{:,.0f}"),
        ("CPU seconds per GiB", rates, _CPU, "{:.3f}"),
        ("demand reads during writes, p50 latency in µs", beside, "p50_us", "{:,.0f}"),
        ("demand reads during writes, p99 latency in µs", beside, "p99_us", "{:,.0f}"),
    ):
        found = {(one.case, one.block_bytes) for one in some}
        rows = [
            {"case": case, "block_bytes": block}
            for case, block in sorted(found, key=lambda at: (CASES.index(at[0]), at[1]))
        ]
        arms = [arm for arm in ARMS if select(some, arm=arm)]
        columns = [by("case"), by("block_bytes", "block", results.size_name)]
        columns += arm_columns(some, arms, measure, form)
        yield Table(f"{title}, median of {rounds} rounds", columns, rows, grouped=True)
    yield compared(
        "Paired by round",
        [
            row
            for measure, what in ((_RATE, "MiB/s"), (_CPU, "CPU s/GiB"))
            for case, block in sorted({(one.case, one.block_bytes) for one in rates})
            for arm in ("ours", "ours_threads")
            for row in ratios_of(
                rates, measure, arm, _FS, measure == _CPU,
                f"{what}, {case.replace('_', ' ')}, {results.size_name(block)}",
                case=case, block_bytes=block,
            )
        ],
    )  # fmt: skip


def goals(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> list[results.Goal]:
    """Return the goals for our arm relative to its rivals."""

    def ratio(
        case: str, block: int = 2 * MIB, measure: str = _RATE, rival: str = _FS, base: str = ""
    ) -> Figure | None:
        """Return the ratio of ours in `case` to a rival's in `base`, which is `case` if empty."""
        above = {"arm": "ours", "case": case, "block_bytes": block}
        below = {"arm": rival, "case": base or case, "block_bytes": block}
        where = f"{results.size_name(block)}, {rival}"
        return ratio_of_medians(samples, measure, above, below, where)

    def best(case: str) -> Figure | None:
        return worst(ratio(case, block, rival=rival) for block in large for rival in _RIVALS)

    def like(case: str) -> Figure | None:
        return worst(ratio(case, block, rival="ring_slots") for block in large)

    large = [block for block in distinct(samples, "block_bytes") if block >= _LARGE]
    large_reads = worst(ratio("batch_read", block) for block in large)
    kept = ratio("writes_beside_read", rival="ours", base="writes_alone")
    write_cpu, read_cpu = (ratio(case, measure=_CPU) for case in ("batch_write", "batch_read"))
    small = ratio("batch_write", 64 * KIB)
    return [
        bound("batch read ≥ 512 KiB / best of fio, threads, ring", "≥", 0.94, best("batch_read")),
        bound("batch write ≥ 512 KiB / best of fio, threads, ring", "≥", 0.94, best("batch_write")),
        bound("batch read ≥ 512 KiB / ring with our slots", "≥", 0.94, like("batch_read")),
        bound("batch write ≥ 512 KiB / ring with our slots", "≥", 0.94, like("batch_write")),
        bound("batch write of 2 MiB / fs tier", "≥", 1.8, ratio("batch_write")),
        bound("batch write of 64 KiB / fs tier", "≥", 4.0, small),
        bound("batch read ≥ 512 KiB / fs tier", "≥", 1.0, large_reads),
        bound("one 128 MiB job of 2 MiB blocks, write / fs tier", "≥", 3.0, ratio("single_write")),
        bound("one 128 MiB job of 2 MiB blocks, read / fs tier", "≥", 1.2, ratio("single_read")),
        bound("CPU s/GiB, 2 MiB batch write / fs tier", "≤", 0.1, write_cpu),
        bound("CPU s/GiB, 2 MiB batch read / fs tier", "≤", 0.5, read_cpu),
        bound("p99 of a read during writes / fs tier", "≤", 0.5, ratio(_BESIDE, measure="p99_us")),
        bound("our writes beside reads / alone", "≥", 0.7, kept),
    ]


REPORTS = (
    Report(
        "pool",
        "The pool's I/O beside fio, a bare ring and vLLM's fs tier",
        Sample,
        _tables,
        goals=goals,
        goals_title="Goals: ratios of medians",
    ),
)
