# SPDX-License-Identifier: Apache-2.0
"""Run by `test_device.py` where NVIDIA's library is the stub: real cuda-python over it."""

from __future__ import annotations

import ctypes
import os
import select
import sysconfig
import threading
import time

import numpy as np
import pytest

from vllm_nvmeof_offload.copy.base import Backend, Direction
from vllm_nvmeof_offload.copy.calibration import Selector
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine, DmaCopier, KernelCopier
from vllm_nvmeof_offload.copy.driver import ORDER_ANY, ORDER_STREAM, Cuda, CudaError
from vllm_nvmeof_offload.copy.pinning import StagingPinning
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.staging import StagingMap

SLOTS, SLOT_BYTES = 8, 8192
#: The pieces of a large batch.
COUNT = 1000


class Seen(ctypes.Structure):
    """`stub_seen` of stub_driver.c."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("batch_calls", "batch_count", "source_order", "flags", "launches", "grid"),
            *("block", "table", "count", "single_copies", "registered"),
            *("not_ready", "relaxed"),
        )
    )


def seen() -> Seen:
    return Seen.in_dll(ctypes.CDLL("libcuda.so.1"), "stub_seen")


def pieces(cache: np.ndarray, staging: np.ndarray, count: int, size: int) -> np.ndarray:
    """Every second fragment of both sides: nothing to merge."""
    rows = np.empty((count, 3), np.uint64)
    rows[:, 0] = cache.ctypes.data + 2 * size * np.arange(count)
    rows[:, 1] = staging.ctypes.data + 2 * size * np.arange(count)
    rows[:, 2] = size
    return rows


def engine(cuda: Cuda, staging: np.ndarray, backend: Backend, waker: Waker) -> CudaCopyEngine:
    place = StagingMap(staging.ctypes.data, SLOT_BYTES, SLOTS - 2, 2)
    pins = StagingPinning(cuda, place, lambda: None, piece_bytes_max=3 * SLOT_BYTES)
    pins.start()
    pins.wait()  # so that all of it has been registered, whatever a copy needs
    kernel = KernelCopier(cuda, cuda.load_kernel(b"\x7fELF stub", "copy_blocks"))
    copiers = Copiers(DmaCopier(cuda), kernel, lambda _, __: backend)
    return CudaCopyEngine(cuda, lambda: 0, copiers, pins, np.array([], np.uint64), waker)


def round_trip(cuda: Cuda, backend: Backend) -> None:
    rng = np.random.default_rng(1)
    cache = rng.integers(0, 256, SLOTS * SLOT_BYTES, np.uint8)
    staging = np.zeros_like(cache)
    copy = engine(cuda, staging, backend, Waker())
    seen().not_ready = 1
    rows = pieces(cache, staging, 100, 128)
    expected, found = cache.copy(), dict[int, bool]()
    for direction in (Direction.STORE, Direction.LOAD):
        ticket = copy.submit(direction, rows, copy.record_fence())
        while ticket not in found:
            found |= {t: outcome.ok for t, outcome in copy.poll()}
        cache[:] = 0
    assert found == {1: True, 2: True}
    part = expected.reshape(-1, 2, 128)[:100, 0]
    assert (staging.reshape(-1, 2, 128)[:100, 0] == part).all()
    assert not staging.reshape(-1, 2, 128)[:100, 1].any()
    copy.close()


def _tables(*arrays: np.ndarray) -> tuple[int, int, int]:
    first, second, third = (array.ctypes.data for array in arrays)
    return first, second, third


def facts(cuda: Cuda) -> None:
    assert (cuda.facts.name, cuda.facts.arch) == ("Stub GPU", "sm_90")
    assert (cuda.facts.uuid, cuda.facts.numa_node) == ("ab" * 16, None)
    assert cuda.facts.driver_version == 13000 and cuda.host_pointers_work_in_kernels


def errors(cuda: Cuda) -> None:
    stream = cuda.create_stream()
    word = np.zeros(2, np.uint64)
    address = np.array([word.ctypes.data, word.ctypes.data], np.uint64)
    sizes = np.array([8, 0], np.uint64)
    with pytest.raises(CudaError, match=r"^cuMemcpyBatchAsync: .*INVALID_VALUE, copy 1 of 2$"):
        cuda.submit_copies(_tables(address, address, sizes), 2, stream, ORDER_STREAM)
    sizes[1] = ~np.uint64(0)
    with pytest.raises(CudaError, match="CUDA error 987654, copy 1 of 2"):
        cuda.submit_copies(_tables(address, address, sizes), 2, stream, ORDER_STREAM)
    for call in (cuda.destroy_event, cuda.event_is_done):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
            call(5)
    cuda.destroy_stream(stream)


class Gate(ctypes.Structure):
    """`stub_gate` of stub_driver.c."""

    _fields_ = (("shut", ctypes.c_uint64), ("inside", ctypes.c_uint64))


def others_run_meanwhile(cuda: Cuda) -> None:
    """Another thread ends a batch call that waits for it: the interpreter lock is free in it."""
    gate = Gate.in_dll(ctypes.CDLL("libcuda.so.1"), "stub_gate")
    words = np.arange(2, dtype=np.uint64)
    address = np.array([words.ctypes.data], np.uint64)
    stream = cuda.create_stream()

    def open_the_gate() -> None:
        while not gate.inside:
            time.sleep(0.001)
        gate.shut = 0

    gate.shut = 1
    other = threading.Thread(target=open_the_gate, daemon=True)
    other.start()
    size = np.array([8], np.uint64)
    behind = address + np.uint64(8)
    cuda.submit_copies(_tables(behind, address, size), 1, stream, ORDER_STREAM)
    other.join()
    assert words.tolist() == [0, 0]
    cuda.destroy_stream(stream)


class Lock(ctypes.Structure):
    """`stub_lock` of stub_driver.c."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("armed", "taken_in_all", "taken"))


def nothing_takes_the_lock(cuda: Cuda, backend: Backend) -> None:
    """This thread keeps the interpreter lock from the first call of a batch to the signal of its
    end, and still they come: neither the submission nor the wait takes the lock."""
    library = ctypes.PyDLL("libcuda.so.1")
    gate, lock = (
        kind.in_dll(library, name) for kind, name in ((Gate, "stub_gate"), (Lock, "stub_lock"))
    )
    memory, waker = np.zeros((2, COUNT * 128), np.uint8), Waker()
    copy = engine(cuda, memory[1], backend, waker)
    rows = pieces(memory[0], memory[1], COUNT, 64)
    rows[:, 1] = memory[1].ctypes.data  # within what is registered
    copy.submit(Direction.STORE, rows[:1], copy.record_fence())
    assert select.select([waker.fd], [], [], 10)[0] and len(copy.poll()) == 1
    waker.clear()
    other = threading.Thread(target=copy.submit, args=(Direction.STORE, rows, None))
    lock.armed, lock.taken, gate.shut = 1, 0, 1
    other.start()
    while not gate.inside:
        time.sleep(0.001)
    assert library.stub_hold_until_readable(waker.fd, 10_000) == 1, "something waits for the lock"
    other.join()
    assert lock.taken == 0
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):  # else they cannot be counted
        assert lock.taken_in_all > 0
    assert [outcome.ok for _, outcome in copy.poll()] == [True]
    copy.close()


def main() -> None:
    cuda = Cuda(0)
    facts(cuda)
    if "STUB_OLD_DRIVER" in os.environ:
        assert not cuda.has_batch
        round_trip(cuda, Backend.DMA)
        assert (seen().single_copies, seen().batch_calls) == (200, 0)
    else:
        assert cuda.has_batch
        round_trip(cuda, Backend.DMA)
        last = seen()
        # 100 pieces each way, in calls of 16, 64 and 20.
        assert (last.batch_calls, last.batch_count, last.single_copies) == (6, 200, 0)
        assert (last.source_order, last.flags) == (ORDER_ANY, 0)
        assert last.registered == SLOTS * SLOT_BYTES
        round_trip(cuda, Backend.OVERLAP)
        assert (last.batch_calls, last.source_order, last.flags) == (12, ORDER_ANY, 1)
        round_trip(cuda, Backend.KERNEL)
        assert (last.launches, last.count) == (2, 100)
        assert (last.block, last.grid) == (512, 7)
        # Three waiter threads and the registering thread of each engine, not the model's thread.
        assert last.relaxed == 3 * 4
        errors(cuda)
        others_run_meanwhile(cuda)
        for backend in Backend:
            nothing_takes_the_lock(cuda, backend)
    assert Selector().choose(Direction.LOAD, np.ones((1, 3), np.uint64)) is Backend.DMA
    cuda.release()
    print("ok")


if __name__ == "__main__":
    main()
