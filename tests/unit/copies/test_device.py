# SPDX-License-Identifier: Apache-2.0
"""The copy engine of each device, and cuda-python called for real over a stub of NVIDIA's
library."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.chunks import pieces_of
from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload import staging as staging_module
from vllm_nvmeof_offload.copy import driver
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.calibration import KvDevice, open_device
from vllm_nvmeof_offload.copy.driver import CudaFacts
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.copy.gpu_checksums import CRC_BLOCKS
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import MIB, PAGE_BYTES

NO_GPU = not Path("/dev/nvidiactl").exists()


def test_the_cpu_uses_the_host_engine() -> None:
    staging = Staging(PAGE_BYTES, 3, 1)
    starts = np.array([], np.uint64)
    engine, fallbacks = open_device("cpu").copy_engine("auto", staging.map, starts, Waker())
    assert isinstance(engine, HostCopyEngine) and fallbacks == ()
    engine.close()
    staging.close()


def test_another_kind_of_device_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"'xpu:0'.*NVIDIA GPUs and vLLM's CPU engine"):
        open_device("xpu:0")


def test_an_amd_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(hip="6.4"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(EngineError, match="AMD"):
        open_device("cuda:0")


def test_a_gpu_without_cuda_python_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip=None)))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EngineError, match=r"pip install '?cuda-bindings.*nvidia-ml-py"):
        open_device("cuda:0")


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_a_missing_driver_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip=None)))
    with pytest.raises(EngineError, match="driver") as error:
        open_device("cuda:0")
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None, "a traceback of two exceptions"


def test_staging_is_on_the_node_of_the_gpu_before_its_first_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int | None]] = []
    monkeypatch.setattr(
        staging_module, "prefer_node", lambda *given: asked.append(("node", given[2])) or True
    )

    real = staging_module.populate

    def populate(address: int, size: int, on_progress: Any) -> None:
        asked.append(("pages", size))
        real(address, size, on_progress)

    monkeypatch.setattr(staging_module, "populate", populate)
    cuda = FakeCuda()
    cuda.facts = CudaFacts("stub", "00" * 16, 13010, "sm_90", 1)
    staging = Staging(PAGE_BYTES, 3, 1, numa_node=KvDevice(cuda).numa_node)
    assert asked == [("node", 1), ("pages", 4 * PAGE_BYTES)] and staging.on_node
    staging.close()
    assert KvDevice(FakeCuda()).numa_node is None, "-1 means that the node is unknown"


@pytest.mark.parametrize("asked", ["cpu", "gpu"])
def test_the_gpu_makes_checksums_only_if_it_is_asked_to(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[str] = []

    def compile_one(arch: str, name: str) -> bytes:
        compiled.append(name)
        return b"code"

    monkeypatch.setattr(driver, "compile_kernels", compile_one)
    starts = np.array([], np.uint64)
    staging = Staging(PAGE_BYTES, 3, 1)
    for _ in range(2):
        cuda = FakeCuda()
        engine, fallbacks = KvDevice(cuda).copy_engine("dma", staging.map, starts, Waker(), asked)
        assert engine.makes_checksums == (asked == "gpu") and fallbacks == ()
        engine.close()
        assert not cuda.allocated and not cuda.events and list(cuda.streams) == [0]
    assert compiled == ([CRC_BLOCKS] if asked == "gpu" else []), "the cache has it the second time"
    staging.close()


@pytest.mark.parametrize("cause", ["no compiler", "no host pointers"])
def test_a_gpu_that_cannot_make_checksums_leaves_them_to_the_cpu(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda, reason = FakeCuda(), cause
    if cause == "no compiler":
        monkeypatch.setattr(driver, "compile_kernels", Mock(side_effect=EngineError(cause)))
    else:
        cuda.host_pointers_work_in_kernels = False
        reason = "kernels cannot access host memory at its host address here"
    staging = Staging(PAGE_BYTES, 3, 1)
    starts = np.array([], np.uint64)
    engine, fallbacks = KvDevice(cuda).copy_engine("dma", staging.map, starts, Waker(), "gpu")
    assert fallbacks == (f"checksums: on the CPU ({reason})",) and fallbacks[0] in caplog.text
    assert not engine.makes_checksums
    engine.close()
    staging.close()


def test_copies_of_a_gpu_run_between_its_tensors_and_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build the engine as the worker does, over the stub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = np.random.default_rng(0).integers(0, 256, (2, 64, 256), np.uint8)
    tensors = [CacheTensor(t.ctypes.data, 256, 256, 64) for t in cache]
    geometry = ChunkGeometry(tensors, 2)
    assert geometry.starts.tolist() == [t.address for t in tensors]
    staging = Staging(PAGE_BYTES, 2 * MIB // PAGE_BYTES, 1)
    cuda = FakeCuda()
    engine, _ = KvDevice(cuda).copy_engine("dma", staging.map, geometry.starts, Waker())
    assert KvDevice(cuda).engine_name("dma") == "dma on stub"
    # The last block of one tensor is adjacent to the first of the next: never one piece.
    pieces = pieces_of(geometry, np.array([63, 0], np.int32)).rows
    pieces[:, 1] += np.uint64(staging.map.base_address)
    fence = engine.record_fence()
    cuda.drain()
    ticket = engine.submit(Direction.STORE, pieces, fence)
    cuda.drain()
    assert [(number, outcome.ok) for number, outcome in engine.poll()] == [(ticket, True)]
    found = np.frombuffer(staging.view, np.uint8)[: 4 * 256].copy()
    assert (found.reshape(2, 2, 256) == cache[:, [63, 0]].transpose(1, 0, 2)).all()
    assert cuda.batches == [4]
    engine.close()
    assert not cuda.registered and list(cuda.streams) == [0]
    staging.close()


HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HAS_BINDINGS = (
    importlib.util.find_spec("cuda") is not None
    and importlib.util.find_spec("cuda.bindings") is not None
)
needs_bindings = pytest.mark.skipif(not HAS_BINDINGS, reason="cuda-bindings is not installed")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(HERE / "stub_driver.c"), "-ldl"], check=True)
    return folder


def _run(stub: Path, **environment: str) -> None:
    paths = {"LD_LIBRARY_PATH": str(stub), "PYTHONPATH": str(ROOT)}
    paths["LD_PRELOAD"] = str(stub / "libcuda.so.1")  # to count who takes the interpreter lock
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.copies.on_stub_driver"],
        env=os.environ | paths | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


@needs_bindings
def test_cuda_python_accepts_our_calls(stub: Path) -> None:
    _run(stub)


@needs_bindings
def test_a_driver_without_the_batch_call_copies_one_by_one(stub: Path) -> None:
    _run(stub, STUB_OLD_DRIVER="1")


@needs_bindings
def test_copy_attributes_are_where_the_driver_reads_them() -> None:
    api = importlib.import_module("cuda.bindings.driver")
    theirs = api.CUmemcpyAttributes()
    order = api.CUmemcpySrcAccessOrder
    theirs.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    theirs.flags = int(api.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
    assert int(order.CU_MEMCPY_SRC_ACCESS_ORDER_ANY) == driver.ORDER_ANY
    assert int(order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) == driver.ORDER_STREAM
    ours = driver._CopyAttributes(driver.ORDER_ANY, (ctypes.c_int * 4)(), 1)
    size = ctypes.sizeof(ours)
    assert ctypes.string_at(theirs.getPtr(), size) == bytes(ours)
