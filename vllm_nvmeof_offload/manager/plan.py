# SPDX-License-Identifier: Apache-2.0
"""What goes into the core and comes out of it beside the protocol's messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_nvmeof_offload.protocol import StoreCommand

__all__ = ["CoreConfig", "Source", "StorePlan"]


class Source(enum.Enum):
    """The tier a look-up found a chunk in."""

    CPU = "cpu"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """world_size: ranks that report. Shares are fractions of the cache slots."""

    world_size: int = 1
    write_through: bool = True
    weights_never_change: bool = False
    land_cache_share: float = 0.5
    writes_pending_share: float = 0.5
    report_deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class StorePlan:
    """command None: nothing to store. refused: new chunks that found no cache slot."""

    command: StoreCommand | None
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    refused: int
