# SPDX-License-Identifier: Apache-2.0
"""An earlier name, for the benchmarks that still use it."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_nvmeof_bench.results import missed

__all__ = ["Row", "missed"]


@dataclass(frozen=True)
class Row:
    """One target. at_least: else `limit` is an upper bound. n: samples of the arm with the
    fewest. where: the block size and rival that decided.
    """

    target: str
    at_least: bool
    limit: float
    unit: str = ""
    measured: float | None = None
    n: int = 0
    where: str = ""

    @property
    def required(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{self.unit}"

    @property
    def reached(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit
