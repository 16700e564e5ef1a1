# SPDX-License-Identifier: Apache-2.0
"""The arms of `bench pool` at one block size: our engines, fio, a bare ring loop, vLLM's fs tier.

Block i has place i of the staging memory and place i of the arm's storage, which was all written
before. Whoever moves blocks inside this process is a `Mover`, and `MoverArm` measures it: CPU time
is the process's clock, which counts all its threads, io_uring's kernel workers and the little that
the loop itself takes. fio and the ring loop are processes of their own.

Latencies: of a job for `single_*` (one job per round: its time is p50, and p99 is not known), of a
demand read for `read_beside_writes`, of a block for fio and the ring. A batch is submitted at
once, so that a block's time in it would be its place in the queue, and is left out.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import inspect
import io
import itertools
import json
import os
import random
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vllm_nvmeof_bench.pool.report import Sample, Settings
from vllm_nvmeof_bench.results import BenchError, percentile
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import IoEngine, IoLimits, IoOp
from vllm_nvmeof_offload.io.threads import ThreadsIoEngine
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import GIB, MIB, slot_stride_bytes

_STALL_S = 60.0


@dataclass(frozen=True)
class Moved:
    """What one arm measured. payload_bytes: header pages and table entries do not count.

    cpu_s: user and system time; None where it cannot be told apart. Latencies are None where an
    arm does not report them.
    """

    payload_bytes: int
    seconds: float
    cpu_s: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None

    def sample(self, arm: str, case: str, block_bytes: int, number: int) -> Sample:
        cpu_s = None if self.cpu_s is None else round(self.cpu_s * GIB / self.payload_bytes, 5)
        rate = round(self.payload_bytes / MIB / self.seconds, 2)
        p50_us, p99_us = (
            None if value is None else round(value, 1) for value in (self.p50_us, self.p99_us)
        )
        return Sample(arm, case, block_bytes, number, rate, cpu_s, p50_us, p99_us)


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer of some blocks; no block is in two jobs that write at one time."""

    token: int
    is_read: bool
    blocks: Sequence[int]


class Arm(abc.ABC):
    """One contestant at one block size. Without files and threads there is nothing to tidy."""

    @abc.abstractmethod
    def measure(self, kind: str) -> dict[str, Moved]:
        """Run one kind of measurement, prepared untimed; return the cases that it yields.

        Raises:
            BenchError: a transfer failed.
        """

    def tidy(self) -> bool:
        """Delete what is no longer used; True if the disk may be busy with that for a while."""
        return False

    def close(self) -> None:  # noqa: B027 - arms without threads and memory close nothing
        """Stop threads and release memory."""


class Mover(Protocol):
    """How an arm in this process takes jobs."""

    #: Bytes of one job in a batch; None: each block is submitted on its own.
    batch_job_bytes: int | None

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Untimed: make sure that what is to be read exists, and name what is to be written."""

    def run(self, jobs: Sequence[Job]) -> None:
        """Submit all at once; return when all is done."""

    def submit(self, job: Job) -> None:
        """Submit one job, which this call prepares."""

    def poll(self, timeout_s: float) -> list[int]:
        """Wait at most so long for jobs to end; return their tokens."""

    def tidy(self) -> bool:
        """As of `Arm`."""

    def close(self) -> None:
        """As of `Arm`."""


# -- reads beside writes ------------------------------------------------------------------

#: Submitted beyond `queued_bytes`, so that so many are queued even while writes end.
_EXTRA_BYTES = 16 * MIB
_EPISODES_MAX = 40
#: One read needs little time beside writes; longer waits come back to look at the clock.
_POLL_S_MAX = 0.05


@dataclass
class _Totals:
    seconds: float = 0.0
    cpu_s: float = 0.0
    writes: int = 0
    latencies_s: list[float] = field(default_factory=list)


def run_beside(
    mover: Mover,
    settings: Settings,
    block_bytes: int,
    reads_wanted: int,
    generator: random.Random,
) -> dict[str, Moved]:
    """One demand read at a time beside a writer that never lets its queue run low.

    The run is cut into episodes. In each the writer fills its queue; after the first writes have
    ended, time starts; reads follow each other with a pause; for every write that ends the writer
    submits a new one, so that `queued_bytes` are always queued. An episode ends when it has
    written `episode_bytes` or has the reads it needs; then it drains, and what the arm no longer
    uses on the disk is deleted. Throughput and CPU time are those of the timed parts. With no
    reads wanted it is one episode of writes.
    """
    blocks = settings.blocks_needed(block_bytes)
    split = blocks // 4
    queue = (settings.queued_bytes + _EXTRA_BYTES) // block_bytes
    queue = max(2, min(queue, (blocks - split) // 2))
    mover.prepare([Job(0, True, range(split))])
    totals = _Totals()
    for _ in range(_EPISODES_MAX):
        episode = _Episode(mover, settings, block_bytes, queue, range(split, blocks), generator)
        episode.run(range(split), reads_wanted - len(totals.latencies_s), totals)
        mover.tidy()
        if len(totals.latencies_s) >= reads_wanted:
            break
    else:
        raise BenchError(f"only {len(totals.latencies_s)} of {reads_wanted} reads came through")
    return _moved(totals, block_bytes)


def _moved(totals: _Totals, block_bytes: int) -> dict[str, Moved]:
    reads = len(totals.latencies_s)
    written = totals.writes * block_bytes
    if not reads:
        return {"writes_alone": Moved(written, totals.seconds, totals.cpu_s)}
    # CPU time of both directions at once cannot be told apart: it goes to all bytes moved.
    share = written / (written + reads * block_bytes)
    latencies_us = [1e6 * latency_s for latency_s in totals.latencies_s]
    return {
        "read_beside_writes": Moved(
            reads * block_bytes,
            sum(totals.latencies_s),
            None,
            percentile(latencies_us, 0.5),
            percentile(latencies_us, 0.99),
        ),
        "writes_beside_read": Moved(written, totals.seconds, totals.cpu_s * share),
    }


class _Episode:
    """One filling, timing and draining of the queue."""

    def __init__(
        self,
        mover: Mover,
        settings: Settings,
        block_bytes: int,
        queue: int,
        write_blocks: range,
        generator: random.Random,
    ) -> None:
        self._mover = mover
        self._settings = settings
        self._block_bytes = block_bytes
        self._queue = queue
        self._next_block = itertools.cycle(write_blocks)
        self._tokens = itertools.count(1)
        self._random = generator
        self._outstanding: set[int] = set()

    def run(self, read_blocks: range, reads: int, totals: _Totals) -> None:
        while len(self._outstanding) < self._queue:
            self._write()
        ended = 0
        while ended < max(1, self._queue // 4):
            ended += self._top_up(self._wait(_STALL_S))
        cpu_s, start_s = time.process_time(), time.perf_counter()
        self._timed(read_blocks, reads, totals)
        totals.seconds += time.perf_counter() - start_s
        totals.cpu_s += time.process_time() - cpu_s
        while self._outstanding:
            self._outstanding.difference_update(self._wait(_STALL_S))

    def _timed(self, read_blocks: range, reads: int, totals: _Totals) -> None:
        budget = max(1, self._settings.episode_bytes // self._block_bytes)
        goal = len(totals.latencies_s) + reads
        written, reading, submitted_s = 0, 0, 0.0
        due_s = time.perf_counter() + self._settings.read_gap_s / 4
        end_s = time.perf_counter() + _STALL_S
        # A read that was handed over is waited for, whatever the budget says; and so is the first
        # write: where none ended, there would be no rate.
        while True:
            more = len(totals.latencies_s) < goal
            if written and not reading and (written >= budget or (reads and not more)):
                break
            now_s = time.perf_counter()
            if now_s > end_s and not written:
                raise BenchError(f"no write ended for {_STALL_S:.0f} s beside reads")
            if more and not reading and now_s >= due_s:
                reading, submitted_s = next(self._tokens), now_s
                self._mover.submit(Job(reading, True, (self._random.choice(read_blocks),)))
            pause_s = due_s - now_s if more and not reading else _POLL_S_MAX
            finished = self._mover.poll(min(max(pause_s, 0.0), _POLL_S_MAX))
            if reading in finished:
                now_s = time.perf_counter()
                totals.latencies_s.append(now_s - submitted_s)
                finished.remove(reading)
                reading, due_s = 0, now_s + self._settings.read_gap_s
            written += self._top_up(finished)
        totals.writes += written

    def _write(self) -> None:
        token = next(self._tokens)
        self._outstanding.add(token)
        self._mover.submit(Job(token, False, (next(self._next_block),)))

    def _top_up(self, finished: list[int]) -> int:
        """Writes that have ended: hand over as many new ones."""
        self._outstanding.difference_update(finished)
        for _ in finished:
            self._write()
        return len(finished)

    def _wait(self, timeout_s: float) -> list[int]:
        end_s = time.perf_counter() + timeout_s
        while time.perf_counter() < end_s:
            finished = self._mover.poll(_POLL_S_MAX)
            if finished:
                return finished
        raise BenchError(f"nothing ended for {timeout_s:.0f} s")


class MoverArm(Arm):
    """Batches, one job, and reads beside writes, over a `Mover`."""

    def __init__(self, mover: Mover, settings: Settings, block_bytes: int) -> None:
        self._mover = mover
        self._settings = settings
        self._block_bytes = block_bytes
        self._random = random.Random(settings.seed)

    def measure(self, kind: str) -> dict[str, Moved]:
        blocks = self._settings.batch_blocks(self._block_bytes)
        single = self._settings.single_blocks(self._block_bytes)
        if kind in ("batch_write", "batch_read"):
            return {kind: self._timed(self._cut(kind == "batch_read", range(blocks)))}
        if kind == "mixed":
            reads = self._cut(True, range(blocks // 2))
            writes = self._cut(False, range(blocks // 2, blocks), first_token=len(reads))
            pairs = zip(reads, writes, strict=False)
            rest = writes[len(reads) :] + reads[len(writes) :]
            return {kind: self._timed([*itertools.chain.from_iterable(pairs), *rest])}
        if kind in ("single_write", "single_read"):
            moved = self._timed([Job(0, kind == "single_read", range(single))])
            return {kind: replace(moved, p50_us=moved.seconds * 1e6)}
        reads_wanted = self._settings.reads if kind == "beside" else 0
        return run_beside(
            self._mover, self._settings, self._block_bytes, reads_wanted, self._random
        )

    def _cut(self, is_read: bool, blocks: range, first_token: int = 0) -> list[Job]:
        """A batch as jobs of the size that suits this arm."""
        job_bytes = self._mover.batch_job_bytes or self._block_bytes
        step = max(1, job_bytes // self._block_bytes)
        parts = [blocks[start : start + step] for start in range(0, len(blocks), step)]
        return [Job(first_token + number, is_read, part) for number, part in enumerate(parts)]

    def _timed(self, jobs: list[Job]) -> Moved:
        self._mover.prepare(jobs)
        payload_bytes = sum(len(job.blocks) for job in jobs) * self._block_bytes
        cpu_s, start_s = time.process_time(), time.perf_counter()
        self._mover.run(jobs)
        end_s, cpu_end_s = time.perf_counter(), time.process_time()
        return Moved(payload_bytes, end_s - start_s, cpu_end_s - cpu_s)

    def tidy(self) -> bool:
        return self._mover.tidy()

    def close(self) -> None:
        self._mover.close()


def fill(staging: Staging, seed: int) -> None:
    """Random bytes everywhere: no device can take them for zeros or shrink them."""
    memory = np.frombuffer(staging.view, np.uint8)
    chunk = np.frombuffer(np.random.default_rng(seed).bytes(1 << 24), np.uint8)
    for start in range(0, len(memory), len(chunk)):
        part = memory[start : start + len(chunk)]
        part[:] = chunk[: len(part)]


# -- our engines --------------------------------------------------------------------------

_TABLE_ENTRY_BYTES = 64
_KEY_BYTES = 36
#: In one call: cutting the rest at every completion would cost more than the I/O.
_SUBMITTED_MAX = 1024


def limits() -> dict[str, int]:
    """The bounds of the product's configuration, so that VLLM_NVMEOF_* variables apply."""
    settings = parse_config({})
    return {
        "threads": settings.io_threads,
        "depth": settings.io_depth,
        "split_bytes": settings.io_split_bytes,
        "write_bytes_beside_reads_max": settings.write_bytes_beside_reads_max,
        "read_bytes_in_flight_max": settings.read_bytes_in_flight_max,
        "write_bytes_in_flight_max": settings.write_bytes_in_flight_max,
    }


class Ground:
    """One pool that our engines share, as the product runs it: whole slots from populated staging.

    A slot is a 4 KiB header page and the payload. Sealing, both checksums, the table entry after
    each write and the proof of identity after each read are inside the timing; only the payload
    counts. `identities[i]` is what slot i was written with.
    """

    def __init__(self, directory: Path, block_bytes: int, blocks: int, staging: Staging) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = slot_stride_bytes(block_bytes)
        self.staging = staging
        spec = PoolSpec(
            targets=(directory,),
            pool_bytes=blocks * (self.slot_bytes + _TABLE_ENTRY_BYTES),
            payload_bytes=block_bytes,
            keyspace=Keyspace.of({"bench": block_bytes}),
            o_direct="auto",
        )
        self.pool = Pool.open(spec)
        if self.pool.slots < blocks:
            self.pool.close()
            raise BenchError(f"no space for a pool of {blocks} blocks of {block_bytes} bytes")
        self.identities = [
            SlotIdentity(number.to_bytes(_KEY_BYTES, "little"), 0) for number in range(blocks)
        ]
        self.written = False

    def op(self, token: int, is_read: bool, block: int) -> IoOp:
        identity = self.identities[block]
        if not is_read:
            identity = SlotIdentity(identity.key, identity.generation + 1)
            self.identities[block] = identity
        return IoOp(
            token,
            OpKind.FETCH if is_read else OpKind.WRITE,
            Urgency.DEMAND if is_read else Urgency.WRITE,
            block,
            self.staging.map.base_address + block * self.slot_bytes,
            identity,
        )


def open_engine(name: str, ground: Ground) -> IoEngine:
    """Build the engine of arm `name`, "ours" or "ours_threads".

    Raises:
        BenchError: it cannot run here, and why.
    """
    memory, address = ground.staging.view, ground.staging.map.base_address
    bounds = IoLimits.of(parse_config({}))
    if name == "ours_threads":
        return ThreadsIoEngine(ground.pool, memory, address, bounds)
    try:
        from vllm_nvmeof_offload.io.uring import UringIoEngine
    except ImportError as error:
        raise BenchError(f"the io_uring engine is not built here ({error})") from None
    try:
        engine: IoEngine = UringIoEngine(ground.pool, memory, address, bounds)
    except EngineError as error:
        raise BenchError(f"the io_uring engine does not start: {error}") from None
    return engine


class EngineMover:
    """Drives one engine as its only caller: submit, wait on `fileno`, poll."""

    batch_job_bytes: int | None = None

    def __init__(self, engine: IoEngine, ground: Ground) -> None:
        self._engine = engine
        self._ground = ground
        self._token = 0
        #: Of `submit`: operation → job, job → operations left.
        self._job_of: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(engine.fileno(), select.POLLIN)
        if not ground.written:
            # Space that was never written takes writes at half the speed.
            blocks = range(len(ground.identities))
            self.run([Job(0, False, blocks)])
            ground.written = True

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Nothing: all slots are written, and an identity is named as an op is made."""

    def run(self, jobs: Sequence[Job]) -> None:
        make, first = self._ground.op, self._token + 1
        ops = [
            make(token, is_read, block)
            for token, (is_read, block) in enumerate(
                ((job.is_read, block) for job in jobs for block in job.blocks), first
            )
        ]
        self._token += len(ops)
        accepted = self._engine.submit(ops[:_SUBMITTED_MAX])
        left = len(ops)
        while left:
            left -= len(self._completed(_STALL_S))
            if accepted < len(ops):
                accepted += self._engine.submit(ops[accepted : accepted + _SUBMITTED_MAX])

    def submit(self, job: Job) -> None:
        ops = []
        for block in job.blocks:
            self._token += 1
            self._job_of[self._token] = job.token
            ops.append(self._ground.op(self._token, job.is_read, block))
        self._left[job.token] = len(ops)
        if self._engine.submit(ops) < len(ops):
            raise BenchError(f"{self._engine.name}: its queue is full")

    def poll(self, timeout_s: float) -> list[int]:
        finished = []
        for token in self._completed(timeout_s, may_be_none=True):
            job = self._job_of.pop(token)
            self._left[job] -= 1
            if not self._left[job]:
                del self._left[job]
                finished.append(job)
        return finished

    def _completed(self, timeout_s: float, may_be_none: bool = False) -> list[int]:
        """Tokens of what has ended well."""
        if not self._poll.poll(timeout_s * 1000) and not may_be_none:
            raise BenchError(f"{self._engine.name}: nothing came for {timeout_s:.0f} s")
        tokens = []
        for completion in self._engine.poll():
            if completion.outcome is None or not completion.outcome.ok:
                raise BenchError(f"{self._engine.name}: an operation ended {completion.outcome}")
            tokens.append(completion.token)
        return tokens

    def tidy(self) -> bool:
        return False

    def close(self) -> None:
        if not self._engine.close():
            raise BenchError(f"{self._engine.name}: I/O hangs in the kernel")


# -- fio and the bare ring loop -----------------------------------------------------------

_RING_SOURCE = Path(__file__).with_name("ring_loop.c")
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


class FioArm(Arm):
    """fio on a flat file, with `depth` blocks in flight; its buffers are filled once, as ours.

    Time and CPU time are those of its loops, not of its start.
    """

    #: Switched off for good when registration is refused (memlock limit).
    registered = True

    def __init__(self, path: Path, settings: Settings, block_bytes: int) -> None:
        self._path = path
        self._settings = settings
        self._block_bytes = block_bytes

    def measure(self, kind: str) -> dict[str, Moved]:
        how = {"batch_write": "write", "batch_read": "read", "mixed": "rw"}[kind]
        options = {
            "rw": how,
            "bs": self._block_bytes,
            "size": self._settings.batch_blocks(self._block_bytes) * self._block_bytes,
            "iodepth": self._settings.depth,
            "randseed": self._settings.seed,
        }
        return {kind: fio_moved(run_fio(options, [self._path]))}


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


def fio_moved(report: dict[str, Any], latency: str = "clat_ns") -> Moved:
    """Moved of fio's JSON with `unified_rw_reporting=mixed`.

    CPU time: of the jobs' processes, which fio gives as shares of their time. latency: which of
    fio's; `lat_ns` has submission in it.
    """
    job = report["jobs"][0]
    total = job["mixed"]
    found = total[latency].get("percentile", {})
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    seconds = total["io_bytes"] / total["bw_bytes"]
    return Moved(
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


class RingArm(Arm):
    """A bare io_uring loop on the same file, with registered buffers and a registered file."""

    def __init__(self, program: Path, path: Path, settings: Settings, block_bytes: int) -> None:
        self._program = program
        self._path = path
        self._settings = settings
        self._block_bytes = block_bytes

    def measure(self, kind: str) -> dict[str, Moved]:
        how = kind.removeprefix("batch_")
        size = self._settings.batch_blocks(self._block_bytes) * self._block_bytes
        numbers = (self._block_bytes, size, self._settings.depth)
        output = _run(
            [str(self._program.resolve()), str(self._path), how, *map(str, numbers)], "ring"
        )
        row = json.loads(output)
        values = [row[key] for key in ("bytes", "seconds", "cpu_s", "p50_us", "p99_us")]
        return {kind: Moved(*values)}


# -- vLLM's fs tier -----------------------------------------------------------------------

_FS_POLL_S = 0.0002
_FS_JOB_BYTES = 2 * MIB


def import_fs() -> Any:
    """Import vLLM's module of the tier, quietly.

    Raises:
        BenchError: this vLLM has none, or there is no vLLM.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from vllm.v1.kv_offload.tiering.fs import manager
    except ImportError as error:
        raise BenchError(f"vLLM's fs tier cannot be imported ({error})") from None
    return manager


def describe_fs() -> dict[str, Any]:
    """Name the parts of the tier that are in use, for the conditions."""
    manager = import_fs()
    from vllm.v1.kv_offload.tiering.fs import io as fs_io

    parameters = inspect.signature(manager.FileSystemTierManager).parameters
    threads = {
        name: parameters[f"n_{name}"].default if f"n_{name}" in parameters else None
        for name in ("read_threads", "write_threads")
    }
    return {
        "c_extension": bool(fs_io._HAS_FSIO_C),
        **threads,
        "job_bytes_in_batches": _FS_JOB_BYTES,
    }


class FsMover:
    """vLLM's own fs tier, driven through its real manager as vLLM's scheduler drives it.

    It has its default threads, and one row of the staging memory per block. Each block becomes a
    file, written under a temporary name and renamed. It does not write a file that exists, so
    that every write has a new key; files of old keys are deleted between the measurements. It uses
    O_DIRECT where the directory has it, and does not sync: nothing is added to its timing.

    A job runs on one thread. A batch is therefore many jobs of 2 MiB (or one block), which loads
    all threads without the cost of tiny jobs; beside reads a job is one block, so that it holds no
    thread for long. Single jobs cannot be waited for, so they are polled every 0.2 ms.
    """

    batch_job_bytes: int | None = _FS_JOB_BYTES

    def __init__(self, directory: Path, block_bytes: int, blocks: int, staging: Staging) -> None:
        self._manager_module = import_fs()
        self._directory = directory
        self._generation = 0
        self._jobs = 0
        self._job_of: dict[int, int] = {}
        #: The key that names each block on disk; a write sets it before it begins.
        self._keys: dict[int, bytes] = {}
        self._new_keys: dict[int, bytes] = {}
        self._stale: list[bytes] = []
        self._view = staging.view[: blocks * block_bytes].cast("B", [blocks, block_bytes])
        self._tier = self._manager_module.FileSystemTierManager(
            _spec(), self._view, "fs", str(directory)
        )
        self._context = _request()

    @property
    def direct(self) -> bool:
        """True if the tier found O_DIRECT to work; else its reads would be of the page cache."""
        return bool(self._tier._use_o_direct)

    def prepare(self, jobs: Sequence[Job]) -> None:
        missing = [b for job in jobs if job.is_read for b in job.blocks if b not in self._keys]
        if missing:
            step = max(1, _FS_JOB_BYTES // self._view.strides[0])  # type: ignore[index]
            parts = [missing[at : at + step] for at in range(0, len(missing), step)]
            writes = [Job(number, False, part) for number, part in enumerate(parts)]
            self._name(writes)
            self.run(writes)
        self._name([job for job in jobs if not job.is_read])

    def _name(self, writes: Sequence[Job]) -> None:
        self._generation += 1
        for job in writes:
            for block in job.blocks:
                self._new_keys[block] = _key(block, self._generation)

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._submit(job)
        self._tier.drain_jobs()
        count = len(self._finished())
        if count != len(jobs):
            raise BenchError(f"vLLM's fs tier finished {count} of {len(jobs)} jobs")

    def submit(self, job: Job) -> None:
        if not job.is_read:
            self._name([job])
        self._submit(job)

    def _submit(self, job: Job) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        self._job_of[self._jobs] = job.token
        transfer = TransferJob(
            job_id=self._jobs,
            keys=[self._key_for(block, job.is_read) for block in job.blocks],
            chunk_ids=np.asarray(job.blocks, np.int32),
            is_promotion=job.is_read,
            req_context=self._context,
        )
        if job.is_read:
            self._tier.submit_load(transfer)
        else:
            self._tier.submit_store(transfer)

    def _key_for(self, block: int, is_read: bool) -> bytes:
        if is_read:
            return self._keys[block]
        old = self._keys.get(block)
        if old is not None:
            self._stale.append(old)
        self._keys[block] = self._new_keys.pop(block)
        return self._keys[block]

    def poll(self, timeout_s: float) -> list[int]:
        end_s = time.perf_counter() + timeout_s
        while not (finished := self._finished()) and time.perf_counter() < end_s:
            time.sleep(_FS_POLL_S)
        return finished

    def _finished(self) -> list[int]:
        finished = []
        for result in self._tier.get_finished_jobs():
            if not result.success:
                raise BenchError("vLLM's fs tier: a job failed")
            finished.append(self._job_of.pop(result.job_id))
        return finished

    def tidy(self) -> bool:
        """Delete the files of old keys; nothing may be in flight."""
        stale, self._stale = self._stale, []
        for key in stale:
            path = self._tier.file_mapper.get_file_name(key)
            os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
        return bool(stale)

    def close(self) -> None:
        self._tier.shutdown()
        self._view.release()


def _key(block: int, generation: int) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    digest = hashlib.sha256(f"{block}:{generation}".encode()).digest()
    return bytes(make_offload_key(digest, 0))


def _request() -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id="bench")


def _spec() -> Any:
    """A real `OffloadingSpec` of one group on one rank; only its configuration is used."""
    from vllm.v1.kv_offload import config as fields
    from vllm.v1.kv_offload.base import OffloadingSpec

    class Spec(OffloadingSpec):  # type: ignore[misc]
        def get_manager(self) -> Any:
            raise AssertionError("not used")

        def get_worker(self, kv_caches: Any) -> Any:
            raise AssertionError("not used")

    return Spec(
        fields.OffloadingConfig(
            groups=(fields.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=1,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=fields.OffloadingModelConfig(name="bench", dtype="bfloat16"),
            cache=fields.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=fields.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
    )
