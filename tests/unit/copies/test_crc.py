# SPDX-License-Identifier: Apache-2.0
"""CRC-32C by the GPU's source, run on the CPU and compared with the pool's library."""

from __future__ import annotations

import ctypes
import io
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("crc32c", reason="it is the reference")
from crc32c import crc32c
from vllm_nvmeof_bench.gpu.crc_kernel import (
    CRC_BLOCKS,
    KERNEL_NAME,
    STRIPE_BYTES,
    CrcKernel,
    cut_chunks,
    join,
    kernel_tables,
)

from tests.unit.copies.fake_cuda import FakeCuda
from tests.unit.copies.test_kernel import ARCHITECTURES, needs_nvrtc
from vllm_nvmeof_offload.copy.driver import compile_kernels, kernel_source
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.units import KIB, MIB

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "kernels" / CRC_BLOCKS
SHAPES = ([2 * MIB], [64 * KIB] * 8, [72 * KIB] * 5, [512], [512 * 7, 512 * 129, 512 * 3])


class Chunk:
    """Pieces in separate memory, each at a multiple of 16."""

    def __init__(self, sizes: list[int], seed: int = 0, skew: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._memory = [rng.integers(0, 256, size + 64, np.uint8) for size in sizes]
        starts = [-memory.ctypes.data % 16 + skew for memory in self._memory]
        self.pieces = [
            memory[start : start + size]
            for memory, start, size in zip(self._memory, starts, sizes, strict=True)
        ]
        self.rows = np.array([(p.ctypes.data, p.size) for p in self.pieces], np.uint64)

    @property
    def crc(self) -> int:
        return int(crc32c(b"".join(piece.tobytes() for piece in self.pieces)))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("kernels") / "crc.so"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    include = f'-DCRC_BLOCKS="{SOURCE}"'
    command = [compiler, *options, include, "-o", str(library), str(HERE / "host_crc.cpp")]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.c_uint64
    return loaded


def _crcs(
    kernels: ctypes.CDLL, chunks: list[Chunk], fast: bool = True, grid: tuple[int, int] = (2, 64)
) -> list[int]:
    parts, counts = cut_chunks([chunk.rows for chunk in chunks])
    tables = kernel_tables()
    words = np.full((len(parts), 32), 0xA5A5A5A5, np.uint32)
    places = [ctypes.c_void_p(array.ctypes.data) for array in (parts, tables, words)]
    rows = places[0], ctypes.c_uint64(len(parts))
    assert kernels.run(int(fast), *grid, *rows, *places[1:]) == 0, "a word that is not aligned"
    return join(words, parts[:, 1], counts)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_the_crc_is_that_of_the_library(on_cpu: ctypes.CDLL, fast: bool, sizes: list[int]) -> None:
    chunk = Chunk(sizes, seed=len(sizes))
    assert _crcs(on_cpu, [chunk], fast) == [chunk.crc]


@given(
    stripes=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=6), min_size=1, max_size=4),
    grid=st.sampled_from([(1, 32), (2, 64), (5, 96), (4, 256)]),
    skew=st.sampled_from([0, 16, 32]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_pieces_in_any_grid_have_the_right_crcs(
    on_cpu: ctypes.CDLL, stripes: list[list[int]], grid: tuple[int, int], skew: int, seed: int
) -> None:
    chunks = [
        Chunk([STRIPE_BYTES * count for count in chunk], seed + at, skew)
        for at, chunk in enumerate(stripes)
    ]
    assert _crcs(on_cpu, chunks, grid=grid) == [chunk.crc for chunk in chunks]


def test_one_changed_bit_is_detected(on_cpu: ctypes.CDLL) -> None:
    chunk = Chunk([72 * KIB] * 2)
    before = chunk.crc
    for piece, at in ((0, 0), (1, 72 * KIB - 1), (0, 64 * KIB), (1, 12_345)):
        chunk.pieces[piece][at] ^= 1
        assert _crcs(on_cpu, [chunk]) == [chunk.crc] != [before]
        chunk.pieces[piece][at] ^= 1


@pytest.mark.parametrize("size", [0, 1, 511, 513, 1000, 64 * KIB + 256])
def test_other_sizes_are_refused_in_plain_words(size: int) -> None:
    rows = np.array([(4096, 512), (4096, size)], np.uint64)
    with pytest.raises(EngineError, match=rf"no CRC of a piece of {size} bytes.*multiple of 512$"):
        cut_chunks([rows])


def test_a_piece_that_is_not_aligned_is_refused() -> None:
    with pytest.raises(EngineError, match=r"at 0x1008.*multiple of 16$"):
        cut_chunks([np.array([(0x1008, 512)], np.uint64)])


def test_the_host_side_launches_crcs_over_the_stub() -> None:
    """Launches of 8 MiB at most, each with its own rows and words; the stub has the library's."""
    cuda = FakeCuda()
    chunks = [Chunk([2 * MIB], seed) for seed in range(5)] + [Chunk([72 * KIB] * 5, 9)]
    rows = [chunk.rows for chunk in chunks]
    kernel = CrcKernel(cuda, cuda.load_kernel(b"", KERNEL_NAME), rows)
    kernel.run()
    assert kernel.join() == [chunk.crc for chunk in chunks]
    assert [sum(sizes) for sizes in cuda.launched] == [8 * MIB, 2 * MIB + 5 * 72 * KIB]
    kernel.close()
    assert not cuda.allocated


def test_the_source_is_the_one_in_the_repository() -> None:
    assert kernel_source(CRC_BLOCKS) == SOURCE.read_text(encoding="utf-8")


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_source_compiles_to_machine_code_without_spills(arch: str) -> None:
    log = io.StringIO()
    code = compile_kernels(arch, CRC_BLOCKS, log)
    assert code.startswith(b"\x7fELF") and b"crc_blocks_reference" in code
    spills = [line for line in log.getvalue().splitlines() if "spill" in line]
    assert len(spills) == 2, "one line a kernel"
    assert all("0 bytes stack frame, 0 bytes spill stores" in line for line in spills)
