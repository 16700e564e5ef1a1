# SPDX-License-Identifier: Apache-2.0
"""The choice of a transfer's backend, and the measured table behind it, over the stub."""

from __future__ import annotations

import ctypes
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.copy.base import Backend, Direction, coalesce
from vllm_nvmeof_offload.copy.calibration import (
    COUNTS,
    FRAGMENT_BYTES,
    Cell,
    Selector,
    best_of,
    calibrate,
    dump_cells,
    parse_cells,
)
from vllm_nvmeof_offload.copy.cuda import DmaCopier, KernelCopier
from vllm_nvmeof_offload.copy.driver import CudaError
from vllm_nvmeof_offload.units import KIB, MIB

KERNEL_BELOW = 32 * KIB


def _pieces(count: int, size: int, start: int = 0) -> np.ndarray:
    pieces = np.empty((count, 3), np.uint64)
    pieces[:, 0] = start + np.arange(count) * 2 * size
    pieces[:, 1] = np.arange(count) * 4 * size
    pieces[:, 2] = size
    return pieces


def _cells() -> list[Cell]:
    """Loads of small fragments are the kernel's, from 64 of them on; stores are DMA's."""
    return [
        Cell(
            direction,
            size,
            count,
            dma_us=10.0,
            kernel_us=5.0
            if direction is Direction.LOAD and size < KERNEL_BELOW and count >= 64
            else 20.0,
        )
        for direction, size, count in itertools.product(Direction, FRAGMENT_BYTES, COUNTS)
    ]


@pytest.mark.parametrize(
    ("direction", "size", "count", "expected"),
    [
        (Direction.LOAD, 4 * KIB, 64, Backend.KERNEL),
        (Direction.LOAD, 4 * KIB, 16, Backend.DMA),
        (Direction.LOAD, 16, 5000, Backend.KERNEL),  # smaller and more than was measured
        (Direction.LOAD, 18 * KIB, 100, Backend.KERNEL),
        (Direction.LOAD, 32 * KIB, 100, Backend.DMA),
        (Direction.LOAD, 2 * MIB, 1000, Backend.DMA),
        (Direction.STORE, 4 * KIB, 1000, Backend.DMA),
        (Direction.LOAD, 4 * KIB, 1, Backend.DMA),
    ],
)
def test_the_nearest_cell_decides(
    direction: Direction, size: int, count: int, expected: Backend
) -> None:
    assert Selector(_cells()).choose(direction, _pieces(count, size)) is expected


def test_an_unmeasured_count_uses_the_cell_of_fewer_fragments() -> None:
    """128 KiB × 1024 exceeds a calibration's memory; other cells are missing if time ran out."""
    large = 128 * KIB
    cells = [
        Cell(Direction.LOAD, large, 16, dma_us=10.0, kernel_us=20.0),
        Cell(Direction.LOAD, large, 256, dma_us=10.0, kernel_us=5.0),
        Cell(Direction.STORE, large, 256, dma_us=10.0, kernel_us=20.0),
    ]
    selector = Selector(cells)
    assert selector.choose(Direction.LOAD, _pieces(1000, large)) is Backend.KERNEL
    assert selector.choose(Direction.LOAD, _pieces(64, large)) is Backend.DMA
    assert selector.choose(Direction.STORE, _pieces(1000, large)) is Backend.DMA
    assert selector.choose(Direction.LOAD, _pieces(1000, 64 * KIB)) is Backend.DMA, "another size"


def test_unaligned_pieces_use_dma() -> None:
    selector = Selector(_cells())
    assert selector.choose(Direction.LOAD, _pieces(64, 4 * KIB, start=8)) is Backend.DMA
    assert selector.choose(Direction.LOAD, _pieces(64, 4 * KIB - 4)) is Backend.DMA


def test_without_a_table_every_piece_uses_dma() -> None:
    assert Selector().choose(Direction.LOAD, _pieces(64, 4 * KIB)) is Backend.DMA


def _cell(dma_us: float, kernel_us: float, **rest: float) -> Cell:
    return Cell(Direction.LOAD, 64 * KIB, 16, dma_us, kernel_us, **rest)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (_cell(15.0, 10.0), Backend.KERNEL),
        (_cell(14.9, 10.0), Backend.DMA),
        (_cell(15.0, 10.0, overlap_us=14.0), Backend.OVERLAP),  # the better kind of DMA
        (_cell(10.0, 10.0, overlap_us=9.0), Backend.OVERLAP),
        (_cell(10.0, 10.0, overlap_us=9.0, spread=0.1), Backend.OVERLAP),
        (_cell(10.0, 10.0, overlap_us=9.0, spread=0.2), Backend.DMA),  # as much as times vary
        (_cell(10.0, 10.0, overlap_us=10.0), Backend.DMA),
    ],
)
def test_a_backend_that_is_not_clearly_faster_does_not_replace_dma(
    cell: Cell, expected: Backend
) -> None:
    assert best_of(cell) is expected
    store = replace(cell, direction=Direction.STORE)
    for one in (cell, store):
        assert Selector([one]).choose(one.direction, _pieces(16, 64 * KIB)) is expected


def test_the_hint_is_only_for_pieces_of_128_kib_and_less() -> None:
    cells = [
        Cell(Direction.LOAD, size, 16, dma_us=10.0, kernel_us=20.0, overlap_us=5.0)
        for size in FRAGMENT_BYTES
    ]
    selector = Selector(cells)
    assert selector.choose(Direction.LOAD, _pieces(16, 128 * KIB)) is Backend.OVERLAP
    assert selector.choose(Direction.LOAD, _pieces(16, 4 * KIB + 3)) is Backend.OVERLAP
    mixed = _pieces(16, 64 * KIB)
    mixed[3, 2] = 256 * KIB
    assert selector.choose(Direction.LOAD, mixed) is Backend.DMA
    assert selector.choose(Direction.LOAD, _pieces(16, 256 * KIB)) is Backend.DMA


def test_a_table_reads_back_from_its_file() -> None:
    cells = _cells()
    assert parse_cells(dump_cells(cells), 64 * MIB) == cells
    assert parse_cells(dump_cells(cells[:-1]), 4 * MIB) == cells[:-1], "enough for so many bytes"
    for bad in (b"{", b"{}", b"[]", dump_cells(cells[1:]), dump_cells([])):
        with pytest.raises(ValueError, match=r".+"):
            parse_cells(bad, 4 * MIB)


class _Clock:
    """Each look costs a ms, so that each measurement does."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def _calibrate(cuda: FakeCuda, budget_s: float) -> list[Cell]:
    memory = ctypes.create_string_buffer(4 * MIB)
    kernel = KernelCopier(cuda, 1)
    staging = ctypes.addressof(memory), len(memory)
    try:
        return calibrate(cuda, DmaCopier(cuda), kernel, staging, budget_s, _Clock())
    finally:
        kernel.close()
        assert not cuda.allocated and list(cuda.streams) == [0], "something was left"


def test_calibration_measures_sizes_that_fit_and_leaves_nothing() -> None:
    cuda = FakeCuda()
    cells = _calibrate(cuda, budget_s=1e9)
    fits = [(f, c) for f in FRAGMENT_BYTES for c in COUNTS if f * c <= 4 * MIB]
    assert {(c.fragment_bytes, c.count) for c in cells} == set(fits)
    assert len(cells) == 2 * len(fits)
    hinted = [cell for cell in cells if cell.fragment_bytes <= 128 * KIB]
    assert cuda.calls["launch"] == 4 * len(cells)
    calls = {4: 1, 16: 1, 64: 2, 256: 3, 1024: 4}  # of 16, 64, 256 and 1024 copies at most
    batches = sum(calls[cell.count] for cell in (*cells, *hinted))
    assert cuda.calls["copy_batch"] == 4 * batches
    assert sum(cuda.hints) == 4 * sum(calls[cell.count] for cell in hinted)
    assert [cell for cell in cells if cell.overlap_us is not None] == hinted
    assert all(cell.spread >= 0 for cell in cells)


def test_a_driver_without_the_batch_call_has_no_hint() -> None:
    cuda = FakeCuda(batch=False)
    cells = _calibrate(cuda, budget_s=0.1)
    assert cells and all(cell.overlap_us is None for cell in cells)


def test_calibration_stops_when_its_time_is_up() -> None:
    cells = _calibrate(FakeCuda(), budget_s=0.1)
    assert 2 <= len(cells) < 20
    assert cells[0].fragment_bytes * cells[0].count == min(FRAGMENT_BYTES) * min(COUNTS)


def test_calibration_without_gpu_memory_leaves_nothing() -> None:
    cuda = FakeCuda()
    cuda.fail["allocate_host"] = 1  # the table's is the first
    with pytest.raises(CudaError, match="STUB"):
        _calibrate(cuda, budget_s=1.0)


def test_merging_adjacent_pieces_keeps_every_byte() -> None:
    pieces = _pieces(4, 64)
    pieces[1, :2] = pieces[0, :2] + np.uint64(64)
    merged = coalesce(pieces, np.array([], np.uint64))
    assert merged[:, 2].tolist() == [128, 64, 64]
    assert (coalesce(pieces, np.sort(pieces[:, 0])) == pieces).all()


@pytest.mark.parametrize("name", ["fragment_bytes", "count", "dma_us", "kernel_us", "spread"])
@pytest.mark.parametrize("value", [None, "1", [], True, -1, float("nan"), float("inf")])
def test_a_kept_table_with_an_invalid_measurement_is_refused(name: str, value: object) -> None:
    rows = json.loads(dump_cells(_cells()))["cells"]
    rows[0][name] = value
    with pytest.raises(ValueError, match=r"not a table of cells|cells missing"):
        parse_cells(json.dumps({"cells": rows}).encode(), 64 * MIB)


def test_a_kept_table_of_endless_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="not a table of cells"):
        parse_cells(b"[" * 100_000, 64 * MIB)
