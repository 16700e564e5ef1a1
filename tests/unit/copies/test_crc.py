# SPDX-License-Identifier: Apache-2.0
"""CRC-32C by the GPU's source, run on the CPU and compared with the pool's library."""

from __future__ import annotations

import ctypes
import io
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("crc32c", reason="it is the reference")
from crc32c import crc32c
from vllm_nvmeof_bench.copy.world import CrcKernel

from tests.unit.copies.fake_cuda import FakeCuda
from tests.unit.copies.test_kernel import ARCHITECTURES, needs_nvrtc
from vllm_nvmeof_offload.copy.base import Payloads
from vllm_nvmeof_offload.copy.driver import compile_kernels, kernel_source
from vllm_nvmeof_offload.copy.gpu_checksums import (
    CRC_BLOCKS,
    KERNEL_NAME,
    PART_BYTES_MAX,
    STRIPE_BYTES,
    GpuChecksums,
    Launch,
    Parts,
    cut_payloads,
    kernel_tables,
)
from vllm_nvmeof_offload.native import core
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


def _transfer(chunks: list[np.ndarray], gap_behind: int = -1) -> tuple[np.ndarray, Payloads]:
    """The pieces of chunks of (address, bytes), one behind the other in staging.

    gap_behind: number of a piece behind which its payload goes on 512 bytes later.
    """
    rows = np.concatenate(chunks)
    ends = np.cumsum(rows[:, 1])
    if gap_behind >= 0:
        ends[gap_behind + 1 :] += np.uint64(512)
    pieces = np.stack([rows[:, 0], ends - rows[:, 1], rows[:, 1]], axis=1)
    counts = np.array([len(chunk) for chunk in chunks], np.uint32)
    sizes = np.array([chunk[:, 1].sum() for chunk in chunks], np.uint64)
    return pieces, Payloads.of(counts, np.cumsum(sizes) - sizes, sizes)


def _cut(chunks: list[np.ndarray], gap_behind: int = -1) -> Parts:
    return cut_payloads(*_transfer(chunks, gap_behind))


def _crcs(
    kernels: ctypes.CDLL, chunks: list[Chunk], fast: bool = True, grid: tuple[int, int] = (2, 64)
) -> list[int]:
    assert core is not None
    parts = _cut([chunk.rows for chunk in chunks])
    assert parts.chunks.tolist() == list(range(len(chunks)))
    tables = kernel_tables()
    words = np.full((len(parts.rows), 32), 0xA5A5A5A5, np.uint32)
    places = [ctypes.c_void_p(array.ctypes.data) for array in (parts.rows, tables, words)]
    rows = places[0], ctypes.c_uint64(len(parts.rows))
    assert kernels.run(int(fast), *grid, *rows, *places[1:]) == 0, "a word that is not aligned"
    crcs = np.empty(len(chunks), np.uint32)
    core.join_crcs(words, np.ascontiguousarray(parts.rows[:, 1]), parts.counts, crcs)
    found: list[int] = crcs.tolist()
    return found


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


GOOD = np.array([(1 << 20, 512), (1 << 21, 3 * 512)], np.uint64)
ODD = [(4096, size) for size in (0, 1, 511, 513, 1000, 64 * KIB + 256)] + [(0x1008, 512)]


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_payload_with_another_piece_is_left_out(odd: tuple[int, int], at: int) -> None:
    with_it = np.insert(GOOD, at, np.array([odd], np.uint64), axis=0)
    parts = _cut([GOOD, with_it, GOOD])
    assert parts.chunks.tolist() == [0, 2] and parts.counts.tolist() == [2, 2]
    assert (parts.rows == np.concatenate([GOOD, GOOD])).all()


def test_a_payload_that_is_not_filled_in_order_and_whole_is_left_out() -> None:
    nothing = np.empty((0, 2), np.uint64)
    assert _cut([GOOD, GOOD, nothing]).chunks.tolist() == [0, 1]
    gap = _cut([GOOD, GOOD], gap_behind=2)
    assert gap.chunks.tolist() == [0], "the second one's second piece comes later"
    pieces, payloads = _transfer([GOOD, GOOD])
    pieces[:2, 1] = pieces[:2, 1][::-1]
    assert cut_payloads(pieces, payloads).chunks.tolist() == [1]
    pieces, payloads = _transfer([GOOD, GOOD])
    payloads.sizes[1] += np.uint64(512)
    assert cut_payloads(pieces, payloads).chunks.tolist() == [0], "the end is missing"
    assert not len(_cut([nothing, nothing]).rows)


@given(
    sizes=st.lists(st.lists(st.integers(1, 300), max_size=5), min_size=1, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_parts_are_short_and_add_up(sizes: list[list[int]]) -> None:
    chunks = [
        np.array([(at << 30, 512 * count) for at, count in enumerate(chunk, 1)], np.uint64)
        for chunk in sizes
    ]
    parts = _cut([chunk.reshape(-1, 2) for chunk in chunks])
    expected = [
        [
            (address + at, min(PART_BYTES_MAX, size - at))
            for address, size in chunk.tolist()
            for at in range(0, size, PART_BYTES_MAX)
        ]
        for chunk in chunks
    ]
    assert [tuple(row) for row in parts.rows.tolist()] == list(itertools.chain(*expected))
    assert parts.counts.tolist() == [len(chunk) for chunk in expected if chunk]
    assert parts.chunks.tolist() == [at for at, chunk in enumerate(expected) if chunk]


@given(sizes=st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_part_of_the_table_is_used_twice(sizes: list[tuple[int, bool]]) -> None:
    """Transfers of one payload are given back in any order."""
    parts_max = 20
    kernel = GpuChecksums(FakeCuda(), 0, parts_max=parts_max)
    held = []
    for at, (count, youngest) in enumerate(sizes):
        pieces, payloads = _transfer([np.array([(4096, 512)] * count, np.uint64)])
        prepared = kernel.prepare(pieces, payloads)
        used = sum(one.run.end - one.run.first for one in held)
        assert prepared is not None or used
        if prepared is not None:
            held.append(prepared)
        runs = sorted((one.run.first, one.run.end) for one in held)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(runs))
        assert not runs or runs[-1][1] <= parts_max
        if held and at % 3 == 0:
            kernel.give_back(held.pop(-1 if youngest else 0))
    for one in held:
        kernel.give_back(one)
    pieces, payloads = _transfer([np.array([(4096, 512)] * parts_max, np.uint64)])
    assert kernel.prepare(pieces, payloads) is not None, "all of it is free again"


def test_the_host_side_launches_crcs_over_the_stub() -> None:
    """Launches of 8 MiB at most, each with its own rows and words; the stub has the library's."""
    cuda = FakeCuda()
    chunks = [Chunk([2 * MIB], seed) for seed in range(5)] + [Chunk([72 * KIB] * 5, 9)]
    rows = [chunk.rows for chunk in chunks]
    launch = Launch(bytes_max=8 * MIB)
    kernel = CrcKernel(cuda, cuda.load_kernel(b"", KERNEL_NAME), rows, launch)
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
