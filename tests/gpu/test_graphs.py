# SPDX-License-Identifier: Apache-2.0
"""Registration of memory and copies do not disturb the capture of a CUDA graph, nor it them."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from tests.gpu.device import Device
from tests.gpu.rig import Rig
from vllm_nvmeof_offload.copy.base import Backend, Direction
from vllm_nvmeof_offload.copy.pinning import Readiness, StagingPinning
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import MIB

ROUNDS = 20
SLOTS, SLOT_BYTES = 32, 4 * MIB


@pytest.mark.parametrize("backend", list(Backend))
def test_copies_run_while_a_graph_is_captured(device: Device, backend: Backend) -> None:
    rng = np.random.default_rng(13)
    rig = Rig(device, "per_layer", backend, 4096)
    original = rng.integers(0, 256, rig.cache.read().size, np.uint8)
    rig.cache.write(original)
    chunk = ([0, 1, 2], 0)
    fences = [rig.engine.record_fence() for _ in range(2 * ROUNDS)]  # on the model's thread
    failed: list[BaseException] = []

    def copies() -> None:
        try:
            for _ in range(ROUNDS):
                for direction in (Direction.STORE, Direction.LOAD):
                    rig.wait(rig.submit(direction, [chunk], fences.pop()))
        except BaseException as error:  # noqa: BLE001 - asserted below, on the test's thread
            failed.append(error)

    device.capture(lambda: _finish(threading.Thread(target=copies)))
    assert not failed
    assert (rig.payload(0) == rig.content_of(original, chunk[0])).all()
    assert (rig.cache.read() == original).all()
    rig.close()


def test_memory_is_registered_while_a_graph_is_captured(device: Device) -> None:
    """As at the start of a server whose CPU tier is large."""
    if device.cuda is None:
        pytest.skip("the host registers nothing")
    memory = mmap.mmap(-1, SLOTS * SLOT_BYTES)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    pins = StagingPinning(
        device.cuda, StagingMap(base, SLOT_BYTES, SLOTS, 0), lambda: None, SLOT_BYTES
    )

    def meanwhile() -> None:
        pins.start()
        pins.wait()

    device.capture(meanwhile)
    slots = np.array([base + n * SLOT_BYTES for n in range(SLOTS)], np.uint64)
    assert pins.readiness(slots) is Readiness.READY
    pins.close()


def _finish(thread: threading.Thread) -> None:
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a copy does not end"
