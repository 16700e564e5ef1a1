# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that behave differently from the imported vLLM; the self-test must catch each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from vllm_nvmeof_offload.vllm_adapter.worker import PointersWorker


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Two blocks of every load come back in each other's place."""
    stock = OffloadingConnectorWorker.start_kv_transfers

    def start(self: Any, metadata: Any) -> None:
        for job in metadata.load_jobs.values():
            ids = job.dst_spec.block_ids
            ids[[0, 1]] = ids[[1, 0]]
        stock(self, metadata)

    with patch.object(OffloadingConnectorWorker, "start_kv_transfers", start):
        yield


@contextlib.contextmanager
def stored_exchanged() -> Iterator[None]:
    """Blocks are given to stores in another order than to loads."""
    stock = OffloadingConnectorWorker.prepare_store_kv

    def prepare(self: Any, metadata: Any) -> None:
        for job in metadata.store_jobs.values():
            spec = job.src_spec
            assert isinstance(spec, GPULoadStoreSpec)
            spec.block_ids = spec.block_ids[::-1].copy()
        stock(self, metadata)

    with patch.object(OffloadingConnectorWorker, "prepare_store_kv", prepare):
        yield


@contextlib.contextmanager
def failures_ignored() -> Iterator[None]:
    """The scheduler does not look at blocks that were not loaded."""

    def ignore(self: Any, *given: Any) -> set[str]:
        return set()

    with patch.object(Scheduler, "_handle_invalid_blocks", ignore):
        yield


@contextlib.contextmanager
def no_reset() -> Iterator[None]:
    """A reset does not reach the connector."""
    with patch.object(Scheduler, "reset_connector_cache", lambda self: True):
        yield


@contextlib.contextmanager
def new_call() -> Iterator[None]:
    """The scheduler demands what the test does not give."""
    stock = Scheduler.update_from_output

    def update(self: Any, output: Any, model_output: Any, clock: float) -> Any:
        return stock(self, output, model_output)

    with patch.object(Scheduler, "update_from_output", update):
        yield


@contextlib.contextmanager
def device_pointers() -> Iterator[None]:
    """The worker gets device pointers; everything else is as before."""
    stock, made = PointersWorker.submit_load, []

    def submit_load(self: Any, *given: Any, **named: Any) -> bool:
        made.append(self)
        return stock(self, *given, **named)

    with pointing(), patch.object(PointersWorker, "submit_load", submit_load):
        yield
    assert len(made) == 3, "three loads by pointers"


@contextlib.contextmanager
def pointers_exchanged() -> Iterator[None]:
    """Device pointers, and two blocks of every load in each other's place."""
    with pointing(), exchanged():
        yield


STAND_INS: tuple[Callable[[], Any], ...] = (
    *(exchanged, stored_exchanged, failures_ignored, no_reset, new_call),
    *(device_pointers, pointers_exchanged),
)


@dataclass
class DevicePointers:
    """A stand-in of vLLM's class."""

    ptrs: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    group_block_counts: tuple[int, ...]
    group_data_ref_counts: tuple[int, ...]
    block_indices: tuple[int, ...]


def resolved(blocks: Sequence[Sequence[int]], firsts: Sequence[int], caches: Any) -> DevicePointers:
    """As vLLM does: group after group, tensor after tensor, block after block."""
    pointers, sizes = [], []
    for ids, refs in zip(blocks, caches.group_data_refs, strict=True):
        for ref in refs:
            tensor = caches.tensors[ref.tensor_idx].tensor
            pointers += [tensor.data_ptr() + one * tensor.stride(0) for one in ids]
            sizes += [ref.page_size_bytes] * len(ids)
    return DevicePointers(
        np.array(pointers, np.uint64),
        np.array(sizes, np.uint64),
        tuple(map(len, blocks)),
        tuple(len(refs) for refs in caches.group_data_refs),
        tuple(firsts),
    )


def _resolve(self: OffloadingConnectorWorker, spec: Any) -> DevicePointers:
    ends = [0, *accumulate(spec.group_sizes)]
    blocks = [spec.block_ids[first:end].tolist() for first, end in pairwise(ends)]
    return resolved(blocks, spec.block_indices, vars(self)["kv_caches"])


def _init_worker(self: OffloadingConnectorWorker, kv_caches: Any) -> None:
    vars(self)["kv_caches"] = kv_caches
    self.worker = self.spec.get_worker(kv_caches)


def _submit_stores(self: OffloadingConnectorWorker) -> None:
    worker: Any = self.worker
    for job, source, target in self._unsubmitted_store_jobs:
        assert worker.submit_store(job, _resolve(self, source), target)
    self._unsubmitted_store_jobs.clear()


def _handle_preemptions(self: OffloadingConnectorWorker, kv_connector_metadata: Any) -> None:
    flushed = kv_connector_metadata.jobs_to_flush or set()
    for job in flushed & kv_connector_metadata.store_jobs.keys():
        entry: Any = kv_connector_metadata.store_jobs.pop(job)
        self._unsubmitted_store_jobs.append((job, entry.src_spec, entry.dst_spec))
    _submit_stores(self)
    if flushed:
        assert self.worker is not None
        self.worker.wait(flushed)


def _start_kv_transfers(self: OffloadingConnectorWorker, metadata: Any) -> None:
    _submit_stores(self)
    worker: Any = self.worker
    for job, entry in metadata.load_jobs.items():
        self._load_jobs[job] = entry.req_id
        assert worker.submit_load(job, entry.src_spec, _resolve(self, entry.dst_spec))


def _submit_store(self: Any, job_id: int, device_ptrs: Any, dst_spec: Any) -> bool:
    raise NotImplementedError


def _submit_load(self: Any, job_id: int, src_spec: Any, device_ptrs: Any) -> bool:
    raise NotImplementedError


@contextlib.contextmanager
def pointing() -> Iterator[None]:
    """The imported vLLM hands over device pointers."""
    with contextlib.ExitStack() as changes:
        for name, method in (
            ("_init_worker", _init_worker),
            ("handle_preemptions", _handle_preemptions),
            ("start_kv_transfers", _start_kv_transfers),
        ):
            changes.enter_context(patch.object(OffloadingConnectorWorker, name, method))
        changes.enter_context(patch.object(base.OffloadingWorker, "submit_store", _submit_store))
        changes.enter_context(patch.object(base.OffloadingWorker, "submit_load", _submit_load))
        changes.enter_context(patch.object(base, "DevicePointers", DevicePointers, create=True))
        yield
