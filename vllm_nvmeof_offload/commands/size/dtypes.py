# SPDX-License-Identifier: Apache-2.0
"""Bytes of one element, by the names that models and vLLM use."""

from __future__ import annotations

__all__ = ["DTYPES", "dtype_bytes"]

DTYPES = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "float32": 4,
    "fp32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


def dtype_bytes(name: object) -> int | None:
    """Bytes of one element of dtype `name`; None for a name that is not known."""
    return DTYPES.get(str(name).removeprefix("torch.").lower())
