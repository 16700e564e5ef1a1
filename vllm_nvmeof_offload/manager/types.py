# SPDX-License-Identifier: Apache-2.0
"""What goes into the core and comes out of it beside the protocol's messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vllm_nvmeof_offload.protocol import StoreCommand

__all__ = [
    "CREDITED",
    "CREDIT_SHARE",
    "AdmissionConfig",
    "CoreConfig",
    "Source",
    "StorePlan",
    "WritePolicy",
]


#: The eviction policy that goes by it, as the configuration names it.
CREDITED = "credited_lru"
#: Uses that each such request is worth, in slots of the tier. A request touches each of its
#: chunks about three times.
CREDIT_SHARE = 2.0


class Source(enum.Enum):
    """The tier a look-up found a chunk in."""

    CPU = "cpu"
    POOL = "pool"


class WritePolicy(enum.Enum):
    """When a chunk of the CPU tier is written to the pool."""

    THROUGH = "through"  # as soon as it is stored
    ON_EVICTION = "on_eviction"  # when the CPU tier is about to need its slot: demotion
    OFF = "off"


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """automatic: False loads whatever is found. Rates pinned by the operator; None: learned.

    read_bytes_per_s: of a rank, all targets together.
    """

    automatic: bool = True
    prefill_tokens_per_s: float | None = None
    read_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """world_size: ranks that report. Shares are fractions of the cache slots.

    tokens_per_chunk: what a chunk saves the model.
    store_threshold: a chunk is stored on its n-th sighting (`sightings`).
    eviction_policy: its configured name, for people; the core is given what it makes.
    credit_share: what a chunk's return is worth at eviction (`recency`); 0: plain LRU.
    clean_share: on-eviction writing keeps at least as much free, or evictable without a loss.
    tell_residency: somebody takes `ManagerCore.residency`'s changes, after every step.
    """

    world_size: int = 1
    store_threshold: int = 1
    eviction_policy: str = CREDITED
    credit_share: float = CREDIT_SHARE
    write_policy: WritePolicy = WritePolicy.THROUGH
    weights_never_change: bool = False
    land_cache_share: float = 0.5
    reload_cache_share: float = 0.25
    prefetch_cache_share: float = 0.25
    tokens_per_chunk: int = 1
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    writes_pending_share: float = 0.5
    clean_share: float = 0.125
    report_deadline_s: float = 60.0
    tell_residency: bool = False


@dataclass(frozen=True, slots=True)
class StorePlan:
    """command None: nothing to store. refused: new chunks that found no cache slot."""

    command: StoreCommand | None
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    refused: int
