# SPDX-License-Identifier: Apache-2.0
"""Messages that vLLM carries between our scheduler side and the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import Command, LoadCommand, RankHello, Report, StoreCommand


@dataclass
class NVMeoFConnectorMetadata(OffloadingConnectorMetadata):
    """One step's jobs and commands, scheduler → workers."""

    commands: tuple[Command, ...] = ()


@dataclass
class NVMeoFWorkerMetadata(OffloadingWorkerMetadata):
    """One step's completions and reports, workers → scheduler."""

    reports: tuple[Report, ...] = ()
    counters: Counts = field(default_factory=Counts)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> NVMeoFWorkerMetadata:
        assert isinstance(other, NVMeoFWorkerMetadata)
        base = super().aggregate(other)
        counters = Counts(self.counters)
        counters.add(other.counters)
        return NVMeoFWorkerMetadata(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            reports=self.reports + other.reports,
            counters=counters,
        )


@dataclass
class NVMeoFHandshake(KVConnectorHandshakeMetadata):
    """Sent by each worker once, at start."""

    hello: RankHello


class ChunkStoreSpec(LoadStoreSpec):
    """Destination of a store job."""

    def __init__(self, command: StoreCommand) -> None:
        self.command = command


class ChunkLoadSpec(LoadStoreSpec):
    """Source of a load job."""

    def __init__(self, command: LoadCommand) -> None:
        self.command = command
