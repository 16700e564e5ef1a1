# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering, adapted for benchmarks on vLLM's CPU engine, which it otherwise refuses.

vLLM's spec requires a GPU only because its worker copies with CUDA streams. The subclass here has a
worker that copies between host buffers, with the same thread and memmove as our arms. The manager,
the CPU tier's shared memory, eviction, promotion and the fs tier are vLLM's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.native import CacheGeometry

_WAIT_S = 60.0


class HostCopyWorker(OffloadingWorker):
    """A worker that copies blocks to and from chunks of `region`, in the order of submission."""

    def __init__(
        self, groups: Sequence[ChunkGeometry], region: Any, chunk_stride_bytes: int
    ) -> None:
        self._groups = groups
        self._geometry = CacheGeometry([one.columns for one in groups])
        self._region = region
        self._base = int(region.base_tensor.data_ptr())
        self._stride = chunk_stride_bytes
        self._changed = threading.Condition()
        self._copy = HostCopyEngine(on_done=self._notify)
        self._jobs: dict[int, tuple[int, int, float]] = {}  # ticket → job, bytes, start
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._submit(job_id, Direction.STORE, src_spec, dst_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any
    ) -> bool:
        self._submit(job_id, Direction.LOAD, dst_spec, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._collect()
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        end_s = time.monotonic() + _WAIT_S
        with self._changed:
            while True:
                self._collect()
                if job_ids.isdisjoint(job for job, _, _ in self._jobs.values()):
                    return
                assert self._changed.wait(end_s - time.monotonic()), "a copy does not end"

    def shutdown(self) -> None:
        self._copy.close()
        self._region.cleanup()

    def _submit(self, job: int, way: Direction, gpu: GPULoadStoreSpec, chunks: Any) -> None:
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        pieces = self._pieces(gpu, chunks.block_ids)
        ticket = self._copy.submit(way, pieces, None)
        self._jobs[ticket] = (job, int(pieces[:, 2].sum()), time.monotonic())

    def _pieces(self, gpu: GPULoadStoreSpec, chunks: Any) -> Descriptors:
        """Return a job's descriptors; blocks and chunks are in group order."""
        groups = b""
        columns = zip(self._groups, gpu.group_sizes, gpu.block_indices, strict=True)
        for number, (one, count, index) in enumerate(columns):
            last = int(index) % one.blocks_per_chunk + count - 1
            groups += bytes([number]) * (1 + last // one.blocks_per_chunk if count else 0)
        assert len(groups) == len(chunks), "the blocks and the chunks differ in number"
        blocks = gpu.block_ids, gpu.group_sizes, gpu.block_indices
        pieces, first = self._geometry.pieces(False, *blocks, groups)
        addresses = self._base + np.asarray(chunks, np.uint64) * np.uint64(self._stride)
        pieces[:, 1] += np.repeat(addresses, np.diff(first))
        return pieces

    def _collect(self) -> None:
        for ticket, _ in self._copy.poll():
            job, count, start_s = self._jobs.pop(ticket)
            seconds = time.monotonic() - start_s
            self._done.append(TransferResult(job, True, count, seconds))

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class HostTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with a `HostCopyWorker`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        tensors = [
            CacheTensor(
                one.tensor.data_ptr(),
                one.tensor.stride(0) * one.tensor.element_size(),
                one.page_size_bytes,
                one.tensor.shape[0],
            )
            for one in kv_caches.tensors
        ]
        groups = [
            ChunkGeometry([tensors[ref.tensor_idx] for ref in refs], self.blocks_per_chunk)
            for refs in kv_caches.group_data_refs
        ]
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostCopyWorker(groups, region, self.kv_bytes_per_chunk)
