# SPDX-License-Identifier: Apache-2.0
"""The seam to cuda-python, called for real over a stub of NVIDIA's library; no GPU, no driver."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_nvmeof_offload.copy import driver
from vllm_nvmeof_offload.errors import EngineError

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


def test_without_cuda_python_the_error_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EngineError, match="cuda-python"):
        driver.Cuda(0)
