# SPDX-License-Identifier: Apache-2.0
"""Mutants of models with several KV cache groups, and of several steps in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import Pieces
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor, JobBlocks
from vllm_nvmeof_offload.groups import Group
from vllm_nvmeof_offload.manager import core
from vllm_nvmeof_offload.protocol import OpReport, Report, unpacked

from . import rank
from .base import Knobs
from .mutants import Patch, mutant, native
from .queue import LookUp
from .requests import Request
from .scheduler import SimScheduler
from .shapes import unit_of_blocks

native("a_hole_is_stored", "provisional_is_written_at_once")


@mutant
def padding_is_copied() -> list[Patch]:
    """As if a group had all bytes from one block to the next."""

    def tensor(address: int, stride_bytes: int, page_bytes: int, block_count: int) -> CacheTensor:
        return CacheTensor(address, stride_bytes, stride_bytes, block_count)

    return [(rank, "CacheTensor", tensor)]


@mutant
def neighbours_bytes_are_copied() -> list[Patch]:
    real = CacheGeometry.loaded

    def pieces(self: Any, blocks: JobBlocks) -> Pieces:
        found = real(self, blocks)
        found.rows[:, 2] *= 2
        return found

    return [(CacheGeometry, "loaded", pieces)]


@mutant
def block_ids_are_reported_for_a_window() -> list[Patch]:
    return [(Knobs, "reports_blocks", True)]


@mutant
def admission_trims() -> list[Patch]:
    """A hit that is declined is loaded in half instead of looked up again."""

    def second(self: Any, request: Request, local: int, first: LookUp) -> LookUp:
        assert first.found is not None
        unit = unit_of_blocks(self._knobs.groups) * self._knobs.blocks_per_chunk
        found = first.found // 2 // unit * unit
        keys = self._keys_of(request, local, local + found)
        return replace(first, found=found, keys=keys)

    return [(SimScheduler, "_second_look_up", second)]


@mutant
def boundary_is_touched_out_of_order() -> list[Patch]:
    """In vLLM's order: group after group."""

    def order(
        keys: Sequence[bytes], ends: npt.NDArray[np.int64], groups: Sequence[Group]
    ) -> npt.NDArray[np.uint32]:
        return np.arange(len(keys), dtype=np.uint32)

    return [(core, "prefix_order", order)]


@mutant
def report_of_a_step_is_read_as_of_the_next() -> list[Patch]:
    """A report without the number of its op would be taken for the latest one's."""
    real = core.ManagerCore.report

    def latest(self: Any, report: Report) -> Report:
        if not isinstance(report, OpReport):
            return report
        own = self._ledger[report.op]
        alike = [
            op.number
            for op in self._ledger
            if op.kind is own.kind
            and (op.batch is None) == (own.batch is None)
            and (op.batch is None or len(op.batch) == len(own.batch))
        ]
        return replace(report, op=max(alike))

    def read(self: Any, reports: Iterable[Report]) -> None:
        real(self, [latest(self, report) for report in unpacked(reports)])

    return [(core.ManagerCore, "report", read)]
