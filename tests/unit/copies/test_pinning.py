# SPDX-License-Identifier: Apache-2.0
"""Staging's registration piece by piece, also during the capture of a CUDA graph, over the
stub."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.copies.fake_cuda import FakeCuda
from tests.unit.copies.rig import Rig
from vllm_nvmeof_offload.copy import calibration, driver, pinning
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.calibration import Cell, KvDevice, calibrate
from vllm_nvmeof_offload.copy.cuda import CudaCopyEngine
from vllm_nvmeof_offload.copy.driver import CudaError
from vllm_nvmeof_offload.copy.pinning import Readiness, StagingPinning
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.staging import SetMap, StagingMap, populate, prefer_node
from vllm_nvmeof_offload.units import MIB, PAGE_BYTES

SLOT = 3 * PAGE_BYTES
BASE = 1 << 30


class _SlowCuda(FakeCuda):
    """Registers one piece per permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(1)

    def register(self, address: int, count: int) -> None:
        self.permits.acquire(timeout=120)
        super().register(address, count)


def _addresses(*slots: int) -> np.ndarray:
    return np.array([BASE + slot * SLOT + PAGE_BYTES for slot in slots], np.uint64)


def test_a_rank_registers_the_memory_of_its_set_with_its_own_part_first() -> None:
    cuda, changed = _SlowCuda(), threading.Semaphore(0)
    part = 5 * SLOT
    members = SetMap(0, 1, (BASE, BASE + part, BASE + 2 * part), (3,))
    # A piece of two and a half slots is two: three pieces per member, none across two members'.
    pins = StagingPinning(
        cuda, StagingMap(BASE + part, SLOT, 4, 1, members), changed.release, 5 * SLOT // 2
    )
    assert pins.first == (BASE + part, 2 * SLOT)
    assert pins.readiness(_addresses(5, 6)) is Readiness.READY
    assert pins.readiness(_addresses(7)) is Readiness.WAITING
    pins.start()
    order = [5, 7, 9, 10, 12, 14, 0, 2, 4]  # their first slots, over all members
    for number, slot in enumerate(order[1:], 1):
        assert pins.readiness(_addresses(slot)) is Readiness.WAITING
        cuda.permits.release()
        assert changed.acquire(timeout=120)
        assert pins.readiness(_addresses(*order[: number + 1])) is Readiness.READY
    assert cuda.registered == {
        BASE + slot * SLOT: (1 if slot % 5 == 4 else 2) * SLOT for slot in order
    }
    assert pins.starts.tolist() == sorted(cuda.registered)
    pins.close()
    assert not cuda.registered


def test_memory_that_cannot_be_registered_fails_only_its_slots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda, changed = FakeCuda(), threading.Semaphore(0)
    cuda.fail["register"] = 2
    pins = StagingPinning(cuda, StagingMap(BASE, SLOT, 3, 0), changed.release, SLOT)
    pins.start()
    assert changed.acquire(timeout=120)
    assert changed.acquire(timeout=120)
    assert pins.readiness(_addresses(0, 1)) is Readiness.READY
    assert pins.readiness(_addresses(1, 2)) is Readiness.FAILED
    assert "CUDA_ERROR_STUB" in caplog.text
    pins.close()
    assert not cuda.registered


def test_a_machine_that_cannot_register_at_all_refuses_to_start() -> None:
    cuda = FakeCuda()
    cuda.fail["register"] = 0
    with pytest.raises(CudaError, match="CUDA_ERROR_STUB"):
        StagingPinning(cuda, StagingMap(BASE, SLOT, 3, 0), lambda: None)


def test_closing_during_registration_leaves_nothing_registered() -> None:
    cuda, changed = _SlowCuda(), threading.Semaphore(0)
    pins = StagingPinning(cuda, StagingMap(BASE, SLOT, 9, 0), changed.release, SLOT)
    pins.start()
    closer = threading.Thread(target=pins.close)
    closer.start()
    cuda.permits.release(9)
    closer.join(timeout=120)
    assert not closer.is_alive() and not cuda.registered


def test_populate_touches_every_page_and_reports_progress() -> None:
    size = 3 * MIB
    memory = mmap.mmap(-1, size)
    view = np.frombuffer(memory, np.uint8)
    reported: list[tuple[int, int]] = []
    populate(view.ctypes.data, size, lambda *at: reported.append(at))
    assert reported[-1] == (size, size)
    vector = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), vector) == 0
    assert all(page & 1 for page in vector)
    del view
    memory.close()


def test_an_unknown_or_missing_node_is_no_preference() -> None:
    memory = mmap.mmap(-1, MIB)
    view = np.frombuffer(memory, np.uint8)
    assert not prefer_node(view.ctypes.data, MIB, None)
    assert not prefer_node(view.ctypes.data, MIB, 1000)
    if Path("/sys/devices/system/node/node0").exists() and prefer_node(view.ctypes.data, MIB, 0):
        view[:] = 1  # and the memory is as good as before
    del view
    memory.close()


def _engine(
    cuda: FakeCuda, backend: str, memory: np.ndarray
) -> tuple[CudaCopyEngine, tuple[str, ...]]:
    staging = StagingMap(memory.ctypes.data, SLOT, memory.nbytes // SLOT - 1, 1)
    starts = np.array([], np.uint64)
    engine, fallbacks = KvDevice(cuda).copy_engine(backend, staging, starts, Waker())
    assert isinstance(engine, CudaCopyEngine)
    return engine, fallbacks


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "load_or_compile", lambda arch, directory, name: b"")
    return np.zeros(5 * MIB, np.uint8)


def _store(cuda: FakeCuda, engine: CudaCopyEngine, memory: np.ndarray) -> None:
    source = np.arange(64, dtype=np.uint8)
    piece = np.array([[source.ctypes.data, memory.ctypes.data, 64]], np.uint64)
    fence = engine.record_fence()
    cuda.drain()
    engine.submit(Direction.STORE, piece, fence)
    cuda.drain()
    assert [outcome.ok for _, outcome in engine.poll()] == [True]
    assert (memory[:64] == source).all()


@pytest.mark.parametrize(("backend", "launches"), [("dma", 0), ("dma_overlap", 0), ("kernel", 1)])
def test_a_configured_backend_is_used(backend: str, launches: int, memory: np.ndarray) -> None:
    cuda = FakeCuda()
    engine, _ = _engine(cuda, backend, memory)
    _store(cuda, engine, memory)
    assert cuda.calls["launch"] == launches and cuda.calls["copy_batch"] == 1 - launches
    engine.close()
    assert not cuda.registered and not cuda.allocated and list(cuda.streams) == [0]


def test_auto_measures_once_and_remembers(
    memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_limit(*given: Any) -> list[Cell]:  # the stub copies slowly
        return calibrate(*given[:-1], budget_s=1e9)

    monkeypatch.setattr(calibration, "calibrate", without_limit)
    measured = []
    for _ in range(2):
        cuda = FakeCuda()
        engine, fallbacks = _engine(cuda, "auto", memory)
        measured.append(cuda.calls["launch"])
        assert fallbacks == ()
        engine.close()
        assert not cuda.registered and not cuda.allocated
    assert measured[0] > 0 and measured[1] == 0


def test_auto_logs_a_missing_requirement_and_kernel_refuses(
    memory: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(arch: str, directory: Path, name: str) -> bytes:
        raise EngineError("the copy kernel needs cuda-core")

    monkeypatch.setattr(driver, "load_or_compile", fail)
    cuda = FakeCuda(batch=False)
    engine, fallbacks = _engine(cuda, "auto", memory)
    assert len(fallbacks) == 2
    assert "cuda-core" in caplog.text and "lacks the batch call" in caplog.text
    _store(cuda, engine, memory)
    engine.close()
    with pytest.raises(EngineError, match="cuda-core"):
        _engine(FakeCuda(), "kernel", memory)


def test_the_modules_import_without_cuda_and_torch() -> None:
    for name in ("cuda", "driver", "calibration"):
        module = importlib.import_module(f"vllm_nvmeof_offload.copy.{name}")
        assert "torch" not in vars(module)


STAGING, STAGING_SLOTS = 1 << 30, 6
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


def _pins(cuda: FakeCuda) -> StagingPinning:
    place = StagingMap(STAGING, PAGE_BYTES, STAGING_SLOTS, 0)
    return StagingPinning(cuda, place, lambda: None, PAGE_BYTES)


def _everything(pins: StagingPinning) -> Readiness:
    return pins.readiness(STAGING + PAGE_BYTES * np.arange(STAGING_SLOTS, dtype=np.uint64))


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


def test_the_model_s_thread_declares_nothing() -> None:
    """The model's thread may do anything while it captures."""
    cuda = FakeCuda()
    rig = Rig(cuda, 1)
    rig.store([0, 1], [0])
    assert rig.finish() == [(1, True)]
    assert "enter_own_thread" not in cuda.callers
