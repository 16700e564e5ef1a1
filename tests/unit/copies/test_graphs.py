# SPDX-License-Identifier: Apache-2.0
"""Our threads keep working during vLLM's CUDA graph capture and do not spoil it, over the stub."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.copies.fake_cuda import FakeCuda
from tests.unit.copies.rig import Rig, Signals
from vllm_nvmeof_offload.copy import pinning
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.driver import CudaError
from vllm_nvmeof_offload.copy.pinning import Readiness, StagingPinning
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import PAGE_BYTES

BASE, SLOTS = 1 << 30, 6
#: The negative control: no thread declares itself.
UNDECLARED = ("enter_own_thread",)


class _Refusing(FakeCuda):
    """Signals when it has refused to register memory."""

    def __init__(self, ignore: tuple[str, ...]) -> None:
        super().__init__(ignore=ignore)
        self.refused = threading.Semaphore(0)

    def register(self, address: int, count: int) -> None:
        try:
            super().register(address, count)
        except CudaError:
            self.refused.release()
            raise


def _on_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def _pins(cuda: FakeCuda) -> StagingPinning:
    place = StagingMap(BASE, PAGE_BYTES, SLOTS, 0)
    return StagingPinning(cuda, place, lambda: None, PAGE_BYTES)


def _everything(pins: StagingPinning) -> Readiness:
    return pins.readiness(np.array([BASE + n * PAGE_BYTES for n in range(SLOTS)], np.uint64))


def test_memory_is_registered_during_a_capture() -> None:
    cuda = FakeCuda()
    pins = _pins(cuda)
    cuda.capturing = True
    pins.start()
    pins.wait()
    assert cuda.spoilt == []
    assert _everything(pins) is Readiness.READY


def test_memory_refused_during_a_capture_is_registered_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "_CAPTURE_S", 0.001)
    cuda = _Refusing(ignore=UNDECLARED)
    pins = _pins(cuda)
    cuda.capturing = True
    pins.start()
    assert all(cuda.refused.acquire(timeout=120) for _ in range(3))
    assert _everything(pins) is Readiness.WAITING
    cuda.capturing = False
    pins.wait()
    assert set(cuda.spoilt) == {"register"}
    assert _everything(pins) is Readiness.READY
    assert not caplog.records


def test_a_lasting_refusal_does_not_prevent_shutdown() -> None:
    cuda = FakeCuda(ignore=UNDECLARED)
    pins = _pins(cuda)
    cuda.capturing = True
    pins.start()
    pins.close()
    assert not cuda.registered


@pytest.mark.parametrize(("ignored", "spoils"), [((), False), (UNDECLARED, True)])
def test_copies_start_and_end_during_a_capture(ignored: tuple[str, ...], spoils: bool) -> None:
    """This covers the pipeline's thread, which polls, and the waiter threads."""
    cuda = FakeCuda(ignore=ignored)
    signals = Signals()
    rig = Rig(cuda, 2, waker=signals)
    fence = rig.engine.record_fence()
    ended: list[bool] = []

    def pipeline() -> None:
        ticket = rig.engine.submit(Direction.STORE, rig.pieces([0, 1], [0]), fence)
        while not ended:
            cuda.drain()
            assert signals.acquire(timeout=120)
            ended.extend(outcome.ok for done, outcome in rig.engine.poll() if done == ticket)

    cuda.capturing = True
    _on_a_thread(pipeline)
    cuda.capturing = False
    assert bool(cuda.spoilt) is spoils
    assert ended == [not spoils]
    rig.engine.close()


def test_the_model_s_thread_declares_nothing() -> None:
    """The model's thread may do anything while it captures."""
    cuda = FakeCuda()
    rig = Rig(cuda, 1)
    rig.engine.record_fence()
    assert "enter_own_thread" not in cuda.callers
