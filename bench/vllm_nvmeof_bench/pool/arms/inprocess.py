# SPDX-License-Identifier: Apache-2.0
"""An arm inside this process: batches, one job, and reads beside writes, over a `Mover`.

CPU time is the process's clock: all its threads and io_uring's kernel workers, and the little
that this loop itself takes. Python's garbage collector is off meanwhile (`run`).

p50 and p99: of a job for `single_*` (one job a round: its time is p50, and p99 is not known),
of a demand read for `read_beside_writes`; a batch is handed over at once, so that a block's
time in it would be its place in the queue, and is left out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import chain

from vllm_nvmeof_bench.pool.arms.base import Job, Mover
from vllm_nvmeof_bench.pool.beside import run_beside
from vllm_nvmeof_bench.pool.samples import Figures
from vllm_nvmeof_bench.pool.settings import Settings

__all__ = ["MoverArm"]


class MoverArm:
    """Implements `arms.base.Arm`."""

    def __init__(self, name: str, mover: Mover, settings: Settings, block_bytes: int) -> None:
        self.name = name
        self._mover = mover
        self._settings = settings
        self._block_bytes = block_bytes
        self._random = random.Random(settings.seed)

    def measure(self, kind: str) -> dict[str, Figures]:
        blocks = self._settings.batch_blocks(self._block_bytes)
        single = self._settings.single_blocks(self._block_bytes)
        if kind == "batch_write":
            return {kind: self._timed(self._cut(False, range(blocks)))}
        if kind == "batch_read":
            return {kind: self._timed(self._cut(True, range(blocks)))}
        if kind == "mixed":
            reads = self._cut(True, range(blocks // 2))
            writes = self._cut(False, range(blocks // 2, blocks), first_token=len(reads))
            pairs = zip(reads, writes, strict=False)
            rest = writes[len(reads) :] + reads[len(writes) :]
            return {kind: self._timed([*chain.from_iterable(pairs), *rest])}
        if kind in ("single_write", "single_read"):
            figures = self._timed([Job(0, kind == "single_read", range(single))])
            took_us = figures.seconds * 1e6
            return {kind: Figures(figures.payload_bytes, figures.seconds, figures.cpu_s, took_us)}
        reads_wanted = self._settings.reads if kind == "beside" else 0
        tidy: Callable[[], bool] = self._mover.tidy
        return run_beside(
            self._mover, self._settings, self._block_bytes, reads_wanted, self._random, tidy
        )

    def _cut(self, is_read: bool, blocks: range, first_token: int = 0) -> list[Job]:
        """A batch as the jobs that this arm likes best."""
        job_bytes = self._mover.batch_job_bytes or self._block_bytes
        step = max(1, job_bytes // self._block_bytes)
        parts = [blocks[start : start + step] for start in range(0, len(blocks), step)]
        return [Job(first_token + number, is_read, part) for number, part in enumerate(parts)]

    def _timed(self, jobs: list[Job]) -> Figures:
        self._mover.prepare(jobs)
        payload_bytes = sum(len(job.blocks) for job in jobs) * self._block_bytes
        cpu_s, start_s = time.process_time(), time.perf_counter()
        self._mover.run(jobs)
        end_s, cpu_end_s = time.perf_counter(), time.process_time()
        return Figures(payload_bytes, end_s - start_s, cpu_end_s - cpu_s)

    def tidy(self) -> bool:
        return self._mover.tidy()

    def close(self) -> None:
        self._mover.close()
