# SPDX-License-Identifier: Apache-2.0
"""What every benchmark's picture has in common: matplotlib where it is needed, a PNG at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["pyplot", "save"]

_DPI = 110


def pyplot() -> Any:
    """matplotlib's pyplot, without a display.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None
    plt.switch_backend("Agg")
    return plt


def save(figure: Any, path: Path) -> None:
    """Write the PNG, making its directory, and let go of the figure.

    Raises:
        BenchError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_DPI, facecolor="white")
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot be written ({error})") from None
    finally:
        pyplot().close(figure)
