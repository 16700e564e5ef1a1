# SPDX-License-Identifier: Apache-2.0
"""Figures that others have published, to stand beside ours. Nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_DOWN, Decimal

from vllm_nvmeof_offload.units import KIB, MIB

__all__ = ["DATA24", "DATA24_DRIVES", "ScaleRatio", "print_kib", "print_mib"]


@dataclass(frozen=True, slots=True)
class ScaleRatio:
    """What one drive was seen to carry; a table scales it by the number of drives."""

    gpus_per_drive: int
    sessions_per_drive: int
    source: str

    def scaled(self, drives: int) -> tuple[int, int]:
        """(GPUs, sessions) on `drives` drives: in proportion, as the source's table does."""
        return drives * self.gpus_per_drive, drives * self.sessions_per_drive


#: A node of 4 GPUs on one drive, 16 conversations at once. The ratio does not follow from a
#: model's configuration: it was measured on one drive, and the table is its multiple.
DATA24 = ScaleRatio(
    4,
    16,
    "Western Digital, technical brief on disaggregated key-value cache offloading with OpenFlex "
    "Data24 4000: a 70B model on vLLM with LMCache",
)
DATA24_DRIVES = (1, 6, 12, 24)


def print_kib(count: int) -> str:
    """A block size as the vLLM blog's table prints it, with KB for KiB."""
    return f"{_rounded(Decimal(count) / KIB, 'KB')}"


def print_mib(count: int) -> str:
    """The same in MB for MiB: two places, halves down (0.875 is printed 0.87), no zeros."""
    return f"{_rounded(Decimal(count) / MIB, 'MB')}"


def _rounded(number: Decimal, unit: str) -> str:
    rounded = number.quantize(Decimal("0.01"), ROUND_HALF_DOWN)
    return f"{rounded.normalize():f} {unit}"
