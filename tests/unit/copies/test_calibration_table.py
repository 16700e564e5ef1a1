# SPDX-License-Identifier: Apache-2.0
"""Kept tables of measurements, measured by one process at a time, over the stub."""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.copy import calibration
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.calibration import Cell, calibrate_again, grid, kept_or_measured
from vllm_nvmeof_offload.copy.cuda import DmaCopier, KernelCopier
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.units import KIB, MIB

SIZE = 4 * MIB


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(calibration, "load_or_compile", lambda arch, directory: b"")


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


def test_a_complete_table_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _Measured(monkeypatch)
    assert _ask() == _ask() != []
    assert measured.times == 1


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
