# SPDX-License-Identifier: Apache-2.0
"""The worker for a vLLM that hands over device pointers instead of block ids.

vLLM's pull request 56076 resolves the blocks of a job once, before its worker gets them: arrays of
addresses, group after group, in each group tensor after tensor, in each tensor block after block.
Our geometry knows the tensors already and needs the blocks, so that the addresses are turned back
into ids. All tensors of a group must give the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LoadStoreSpec

from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.vllm_adapter import capabilities
from vllm_nvmeof_offload.vllm_adapter.worker import BlockColumns, NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankWorker


class PointersWorker(NVMeoFOffloadingWorker):
    """One rank's transfers, for a vLLM that names GPU blocks by the addresses of their pages.

    kv_caches: vLLM's `CanonicalKVCaches`, from which it makes the addresses.
    """

    def __init__(self, parts: RankWorker, kv_caches: Any) -> None:
        super().__init__(parts)
        tensors = [one.tensor for one in kv_caches.tensors]  # int8[blocks, bytes]
        self._rows = [
            _Rows([tensors[ref.tensor_idx] for ref in refs]) for refs in kv_caches.group_data_refs
        ]

    def submit_store(  # type: ignore[override]
        self, job_id: int, device_ptrs: Any, dst_spec: LoadStoreSpec, **_: Any
    ) -> bool:
        self._store(job_id, dst_spec, self._columns_at(device_ptrs))
        return True

    def submit_load(  # type: ignore[override]
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        device_ptrs: Any,
        expedited: bool = False,
        **_: Any,
    ) -> bool:
        self._load(job_id, src_spec, self._columns_at(device_ptrs), expedited=expedited)
        return True

    def _columns_at(self, device_ptrs: Any) -> BlockColumns:
        """The blocks of vLLM's `DevicePointers`."""
        sizes, refs = device_ptrs.group_block_counts, device_ptrs.group_data_ref_counts
        if [*refs] != [one.count for one in self._rows]:
            raise IntegrationError(f"vLLM's device pointers name {refs} tensors per group")
        ids, at = [], 0
        for rows, size in zip(self._rows, sizes, strict=True):
            ids.append(rows.ids_of(device_ptrs.ptrs[at : at + rows.count * size], size))
            at += rows.count * size
        if at != len(device_ptrs.ptrs):
            raise IntegrationError(
                f"{len(device_ptrs.ptrs)} device pointers, of which groups have {at}"
            )
        return BlockColumns(np.concatenate(ids), sizes, device_ptrs.block_indices)


class _Rows:
    """The first addresses and the strides of a group's tensors, whose rows are blocks."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.count = len(tensors)
        self._blocks = min((one.shape[0] for one in tensors), default=0)
        self._starts = np.array([one.data_ptr() for one in tensors], np.uint64)[:, None]
        self._strides = np.array([one.stride(0) for one in tensors], np.uint64)[:, None]

    def ids_of(self, pointers: npt.NDArray[np.uint64], blocks: int) -> npt.NDArray[np.int32]:
        """The ids of so many blocks. pointers: uint64[tensors × blocks], tensor after tensor.

        A pipeline stage without a layer of the group has no addresses: the ids are then 0, and
        nothing is copied.
        """
        if not self.count:
            return np.zeros(blocks, np.int32)
        table = pointers.reshape(self.count, blocks)
        ids = (table[:1] - self._starts[:1]) // self._strides[:1]
        if (self._starts + ids * self._strides != table).any() or (ids >= self._blocks).any():
            raise IntegrationError("vLLM's device pointers are not those of blocks of its KV cache")
        return np.asarray(ids[0], np.int32)


def worker_class() -> type[NVMeoFOffloadingWorker]:
    """The worker that fits this vLLM."""
    pointers = capabilities.DEVICE_BLOCKS.form == capabilities.POINTERS
    return PointersWorker if pointers else NVMeoFOffloadingWorker


def make_worker(parts: RankWorker, kv_caches: Any) -> NVMeoFOffloadingWorker:
    """A worker that fits this vLLM. kv_caches: vLLM's `CanonicalKVCaches`."""
    if capabilities.DEVICE_BLOCKS.form == capabilities.POINTERS:
        return PointersWorker(parts, kv_caches)
    return NVMeoFOffloadingWorker(parts)
