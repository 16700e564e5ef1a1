# SPDX-License-Identifier: Apache-2.0
"""What pool to open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.pool.table import ENTRY_BYTES
from vllm_nvmeof_offload.units import slot_stride_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_nvmeof_offload.pool.keyspace import Keyspace

__all__ = ["PoolSpec"]


@dataclass(frozen=True)
class PoolSpec:
    """What to open.

    targets: directories that exist or can be made. pool_bytes: this rank's share over all
    targets. payload_bytes: of one slot. engine_index: None takes the first free one, of replica
    r of n: r, r + n, r + 2n, … engine: the same on all ranks of one engine, which share an
    engine directory; "": the rank shares with whom it finds.
    o_direct: "on" fails where "auto" falls back to buffered I/O. adopt: False voids what is
    there. adoptable: may a later start adopt what is written from now on?
    """

    targets: tuple[Path, ...]
    pool_bytes: int
    payload_bytes: int
    keyspace: Keyspace
    rank: int = 0
    world_size: int = 1
    engine_index: int | None = None
    engine: str = ""
    replica: int = 0
    replicas: int = 1
    o_direct: str = "auto"
    adopt: bool = True
    adoptable: bool = True

    def __post_init__(self) -> None:
        assert self.targets
        assert self.payload_bytes > 0
        assert 0 <= self.replica < self.replicas
        assert self.o_direct in ("auto", "on", "off")

    @property
    def slot_bytes(self) -> int:
        return slot_stride_bytes(self.payload_bytes)

    @property
    def slots_per_target(self) -> int:
        """How many slots `pool_bytes` buys on each target, table entries included."""
        return self.pool_bytes // len(self.targets) // (self.slot_bytes + ENTRY_BYTES)
