# SPDX-License-Identifier: Apache-2.0
"""The copy kernels: compiled for the CPU and run there, and compiled for each GPU we name."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.copy.driver import compile_kernels, kernel_source, load_or_compile
from vllm_nvmeof_offload.errors import EngineError

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "kernels" / "copy_blocks.cu"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    include = f'-DCOPY_BLOCKS="{SOURCE}"'
    command = [compiler, *options, include, "-o", str(library), str(HERE / "host_kernels.cpp")]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.c_uint64
    return loaded


def _run(kernels: ctypes.CDLL, fast: bool, grid: tuple[int, int], table: np.ndarray) -> int:
    rows = ctypes.c_void_p(table.ctypes.data), ctypes.c_uint64(len(table))
    found: int = kernels.run(int(fast), *grid, *rows)
    return found


@pytest.mark.parametrize("fast", [False, True])
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    align=st.sampled_from([1, 4, 16]),
    skew=st.sampled_from([0, 1, 4, 8, 16]),
    grid=st.sampled_from([(1, 32), (2, 64), (5, 96)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_each_piece_is_copied_and_nothing_else(
    on_cpu: ctypes.CDLL,
    fast: bool,
    sizes: list[int],
    align: int,
    skew: int,
    grid: tuple[int, int],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    sizes = [max(align, size // align * align) for size in sizes]
    room = 5056
    base = np.zeros(len(sizes) * room + 64, np.uint8)
    source = rng.integers(1, 256, base.size, np.uint8)
    expected = base.copy()
    start = [-array.ctypes.data % 16 for array in (base, source)]
    table = np.empty((len(sizes), 3), np.uint64)
    for row, (place, count) in enumerate(zip(rng.permutation(len(sizes)), sizes, strict=True)):
        to, of = start[0] + int(place) * room, start[1] + row * room + skew
        table[row] = base.ctypes.data + to, source.ctypes.data + of, count
        expected[to : to + count] = source[of : of + count]
    assert _run(on_cpu, fast, grid, table) == 0, "a word that is not aligned"
    assert (base == expected).all()


def test_the_source_is_the_one_in_the_repository() -> None:
    assert kernel_source() == SOURCE.read_text(encoding="utf-8")


needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None
    or importlib.util.find_spec("cuda.core") is None
    or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda-core is not installed: nothing here can compile CUDA",
)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernels_compile_to_machine_code_without_a_gpu(arch: str) -> None:
    log = io.StringIO()
    code = compile_kernels(arch, log=log)
    assert code.startswith(b"\x7fELF")
    assert b"copy_blocks_reference" in code
    spills = [line for line in log.getvalue().splitlines() if "spill" in line]
    assert len(spills) == 2, "one line a kernel"
    assert all("0 bytes stack frame, 0 bytes spill stores" in line for line in spills)


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="NVRTC"):
        compile_kernels("sm_12345")


@needs_nvrtc
def test_machine_code_is_kept(tmp_path: Path) -> None:
    code = load_or_compile("sm_90", tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == code
    file.write_bytes(b"from the cache")
    assert load_or_compile("sm_90", tmp_path) == b"from the cache"


def test_without_cuda_core_the_kernel_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(EngineError, match="cuda-core"):
        compile_kernels("sm_90")
