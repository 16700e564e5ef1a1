# SPDX-License-Identifier: Apache-2.0
"""KV cache → staging → pool on disk → staging → KV cache, hundreds of chunks, by the pipeline; and
the thread of the pipeline, which sleeps until the engine's wake-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("crc32c", reason="the pool needs it")
pytest.importorskip("pydantic", reason="the configuration needs it")

from tests.chunks import batch_of, begin, geometry_of, place_in
from tests.gpu.device import Device
from tests.gpu.rig import Rig
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.copy import calibration as gpu
from vllm_nvmeof_offload.copy.base import Backend
from vllm_nvmeof_offload.copy.calibration import KvDevice
from vllm_nvmeof_offload.copy.cuda import KernelCopier
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.io.base import NoIoEngine, Waker
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    LoadCommand,
    OpReport,
    SlotIdentity,
    StoreCommand,
    WriteCommand,
    unpacked,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import slot_stride_bytes
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

ROUNDS, CHUNKS, PER_CHUNK, PAGE_BYTES = 100, 4, 2, 36_864
WAIT_S = 60.0


class _Pipeline:
    """One rank's pipeline, stepped by the test."""

    def __init__(self, device: Device, directory: Path, backend: Backend) -> None:
        self.device = device
        self.blocks = CHUNKS * PER_CHUNK
        self.cache = device.allocate(self.blocks * PAGE_BYTES)
        tensor = CacheTensor(self.cache.address, PAGE_BYTES, PAGE_BYTES, self.blocks)
        self.geometry = geometry_of([tensor], PER_CHUNK)
        slot = slot_stride_bytes(self.geometry.payload_bytes)
        self.pool = Pool.open(
            PoolSpec((directory,), 2 * CHUNKS * (slot + 64), self.geometry.payload_bytes,
                     Keyspace.of({"test": "gpu"}))
        )  # fmt: skip
        self.staging = Staging(slot, CHUNKS, 2)
        address = self.staging.map.base_address
        self.io = choose_io_engine("auto", self.pool, self.staging.view, address, TUNING)[0]
        self.copy, _ = KvDevice(device.cuda, device.model_stream).copy_engine(
            backend.value, self.staging.map, self.geometry.starts, Waker()
        )
        length = self.geometry.payload_bytes
        pump = TransferLimits(
            group_bytes=(length,), read_deadline_s=WAIT_S, write_deadline_s=WAIT_S
        )
        self.pipeline = TransferPipeline(self.staging.map, self.copy, self.io, pump)
        self._ops = 0

    def op(self) -> int:
        self._ops += 1
        return self._ops

    def begin(self, command: StoreCommand | LoadCommand, blocks: Sequence[int]) -> None:
        begin(self.pipeline, self.geometry, command, blocks, self.copy.record_fence())

    def run(self) -> None:
        """Step until no job is under way; check that every job succeeded."""
        end_s = time.monotonic() + WAIT_S
        while True:
            self.device.go_on()
            self.pipeline.step()
            for report in unpacked(self.pipeline.take_reports()):
                assert not isinstance(report, OpReport) or report.codes is None, report
            for job in self.pipeline.take_finished():
                assert not job.failures
            if self.pipeline.idle():
                return
            assert time.monotonic() < end_s, "the pipeline does not come to rest"

    def close(self) -> None:
        assert self.io.close()
        self.copy.close()
        self.pool.close()
        self.staging.close()


@pytest.mark.parametrize("backend", list(Backend))
def test_hundreds_of_round_trips_through_the_pool(
    device: Device, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu, "load_kernel", lambda cuda: _kernel(device))
    (tmp_path / "pool").mkdir()
    try:
        rank = _Pipeline(device, tmp_path / "pool", backend)
    except OffloadError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(5)
    for number in range(ROUNDS):
        original = rng.integers(0, 256, rank.blocks * PAGE_BYTES, np.uint8)
        rank.cache.write(original)
        blocks = rng.permutation(rank.blocks)
        names = [SlotIdentity(bytes([i]) * 36, number + 1) for i in range(CHUNKS)]
        slots = rng.permutation(CHUNKS).tolist()
        places = [place_in(at) for at in range(CHUNKS)]
        stored = batch_of(*((name, slots[at], None) for at, name in enumerate(names)))
        rank.begin(StoreCommand(rank.op(), stored), blocks)
        written = batch_of(*((name, slots[at], places[at]) for at, name in enumerate(names)))
        rank.pipeline.command(WriteCommand(rank.op(), written))
        rank.run()
        rank.cache.write(np.full_like(original, 0xA5))
        loaded = batch_of(*((name, None, places[at]) for at, name in enumerate(names)))
        rank.begin(LoadCommand(rank.op(), loaded), blocks)
        rank.run()
        assert (rank.cache.read() == original).all(), f"round {number}"
    rank.close()


def _kernel(device: Device) -> KernelCopier:
    return KernelCopier(device.cuda, device.kernel())


WAKE_UPS = 40
#: The runner polls by itself once per second: a lost wake-up costs a second per copy.
LONGEST_S = WAKE_UPS / 2


@pytest.mark.parametrize("backend", list(Backend))
def test_the_thread_is_woken_by_every_copy(device: Device, backend: Backend) -> None:
    rng = np.random.default_rng(11)
    waker = Waker()
    rig = Rig(device, "per_layer", backend, 4096, waker=waker)
    io = NoIoEngine()
    config = TransferLimits(group_bytes=(rig.geometry.payload_bytes,))
    pipeline = TransferPipeline(rig.map, rig.engine, io, config)
    runner = PipelineRunner(pipeline, waker, io.fileno())
    geometry = geometry_of(rig.tensors, rig.per_chunk)
    started_s, op = time.monotonic(), 0
    count = rig.slots // 2
    for number in range(WAKE_UPS):
        original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
        rig.cache.write(original)
        chunks = rng.permutation(rig.blocks)[: count * rig.per_chunk].astype(np.int32)
        names = [SlotIdentity(bytes([i]) * 36, number + 1) for i in range(count)]
        batch = batch_of(*((name, slot, None) for slot, name in enumerate(names)))
        expected = original.copy()
        for command in (StoreCommand(op + 1, batch), LoadCommand(op + 2, batch)):
            op = command.op
            fence = rig.engine.record_fence()
            runner.hand_over(_start(geometry, command, chunks, fence), op)
            _finish(device, runner, op)
            if isinstance(command, StoreCommand):
                poisoned = np.full_like(original, 0xA5)
                rig.cache.write(poisoned)
                expected = poisoned
        for part in np.split(chunks, count):
            rig.place(expected, part.tolist(), rig.content_of(original, part.tolist()))
        assert (rig.cache.read() == expected).all(), f"round {number}"
        assert time.monotonic() - started_s < LONGEST_S, "copies ended without a wake-up"
    runner.stop()
    rig.close()


def _start(
    geometry: CacheGeometry,
    command: StoreCommand | LoadCommand,
    blocks: Sequence[int],
    fence: object,
) -> Callable[[TransferPipeline], None]:
    return lambda pipeline: begin(pipeline, geometry, command, blocks, fence)


def _finish(device: Device, runner: PipelineRunner, op: int) -> None:
    end_s = time.monotonic() + 30
    while True:
        device.go_on()
        finished, _, _ = runner.take()
        if finished:
            assert [(job.op, job.failures) for job in finished] == [(op, ())]
            return
        assert time.monotonic() < end_s
