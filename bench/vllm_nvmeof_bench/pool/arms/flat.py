# SPDX-License-Identifier: Apache-2.0
"""The arms without a pool: fio and a bare ring loop, on one flat file that was written before.

Both are processes of their own, at our block size, with `depth` blocks in flight, registered
buffers and a registered file, O_DIRECT, sequential like the others. Their time and CPU time are
those of their loops, not of their start; latencies are per block. `mixed` alternates.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.pool.samples import Figures
from vllm_nvmeof_bench.pool.settings import BenchError, Settings
from vllm_nvmeof_offload.units import MIB

__all__ = ["FioArm", "RingArm", "build_ring", "fio_figures", "fio_version", "run_fio", "write_flat"]

_RING_SOURCE = Path(__file__).parents[1] / "ring_loop.c"
_TIMEOUT_S = 300.0


def write_flat(path: Path, size: int, seed: int) -> None:
    """Make the file and write all of it."""
    chunk = np.random.default_rng(seed).bytes(16 * MIB)
    with path.open("wb") as file:
        for start in range(0, size, len(chunk)):
            file.write(chunk[: size - start])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(command: list[str], what: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{what}: {error}") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise BenchError(f"{what}: exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def fio_version() -> str:
    """fio's version.

    Raises:
        BenchError: there is no fio.
    """
    return _run(["fio", "--version"], "fio is not installed").strip()


class FioArm:
    """Implements `arms.base.Arm`. Its buffers are filled once and stay as they are, as ours."""

    name = "fio"
    #: Switched off for good when registration is refused (memlock limit).
    registered = True

    def __init__(self, path: Path, settings: Settings, block_bytes: int) -> None:
        self._path = path
        self._settings = settings
        self._block_bytes = block_bytes

    def measure(self, kind: str) -> dict[str, Figures]:
        how = {"batch_write": "write", "batch_read": "read", "mixed": "rw"}[kind]
        options = {
            "rw": how,
            "bs": self._block_bytes,
            "size": self._settings.batch_blocks(self._block_bytes) * self._block_bytes,
            "iodepth": self._settings.depth,
            "randseed": self._settings.seed,
        }
        return {kind: fio_figures(run_fio(options, [self._path]))}

    def tidy(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is left running."""


def run_fio(options: Mapping[str, object], files: Sequence[Path]) -> dict[str, Any]:
    """fio's report on one group of processes, one a file: io_uring, O_DIRECT, registered.

    Raises:
        BenchError: fio failed, without registration too.
    """
    try:
        output = _run(_fio_command(options, files), "fio")
    except BenchError:
        if not FioArm.registered:
            raise
        FioArm.registered = False
        output = _run(_fio_command(options, files), "fio")
    report: dict[str, Any] = json.loads(output[output.index("{") :])
    return report


def _fio_command(options: Mapping[str, object], files: Sequence[Path]) -> list[str]:
    common = {
        "name": "global",
        **options,
        "ioengine": "io_uring",
        "direct": 1,
        "fixedbufs": int(FioArm.registered),
        "registerfiles": int(FioArm.registered),
        "scramble_buffers": 0,
        "unified_rw_reporting": "mixed",
        "group_reporting": 1,
        "percentile_list": "50:99",
        "output-format": "json",
    }
    command = ["fio", *(f"--{key}={value}" for key, value in common.items())]
    for number, path in enumerate(files):
        name = str(path).replace(":", "\\:")
        command += [f"--name=job{number}", f"--filename={name}"]
    return command


def fio_figures(report: dict[str, Any], latency: str = "clat_ns") -> Figures:
    """Figures of fio's JSON with `unified_rw_reporting=mixed`.

    CPU time: of the jobs' processes, which fio gives as shares of their time. latency: which of
    fio's; `lat_ns` has submission in it.
    """
    job = report["jobs"][0]
    total = job["mixed"]
    found = total[latency].get("percentile", {})
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    seconds = total["io_bytes"] / total["bw_bytes"]
    return Figures(
        total["io_bytes"],
        seconds,
        cpu_s,
        found["50.000000"] / 1000 if "50.000000" in found else None,
        found["99.000000"] / 1000 if "99.000000" in found else None,
    )


def build_ring(directory: Path) -> Path:
    """Compile the ring loop into `directory`, unless it is there and newer than its source.

    Raises:
        BenchError: no C compiler, or no liburing to compile with.
    """
    program = directory / "ring_loop"
    if program.exists() and program.stat().st_mtime >= _RING_SOURCE.stat().st_mtime:
        return program
    directory.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "gcc")
    command = [compiler, "-O2", "-o", str(program), str(_RING_SOURCE), "-luring"]
    try:
        _run(command, f"the ring loop does not compile (needs {compiler} and liburing-dev)")
    except BenchError:
        program.unlink(missing_ok=True)
        raise
    return program


class RingArm:
    """Implements `arms.base.Arm`."""

    name = "ring"

    def __init__(self, program: Path, path: Path, settings: Settings, block_bytes: int) -> None:
        self._program = program
        self._path = path
        self._settings = settings
        self._block_bytes = block_bytes

    def measure(self, kind: str) -> dict[str, Figures]:
        how = kind.removeprefix("batch_")
        size = self._settings.batch_blocks(self._block_bytes) * self._block_bytes
        numbers = (self._block_bytes, size, self._settings.depth)
        output = _run(
            [str(self._program.resolve()), str(self._path), how, *map(str, numbers)], "ring"
        )
        row = json.loads(output)
        return {
            kind: Figures(row["bytes"], row["seconds"], row["cpu_s"], row["p50_us"], row["p99_us"])
        }

    def tidy(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is left running."""
