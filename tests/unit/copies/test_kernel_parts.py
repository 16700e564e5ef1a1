# SPDX-License-Identifier: Apache-2.0
"""The copy kernel's input: pieces cut into short parts, parts grouped into short launches."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.copy.base import DESCRIPTORS_MAX, Direction
from vllm_nvmeof_offload.copy.cuda import (
    BLOCKS_MAX,
    LAUNCH_BYTES_MAX,
    PART_BYTES_MAX,
    KernelCopier,
    Table,
    cut,
)
from vllm_nvmeof_offload.units import KIB, MIB

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
