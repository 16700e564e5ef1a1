# SPDX-License-Identifier: Apache-2.0
"""The copy benchmark from end to end over the stub; its figures mean nothing."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm_nvmeof_bench.copy import (
    ARMS,
    Bench,
    GpuRig,
    Settings,
    VllmCopier,
    World,
    conditions_of,
    load_theirs,
)
from vllm_nvmeof_bench.reports.copy import REPORTS, Sample
from vllm_nvmeof_bench.results import BenchError, dump, load

from tests.unit.copies.fake_cuda import FakeCuda, working_cuda
from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.cuda import DmaCopier
from vllm_nvmeof_offload.copy.gpu_checksums import KERNEL_NAME
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.units import KIB, MIB

pytest.importorskip("vllm_nvmeof_bench")


SETTINGS = Settings(
    rounds=1,
    blocks=8,
    gib=4 / 1024,
    sizes=(4 * KIB, 512 * KIB),
    small_sizes=(4 * KIB,),
    counts=(4,),
    both_size=64 * KIB,
    mix_percent=(25,),
    submit_size=4 * KIB,
    disk_bytes=MIB,
    disk_chunk_bytes=64 * KIB,
    disk_tier_slots=8,
)


@pytest.fixture
def working() -> Iterator[FakeCuda]:
    with working_cuda() as cuda:
        yield cuda


def test_every_case_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    cuda = FakeCuda()
    world = World(cuda, 1, SETTINGS.bytes_max, {"vllm": DmaCopier(cuda).copy})
    samples = Bench(world, SETTINGS).copies()
    file = tmp_path / "build" / "copy.json"
    dump(file, "copy", samples, conditions_of(world, SETTINGS, "a stand-in"))
    world.close()
    assert not cuda.registered and not cuda.allocated and not cuda.events
    found, about = load(file, "copy", Sample)
    assert found == samples
    cases = {"transfer", "few", "both", "mix", "submit"}
    assert {one.case for one in samples} == cases
    assert {one.arm for one in samples} == {"contiguous", *ARMS, "vllm"}
    assert {s.direction for s in samples if s.case == "mix"} == {"load 25%"}
    assert about["vllm_arm"] == "a stand-in"
    assert "/" not in json.dumps(about).replace("GT/s", ""), "a path"


def test_only_requested_parts_are_measured(tmp_path: Path) -> None:
    world = World(FakeCuda(), 1, SETTINGS.bytes_max)
    only = Settings(rounds=1, parts=("submit",), gib=4 / 1024, blocks=8, submit_size=4 * KIB)
    assert {(one.case, one.arm, one.direction) for one in Bench(world, only).copies()} == {
        ("submit", arm, direction) for arm in ("dma", "kernel") for direction in ("store", "load")
    }
    world.close()


def test_staging_is_the_product_s_and_no_copy_crosses_a_registration() -> None:
    cuda = FakeCuda()
    world = World(cuda, 1, SETTINGS.bytes_max, piece_bytes_max=MIB)
    assert len(cuda.registered) > SETTINGS.bytes_max // MIB
    row = world.pieces(4 * KIB, 1)[0].tolist()
    assert "dc" in vm_flags(row[1]), "a forked child would inherit it: not the product's mapping"
    # Not a divisor of a registration: 14 blocks, then a gap.
    sizes = Settings(**{**vars(SETTINGS), "sizes": (72 * KIB,), "blocks": 40})
    cuda.regions = [*cuda.registered.items(), (row[0], 5 * MIB)]
    assert {one.arm for one in Bench(world, sizes).copies()} == {"contiguous", *ARMS}
    world.close()


def vm_flags(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds `address`."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(one, 16) for one in first.split("-"))
            within = begin <= address < end
        elif within and first == "VmFlags:":
            return set(rest.split())
    raise AssertionError("no mapping there")


class Failing:
    """An arm of other software that works so many times."""

    def __init__(self, cuda: FakeCuda, times: int) -> None:
        self._copy = DmaCopier(cuda).copy
        self._left = times

    def __call__(self, direction: Direction, pieces: Descriptors, stream: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("no such\nimage")
        self._copy(direction, pieces, stream)


@pytest.mark.parametrize("times", [0, 9])
def test_an_arm_that_fails_is_left_out_with_its_error(times: int) -> None:
    cuda = FakeCuda()
    world = World(cuda, 1, SETTINGS.bytes_max, {"vllm": Failing(cuda, times)})
    samples = Bench(world, SETTINGS).copies()
    about = conditions_of(world, SETTINGS, "a stand-in")
    world.close()
    assert {one.arm for one in samples} == {"contiguous", *ARMS}
    assert {one.case for one in samples} == {"transfer", "few", "both", "mix", "submit"}
    assert about["failed_arms"] == {"vllm": "ValueError: no such"}
    assert "left out: vllm: ValueError: no such" in REPORTS[0].lines(about)


def test_a_kernel_that_the_driver_refuses_is_left_out() -> None:
    cuda = FakeCuda()
    world = World(cuda, 1, SETTINGS.bytes_max)
    cuda.fail = {"launch": cuda.calls["launch"] + 5}
    arms = {one.arm for one in Bench(world, SETTINGS).copies()}
    world.close()
    assert arms >= {"contiguous", "dma", "dma_overlap"} and "kernel" not in arms
    assert "CUDA_ERROR_STUB" in world.failed["kernel"]
    assert not cuda.registered and not cuda.allocated and not cuda.events


@pytest.mark.parametrize(
    ("kernel", "fails", "why"),
    [
        (EngineError("no NVRTC library\nin a second line"), {}, "EngineError: no NVRTC library"),
        (1, {"launch": 3}, "CUDA_ERROR_STUB"),
    ],
    ids=["not there", "calibration fails"],
)
def test_without_a_kernel_dma_is_measured(
    kernel: int | EngineError, fails: dict[str, int], why: str
) -> None:
    cuda = FakeCuda()
    cuda.fail = fails
    world = World(cuda, kernel, SETTINGS.bytes_max)
    cuda.fail = {}
    assert {one.arm for one in Bench(world, SETTINGS).copies()} == {
        "contiguous",
        "dma",
        "dma_overlap",
    }
    assert set(world.failed) == {"kernel", "auto"} and world.failed["kernel"].endswith(why)
    world.close()


def test_without_a_working_arm_the_benchmark_fails() -> None:
    cuda = FakeCuda()
    world = World(cuda, 1, SETTINGS.bytes_max)
    cuda.fail = {"launch": cuda.calls["launch"], "copy_batch": cuda.calls["copy_batch"]}
    with pytest.raises(BenchError, match=r"every arm failed: dma: .*CUDA_ERROR_STUB"):
        Bench(world, SETTINGS).copies()


def test_an_error_of_our_code_is_no_failed_arm() -> None:
    world = World(FakeCuda(), 1, SETTINGS.bytes_max)

    def wrong(*_: object) -> None:
        raise ZeroDivisionError

    world.arms["dma"] = wrong
    with pytest.raises(ZeroDivisionError):
        Bench(world, SETTINGS).copies()


def test_a_loop_beside_an_arm_that_fails_gives_no_figure(working: FakeCuda) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    torch = MagicMock()
    torch.cuda.current_stream.return_value = stream
    world = World(working, 1, SETTINGS.bytes_max)
    working.fail = {"launch": working.calls["launch"] + 3}
    short = Settings(**{**vars(SETTINGS), "loop_s": 0.5})
    arms = {one.arm for one in Bench(world, short, torch).loops()}
    assert arms == {"alone", "dma", "dma_overlap"} and "kernel" in world.failed


class _Compute:
    """The part of torch that a compute loop needs."""

    bfloat16 = None

    def __init__(self) -> None:
        self.products = 0
        nothing = SimpleNamespace(synchronize=lambda: None)
        self.cuda = SimpleNamespace(synchronize=lambda: None, current_stream=lambda: nothing)

    def randn(self, *shape: int, **named: object) -> None: ...

    def empty_like(self, other: object) -> None: ...

    def mm(self, *factors: object, **named: object) -> None:
        self.products += 1


CRC_SETTINGS = replace(
    SETTINGS,
    crc_chunks=((MIB, 1), (8 * KIB, 3)),
    crc_bytes=2 * MIB,
    crc_launches=((4, 256, 8 * MIB, False), (1, 1024, 32 * MIB, True)),
    loop_s=0.01,
    rounds=2,
)


def test_crcs_are_measured_without_and_beside_compute(working: FakeCuda) -> None:
    world = World(working, 1, SETTINGS.bytes_max)
    kernel = working.load_kernel(b"", KERNEL_NAME)
    samples = Bench(world, CRC_SETTINGS, _Compute()).crc(kernel)
    ways = "4x256, 8 MiB", "1x1024, 32 MiB, urgent"
    found = {(s.case, s.arm, s.block_bytes, s.count) for s in samples}
    assert found >= {
        *(("crc", arm, *chunk) for arm in ways for chunk in ((MIB, 1), (8 * KIB, 3))),
        *(("crc_join", "host", *chunk) for chunk in ((MIB, 1), (8 * KIB, 3))),
        *(("crc_beside", arm, MIB, 1) for arm in ways),
        *(("crc_matrix", arm, 0, 0) for arm in ("alone", *ways)),
    }
    assert all(one.value > 0 for one in samples)
    world.close()
    assert not working.allocated


def test_a_wrong_crc_stops_the_benchmark() -> None:
    cuda = FakeCuda()
    world = World(cuda, 1, SETTINGS.bytes_max)
    kernel = cuda.load_kernel(b"", KERNEL_NAME)
    cuda.ignore.add("copy_batch")  # GPU memory holds something else
    with pytest.raises(BenchError, match="wrong CRC of a chunk of 1 × 1048576 bytes"):
        Bench(world, CRC_SETTINGS).crc(kernel)


def test_wrong_bytes_stop_the_benchmark() -> None:
    world = World(FakeCuda(ignore=("copy_batch",)), 1, SETTINGS.bytes_max)
    with pytest.raises(BenchError, match="wrong bytes"):
        Bench(world, SETTINGS).copies()


@pytest.mark.slow  # every arm reads real files
def test_loads_from_disk_are_streamed_and_in_two_phases(working: FakeCuda, tmp_path: Path) -> None:
    kept: list[int] = []
    settings = replace(SETTINGS, directory=tmp_path, rounds=2)
    world = SimpleNamespace(cuda=working)
    samples = Bench(world, settings, keep=lambda newest: kept.append(len(newest))).disk()
    assert {(one.arm, one.count) for one in samples} == {
        (arm, count) for arm in ("streamed", "two_phase", "read") for count in (4, 16)
    }
    assert kept == [6, 12], "none is lost"
    assert all(one.value > 0 for one in samples)
    assert not working.registered and not working.allocated
    assert list(tmp_path.iterdir()) == [], "the disk is left as it was"


def test_wrong_bytes_from_disk_stop_it(
    working: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuRig, "fill", lambda self: None)  # GPU memory holds something else
    with pytest.raises(BenchError, match="differ from the written bytes"):
        Bench(SimpleNamespace(cuda=working), replace(SETTINGS, directory=tmp_path)).disk()


# The benchmark calls vLLM's copy code in the right direction and with its real signature.
#
# torch and vLLM's functions are stand-ins here, which move bytes by the addresses that they get.


STREAM = 77


class _Tensor(np.ndarray):
    """The used part of a CPU tensor."""

    def numel(self) -> int:
        return self.size

    def numpy(self) -> np.ndarray:
        return self.view(np.ndarray)


class Theirs:
    """One of vLLM's two functions; `calls` records its calls. current: torch's stream."""

    THRESHOLD_BYTES = 28 * KIB

    def __init__(self, current: list[object]) -> None:
        self.calls: list[dict[str, Any]] = []
        self.current = current

    def torch(self) -> SimpleNamespace:
        @contextlib.contextmanager
        def stream(one: object) -> Any:
            self.current.append(one)
            yield
            self.current.pop()

        def empty(count: int, dtype: object, pin_memory: bool) -> _Tensor:
            assert dtype == "int64" and pin_memory
            return np.empty(count, np.int64).view(_Tensor)

        cuda = SimpleNamespace(ExternalStream=lambda handle: handle, stream=stream)
        return SimpleNamespace(cuda=cuda, empty=empty, int64="int64")

    def swap_blocks_batch(
        self, src_ptrs: _Tensor, dst_ptrs: _Tensor, sizes: _Tensor, **named: Any
    ) -> None:
        self.calls.append({**named, "stream": self.current[-1]})
        for row in zip(dst_ptrs.tolist(), src_ptrs.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(*row)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("size", [4 * KIB, 20, 64 * KIB])
def test_bytes_are_copied_in_the_right_direction_by_vllms_function(
    direction: Direction, size: int
) -> None:
    current: list[object] = [None]
    ops, small = Theirs(current), Theirs(current)
    rng = np.random.default_rng(size)
    gpu, staging = (rng.integers(0, 256, (4, size), np.uint8) for _ in range(2))
    pieces = np.empty((4, 3), np.uint64)
    pieces[:, 0] = gpu.ctypes.data + size * np.array([2, 0, 3, 1])
    pieces[:, 1] = staging.ctypes.data + size * np.arange(4)
    pieces[:, 2] = size
    before = gpu.copy(), staging.copy()
    VllmCopier(ops.torch(), ops, small).copy(direction, pieces, STREAM)
    if direction is Direction.STORE:
        assert (staging == before[0][[2, 0, 3, 1]]).all() and (gpu == before[0]).all()
    else:
        assert (gpu[[2, 0, 3, 1]] == before[1]).all() and (staging == before[1]).all()
    by_kernel = direction is Direction.LOAD and size == 4 * KIB  # 20 is no multiple of 8
    called, other = (small, ops) if by_kernel else (ops, small)
    (call,) = called.calls
    assert not other.calls and call["stream"] == STREAM
    assert call["is_src_access_order_any"] is (direction is Direction.LOAD)
    assert call.get("bytes_per_chunk") == (4 * KIB if by_kernel else None)


def _arguments(module: str, function: str) -> list[str]:
    """The parameters of a function of the installed vLLM, without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *module.split(".")).with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
    raise AssertionError(f"vLLM's {module} has no {function}")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM here")
def test_the_installed_vllm_accepts_these_arguments() -> None:
    batch = _arguments("_custom_ops", "swap_blocks_batch")
    assert batch[3:] == ["is_src_access_order_any"] and batch[0].startswith("src")
    small = _arguments("v1.kv_offload.cpu.swap_blocks_triton", "swap_blocks_batch")
    assert small[3:] == ["is_src_access_order_any", "bytes_per_chunk"]
    assert small[0].startswith("src") and small[1].startswith("dst")


def test_without_a_gpu_there_is_no_arm_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert load_theirs() == (None, "torch finds no GPU")
    monkeypatch.setitem(sys.modules, "torch", None)
    copier, why = load_theirs()
    assert copier is None and "torch" in why and "\n" not in why
