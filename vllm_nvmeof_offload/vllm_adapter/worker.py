# SPDX-License-Identifier: Apache-2.0
"""The adapter from vLLM's worker interface to the transfer pipeline.

All calls are made on the worker's main thread. Every transfer is reported to vLLM as successful,
because vLLM's worker asserts success. In the step that reports a job as finished, the connector
reports its failures: it sends block ids or requests to vLLM, and outcomes to the manager
(docs/protocol.md, rule 8).

vLLM recomputes from the first reported block. This is correct only for a single group of full
attention: earlier blocks of a window may not have been loaded, and with several groups vLLM refuses
block ids. In these cases the whole request is reported and recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from vllm_nvmeof_offload.errors import OutcomeKind
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import Command, LoadCommand, Report, ResetCommand, StoreCommand
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec
from vllm_nvmeof_offload.worker.build import RankWorker
from vllm_nvmeof_offload.worker.pipeline import Transfer, TransferPipeline

#: The maximum number of pieces that the model's thread submits itself: about 0.2 ms in the driver.
_START_PIECES_MAX = 256


#: The last three parts of a `Transfer`.
_Blocks: TypeAlias = tuple[npt.NDArray[np.int32], Sequence[int], Sequence[int]]


def _blocks_of(spec: GPULoadStoreSpec) -> _Blocks:
    return spec.block_ids, spec.group_sizes, spec.block_indices


class NVMeoFOffloadingWorker(OffloadingWorker):
    """One rank's transfers.

    With `reports_blocks` (`resumes_at_any_block`), a failed load is reported as the GPU blocks that
    it did not fill; otherwise, as its request.
    """

    def __init__(self, parts: RankWorker, *, reports_blocks: bool = False) -> None:
        self._parts = parts
        self._runner = parts.runner
        self._geometry = parts.geometry
        self._ops: dict[int, int] = {}  # our op, by vLLM's job
        self._jobs: dict[int, int] = {}  # vLLM's job, by our op
        self._loads: dict[int, tuple[LoadCommand, _Blocks]] = {}  # by op
        self._transfers: list[Transfer] = []  # submitted, but not yet handed over
        self._helpers: dict[int, int] = {}  # by op, for loads with a choice of peers
        self._gathers = False
        self._tensors = max(len(one.starts) for one in parts.geometry.by_group)
        self._reports_blocks = reports_blocks
        self._invalid_blocks: dict[str | None, set[int]] = {}  # by request
        self._requests: dict[int, str] = {}  # the request, by vLLM's load job
        self._failed_requests: set[str] = set()
        self._reports: list[Report] = []
        self._counters = Counts()

    # -- vLLM's interface -------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, **_: Any
    ) -> bool:
        assert isinstance(dst_spec, CommandSpec) and isinstance(dst_spec.command, StoreCommand)
        self._submit(job_id, dst_spec.command, _blocks_of(src_spec))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
        **_: Any,
    ) -> bool:
        # The request of an expedited load runs in this step, before a failure can be reported.
        assert not expedited, "parse_config accepts no sync_load_budget_bytes"
        assert isinstance(src_spec, CommandSpec) and isinstance(src_spec.command, LoadCommand)
        blocks = _blocks_of(dst_spec)
        self._loads[src_spec.command.op] = src_spec.command, blocks
        self._submit(job_id, src_spec.command, blocks)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, reports, counters = self._runner.take()
        self._reports += reports
        self._counters.add(counters)
        results: list[TransferResult] = []
        for job in finished:
            job_id = self._jobs.pop(job.op)
            del self._ops[job_id]
            load, request = self._loads.pop(job.op, None), self._requests.pop(job_id, None)
            if job.failures and load is not None:
                self._load_failed(*load, [row for row, _ in job.failures], request)
            elif job.failures:
                stale = [row for row, one in job.failures if one.kind is OutcomeKind.STALE]
                self._counters["unstored_chunks", "incomplete"] += len(stale)
            results.append(TransferResult(job_id, True, job.copied_bytes, job.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Cancel the loads that have not started; wait until all copies and DMA have ended."""
        self._hand_over()
        ops = [self._ops[job_id] for job_id in job_ids if job_id in self._ops]
        for op in ops:
            if op in self._loads:
                self._runner.hand_over(lambda p, op=op: p.cancel(op))  # type: ignore[misc]
        self._runner.wait(ops)

    def sleep(self) -> None:
        """Stop using the KV cache's memory, which vLLM will unmap, until `wake` is called."""
        self.wait(set(self._ops))
        self._parts.copy.asleep = True

    def wake(self) -> None:
        self._parts.copy.asleep = False

    def shutdown(self) -> None:
        parts = self._parts
        if parts.watcher is not None:
            parts.watcher.stop()
        parts.runner.stop()
        released = parts.links is None or parts.links.close()
        released &= parts.io.close()
        parts.copy.close()
        parts.runner.leave_set()
        if parts.regions is not None:
            parts.regions.end(abandon=not released)
        if parts.pool is not None:
            parts.pool.close(abandon=not released)
        if released:  # otherwise the kernel may use this memory until the process exits
            parts.staging.close()

    # -- the connector's interface ----------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Collect the jobs of a step, and hand them over with one fence."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            self._hand_over()

    def apply(self, commands: Iterable[Command]) -> None:
        """Start commands without GPU blocks, in order."""
        given, links = tuple(commands), self._parts.links

        def command_all(pipeline: TransferPipeline) -> None:
            for command in given:
                if links is not None and isinstance(command, ResetCommand):
                    links.set_tag(command.tag)
                pipeline.command(command)

        if given:  # one hand-over, because a long prompt causes hundreds of commands
            self._runner.hand_over(command_all)

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def take_reports(self) -> tuple[list[Report], Counts]:
        """Return the reports that `get_finished` collected, after the ends of their jobs."""
        taken = self._reports, self._counters
        self._reports, self._counters = [], Counts()
        return taken

    def note_requests(self, requests: Mapping[int, str]) -> None:
        self._requests.update(requests)

    def take_invalid_blocks(self) -> set[int]:
        """Return the GPU blocks that finished loads did not fill; none if requests are reported."""
        taken, self._invalid_blocks = self._invalid_blocks, {}
        return set().union(*taken.values())

    def forget_blocks(self, requests: Iterable[str]) -> None:
        """Forget the GPU blocks that the loads of these requests did not fill."""
        for request in requests:
            self._invalid_blocks.pop(request, None)

    def take_failed_requests(self) -> set[str]:
        """Return requests to recompute because finished loads did not fill all of their blocks."""
        taken, self._failed_requests = self._failed_requests, set()
        return taken

    # -- helpers ----------------------------------------------------------------------

    def _submit(self, job_id: int, command: StoreCommand | LoadCommand, blocks: _Blocks) -> None:
        op, batch, *helpers = command
        is_store = isinstance(command, StoreCommand)
        self._ops[job_id], self._jobs[op] = op, job_id
        self._transfers.append((op, is_store, batch, *blocks))
        if not is_store and helpers[0] is not None:
            self._helpers[op] = helpers[0]
        if not self._gathers:
            self._hand_over()

    def _hand_over(self) -> None:
        """Hand over the submitted jobs, with the fence after which they may access GPU blocks."""
        transfers, self._transfers = self._transfers, []
        helpers, self._helpers = self._helpers, {}
        if transfers:
            geometry, fence = self._geometry, self._parts.copy.record_fence()
            ops = [one[0] for one in transfers]
            begin = self._runner.start if self._is_quick(transfers) else self._runner.hand_over
            begin(lambda p: p.transfer(geometry, transfers, fence, helpers), *ops)

    def _is_quick(self, transfers: Sequence[Transfer]) -> bool:
        blocks = sum(len(ids) for _, _, _, ids, _, _ in transfers)
        return (
            blocks * self._tensors <= _START_PIECES_MAX
            and not all(is_store for _, is_store, *_ in transfers)
            and not any(batch.has_places for _, _, batch, *_ in transfers)
        )

    def _load_failed(
        self, command: LoadCommand, blocks: _Blocks, rows: list[int], request: str | None
    ) -> None:
        if self._reports_blocks:
            (group,), (ids, _, (first,)) = self._geometry.by_group, blocks
            by_chunk = group.split(ids, first, len(command.batch))
            failed = self._invalid_blocks.setdefault(request, set())
            for row in rows:
                failed.update(by_chunk[row].tolist())
        else:
            assert request is not None, "a load without a request has failed"
            self._failed_requests.add(request)
