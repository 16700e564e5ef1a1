# SPDX-License-Identifier: Apache-2.0
"""The choice of a transfer's backend, the measured table behind it, and who measures, over the
stub."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.copy import calibration, driver
from vllm_nvmeof_offload.copy.base import Backend, Direction
from vllm_nvmeof_offload.copy.calibration import (
    COUNTS,
    FRAGMENT_BYTES,
    Cell,
    Selector,
    best_of,
    calibrate,
    calibrate_again,
    dump_cells,
    grid,
    kept_or_measured,
    parse_cells,
)
from vllm_nvmeof_offload.copy.cuda import DmaCopier, KernelCopier
from vllm_nvmeof_offload.copy.driver import CudaError
from vllm_nvmeof_offload.errors import EngineError
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


SIZE = 4 * MIB


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(driver, "load_or_compile", lambda arch, directory, name: b"")


class _Measured:
    """A replacement of `calibrate` that returns every cell, or only so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int | None = None) -> None:
        self.times = 0
        self.count = count
        self.budgets_s: list[float] = []
        monkeypatch.setattr(calibration, "calibrate", self)

    def __call__(self, *given: object) -> list[Cell]:
        self.times += 1
        _, _, _, (_, size), budget_s = given  # type: ignore[misc]
        self.budgets_s.append(budget_s)
        cells = [
            Cell(direction, fragment, count, 2.0, 1.0 + self.times)
            for fragment, count in grid(min(size, 64 * MIB))
            for direction in Direction
        ]
        return cells[: self.count]


def _ask(size: int = SIZE, **rest: float) -> list[Cell]:
    cuda = FakeCuda()
    kernel = KernelCopier(cuda, 1)
    memory = ctypes.create_string_buffer(16)
    try:
        return kept_or_measured(
            cuda, DmaCopier(cuda), kernel, (ctypes.addressof(memory), size), **rest
        )
    finally:
        kernel.close()


def test_a_table_that_was_cut_short_is_used_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured = _Measured(monkeypatch, count=5)
    assert len(_ask()) == len(_ask()) == 5
    assert measured.times == 2
    assert "doctor --calibrate" in caplog.text


def test_a_table_for_less_memory_does_not_serve_more(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _Measured(monkeypatch)
    few, many = _ask(SIZE), _ask(64 * MIB)
    assert measured.times == 2 and len(few) < len(many)
    assert _ask(SIZE) == many, "a table for more memory serves less memory"
    assert _ask(256 * MIB) == many and measured.times == 2


def test_too_little_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _Measured(monkeypatch)
    assert _ask(SIZE - KIB) == [] and not measured.times


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    """Hold the lock through another open file, as another process would."""
    path = tmp_path / "vllm-nvmeof-calibration.lock"
    handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield path
    os.close(handle)


def test_a_process_does_not_measure_beside_another(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured = _Measured(monkeypatch)
    assert _ask(lock_wait_s=0.0) == [] and not measured.times
    assert "copies by DMA only" in caplog.text
    with pytest.raises(EngineError, match="another process"):
        calibrate_again(FakeCuda(), lock_wait_s=0.0)


def test_a_process_that_waited_uses_the_table_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one GPU start together: one measures, and the other one waits for it."""
    inside, go_on = threading.Event(), threading.Event()
    measured = _Measured(monkeypatch)

    def slowly(*given: object) -> list[Cell]:
        inside.set()
        assert go_on.wait(20)
        return measured(*given)

    def wait(_: float) -> None:
        go_on.set()

    monkeypatch.setattr(calibration, "calibrate", slowly)
    monkeypatch.setattr(calibration, "pause", wait)
    found: list[list[Cell]] = []
    other = threading.Thread(target=lambda: found.append(_ask()))
    other.start()
    assert inside.wait(20)
    mine = _ask()
    other.join()
    assert found == [mine] and measured.times == 1


def test_an_unavailable_lock_blocks_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm-nvmeof-calibration.lock").symlink_to(tmp_path / "elsewhere")
    measured = _Measured(monkeypatch)
    assert _ask() and measured.times == 1
    assert not (tmp_path / "elsewhere").exists(), "a foreign link was followed"


def test_a_recalibration_replaces_the_kept_table(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _Measured(monkeypatch)
    first = _ask()
    cuda = FakeCuda()
    again = calibrate_again(cuda)
    assert measured.times == 2 and again != first
    assert measured.budgets_s[1] > measured.budgets_s[0]
    assert not cuda.registered and not cuda.allocated
    assert _ask() == again and measured.times == 2


def test_an_incomplete_recalibration_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _Measured(monkeypatch, count=5)
    cuda = FakeCuda()
    with pytest.raises(EngineError, match="did not finish in time; nothing was saved"):
        calibrate_again(cuda)
    assert not cuda.registered and not cuda.allocated
