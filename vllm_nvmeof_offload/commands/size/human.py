# SPDX-License-Identifier: Apache-2.0
"""Numbers for people, with the digits that tell two sizes apart."""

from __future__ import annotations

from vllm_nvmeof_offload.units import GIB, KIB, MIB, TIB

__all__ = ["human_bytes", "human_seconds"]


def human_bytes(count: float) -> str:
    """Four digits: `1.254 MiB`."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """`12.34 s`, or `5.67 ms` below a tenth of a second."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
