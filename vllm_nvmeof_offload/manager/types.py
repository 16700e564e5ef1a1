# SPDX-License-Identifier: Apache-2.0
"""The core's configuration and its answers, beside the messages of `protocol`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vllm_nvmeof_offload.protocol import StoreCommand

#: Configured name of the eviction policy under which a chunk's returns count (`Recency`).
CREDITED = "credited_lru"
#: By how many uses each return lets a chunk count as used later, as a share of the tier's slots.
#: A request touches each of its chunks about three times.
CREDIT_SHARE = 2.0


class Source(enum.Enum):
    """The tier in which a look-up found a chunk."""

    CPU = "cpu"
    POOL = "pool"


class WritePolicy(enum.Enum):
    """When a chunk of the CPU tier is written to the pool."""

    THROUGH = "through"  # as soon as it is stored
    ON_EVICTION = "on_eviction"  # when the CPU tier is about to need its slot: demotion
    OFF = "off"


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """automatic: False loads whatever is found. Rates are pinned by the operator; None: learned.

    read_bytes_per_s: of one rank, over all targets.
    """

    automatic: bool = True
    prefill_tokens_per_s: float | None = None
    read_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """world_size: ranks that report. Shares are fractions of the cache slots.

    store_threshold: a chunk is stored on its n-th sighting (`StoreThreshold`).
    eviction_policy: its configured name, for the log; the core is given the policy itself.
    credit_share: how much longer a chunk that came back is kept (`Recency`); 0: plain LRU.
    clean_share: on-eviction writing keeps at least this share free, or evictable without a loss.
    kv_events: record changes in `ManagerCore.kv_events`; the caller takes them after each step.
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
    kv_events: bool = False


@dataclass(frozen=True, slots=True)
class StorePlan:
    """command None: nothing to store. refused: new chunks that found no cache slot."""

    command: StoreCommand | None
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    refused: int
