# SPDX-License-Identifier: Apache-2.0
"""Adapter from vLLM's worker interface to the transfer pipeline.

All calls come on the worker's main thread. Every transfer is reported to vLLM as successful,
because its stock worker asserts that. The connector reports failures: block ids to vLLM, reports
to the manager, both in the step in which the job is reported finished (rule 8).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import Command, LoadCommand, Report, StoreCommand
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec
from vllm_nvmeof_offload.worker.build import RankWorker
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline

#: A job's GPU blocks as `ChunkGeometry` takes them: int32[n], the first one's position in the first
#: chunk, and the number of chunks. Their pieces are made on the pipeline's thread.
_Blocks = tuple[npt.NDArray[np.int32], int, int]


class NVMeoFOffloadingWorker(OffloadingWorker):
    """One rank's transfers."""

    def __init__(self, parts: RankWorker) -> None:
        self._parts = parts
        self._runner = parts.runner
        self._geometry = parts.geometry
        self._ops: dict[int, int] = {}  # vLLM's job → our op
        self._jobs: dict[int, int] = {}  # our op → vLLM's job
        self._load_blocks: dict[int, _Blocks] = {}  # by op, in case a chunk fails
        self._invalid_blocks: set[int] = set()
        self._reports: list[Report] = []
        self._counters = Counts()

    # -- vLLM's interface -------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, CommandSpec) and isinstance(dst_spec.command, StoreCommand)
        command, blocks = dst_spec.command, self._blocks(src_spec, len(dst_spec.command.batch))
        fence = self._begin(job_id, command.op)
        self._runner.hand_over(
            lambda p: p.store(command, self._geometry.pieces_by_chunk(*blocks), fence), command.op
        )
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any
    ) -> bool:
        assert isinstance(src_spec, CommandSpec) and isinstance(src_spec.command, LoadCommand)
        command, blocks = src_spec.command, self._blocks(dst_spec, len(src_spec.command.batch))
        fence = self._begin(job_id, command.op)
        self._load_blocks[command.op] = blocks
        self._runner.hand_over(
            lambda p: p.load(command, self._geometry.pieces_by_chunk(*blocks), fence), command.op
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, reports, counters = self._runner.take()
        self._reports += reports
        self._counters.add(counters)
        results: list[TransferResult] = []
        for job in finished:
            job_id = self._jobs.pop(job.op)
            del self._ops[job_id]
            blocks = self._load_blocks.pop(job.op, None)
            if blocks is not None and job.failures:
                by_chunk = self._geometry.split(*blocks)
                for index, _ in job.failures:
                    self._invalid_blocks.update(by_chunk[index].tolist())
            results.append(TransferResult(job_id, True, job.copied_bytes, job.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Wait until stores are copied, and until loads, cancelled if not started, run no DMA."""
        ops = [self._ops[job_id] for job_id in job_ids if job_id in self._ops]
        for op in ops:
            if op in self._load_blocks:
                self._runner.hand_over(lambda p, op=op: p.cancel(op))  # type: ignore[misc]
        self._runner.wait(ops)

    def sleep(self) -> None:
        """vLLM is about to unmap the KV cache's memory: touch it no more until `wake`."""
        self.wait(set(self._ops))
        self._parts.copy.asleep = True

    def wake(self) -> None:
        self._parts.copy.asleep = False

    def shutdown(self) -> None:
        parts = self._parts
        if parts.watcher is not None:
            parts.watcher.stop()
        parts.runner.stop()
        released = parts.io.close()
        parts.copy.close()
        if parts.pool is not None:
            parts.pool.close(abandon=not released)
        if released:  # otherwise the kernel still uses our memory until the process ends
            parts.staging.close()

    # -- the connector's interface ----------------------------------------------------

    def apply(self, commands: Iterable[Command]) -> None:
        """Start commands that move no GPU blocks, in their order."""
        given = tuple(commands)

        def command_all(pipeline: TransferPipeline) -> None:
            for command in given:
                pipeline.command(command)

        if given:  # in one hand-over, because a long prompt gives hundreds
            self._runner.hand_over(command_all)

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def take_reports(self) -> tuple[list[Report], Counts]:
        """Reports as of the last `get_finished`, so that a job is not reported to vLLM before."""
        taken = self._reports, self._counters
        self._reports, self._counters = [], Counts()
        return taken

    def take_invalid_blocks(self) -> set[int]:
        """GPU blocks that finished loads did not fill."""
        taken, self._invalid_blocks = self._invalid_blocks, set()
        return taken

    # -- helpers ----------------------------------------------------------------------

    def _begin(self, job_id: int, op: int) -> object:
        """Returns the fence after which the job may touch GPU blocks."""
        self._ops[job_id], self._jobs[op] = op, job_id
        return self._parts.copy.record_fence()

    def _blocks(self, spec: GPULoadStoreSpec, chunk_count: int) -> _Blocks:
        return (
            spec.block_ids,
            int(spec.block_indices[0]) % self._geometry.blocks_per_chunk,
            chunk_count,
        )
