# SPDX-License-Identifier: Apache-2.0
"""`bench latency`: random I/O on two targets at jobs × depth and two sizes, by fio and by ours.

A *point* is a size, a number of jobs and a depth. At each, on each target, two arms:

    fio    `jobs` processes with io_uring, registered buffers and files, O_DIRECT
    ours   `jobs` processes, each with the product's engine on a pool of its own, as ranks have

A job does random reads (or writes) in 64 MiB of its own, written before, and keeps `depth` of
them in flight: as one ends the next is submitted. A latency is measured from the submission to
the caller's return. That of ours includes the Python caller: sealing, checksums, proof of
identity, the ring's thread and the wake-up. At 4 KiB our slot is 8 KiB, a header page and the
payload; at the slot's size both move the slot's bytes.

At every point and in every round both arms run on both targets in a drawn order, so that what is
compared was measured within seconds. Sizes follow each other, each with its own files and pools.
The throttle, if there is one, is set before each measurement and taken off after it; this process
and its children are in its group from the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import vllm_nvmeof_bench
from vllm_nvmeof_bench import conditions
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.latency import worker
from vllm_nvmeof_bench.latency.report import ARMS, PAYLOAD_MIN, STAND_IN, Point, Sample
from vllm_nvmeof_bench.pool.arms import FioArm, fio_moved, fio_version, limits, run_fio, write_flat
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.results import BenchError, dump, percentile, size_name
from vllm_nvmeof_bench.settings import (
    check_names,
    check_positive,
    option,
    recorded,
    size_option,
)
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes

_CASES = ("read", "write")
_THROTTLE_MB_PER_S = 100
_REMEDY = "give another --target, or fewer --jobs"
_MB = 1_000_000
#: The throttle's slices: what one has left over is not the next measurement's.
_SLICE_S = 0.15
_END_S = 30.0


@dataclass(frozen=True)
class Place:
    """A target. mb_per_s: what its disk is throttled to; None: as it is."""

    name: str
    directory: Path
    mb_per_s: int | None = None


@dataclass(frozen=True)
class Settings:
    """One run. slot_bytes: the payload of the pool's slot. ramp_s: before what is counted."""

    target: tuple[str, ...] = option(
        ("local=build/bench/latency-disk",),
        "NAME=DIRECTORY, once or twice: what the second adds to the first. Given once, a "
        "throttled stand-in on the same disk is the second.",
        recorded=False,
        repeated=True,
    )
    throttle: int = option(0, "MB/s of the second target's disk; 0: as it is.", min=0)
    cases: tuple[str, ...] = option(("read",), "Of read,write.")
    jobs: tuple[int, ...] = option((1, 2, 4), "Processes at once.")
    depths: tuple[int, ...] = option((1, 4, 16), "I/Os in flight in each process.")
    slot_bytes: int = size_option(
        512 * KIB, "Payload of the pool's slot, beside 4 KiB.", flag="--slot"
    )
    rounds: int = option(5, "Samples of everything.", min=1)
    run_s: float = option(0.5, "Seconds of one measurement.", flag="--seconds")
    seed: int = option(1, "Seed of contents, places and orders.")
    ramp_s: float = 0.1
    job_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        check_names("case", self.cases, _CASES)
        check_positive(self, "jobs", "depths", "rounds")
        if self.run_s <= 0:
            raise BenchError("a measurement is longer than 0 s")
        if self.slot_bytes < PAYLOAD_MIN or self.slot_bytes % PAYLOAD_MIN:
            raise BenchError(f"slot of {self.slot_bytes} bytes: a multiple of 4 KiB, for O_DIRECT")
        if self.slots(self.slot_bytes) < 2 * max(self.depths):
            raise BenchError(
                f"{max(self.depths)} slots of {self.slot_bytes} bytes in flight need more than "
                f"the {self.job_bytes} bytes of a job: give a smaller --depths or --slot"
            )

    @property
    def places(self) -> tuple[Place, Place]:
        """The two targets.

        Of one target the second is a throttled stand-in in the same directory. Of two, a throttle
        is the second's, whose name then says so.

        Raises:
            BenchError: not of the form NAME=DIRECTORY, or not two targets.
        """
        given = [_place(text) for text in self.target]
        if len(given) == 1:
            mb_per_s = self.throttle or _THROTTLE_MB_PER_S
            stand_in = Place(f"{STAND_IN}-{mb_per_s}-MB/s", given[0].directory, mb_per_s)
            return given[0], stand_in
        if len(given) != 2 or given[0].name == given[1].name:
            raise BenchError("give one or two targets of different names: --target NAME=DIRECTORY")
        first, second = given
        if self.throttle:
            name = f"{second.name}-{STAND_IN}-{self.throttle}-MB/s"
            second = Place(name, second.directory, self.throttle)
        return first, second

    @property
    def payloads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((PAYLOAD_MIN, self.slot_bytes)))

    def points(self, payload_bytes: int) -> list[Point]:
        return [
            Point(case, payload_bytes, jobs, depth)
            for case in self.cases
            for jobs in self.jobs
            for depth in self.depths
        ]

    def slots(self, payload_bytes: int) -> int:
        """Slots of one job's pool."""
        return self.job_bytes // slot_stride_bytes(payload_bytes)

    @property
    def disk_bytes_max(self) -> int:
        """The most bytes on one target: a pool and a file per job, and the pools' tables."""
        return max(self.jobs) * (2 * self.job_bytes + 8 * MIB)


def _place(text: str) -> Place:
    name, equals, directory = text.partition("=")
    if not equals or not name or not directory:
        raise BenchError(f"--target {text!r}: give NAME=DIRECTORY")
    return Place(name, Path(directory))


# -- arms: files for fio, child processes with pools for ours -----------------------------


@dataclass(frozen=True)
class Measured:
    """The moved of one arm at one point; the fields are those of `Sample`."""

    operations: int
    mean_us: float
    p50_us: float
    p99_us: float
    mib_per_s: float
    cpu_s_per_gib: float


class FioJobs:
    """One file per job, written once; a run starts as many processes as the point has jobs."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._settings = settings
        directory.mkdir()
        self._files = [directory / f"file-{job}" for job in range(max(settings.jobs))]
        for number, path in enumerate(self._files):
            write_flat(path, settings.job_bytes, settings.seed + number)

    def measure(self, point: Point, seed: int) -> Measured:
        settings = self._settings
        size = settings.job_bytes // point.io_bytes * point.io_bytes
        options = {
            "rw": f"rand{point.case}",
            "bs": point.io_bytes,
            "size": size,
            "iodepth": point.depth,
            "time_based": 1,
            "runtime": f"{round(1000 * settings.run_s)}ms",
            "ramp_time": f"{round(1000 * settings.ramp_s)}ms",
            "lat_percentiles": 1,
            "randseed": seed,
        }
        report = run_fio(options, self._files[: point.jobs])
        total = report["jobs"][0]["mixed"]
        if not total["total_ios"]:
            raise BenchError(f"fio ended nothing in {settings.run_s} s: give a longer --seconds")
        moved = fio_moved(report, "lat_ns")
        return Measured(
            operations=total["total_ios"],
            mean_us=total["lat_ns"]["mean"] / 1000,
            p50_us=moved.p50_us or 0.0,
            p99_us=moved.p99_us or 0.0,
            mib_per_s=moved.payload_bytes / MIB / moved.seconds,
            cpu_s_per_gib=(moved.cpu_s or 0.0) * GIB / moved.payload_bytes,
        )

    def close(self) -> None:
        """Nothing is left running."""


class OurJobs:
    """One process per job, which waits for orders between measurements; see `worker`."""

    def __init__(self, directory: Path, settings: Settings, payload_bytes: int) -> None:
        self._settings = settings
        self._payload_bytes = payload_bytes
        self._children: list[_Child] = []
        directory.mkdir()
        try:
            for job in range(max(settings.jobs)):
                numbers = (payload_bytes, settings.slots(payload_bytes), settings.seed + job)
                self._children.append(_Child(directory / f"job-{job}", numbers))
            self.engines = [str(child.answer()["engine"]) for child in self._children]
        except BaseException:
            self.close()
            raise

    def measure(self, point: Point, seed: int) -> Measured:
        """seed: used by fio; ours goes on in the order that it drew at its start."""
        order = worker.Order(point.case, point.depth, self._settings.ramp_s, self._settings.run_s)
        children = self._children[: point.jobs]
        for child in children:
            child.ask(asdict(order))
        answers = [worker.Answer(**child.answer()) for child in children]
        latencies = [one for answer in answers for one in answer.latencies_us]
        if not latencies:
            raise BenchError(f"nothing ended in {order.run_s} s: give a longer --seconds")
        moved = len(latencies) * self._payload_bytes
        rates = [
            len(answer.latencies_us) * self._payload_bytes / MIB / answer.seconds
            for answer in answers
            if answer.latencies_us  # else the target is so slow that one job had no turn
        ]
        return Measured(
            operations=len(latencies),
            mean_us=statistics.fmean(latencies),
            p50_us=percentile(latencies, 0.5),
            p99_us=percentile(latencies, 0.99),
            mib_per_s=sum(rates),
            cpu_s_per_gib=sum(answer.cpu_s for answer in answers) * GIB / moved,
        )

    def close(self) -> None:
        for child in self._children:
            child.close()


class _Child:
    """One job's process: a line of JSON in, a line of JSON out."""

    def __init__(self, directory: Path, numbers: tuple[int, ...]) -> None:
        package = str(Path(vllm_nvmeof_bench.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until close()
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(directory), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def ask(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed() from None

    def answer(self) -> dict[str, Any]:
        """The next line. The child bounds its own waits.

        Raises:
            BenchError: the child ended; with its last line of stderr.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        return dict(json.loads(line))

    def _failed(self) -> BenchError:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or ["no message"]
        return BenchError(f"a job of ours ended: {lines[-1]}")

    def close(self) -> None:
        """End the child by ending its input, and delete its pool."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        shutil.rmtree(self._directory, ignore_errors=True)


# -- the run ------------------------------------------------------------------------------

_Fields = dict[tuple[str, str], FioJobs | OurJobs]


def run(
    settings: Settings,
    keep: Callable[[list[Sample], dict[str, Any]], None],
    on_progress: OnProgress = unheard,
) -> None:
    """Measure; after each size `keep` gets all samples so far, and the conditions.

    Raises:
        BenchError: no fio, no io_uring, too little space, or an arm failed.
        ThrottleError: a throttle is wanted and cannot be had.
    """
    places = settings.places
    fio_version()
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
        one = _Run(settings, homes, throttle, on_progress)
        for payload_bytes in settings.payloads:
            one.size(payload_bytes)
            found = {"engines": sorted(one.engines), "fio_registered": FioArm.registered}
            found["load_average_at_end"] = conditions.load_average()
            keep(one.samples, {**common, **found})


class _Run:
    def __init__(
        self,
        settings: Settings,
        homes: dict[str, Path],
        throttle: Throttle | None,
        on_progress: OnProgress,
    ) -> None:
        self.samples: list[Sample] = []
        self.engines: set[str] = set()
        self._settings = settings
        self._places = settings.places
        self._homes = homes
        self._throttle = throttle
        self._on_progress = on_progress
        points = sum(len(settings.points(size)) for size in settings.payloads)
        self._total = points * settings.rounds * len(self._places) * len(ARMS)

    def size(self, payload_bytes: int) -> None:
        name = size_name(payload_bytes)
        with contextlib.ExitStack() as stack:
            fields: _Fields = {}
            for place in self._places:
                self._report(f"{name} · writing everything once on {place.name}")
                home = self._homes[place.name] / f"payload-{payload_bytes}"
                home.mkdir()
                fio = FioJobs(home / "fio", self._settings)
                ours = OurJobs(home / "ours", self._settings, payload_bytes)
                stack.callback(ours.close)
                self.engines.update(ours.engines)
                fields[place.name, "fio"], fields[place.name, "ours"] = fio, ours
            for number in range(self._settings.rounds):
                for point in self._settings.points(payload_bytes):
                    self._point(fields, point, number)

    def _point(self, fields: _Fields, point: Point, number: int) -> None:
        seed = f"{self._settings.seed} {point} {number}"
        dice = random.Random(seed)
        size = size_name(point.payload_bytes)
        self._report(f"{size} · round {number + 1} · {point.case} {point.jobs} × {point.depth}")
        pairs = [(place, arm) for place in self._places for arm in ARMS]
        found = {}
        for place, arm in dice.sample(pairs, len(pairs)):
            self._limit(place.mb_per_s)
            measured = fields[place.name, arm].measure(point, dice.getrandbits(31))
            self._limit(None)
            found[place, arm] = Sample(
                target=place.name, arm=arm, round=number, **asdict(point), **asdict(measured)
            )
        # The file keeps the targets' order: what the second adds to the first.
        self.samples += [found[pair] for pair in pairs]

    def _limit(self, mb_per_s: int | None) -> None:
        if self._throttle is None:
            return
        limit = None if mb_per_s is None else mb_per_s * _MB
        self._throttle.limit(limit, limit)
        if limit is not None:
            time.sleep(_SLICE_S)

    def _report(self, what: str) -> None:
        self._on_progress(len(self.samples), self._total, what)


def measure(settings: Settings, json_path: Path) -> None:
    """Run, and write the JSON file after each size.

    Raises:
        BenchError, ThrottleError: it cannot run here, or an arm failed.
    """
    with progress() as on_progress:
        run(settings, lambda *found: dump(json_path, "latency", *found), on_progress)


COMMANDS = (
    Command(
        "latency",
        """Measure the latency of random I/O on two targets, and what our engine adds to fio there.

        At each number of jobs and depth, with 4 KiB and with whole slots, interleaved. Takes about
        6 minutes and 0.6 GiB of each target, which is left as it was. A throttle needs a control
        group, for which this mostly has to run as root. Nothing else should run meanwhile.
        """,
        Settings,
        measure,
    ),
)
