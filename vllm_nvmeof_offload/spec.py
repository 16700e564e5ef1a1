# SPDX-License-Identifier: Apache-2.0
"""The spec, which parses the configuration and builds the manager and the worker.

vLLM creates a spec in the scheduler and in each worker.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import TUNING, Replica, parse_config
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.eviction import choose_policy, credit_share
from vllm_nvmeof_offload.manager.handshake import WritePolicy, ahead_shares
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, METRICS
from vllm_nvmeof_offload.protocol import RankHello
from vllm_nvmeof_offload.vllm_adapter.deployment import Deployment
from vllm_nvmeof_offload.vllm_adapter.groups import (
    LayerCaches,
    facts_of,
    geometry_of,
    resumes_at_any_block,
)
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankIdentity, build_worker

__all__ = ["NVMeoFOffloadingSpec"]

_REPORT_GRACE_S = 5.0


class NVMeoFOffloadingSpec(OffloadingSpec):
    #: Set by the connector before `get_worker`.
    deployment: Deployment | None = None
    replica: Replica = Replica()
    one_host: bool = True
    layers: LayerCaches | None = None
    #: Set by `get_worker`.
    hello: RankHello | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
        return {
            one.name: kinds[one.kind](one.help, tuple(label.name for label in one.labels))
            for one in METRICS.values()
        }

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return CONFIG_LABELS

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = parse_config(config.extra_config)
        self.offload_prompt_only = self.settings.offload_prompt_only

    def get_manager(self) -> OffloadingManager:
        settings, tuning = self.settings, self.settings.tuning
        deadline_ms = max(settings.read_deadline_ms, tuning.write_deadline_ms)
        write_policy = WritePolicy(settings.write_policy)
        land, reload, prefetch = ahead_shares(settings.ahead_cache_share)
        config = CoreConfig(
            world_size=self.config.parallel.world_size,
            store_threshold=settings.store_threshold,
            eviction_policy=settings.eviction_policy,
            credit_share=credit_share(settings.eviction_policy, write_policy),
            write_policy=write_policy,
            weights_never_change=settings.weights_never_change,
            land_cache_share=land,
            reload_cache_share=reload,
            prefetch_cache_share=prefetch,
            retain_share=settings.retain_share,
            admission=settings.admission == "auto",
            report_deadline_s=deadline_ms / 1000 + _REPORT_GRACE_S,
            peers=tuple(settings.peers),
            kv_events=self.kv_events_config.enable_kv_cache_events,
        )
        policy, prompts_only = choose_policy(settings.eviction_policy), settings.offload_prompt_only
        return NVMeoFOffloadingManager(config, policy=policy, prompts_only=prompts_only)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.deployment is not None, "the connector sets it"
        assert self.layers is not None, "the connector sets it"
        one_copy = self.settings.one_copy and self.one_host
        geometry = geometry_of(self.config, self.layers, one_copy=one_copy)
        parallel = self.config.parallel
        keyspace = self.deployment.keyspace(
            layout=str(self.config.kv_cache_layout),
            blocks_per_chunk=self.blocks_per_chunk,
            tokens_per_hash=self.tokens_per_hash,
            groups=facts_of(self.config, self.layers.config),
            # A server that only locks a directory must not share it with servers that lease it.
            **({"share": self.settings.share_group} if self.settings.share_group else {}),
        )
        if self.settings.tuning != TUNING:
            changed = self.settings.tuning.model_dump(exclude_defaults=True)
            logger.warning("experiment: %s", json.dumps(changed))
        place = RankIdentity(
            keyspace=keyspace,
            rank=parallel.rank,
            world_size=parallel.world_size,
            volatile=(*self.deployment.volatile, *self.deployment.replaced()),
            replica=self.replica,
        )
        parts, self.hello = build_worker(self.settings, geometry, place, self.layers.device)
        reports_blocks = resumes_at_any_block(self.layers.config)
        return NVMeoFOffloadingWorker(parts, reports_blocks=reports_blocks)
