# SPDX-License-Identifier: Apache-2.0
"""The kernels for copies and CRC-32C: compiled for the CPU and run there, compiled for each GPU
that we name, and their input."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_nvmeof_bench.copy import CrcKernel

from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.copy import gpu_checksums
from vllm_nvmeof_offload.copy.base import DESCRIPTORS_MAX, Direction, Payloads
from vllm_nvmeof_offload.copy.cuda import (
    BLOCKS_MAX,
    LAUNCH_BYTES_MAX,
    PART_BYTES_MAX,
    KernelCopier,
    Table,
    cut,
)
from vllm_nvmeof_offload.copy.driver import (
    COPY_BLOCKS,
    compile_kernels,
    kernel_source,
)
from vllm_nvmeof_offload.copy.gpu_checksums import (
    CRC_BLOCKS,
    KERNEL_NAME,
    STRIPE_BYTES,
    GpuChecksums,
    Launch,
    Parts,
    cut_payloads,
    kernel_tables,
)
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.units import KIB, MIB

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def compiled(folder: Path, define: str) -> ctypes.CDLL:
    """The kernels of a source, compiled for this CPU with the host's harness around them."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = folder / "kernels.so"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    command = [compiler, *options, define, "-o", str(library), str(HERE / "host_kernels.cpp")]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.c_uint64
    return loaded


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    define = f'-DCOPY_BLOCKS="{KERNELS / COPY_BLOCKS}"'
    return compiled(tmp_path_factory.mktemp("kernels"), define)


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


@pytest.mark.parametrize("name", [COPY_BLOCKS, CRC_BLOCKS])
def test_the_source_is_the_one_in_the_repository(name: str) -> None:
    assert kernel_source(name) == (KERNELS / name).read_text(encoding="utf-8")


needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None
    or importlib.util.find_spec("cuda.core") is None
    or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda-core is not installed: nothing here can compile CUDA",
)


@needs_nvrtc
@pytest.mark.parametrize("source", [COPY_BLOCKS, CRC_BLOCKS])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernels_compile_to_machine_code_without_a_gpu(arch: str, source: str) -> None:
    log = io.StringIO()
    code = compile_kernels(arch, source, log)
    assert code.startswith(b"\x7fELF")
    assert f"{Path(source).stem}_reference".encode() in code
    spills = [line for line in log.getvalue().splitlines() if "spill" in line]
    assert len(spills) == 2, "one line a kernel"
    assert all("0 bytes stack frame, 0 bytes spill stores" in line for line in spills)


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="NVRTC"):
        compile_kernels("sm_12345")


def test_without_cuda_core_the_kernel_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(EngineError, match="cuda-core"):
        compile_kernels("sm_90")


EDGES = [1, 16, PART_BYTES_MAX - 1, PART_BYTES_MAX, PART_BYTES_MAX + 1, 3 * PART_BYTES_MAX]


@given(sizes=st.lists(st.sampled_from(EDGES) | st.integers(1, MIB), max_size=30))
@settings(max_examples=100, deadline=None)
def test_the_parts_of_a_piece_add_up_to_it(sizes: list[int]) -> None:
    pieces = np.array(
        [(at << 40, at << 50, size) for at, size in enumerate(sizes, 1)], np.uint64
    ).reshape(-1, 3)
    parts = cut(pieces[:, 0], pieces[:, 1], pieces[:, 2])
    expected = [
        (to + at, of + at, min(PART_BYTES_MAX, size - at))
        for to, of, size in pieces.tolist()
        for at in range(0, size, PART_BYTES_MAX)
    ]
    assert parts.dtype == np.uint64 and [tuple(row) for row in parts.tolist()] == expected


class _Grids(FakeCuda):
    """Records the number of thread blocks of each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.grids: list[int] = []

    def launch(self, *given: object, **named: object) -> None:
        self.grids.append(given[1])  # type: ignore[arg-type]
        super().launch(*given, **named)  # type: ignore[arg-type]


def _copy(sizes: list[int], tables: int = 16) -> _Grids:
    """Through the stub, from one array to another; every byte must arrive."""
    cuda = _Grids()
    total = sum(sizes)
    source = np.random.default_rng(total).integers(0, 256, total, np.uint8)
    target = np.zeros_like(source)
    places = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    pieces = np.empty((len(sizes), 3), np.uint64)
    pieces[:, 0] = target.ctypes.data + places
    pieces[:, 1] = source.ctypes.data + places
    pieces[:, 2] = sizes
    kernel = KernelCopier(cuda, 1, tables=tables)
    stream, used = cuda.create_stream(), list[Table]()
    assert kernel.copy(Direction.LOAD, pieces, stream, used)
    cuda.drain()
    while used:
        used.pop().give_back()
    kernel.close()
    assert (target == source).all()
    return cuda


def test_a_launch_has_at_most_eight_mib_and_few_blocks() -> None:
    cuda = _copy([20 * MIB, 5 * KIB, 3 * MIB + 16])
    rest = 7 * MIB + 5 * KIB + 16
    assert [sum(sizes) for sizes in cuda.launched] == [8 * MIB, 8 * MIB, rest]
    assert all(sum(sizes) <= LAUNCH_BYTES_MAX for sizes in cuda.launched)
    assert max(cuda.grids) == BLOCKS_MAX <= 8


def test_many_small_pieces_use_several_tables_and_a_long_one_only_its_share() -> None:
    assert [len(sizes) for sizes in _copy([16] * 10_000).launched] == [4096, 4096, 1808]
    one_table = DESCRIPTORS_MAX * PART_BYTES_MAX
    assert len(_copy([one_table // 8] * 8, tables=1).launched) == one_table // LAUNCH_BYTES_MAX


def test_without_enough_tables_nothing_is_done() -> None:
    cuda = FakeCuda()
    kernel = KernelCopier(cuda, 1, tables=1)
    memory = ctypes.create_string_buffer(16)
    pieces = np.full((DESCRIPTORS_MAX + 1, 3), ctypes.addressof(memory), np.uint64)
    pieces[:, 2] = 1
    used: list[Table] = []
    assert not kernel.copy(Direction.STORE, pieces, cuda.create_stream(), used)
    assert not used and cuda.is_idle and not cuda.calls["launch"]
    kernel.close()


def test_few_parts_use_few_thread_blocks() -> None:
    assert _copy([KIB]).grids == [1]
    assert _copy([KIB] * 17).grids == [2]


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
def crcs_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    define = f'-DCRC_BLOCKS="{KERNELS / CRC_BLOCKS}"'
    return compiled(tmp_path_factory.mktemp("kernels"), define)


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
    assert parts.rows[:, 1].max() <= gpu_checksums.PART_BYTES_MAX
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
def test_the_crc_is_that_of_the_library(
    crcs_on_cpu: ctypes.CDLL, fast: bool, sizes: list[int]
) -> None:
    chunk = Chunk(sizes, seed=len(sizes))
    assert _crcs(crcs_on_cpu, [chunk], fast) == [chunk.crc]


@given(
    stripes=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=6), min_size=1, max_size=4),
    grid=st.sampled_from([(1, 32), (2, 64), (5, 96), (4, 256)]),
    skew=st.sampled_from([0, 16, 32]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_pieces_in_any_grid_have_the_right_crcs(
    crcs_on_cpu: ctypes.CDLL, stripes: list[list[int]], grid: tuple[int, int], skew: int, seed: int
) -> None:
    chunks = [
        Chunk([STRIPE_BYTES * count for count in chunk], seed + at, skew)
        for at, chunk in enumerate(stripes)
    ]
    assert _crcs(crcs_on_cpu, chunks, grid=grid) == [chunk.crc for chunk in chunks]


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
