# SPDX-License-Identifier: Apache-2.0
"""The engine below the pipeline's thread, which sleeps until the engine's wake-up."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("crc32c", reason="the pipeline's modules need it")

from tests.chunks import batch_of
from tests.gpu.device import Device
from tests.gpu.rig import Rig
from vllm_nvmeof_offload.copy.base import Backend, Descriptors, Pieces
from vllm_nvmeof_offload.io.base import NoIoEngine, Waker
from vllm_nvmeof_offload.protocol import LoadCommand, SlotIdentity, StoreCommand
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

ROUNDS = 40
#: The runner polls by itself once per second: a lost wake-up costs a second per copy.
LONGEST_S = ROUNDS / 2


@pytest.mark.parametrize("backend", list(Backend))
def test_the_thread_is_woken_by_every_copy(device: Device, backend: Backend) -> None:
    rng = np.random.default_rng(11)
    waker = Waker()
    rig = Rig(device, "per_layer", backend, 4096, waker=waker)
    io = NoIoEngine()
    config = TransferLimits(group_bytes=(rig.geometry.payload_bytes,))
    pipeline = TransferPipeline(rig.map, rig.engine, io, config)
    runner = PipelineRunner(pipeline, waker, io.fileno())
    started_s, op = time.monotonic(), 0
    count = rig.slots // 2
    for number in range(ROUNDS):
        original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
        rig.cache.write(original)
        chunks = rng.permutation(rig.blocks)[: count * rig.per_chunk].astype(np.int32)
        pieces = [rig.geometry.pieces(part, 0) for part in np.split(chunks, count)]
        names = [SlotIdentity(bytes([i]) * 36, number + 1) for i in range(count)]
        batch = batch_of(*((name, slot, None) for slot, name in enumerate(names)))
        expected = original.copy()
        for command in (StoreCommand(op + 1, batch), LoadCommand(op + 2, batch)):
            op = command.op
            runner.hand_over(_start(command, pieces, rig.engine.record_fence()), op)
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
    command: StoreCommand | LoadCommand, pieces: list[Descriptors], fence: object
) -> Callable[[TransferPipeline], None]:
    def call(pipeline: TransferPipeline) -> None:
        if isinstance(command, StoreCommand):
            pipeline.store(command, Pieces.of(pieces), fence)
        else:
            pipeline.load(command, Pieces.of(pieces), fence)

    return call


def _finish(device: Device, runner: PipelineRunner, op: int) -> None:
    end_s = time.monotonic() + 30
    while True:
        device.go_on()
        finished, _, _ = runner.take()
        if finished:
            assert [(job.op, job.failures) for job in finished] == [(op, ())]
            return
        assert time.monotonic() < end_s
