# SPDX-License-Identifier: Apache-2.0
"""The worker that the benchmarks give to vLLM's tiering copies bytes to the right blocks."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry

BLOCKS, PAGE, PER_CHUNK, CHUNKS = 12, 4096, 2, 5


def test_stored_bytes_are_loaded_into_other_blocks() -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.base")
    peer = pytest.importorskip("vllm_nvmeof_bench.serve.peer")
    cache = np.random.default_rng(3).integers(0, 255, (2, BLOCKS, PAGE), np.uint8)
    before = cache.copy()
    memory = np.zeros((CHUNKS, 2 * PAGE * PER_CHUNK), np.uint8)
    tensors = [CacheTensor(one.ctypes.data, PAGE, PAGE, BLOCKS) for one in cache]
    region = SimpleNamespace(
        base_tensor=SimpleNamespace(data_ptr=lambda: memory.ctypes.data), cleanup=lambda: None
    )
    worker = peer.HostCopyWorker(ChunkGeometry(tensors, PER_CHUNK), region, memory.strides[0])
    try:
        gpu = base.GPULoadStoreSpec([7, 1, 4], group_sizes=(3,), block_indices=(0,))
        cpu = base.BlockIDsLoadStoreSpec([3, 0])
        assert worker.submit_store(10, gpu, cpu)
        worker.wait({10})
        [result] = worker.get_finished()
        assert (result.job_id, result.success, result.transfer_size) == (10, True, 3 * 2 * PAGE)
        cache[:] = 0
        # From the middle of the first chunk: blocks 1 and 2 of what was stored.
        back = base.GPULoadStoreSpec([2, 9], group_sizes=(2,), block_indices=(1,))
        assert worker.submit_load(11, cpu, back)
        end_s = time.monotonic() + 120
        while not (done := worker.get_finished()) and time.monotonic() < end_s:
            worker.wait({11})
        assert [one.job_id for one in done] == [11]
        assert np.array_equal(cache[:, [2, 9]], before[:, [1, 4]])
    finally:
        worker.shutdown()
