# SPDX-License-Identifier: Apache-2.0
"""Both arms on one target at one size: files for fio, child processes with pools for ours."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import vllm_nvmeof_bench
from vllm_nvmeof_bench.latency import worker
from vllm_nvmeof_bench.latency.settings import Point, Settings
from vllm_nvmeof_bench.pool.arms.flat import fio_figures, run_fio, write_flat
from vllm_nvmeof_bench.pool.samples import percentile
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_offload.units import GIB, MIB

__all__ = ["FioJobs", "Measured", "OurJobs"]

_END_S = 30.0


@dataclass(frozen=True)
class Measured:
    """What one arm did at one point; the fields are those of `samples.Sample`."""

    operations: int
    mean_us: float
    p50_us: float
    p99_us: float
    mib_per_s: float
    cpu_s_per_gib: float


class FioJobs:
    """One file a job, written once; a run starts as many processes as the point has jobs."""

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
        figures = fio_figures(report, "lat_ns")
        return Measured(
            operations=total["total_ios"],
            mean_us=total["lat_ns"]["mean"] / 1000,
            p50_us=figures.p50_us or 0.0,
            p99_us=figures.p99_us or 0.0,
            mib_per_s=figures.payload_bytes / MIB / figures.seconds,
            cpu_s_per_gib=(figures.cpu_s or 0.0) * GIB / figures.payload_bytes,
        )

    def close(self) -> None:
        """Nothing is left running."""


class OurJobs:
    """One process a job, which waits for orders between measurements; see `worker`."""

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
        """seed: for fio alone; ours goes on in an order of its own, drawn at its start."""
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
            BenchError: it ended; with its last words.
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
        """Its input ends, and so does it; its pool goes with it."""
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
