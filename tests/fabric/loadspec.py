# SPDX-License-Identifier: Apache-2.0
"""The parameters of a load, and its report on each operation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoadSpec:
    """A load. interval_s: between operations; deadlines as in `TransferLimits`, in seconds."""

    targets: tuple[Path, ...]
    engine: str = "uring"
    interval_s: float = 0.1
    slots: int = 48  # over all targets
    read_deadline_s: float = 2.0
    write_deadline_s: float = 3.0
    #: False: only writes, as fast as the bounds allow, on targets chosen by the manager's rule.
    loads: bool = True


@dataclass(frozen=True)
class OpEnd:
    """kind: store, write or load. outcome: "ok", "miss" with its reason, or "WRONG BYTES".

    target: -1 where a store's chunk has no place in the pool yet.
    """

    kind: str
    target: int
    began_s: float
    ended_s: float
    outcome: str

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s
