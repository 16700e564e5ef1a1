# SPDX-License-Identifier: Apache-2.0
"""The benchmark calls vLLM's copy code in the right direction and with its real signature.

torch and vLLM's functions are stand-ins here, which move bytes by the addresses that they get.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm_nvmeof_bench")

from vllm_nvmeof_bench.copy import VllmCopier, load_theirs

from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.units import KIB

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
