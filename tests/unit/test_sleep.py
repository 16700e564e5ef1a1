# SPDX-License-Identifier: Apache-2.0
"""When vLLM sleeps, nothing of ours touches the KV cache's memory: over the stub of CUDA."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from tests.chunks import batch_of
from tests.gpu.device import StubDevice
from tests.gpu.rig import Rig
from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.connector import NVMeoFOffloadingConnector
from vllm_nvmeof_offload.copy.base import Backend
from vllm_nvmeof_offload.copy.geometry import CacheGeometry
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import NoIoEngine, Waker
from vllm_nvmeof_offload.protocol import OpReport, SlotIdentity, StoreCommand
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankWorker
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

WAIT_S = 120


class _Rank:
    """A worker over the stub, whose GPU works only when the test drains it."""

    def __init__(self) -> None:
        waker = Waker()
        self.rig = Rig(StubDevice(), "contiguous", Backend.DMA, 4096, waker=waker)
        self.cuda = cast(FakeCuda, self.rig.device.cuda)
        io = NoIoEngine()
        config = TransferLimits(group_bytes=(self.rig.geometry.payload_bytes,))
        pipeline = TransferPipeline(self.rig.map, self.rig.engine, io, config)
        self.runner = PipelineRunner(pipeline, waker, io.fileno())
        self.worker = NVMeoFOffloadingWorker(
            RankWorker(
                self.runner,
                CacheGeometry([(Group(0, GroupKind.FULL, 48, 3), self.rig.tensors)]),
                self.rig.engine,
                io,
                cast(Any, SimpleNamespace(close=lambda: None)),
                None,
                None,
            )
        )

    def store(self, job: int) -> None:
        """Blocks 0 to 2 into slot 0."""
        batch = batch_of((SlotIdentity(bytes([job]) * 36, job), 0, None))
        spec = GPULoadStoreSpec([0, 1, 2], group_sizes=(3,), block_indices=(0,))
        self.worker.submit_store(job, spec, CommandSpec(StoreCommand(job, batch)))

    def finished(self) -> bool:
        """Wait for the one open job; return whether it succeeded."""
        end_s = time.monotonic() + WAIT_S
        while not self.worker.get_finished():
            self.cuda.drain()
            assert time.monotonic() < end_s
        reports, _ = self.worker.take_reports()
        return all(one.codes is None for one in reports if isinstance(one, OpReport))


@pytest.fixture
def rank() -> Iterator[_Rank]:
    one = _Rank()
    yield one
    one.runner.stop()
    one.rig.close()


def test_sleep_waits_for_copies_in_flight(rank: _Rank) -> None:
    content = np.random.default_rng(1).integers(1, 256, rank.rig.cache.read().size, np.uint8)
    rank.rig.cache.write(content)
    rank.store(1)
    asleep = threading.Thread(target=rank.worker.sleep)
    asleep.start()
    asleep.join(0.2)
    assert asleep.is_alive(), "its copy has not run"
    end_s = time.monotonic() + WAIT_S
    while asleep.is_alive() and time.monotonic() < end_s:
        rank.cuda.drain()
    assert not asleep.is_alive()
    assert (rank.rig.payload(0) == rank.rig.content_of(content, [0, 1, 2])).all()
    assert rank.finished()


def test_nothing_is_copied_until_wake_up(rank: _Rank) -> None:
    rank.worker.sleep()
    rank.store(1)
    assert not rank.finished()
    assert rank.cuda.calls["copy_batch"] == 0
    rank.worker.wake()
    rank.store(2)
    assert rank.finished()
    assert rank.cuda.calls["copy_batch"] == 1


def test_the_connector_submits_postponed_jobs_first() -> None:
    did: list[str] = []

    class Connector(NVMeoFOffloadingConnector):
        connector_worker: Any = SimpleNamespace(
            handle_preemptions=lambda meta: did.append("submit")
        )
        _worker: Any = SimpleNamespace(
            together=nullcontext, sleep=lambda: did.append("sleep"), wake=lambda: did.append("wake")
        )

        def __init__(self) -> None: ...

    connector = Connector()
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert did == ["submit", "sleep", "wake"]


def test_a_handshake_that_is_repeated_after_sleep_changes_nothing() -> None:
    """vLLM 0.33 repeats it with each wake-up; the tiers must outlive that."""

    class Connector(NVMeoFOffloadingConnector):
        _manager: Any = SimpleNamespace(is_attached=True)

        def __init__(self) -> None: ...

    Connector().set_xfer_handshake_metadata_pp_aware({})
