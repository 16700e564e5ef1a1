# SPDX-License-Identifier: Apache-2.0
"""`bench latency`: random I/O by fio and our engine on two targets, by jobs × depth and size.

A *point* is a size, a number of jobs and a depth, measured on each target with two arms:

    fio    `jobs` processes with io_uring, registered buffers and files, O_DIRECT
    ours   `jobs` processes, each with the product's engine and a separate pool, like ranks

A job keeps `depth` random reads (or writes) in flight in its own, already written 64 MiB. Latency
is the time from submission until the caller has the result. For our engine it includes sealing,
checksums, the identity check, the ring's thread, the wake-up and the Python caller. At 4 KiB our
slot is 8 KiB: a header page and the payload. At other sizes both arms move whole slots.

At every point of every round both arms run on both targets in random order, so that compared values
are measured within seconds of each other. Each size has separate files and pools. A throttle is set
only during measurements, but this process and its children are in its group from the start.

`--stages` also splits our reads on the first target, by timestamps of the caller, the engine and
the kernel's trace events. It needs root, and a target directly on a disk, because only then do the
events of a read and of its request name the same sector. It measures fio with our slot's size too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import os
import random
import re
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vllm_nvmeof_bench import conditions
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import OnProgress, home_in, progress, quiet_interpreter, unheard
from vllm_nvmeof_bench.pool import (
    EngineMover,
    Fio,
    Ground,
    Job,
    Mover,
    fill,
    fio_moved,
    limits,
    write_flat,
)
from vllm_nvmeof_bench.reports.latency import (
    ARMS,
    PAYLOAD_MIN,
    SLOT_BY_FIO,
    STAGES,
    STAND_IN,
    Point,
    Sample,
)
from vllm_nvmeof_bench.results import MB, BenchError, dump, percentile, size_name
from vllm_nvmeof_bench.settings import check_names, check_positive, option, recorded, size_option
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes

_CASES = ("read", "write")
_THROTTLE_MB_PER_S = 100
_REMEDY = "give another --target, or fewer --jobs"
#: A pause after setting the throttle, until the kernel's unthrottled time slice has expired.
_SLICE_S = 0.15
_TRACING, _TRACE_KIB = Path("/sys/kernel/tracing/instances"), 16_384
#: The disk's events, with their columns in `kernel_times`, and all traced events.
_DISK = {"block_rq_issue": 1, "block_rq_complete": 2}
_EVENTS = (
    "io_uring/io_uring_submit_req",
    "io_uring/io_uring_complete",
    "block/block_bio_queue",
    *(f"block/{event}" for event in _DISK),
)
_EVENT = re.compile(r"-(\d+) +\[\d+\] \S+ +(\d+\.\d+): (\w+): (.*)")
_T = TypeVar("_T")


class Place(NamedTuple):
    """A target. mb_per_s: the throttle's limit in MB/s; None: not throttled."""

    name: str
    directory: Path
    mb_per_s: int | None = None


@dataclass(frozen=True)
class Settings:
    """Settings for the run. ramp_s: time before operations count. job_bytes: a job's bytes."""

    target: tuple[str, ...] = option(
        ("local=build/bench/latency-disk",),
        "Target as NAME=DIRECTORY, once or twice: the second is compared with the first. If given "
        "once, the second is a throttled stand-in on the same disk.",
        recorded=False,
        repeated=True,
    )
    throttle: int = option(0, "Throttle of the second target in MB/s; 0: none.", min=0)
    cases: tuple[str, ...] = option(("read",), "Cases to measure: read,write.")
    jobs: tuple[int, ...] = option((1, 2, 4), "Concurrent processes.")
    depths: tuple[int, ...] = option((1, 4, 16), "I/Os in flight in each process.")
    slot_bytes: int = size_option(512 * KIB, "Payload size, in addition to 4 KiB.", flag="--slot")
    rounds: int = option(5, "Samples per measurement.", min=1)
    run_s: float = option(0.5, "Seconds per measurement.", flag="--seconds")
    seed: int = option(1, "Seed for contents and orders.")
    stages: bool = option(False, "Also split our reads into stages by tracing the kernel.")
    ramp_s: float = 0.1
    job_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        check_names("case", self.cases, _CASES)
        check_positive(self, "jobs", "depths", "rounds")
        if self.run_s <= 0:
            raise BenchError("a measurement must take more than 0 s")
        if self.slot_bytes < PAYLOAD_MIN or self.slot_bytes % PAYLOAD_MIN:
            raise BenchError(f"slot of {self.slot_bytes} bytes: O_DIRECT needs multiples of 4 KiB")
        if self.slots(self.slot_bytes) < 2 * max(self.depths):
            raise BenchError(
                f"{max(self.depths)} slots of {self.slot_bytes} bytes in flight need more than "
                f"the {self.job_bytes} bytes of a job: give a smaller --depths or --slot"
            )

    @property
    def places(self) -> tuple[Place, Place]:
        """The two targets: those given, the second throttled if `throttle` is set; or the one given
        and a throttled stand-in in its directory. Raises BenchError if the option is malformed."""
        given = [text.partition("=") for text in self.target]
        named = {name: Path(directory) for name, _, directory in given if name and directory}
        if not 0 < len(named) == len(given) <= 2:
            raise BenchError(
                f"--target {' '.join(self.target)!r}: give one or two as NAME=DIRECTORY, with "
                "different names"
            )
        (first, directory), *others = named.items()
        if not others:
            mb_per_s = self.throttle or _THROTTLE_MB_PER_S
            second = Place(f"{STAND_IN}-{mb_per_s}-MB/s", directory, mb_per_s)
        elif self.throttle:
            name = f"{others[0][0]}-{STAND_IN}-{self.throttle}-MB/s"
            second = Place(name, others[0][1], self.throttle)
        else:
            second = Place(*others[0])
        return Place(first, directory), second

    @property
    def payloads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((PAYLOAD_MIN, self.slot_bytes)))

    def points(self, payload_bytes: int) -> list[Point]:
        sides = itertools.product(self.cases, (payload_bytes,), self.jobs, self.depths)
        return [Point(*side) for side in sides]

    def slots(self, payload_bytes: int) -> int:
        """Return the number of slots in a job's pool."""
        return self.job_bytes // slot_stride_bytes(payload_bytes)

    @property
    def disk_bytes_max(self) -> int:
        """The maximum space used on a target: per job, a pool with its table, and a file."""
        return max(self.jobs) * (2 * self.job_bytes + 8 * MIB)


class Order(NamedTuple):
    """An order to keep `depth` operations in flight for ramp_s + run_s; only run_s counts."""

    case: str
    depth: int
    ramp_s: float
    run_s: float


class Answer(NamedTuple):
    """A job's result. latencies_us: latencies of operations submitted after the ramp. seconds,
    cpu_s: time and CPU time from the end of the ramp to the last completion."""

    latencies_us: list[float]
    seconds: float
    cpu_s: float


def drive(
    mover: Mover,
    slots: int,
    order: Order,
    dice: random.Random,
    clock: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.process_time,
) -> Answer:
    """Run operations on random slots in a closed loop, at most one per slot at a time; raise
    BenchError if an operation fails or none completes for a minute."""
    waiting = collections.deque(dice.sample(range(slots), slots))
    handed: dict[int, tuple[float, int]] = {}  # token → (time of submission, slot)
    token, latencies = 0, []
    now_s = clock()
    counted_s, end_s = now_s + order.ramp_s, now_s + order.ramp_s + order.run_s
    counted_cpu_s: float | None = None
    while True:
        if counted_cpu_s is None and now_s >= counted_s:
            counted_s, counted_cpu_s = now_s, cpu()
        while now_s < end_s and len(handed) < order.depth:
            token += 1
            slot = waiting.popleft()
            handed[token] = (clock(), slot)
            mover.submit(token, order.case == "read", slot)
        if not handed:
            break
        done, now_s = mover.wait(), clock()
        for one in done:
            since_s, slot = handed.pop(one)
            waiting.append(slot)
            if counted_cpu_s is not None and since_s >= counted_s:
                latencies.append(1e6 * (now_s - since_s))
    cpu_s = cpu() - (counted_cpu_s or 0.0)
    return Answer([round(one, 1) for one in latencies], now_s - counted_s, cpu_s)


@functools.cache
def _opened(
    directory: Path, payload_bytes: int, slots: int, seed: int
) -> tuple[EngineMover, random.Random]:
    """Return this process's engine and random order. Every slot has been written once."""
    staging = Staging(slot_stride_bytes(payload_bytes), slots, 0)
    fill(staging, seed)
    try:
        mover = EngineMover("uring", Ground(directory, payload_bytes, slots, staging))
        mover.fill()
    except OffloadError as error:  # only BenchError can be pickled for the parent
        raise BenchError(f"a job of ours cannot start: {error}") from None
    return mover, random.Random(seed)


def _name_here(*job: Any) -> str:
    return _opened(*job)[0].name


class _Timed(Mover):
    """A mover that records, by token, when each stage of a read ends, in ns."""

    def __init__(self, mover: EngineMover) -> None:
        self._mover, self.times = mover, dict[int, list[int]]()

    def run(self, jobs: Sequence[Job]) -> None:
        self._mover.run(jobs)

    def submit(self, token: int, is_read: bool, block: int) -> None:
        self.times[token] = [time.monotonic_ns()]
        self._mover.submit(token, is_read, block)

    def poll(self, timeout_s: float) -> list[int]:
        self._mover.sleep(timeout_s)
        woken, found = time.monotonic_ns(), self._mover.take()
        taken = time.monotonic_ns()
        for one in found:
            self.times[one.token] += [round(1e9 * (one.ended_s or 0)), woken, taken]
        return [one.token for one in found]


@contextlib.contextmanager
def _traced() -> Iterator[Path]:
    """Trace rings and disks in a buffer of this process; yield the trace's file."""
    buffer = _TRACING / f"vllm-nvmeof-bench-{os.getpid()}"
    try:
        buffer.mkdir()
        try:
            (buffer / "trace_clock").write_text("mono")
            (buffer / "buffer_size_kb").write_text(f"{_TRACE_KIB}")
            for event in _EVENTS:
                (buffer / "events" / event / "enable").write_text("1")
            yield buffer / "trace"
        finally:
            buffer.rmdir()  # disables its events
    except OSError as error:
        raise BenchError(f"--stages: the kernel's tracing cannot be used: {error}") from None


def kernel_times(trace: str, threads: Collection[str]) -> list[tuple[float, ...]]:
    """Return, for each read of these threads in order of submission, the ns at which its ring
    submitted it, the disk got it, the disk completed it, and the ring saw this; nan if unknown."""
    reads: list[list[float]] = []
    by_tag: dict[str, int] = {}
    by_sector: dict[str, int] = {}
    for thread, seconds, event, text in _EVENT.findall(trace):
        words, ns = text.split(), 1e9 * float(seconds)
        if event not in _DISK and thread not in threads:
            continue
        if event == "io_uring_submit_req" and "READ_FIXED" in text:
            by_tag[words[words.index("user_data") + 1]] = len(reads)
            reads.append([ns] + [math.nan] * 3)
        elif event == "block_bio_queue" and reads:  # the ring submits the last read
            by_sector[words[2]] = len(reads) - 1
        elif event in _DISK and (sector := words[words.index("+") - 1]) in by_sector:
            reads[by_sector[sector]][_DISK[event]] = ns
        elif event == "io_uring_complete":
            read = by_tag.pop(words[words.index("user_data") + 1], None)
            if read is not None:
                reads[read][3] = ns
    return [tuple(read) for read in reads]


def _stages_here(order: Order, *job: Any) -> dict[str, float]:
    """Return the median µs of each stage of this process's reads, and of the whole."""
    mover, dice = _opened(*job)
    timed = _Timed(mover)
    with _traced() as trace, quiet_interpreter():
        drive(timed, job[2], order, dice)
        kernel = kernel_times(trace.read_text(), os.listdir("/proc/self/task"))
    if len(kernel) != len(timed.times):
        raise BenchError("--stages: the kernel's trace lacks reads: decrease --seconds")
    rows = np.array(
        [
            (caller[0], *events, *caller[1:])
            for caller, events in zip(timed.times.values(), kernel, strict=True)
        ]
    )
    rows = rows[~np.isnan(rows).any(axis=1)]
    if not len(rows):
        raise BenchError("--stages: the kernel's trace lacks the disk's requests")
    every = [*np.diff(rows).T, rows[:, -1] - rows[:, 0]]
    medians = [round(float(np.median(one)) / 1000, 2) for one in every]
    return dict(zip(STAGES, medians, strict=True))


def _drive_here(order: Order, *job: Any) -> Answer:
    mover, dice = _opened(*job)
    with quiet_interpreter():
        return drive(mover, job[2], order, dice)


#: A function that measures a point with a seed, and returns the measured fields of a `Sample`.
_Measure = Callable[[Point, int], dict[str, Any]]
#: A function that measures the stages of reads at this depth.
_Split = Callable[[int], dict[str, float]]


def _fio_arm(fio: Fio, directory: Path, settings: Settings) -> _Measure:
    """Write a file per job; return a function that measures fio with one process per job."""
    directory.mkdir()
    files = [directory / f"file-{job}" for job in range(max(settings.jobs))]
    for number, path in enumerate(files):
        write_flat(path, settings.job_bytes, settings.seed + number)

    def measure(point: Point, seed: int, io_bytes: int = 0) -> dict[str, Any]:
        io_bytes = io_bytes or point.io_bytes
        options = {
            "rw": f"rand{point.case}",
            "bs": io_bytes,
            "size": settings.job_bytes // io_bytes * io_bytes,
            "iodepth": point.depth,
            "time_based": 1,
            "runtime": f"{round(1000 * settings.run_s)}ms",
            "ramp_time": f"{round(1000 * settings.ramp_s)}ms",
            "lat_percentiles": 1,
            "randseed": seed,
        }
        report = fio.run(options, files[: point.jobs])
        total = report["jobs"][0]["mixed"]
        if not total["total_ios"]:
            raise BenchError(f"fio completed nothing in {settings.run_s} s: increase --seconds")
        moved = fio_moved(report, "lat_ns")
        return {
            "operations": total["total_ios"],
            "mean_us": total["lat_ns"]["mean"] / 1000,
            "p50_us": moved.p50_us or 0.0,
            "p99_us": moved.p99_us or 0.0,
            "mib_per_s": moved.payload_bytes / MIB / moved.seconds,
            "cpu_s_per_gib": (moved.cpu_s or 0.0) * GIB / moved.payload_bytes,
        }

    return measure


def _our_arm(
    stack: contextlib.ExitStack, directory: Path, settings: Settings, payload_bytes: int
) -> tuple[_Measure, list[str], _Split]:
    """Return the functions that measure our engine, and the names of the jobs' engines.

    Each job's process waits between measurements, and ignores Ctrl-C. Only fio uses a measurement's
    seed; our jobs continue their own random order.
    """
    directory.mkdir()
    slots, at_start = settings.slots(payload_bytes), (signal.SIGINT, signal.SIG_IGN)
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    jobs = [
        (
            stack.enter_context(ProcessPoolExecutor(1, context, signal.signal, at_start)),
            (directory / f"job-{job}", payload_bytes, slots, settings.seed + job),
        )
        for job in range(max(settings.jobs))
    ]

    def measure(point: Point, seed: int) -> dict[str, Any]:
        order = Order(point.case, point.depth, settings.ramp_s, settings.run_s)
        running = jobs[: point.jobs]
        answers = _results(child.submit(_drive_here, order, *job) for child, job in running)
        latencies = [one for answer in answers for one in answer.latencies_us]
        if not latencies:
            raise BenchError(f"nothing completed in {order.run_s} s: increase --seconds")
        rates = [
            len(answer.latencies_us) * payload_bytes / MIB / answer.seconds
            for answer in answers
            if answer.latencies_us  # empty if the target is too slow for a job
        ]
        moved = len(latencies) * payload_bytes
        return {
            "operations": len(latencies),
            "mean_us": statistics.fmean(latencies),
            "p50_us": percentile(latencies, 0.5),
            "p99_us": percentile(latencies, 0.99),
            "mib_per_s": sum(rates),
            "cpu_s_per_gib": sum(answer.cpu_s for answer in answers) * GIB / moved,
        }

    def split(depth: int) -> dict[str, float]:
        (child, job), order = jobs[0], Order("read", depth, 0.0, settings.run_s)
        return _results([child.submit(_stages_here, order, *job)])[0]

    return measure, _results(child.submit(_name_here, *job) for child, job in jobs), split


def _results(begun: Iterable[Future[_T]]) -> list[_T]:
    futures = list(begun)
    try:
        return [one.result() for one in futures]
    except BrokenExecutor as error:
        raise BenchError(f"a job of ours exited: {error}") from None


def run(
    settings: Settings,
    keep: Callable[[list[Sample], dict[str, Any]], None],
    on_progress: OnProgress = unheard,
) -> None:
    """Measure; after each size, pass all samples so far and the conditions to `keep`.

    Raises: BenchError: fio, io_uring or space is missing, or an arm failed. ThrottleError: this
    machine does not support a throttle that the settings need.
    """
    places, fio = settings.places, Fio()
    with contextlib.ExitStack() as stack:
        homes = {
            place.name: stack.enter_context(
                home_in(place.directory, settings.disk_bytes_max, _REMEDY)
            )
            for place in places
        }
        common = conditions.at_start(homes[places[0].name])
        del common["disk"]
        common["settings"] = {**recorded(settings), "engine": limits()}
        common["targets"] = {
            place.name: {
                **conditions.mount_of(homes[place.name]),
                "throttled_mb_per_s": place.mb_per_s,
            }
            for place in places
        }
        throttle = None
        for place in places:
            if place.mb_per_s is not None:
                throttle = stack.enter_context(Throttle(homes[place.name]))
                throttle.add(os.getpid())
                common["throttle"] = throttle.kind
        one = _Run(settings, fio, homes, throttle, on_progress)
        for payload_bytes in settings.payloads:
            one.size(payload_bytes)
            found = {"engines": sorted(one.engines), "fio_registered": fio.registered}
            if settings.stages:
                found["stages"] = one.stages
            found["load_average_at_end"] = conditions.load_average()
            keep(one.samples, {**common, **found})


@dataclass
class _Run:
    settings: Settings
    fio: Fio
    homes: dict[str, Path]
    throttle: Throttle | None
    on_progress: OnProgress
    samples: list[Sample] = field(default_factory=list)
    engines: set[str] = field(default_factory=set)
    stages: list[dict[str, Any]] = field(default_factory=list)

    def size(self, payload_bytes: int) -> None:
        """Measure all points of a size, and delete its files."""
        settings, name = self.settings, size_name(payload_bytes)
        with contextlib.ExitStack() as stack:
            arms: dict[tuple[str, str], _Measure] = {}
            splits: list[_Split] = []
            for place in self.settings.places:
                self._report(f"{name} · writing all files on {place.name}")
                home = self.homes[place.name] / f"payload-{payload_bytes}"
                home.mkdir()
                stack.callback(shutil.rmtree, home, ignore_errors=True)
                arms[place.name, "fio"] = _fio_arm(self.fio, home / "fio", settings)
                ours = _our_arm(stack, home / "ours", settings, payload_bytes)
                arms[place.name, "ours"], engines, split = ours
                splits.append(split)
                self.engines.update(engines)
            for number in range(settings.rounds):
                for point in settings.points(payload_bytes):
                    what = f"{point.case} {point.jobs} × {point.depth}"
                    self._report(f"{name} · round {number + 1} · {what}")
                    self._point(arms, point, number)
                for depth in settings.depths if settings.stages else ():
                    self._report(f"{name} · round {number + 1} · stages at depth {depth}")
                    fio = arms[self.settings.places[0].name, "fio"]
                    self._split(payload_bytes, depth, number, splits[0], fio)

    def _point(self, arms: dict[tuple[str, str], _Measure], point: Point, number: int) -> None:
        dice = random.Random(f"{self.settings.seed} {point} {number}")
        pairs = [(place, arm) for place in self.settings.places for arm in ARMS]
        found = {}
        for place, arm in dice.sample(pairs, len(pairs)):
            self._limit(place.mb_per_s)
            measured = arms[place.name, arm](point, dice.getrandbits(31))
            self._limit(None)
            found[place, arm] = Sample(
                target=place.name, arm=arm, round=number, **asdict(point), **measured
            )
        # The order of targets matters: the report compares the second with the first.
        self.samples += [found[pair] for pair in pairs]

    def _split(self, payload_bytes: int, depth: int, number: int, split: _Split, fio: Any) -> None:
        point, slot_bytes = Point("read", payload_bytes, 1, depth), slot_stride_bytes(payload_bytes)
        found = split(depth) | {SLOT_BY_FIO: fio(point, number, slot_bytes)["p50_us"]}
        where = {"payload_bytes": payload_bytes, "depth": depth, "round": number}
        self.stages += [{**where, "stage": stage, "us": us} for stage, us in found.items()]

    def _limit(self, mb_per_s: int | None) -> None:
        if self.throttle is None:
            return
        limit = None if mb_per_s is None else mb_per_s * MB
        self.throttle.limit(limit, limit)
        if limit is not None:
            time.sleep(_SLICE_S)

    def _report(self, what: str) -> None:
        settings = self.settings
        points = sum(len(settings.points(size)) for size in settings.payloads)
        total = points * settings.rounds * len(self.settings.places) * len(ARMS)
        self.on_progress(len(self.samples), total, what)


def measure(settings: Settings, json_path: Path) -> None:
    """Run the benchmark, and write the JSON file after each size. Raises as `run` does."""
    with progress() as on_progress:
        run(settings, lambda *found: dump(json_path, "latency", *found), on_progress)


COMMANDS = (
    Command(
        "latency",
        """Measure the latency of random I/O on two targets, by fio and by our engine.

        Takes about 6 minutes and 0.6 GiB on each target, freed at the end. A throttle needs a
        control group, and thus usually root. Nothing else should run at the same time.
        """,
        Settings,
        measure,
    ),
)
