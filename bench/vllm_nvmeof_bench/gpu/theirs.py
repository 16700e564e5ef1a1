# SPDX-License-Identifier: Apache-2.0
"""The arm `vllm`: vLLM's released copy code, unmodified, called as its offloading worker does.

Its batch call for stores and larger loads, its Triton kernel for loads of small fragments, by
its own threshold. It comes from whichever vLLM is installed; without one, or one without its
CUDA files, there is no such arm, and the file of samples says why.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm_nvmeof_offload.copy.base import Descriptors, Direction, sides

__all__ = ["VllmCopier", "load_theirs"]

_WORD_BYTES = 8
_CHUNK_BYTES_MAX = 8192


class VllmCopier:
    """Pointers go into pinned tensors at each transfer, as in vLLM's worker."""

    def __init__(self, torch: Any, ops: Any, small: Any) -> None:
        self._torch = torch
        self._ops = ops
        self._small = small
        self._streams: dict[int, Any] = {}
        self._tables: tuple[Any, ...] = ()

    def copy(self, direction: Direction, pieces: Descriptors, stream: int) -> None:
        """On `stream`; as vLLM: any access order for loads, the stream's for stores."""
        sources, destinations, sizes = self._filled(direction, pieces)
        outer = self._streams.get(stream)
        if outer is None:
            outer = self._streams[stream] = self._torch.cuda.ExternalStream(stream)
        load = direction is Direction.LOAD
        largest = int(pieces[:, 2].max())
        fits = largest < self._small.THRESHOLD_BYTES and not (pieces[:, 2] % _WORD_BYTES).any()
        with self._torch.cuda.stream(outer):
            if load and fits:
                chunk = min(1 << (largest - 1).bit_length(), _CHUNK_BYTES_MAX)
                self._small.swap_blocks_batch(
                    sources,
                    destinations,
                    sizes,
                    is_src_access_order_any=True,
                    bytes_per_chunk=chunk,
                )
            else:
                self._ops.swap_blocks_batch(
                    sources, destinations, sizes, is_src_access_order_any=load
                )

    def _filled(self, direction: Direction, pieces: Descriptors) -> tuple[Any, ...]:
        if not self._tables or self._tables[0].numel() < len(pieces):
            self._tables = tuple(
                self._torch.empty(len(pieces), dtype=self._torch.int64, pin_memory=True)
                for _ in range(3)
            )
        destinations, sources, sizes = sides(direction, pieces)
        tables = tuple(table[: len(pieces)] for table in self._tables)
        for table, column in zip(tables, (sources, destinations, sizes), strict=True):
            table.numpy()[:] = column
        return tables


def load_theirs() -> tuple[VllmCopier | None, str]:
    """The copier and its vLLM's version; or None, and why there is none."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return None, "torch finds no GPU"
        ops = importlib.import_module("vllm._custom_ops")
        small = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
        version = str(importlib.import_module("vllm.version").__version__)
    except Exception as error:  # noqa: BLE001 - other people's import-time code; the arm is absent
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        return None, f"vLLM {version} here has no CUDA files"
    return VllmCopier(torch, ops, small), version
