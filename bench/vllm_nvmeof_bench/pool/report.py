# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench pool`: tables, goals, picture.

Goals are ratios of medians over rounds. Where a goal covers several block sizes, the worst one
decides and is named. "The best of fio, threads and ring" is the largest of their medians at that
block size. A goal whose samples are not all there is neither reached nor missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import plots, results
from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.results import BenchError, Figure, bound, ratio_of_medians, select, worst
from vllm_nvmeof_bench.settings import check_names, check_positive, option, size_option
from vllm_nvmeof_bench.tables import Column, Table, arm_columns, disk_in, load_in
from vllm_nvmeof_offload.units import GIB, KIB, MIB

ARMS = ("ours", "ours_threads", "fio", "ring", "ring_slots", "vllm_fs")
#: One kind of measurement → the cases that it yields.
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
#: Measured by every arm; the rest only by those that take jobs.
FLAT_KINDS = frozenset({"batch_write", "batch_read", "mixed"})
_BESIDE_KINDS = frozenset({"beside", "writes_alone"})
_FLAT_ARMS = frozenset({"fio", "ring", "ring_slots"})
_BLOCKS = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)


@dataclass(frozen=True)
class Settings:
    """One run. Less than 1 GiB per round measures how an engine starts, not how it runs.

    Ours run with the product's configuration, as the conditions say. queued_bytes: what the
    saturating writer keeps queued. episode_bytes: what it may write before it pauses and the fs
    tier's files, which nothing else bounds, are deleted. reads: demand reads per round.
    settle_s: the disk's time after a deletion, before the next measurement.
    """

    directory: Path = option(
        Path("build/bench/disk"), "The disk to measure: a directory on it.", flag="--dir"
    )
    arms: tuple[str, ...] = option(ARMS, "Arms to measure.")
    cases: tuple[str, ...] = option(CASES, "Cases to measure.")
    blocks: tuple[int, ...] = size_option(_BLOCKS, "Block sizes.")
    rounds: int = option(5, "Samples of everything.", min=1)
    bytes_per_round: int = size_option(GIB, "Bytes that a batch moves.")
    depth: int = option(32, "Blocks in flight of fio and the ring.")
    seed: int = option(1, "Seed of the random bytes and of the blocks that are read.")
    goals: bool = option(
        True,
        "Print the goals, and measure the manager, which has some.",
        recorded=False,
        flag="--targets/--no-targets",
    )
    single_bytes: int = 128 * MIB
    queued_bytes: int = 64 * MIB
    episode_bytes: int = GIB
    reads: int = 100
    read_gap_s: float = 0.02
    beside_block_bytes: int = 2 * MIB
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        check_names("arm", self.arms, ARMS)
        check_names("case", self.cases, CASES)
        check_positive(self, "blocks", "rounds", "depth", "reads")
        for block in self.blocks:
            if block < 4 * KIB or block % (4 * KIB):
                raise BenchError(f"block size {block}: a multiple of 4 KiB, for O_DIRECT")
            if self.bytes_per_round < 8 * block:
                raise BenchError(
                    f"{self.bytes_per_round} bytes per round are fewer than 8 blocks of {block}"
                )

    def kinds(self, arm: str, block_bytes: int) -> tuple[str, ...]:
        """The kinds of measurement that `arm` takes part in at this block size."""
        return tuple(
            kind
            for kind, cases in KINDS.items()
            if set(cases) & set(self.cases)
            and (kind in FLAT_KINDS or arm not in _FLAT_ARMS)
            and (kind not in _BESIDE_KINDS or block_bytes == self.beside_block_bytes)
        )

    def batch_blocks(self, block_bytes: int) -> int:
        return self.bytes_per_round // block_bytes

    def single_blocks(self, block_bytes: int) -> int:
        return max(1, self.single_bytes // block_bytes)

    def blocks_needed(self, block_bytes: int) -> int:
        """Blocks that memory and storage must hold."""
        return max(self.batch_blocks(block_bytes), self.single_blocks(block_bytes))

    @property
    def disk_bytes_max(self) -> int:
        """The most bytes on the disk at any time: pool or flat file, and the fs tier's files."""
        data = max(self.blocks_needed(block) * (block + 8 * KIB) for block in self.blocks)
        fs_writes = max(self.bytes_per_round, self.single_bytes)
        if set(self.cases) & {"read_beside_writes", "writes_beside_read", "writes_alone"}:
            fs_writes = max(fs_writes, self.episode_bytes + 2 * self.queued_bytes)
        return data + (data + fs_writes if "vllm_fs" in self.arms else 0)


@dataclass(frozen=True)
class Sample:
    """One arm, case, block size and round. MiB and GiB of payload.

    cpu_s_per_gib: None where the CPU time of two directions cannot be told apart. Latencies: None
    where an arm reports none.
    """

    arm: str
    case: str
    block_bytes: int
    round: int
    mib_per_s: float
    cpu_s_per_gib: float | None
    p50_us: float | None
    p99_us: float | None


def tables(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    """Throughput, CPU time, and the demand read's latency."""
    rounds = max((one.round for one in samples), default=0) + 1
    of = f"median of {rounds} rounds"
    throughput = [one for one in samples if one.case != _BESIDE]
    beside = select(samples, case=_BESIDE)
    yield _table(f"MiB/s, {of}", throughput, _RATE)
    yield _table(f"CPU seconds per GiB, {of}", throughput, _CPU, "{:.3f}")
    if beside:
        yield _table(f"demand read beside writes, p50 in µs, {of}", beside, "p50_us")
        yield _table(f"demand read beside writes, p99 in µs, {of}", beside, "p99_us")


def _table(title: str, samples: Sequence[Sample], measure: str, form: str = "{:,.0f}") -> Table:
    found = sorted({(CASES.index(one.case), one.block_bytes) for one in samples})
    rows = [{"case": CASES[index], "block_bytes": block} for index, block in found]
    names = (
        Column("case", lambda row: row["case"]),
        Column("block", lambda row: results.size_name(row["block_bytes"])),
    )
    arms = [arm for arm in ARMS if select(samples, arm=arm)]
    return Table(title, [*names, *arm_columns(samples, arms, measure, form)], rows, grouped=True)


def lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    """What ran and what did not, and how busy the machine was."""
    for name, arm in conditions.get("arms", {}).items():
        if not arm.get("available"):
            yield f"{name}: not measured: {arm.get('reason')}"
        elif "runs" in arm:
            extra = "" if arm.get("c_extension") is None else f", C extension {arm['c_extension']}"
            yield f"{name}: {arm['runs']}{extra}"
    yield f"{disk_in(conditions)}; {load_in(conditions)}"


def goals(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> list[results.Goal]:
    """In the order of the requirements; the manager's figures are among the conditions."""

    def ratio(
        case: str, block: int = 2 * MIB, measure: str = _RATE, rival: str = _FS, base: str = ""
    ) -> Figure | None:
        """Ours over a rival's, in the same case unless `base` names another."""
        above = {"arm": "ours", "case": case, "block_bytes": block}
        below = {"arm": rival, "case": base or case, "block_bytes": block}
        where = f"{results.size_name(block)}, {rival}"
        return ratio_of_medians(samples, measure, above, below, where)

    def best(case: str) -> Figure | None:
        return worst(ratio(case, block, rival=rival) for block in large for rival in _RIVALS)

    def like(case: str) -> Figure | None:
        return worst(ratio(case, block, rival="ring_slots") for block in large)

    large = [block for block in _blocks(samples) if block >= _LARGE]
    large_reads = worst(ratio("batch_read", block) for block in large)
    kept = ratio("writes_beside_read", rival="ours", base="writes_alone")
    write_cpu, read_cpu = (ratio(case, measure=_CPU) for case in ("batch_write", "batch_read"))
    given = conditions.get("manager") or {}
    manager = {name: Figure(value, 1) for name, value in given.items() if value is not None}
    lookup, pause = manager.get("lookup_us"), manager.get("gc_pause_ms_max")
    entry = manager.get("bytes_per_entry")
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
        bound("p99 of a read beside writes / fs tier", "≤", 0.5, ratio(_BESIDE, measure="p99_us")),
        bound("our writes beside reads / alone", "≥", 0.7, kept),
        bound("manager: time per key looked up", "≤", 1.0, lookup, " µs"),
        bound("manager: memory per entry, 1 M entries", "≤", 400.0, entry, " B"),
        bound("manager: longest collection pause", "≤", 20.0, pause, " ms"),
    ]


def _blocks(samples: Sequence[Sample]) -> list[int]:
    return sorted({one.block_bytes for one in samples})


_STYLES = {
    "ours": plots.Style(plots.BLUE, "o", "ours (io_uring)", linewidth=2.4),
    "ours_threads": plots.Style(plots.SKY, "s", "ours (threads)"),
    "fio": plots.Style(plots.GREY, "^", "fio"),
    "ring": plots.Style(plots.BLACK, "D", "bare ring loop"),
    "ring_slots": plots.Style(plots.GREEN, "P", "bare ring loop, our slots' size"),
    "vllm_fs": plots.Style(plots.RED, "v", "vLLM fs tier"),
}
_LINES = (
    ("batch_write", _RATE, "batch write"),
    ("batch_read", _RATE, "batch read"),
    ("mixed", _RATE, "half reads, half writes"),
    ("single_write", _RATE, "one 128 MiB job, write"),
    ("single_read", _RATE, "one 128 MiB job, read"),
    ("batch_write", _CPU, "CPU time, batch write"),
    ("batch_read", _CPU, "CPU time, batch read"),
)
_MIB_PER_GIB = 1024
#: Name, unit, scale; name of a group of bars → case and measure.
_BARS = (
    (
        "one 2 MiB read beside 64 MiB of queued writes",
        "ms",
        1000.0,
        {"p50": (_BESIDE, "p50_us"), "p99": (_BESIDE, "p99_us")},
    ),
    (
        "those writes",
        "GiB/s",
        _MIB_PER_GIB,
        {"alone": ("writes_alone", _RATE), "beside reads": ("writes_beside_read", _RATE)},
    ),
)
_PANELS_PER_ROW = 3


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Lines are medians over rounds, bands and whiskers reach over all samples."""
    rounds = max(one.round for one in samples) + 1
    title = (
        f"Pool I/O, median and range of {rounds} rounds, interleaved on one directory\n"
        f"{disk_in(conditions)}, {plots.where_measured(conditions)}"
    )
    measured = {one.case for one in samples}
    lines = [one for one in _LINES if one[0] in measured]
    bars = [one for one in _BARS if any(case in measured for case, _ in one[-1].values())]
    mosaic = plots.mosaic(len(lines) + len(bars), _PANELS_PER_ROW)
    with plots.picture(path, title, mosaic, (5.3, 4.2)) as (figure, panels):
        for panel, (case, measure, name) in zip(panels, lines, strict=False):
            _lines(panel, samples, case, measure)
            plots.finish(panel, name, ylabel="CPU seconds per GiB" if measure == _CPU else "GiB/s")
        for panel, (name, unit, scale, groups) in zip(panels[len(lines) :], bars, strict=True):
            _bars(panel, samples, groups, scale)
            plots.finish(panel, name, ylabel=unit)
        plots.legend_below(figure, panels[: len(lines)])


def _lines(panel: Any, samples: Sequence[Sample], case: str, measure: str) -> None:
    chosen = select(samples, case=case)
    blocks = _blocks(chosen)
    spread = results.spreads_by(chosen, measure, "arm", "block_bytes")
    scale = 1.0 if measure == _CPU else _MIB_PER_GIB
    plots.lines(panel, _STYLES, blocks, spread, scale, band=True)
    plots.size_axis(panel, blocks)
    if measure == _CPU and blocks:
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)


def _bars(
    panel: Any, samples: Sequence[Sample], groups: Mapping[str, tuple[str, str]], scale: float
) -> None:
    """At the largest block size of each arm."""

    def spread(arm: str, group: tuple[str, str]) -> results.Spread | None:
        case, measure = group
        mine = select(samples, arm=arm, case=case)
        block = max(_blocks(mine), default=0)
        return results.spread_of(results.values_of(mine, measure, block_bytes=block))

    plots.bars(panel, _STYLES, groups, spread, scale)


def published(samples: Sequence[Sample]) -> dict[str, str]:
    """Reads of 2 MiB as shares of fio's throughput."""
    reads = {"case": "batch_read", "block_bytes": 2 * MIB}
    shown = {}
    for arm, name in (("ours", "ours"), ("vllm_fs", "vLLM's fs tier")):
        share = ratio_of_medians(samples, _RATE, {"arm": arm, **reads}, {"arm": "fio", **reads})
        if share:
            shown[f"reads of 2 MiB, {name} / fio"] = f"{share.value:.0%}"
    return shown


_GOALS = "Goals: ratios of medians, and the manager"
BENCHES = (Benchmark("pool", Sample, lines, tables, plot, goals, _GOALS, published, columns=120),)
