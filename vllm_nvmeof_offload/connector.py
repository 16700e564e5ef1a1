# SPDX-License-Identifier: Apache-2.0
"""The connector: vLLM's OffloadingConnector, extended for a fallible, persistent backend.

It reports failed loads; vLLM then recomputes from the first failed block or, if it cannot resume
there, the whole request. The connector sends our commands with each step's metadata, the workers'
reports with each step's output, and each worker's capacity and adopted chunks in the handshake.

Methods that forward vLLM's arguments also accept arguments added in later releases (`more`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from vllm_nvmeof_offload.config import WEIGHTS_SEEN, parse_config
from vllm_nvmeof_offload.exporter import ExporterSettings
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL
from vllm_nvmeof_offload.metrics import COUNTERS, PREFIX, Counts
from vllm_nvmeof_offload.protocol import Command, RankHello, Report
from vllm_nvmeof_offload.spec import NVMeoFOffloadingSpec
from vllm_nvmeof_offload.vllm_adapter import new_weights, vllm_release
from vllm_nvmeof_offload.vllm_adapter.configure import choose_blocks_per_chunk, register_loaded
from vllm_nvmeof_offload.vllm_adapter.deployment import deployed
from vllm_nvmeof_offload.vllm_adapter.groups import LayerCaches, groups_of, keep_boundaries
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager
from vllm_nvmeof_offload.vllm_adapter.new_weights import OldKV, PausedTiers, logged_in_one_line
from vllm_nvmeof_offload.vllm_adapter.scheduler_view import SchedulerView, key_bytes_of, timed
from vllm_nvmeof_offload.vllm_adapter.sharing import ShareSettings
from vllm_nvmeof_offload.vllm_adapter.supported import count_nodes, refuse_unsupported, replica_of
from vllm_nvmeof_offload.vllm_adapter.tracing import trace_loads
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker

__all__ = [
    "NVMeoFOffloadingConnector",
    "OffloadingStats",
]


@dataclass
class NVMeoFHandshake(KVConnectorHandshakeMetadata):
    hello: RankHello


@dataclass
class NVMeoFConnectorMetadata(OffloadingConnectorMetadata):
    commands: tuple[Command, ...] = ()


@dataclass
class NVMeoFWorkerMetadata(OffloadingWorkerMetadata):
    reports: tuple[Report, ...] = ()
    counters: Counts = field(default_factory=Counts)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> NVMeoFWorkerMetadata:
        assert isinstance(other, NVMeoFWorkerMetadata)
        base = super().aggregate(other)
        counters = Counts(self.counters)
        counters.add(other.counters)
        return NVMeoFWorkerMetadata(
            base.completed_jobs, base.transfer_stats, self.reports + other.reports, counters
        )


class OffloadingStats(OffloadingConnectorStats):
    """vLLM's statistics, with a shorter `KV Transfer metrics: …` line in the log."""

    def reduce(self) -> dict[str, int | float]:
        """Return the last interval's nonzero counters; ours have short names."""
        short: dict[str, int | float] = {}
        for key, value in super().reduce().items():  # such as `vllm:nvmeof_lookups:('cpu',)`
            name, _, labels = key.removeprefix(PREFIX).partition(":")
            if not key.startswith(PREFIX):
                short[key] = round(value, 3)
            elif name in COUNTERS and value:
                values = [part.strip(" '") for part in labels.strip("()").split(",")]
                short[" ".join([name, *filter(None, values)])] = round(value, 3)
        return {key: value for key, value in short.items() if value}


register_loaded()  # vLLM looks up the class by name for a MultiConnector's metrics


class NVMeoFOffloadingConnector(OffloadingConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        vllm_release.refuse_different()  # in case the plugin did not run
        with logged_in_one_line():
            refuse_unsupported(vllm_config, kv_cache_config)
        choose_blocks_per_chunk(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = parse_config(extra)
        vllm_release.refuse_unknown(config.allow_unknown_vllm)
        replica = replica_of(vllm_config, config.replicas)
        one_host = count_nodes(vllm_config.parallel_config) == 1
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            spec = self.connector_worker.spec
            assert isinstance(spec, NVMeoFOffloadingSpec)
            spec.deployment = deployed(vllm_config, extra.get(WEIGHTS_SEEN, {}))
            spec.replica = replica
            spec.one_host = one_host
        #: Seconds spent in scheduler-side methods since the last step's output.
        self._spent_s = 0.0
        #: KV events that a reset has already collected; the next step reports them.
        self._events: list[KVCacheEvent] = []
        if self.connector_scheduler is not None:
            offloaded = build_offloading_config(vllm_config, kv_cache_config)
            self._groups = groups_of(offloaded, kv_cache_config)
            self._boundary_tokens = keep_boundaries(
                self.scheduler, vllm_config, kv_cache_config, self._groups, config.boundary_tokens
            )
            share = ShareSettings(one_host, config.share_group)
            self._share = None if config.share == "off" else share
            name = str(vllm_config.model_config.served_model_name)
            labels = {"model_name": name, "engine": str(replica.index)}
            is_dropped = vllm_release.drops_connector_stats()
            self._export = ExporterSettings(config.metrics_listen, replica, labels, is_dropped)
            #: Whether vLLM's `weight_version` is accepted as the name of the weights.
            self.trusts_weight_version = config.trust_weight_version
            self._view = SchedulerView(self.scheduler, self._groups, lambda: self._kv_cache_manager)
            self._old_kv = OldKV(self._manager.suspension, self._view)
            self.paused = PausedTiers(self._manager)
            new_weights.install(EngineCore)
            new_weights.end_with_parent()
            self._test_unknown(vllm_config)

    def _test_unknown(self, vllm_config: Any) -> None:
        if vllm_release.release() != vllm_release.UNKNOWN:
            return
        from vllm_nvmeof_offload.vllm_adapter import self_test

        with logged_in_one_line():
            self_test.run(vllm_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # In BLHNC, all layers of a block are contiguous. vLLM's CPU attention backend supports only
        # LBHNC. On other platforms vLLM falls back from BLHNC if necessary, and logs that.
        return "LBHNC" if current_platform.is_cpu() else "BLHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadingStats:
        return OffloadingStats() if data is None else OffloadingStats(data=data)

    # -- worker side ------------------------------------------------------------------

    @property
    def _worker(self) -> NVMeoFOffloadingWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, NVMeoFOffloadingWorker)
        return worker

    def register_kv_caches(self, kv_caches: dict[str, Any], **more: Any) -> None:
        assert self.connector_worker is not None
        spec = self.connector_worker.spec
        assert isinstance(spec, NVMeoFOffloadingSpec)
        # vLLM's `CanonicalKVCaches` do not separate groups whose blocks share one allocation.
        spec.layers = LayerCaches(self._kv_cache_config, kv_caches)
        with logged_in_one_line():  # errors such as no driver, no pinned memory, a pool in use
            super().register_kv_caches(kv_caches, **more)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self.connector_worker is not None
        spec = self.connector_worker.spec
        assert isinstance(spec, NVMeoFOffloadingSpec) and spec.hello is not None
        return NVMeoFHandshake(spec.hello)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata, **more: Any) -> None:
        # Submit the previous step's deferred stores first, because commands may name their slots.
        with self._worker.together():
            super().handle_preemptions(kv_connector_metadata, **more)
        self._apply(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, NVMeoFConnectorMetadata)
        if metadata.commands:  # this model runner does not call handle_preemptions
            self._submit_deferred_stores()
            self._apply(metadata)
        self._worker.note_requests({job: load.req_id for job, load in metadata.load_jobs.items()})
        with self._worker.together():
            super().start_load_kv(forward_context, **kwargs)

    # Before sleep, vLLM waits for work submitted to the GPU, then unmaps the KV cache's memory. A
    # load that still waits for its bytes, or a store deferred to the next step, would be submitted
    # later and break the worker's CUDA context. vLLM 0.32 calls neither of the next two methods, so
    # it must not sleep while requests are running. A later vLLM may call either method repeatedly.

    def unregister_kv_caches(self) -> None:
        self._submit_deferred_stores()
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        self._worker.wake()

    def _submit_deferred_stores(self) -> None:
        assert self.connector_worker is not None
        with self._worker.together():
            self.connector_worker.handle_preemptions(OffloadingConnectorMetadata({}, {}))

    def _apply(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, NVMeoFConnectorMetadata)
        self._worker.apply(metadata.commands)
        metadata.commands = ()

    def get_transfer_results(
        self, finished_req_ids: set[str], **more: Any
    ) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids, **more)
        # Drop our report on the blocks of a request that vLLM itself reports as failed.
        self._worker.forget_blocks(results.failed_recving)
        results.failed_recving |= self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks().union(super().get_block_ids_with_load_errors())

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        base = super().build_connector_worker_meta()
        if self.connector_worker is None:
            return base
        if base is None and not self._worker.has_reports:
            return None
        reports, counters = self._worker.take_reports()
        base = base or OffloadingWorkerMetadata()
        return NVMeoFWorkerMetadata(
            base.completed_jobs, base.transfer_stats, tuple(reports), counters
        )

    # -- scheduler side ---------------------------------------------------------------

    @property
    def _manager(self) -> NVMeoFOffloadingManager:
        manager = self.scheduler.manager
        assert isinstance(manager, NVMeoFOffloadingManager)
        return manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._manager.is_attached:
            return  # vLLM 0.33 repeats the same handshake after sleep
        hellos = []
        for handshake in metadata.values():
            assert isinstance(handshake, NVMeoFHandshake)
            hellos.append(handshake.hello)
        by_priority = self._vllm_config.scheduler_config.policy == "priority"
        key_bytes = key_bytes_of(self._vllm_config.cache_config.prefix_caching_hash_algo)
        queue = self._view.queue(by_priority=by_priority)
        self._manager.attach(
            hellos,
            key_bytes,
            self._groups,
            queue,
            boundary_tokens=self._boundary_tokens,
            tail_tokens=self._view.tail_tokens,
            share=self._share,
            export=self._export,
        )

    @timed
    def on_new_request(self, request: Any, **more: Any) -> None:
        super().on_new_request(request, **more)
        context, prefetch = self._view.context(request.request_id), self._may_prefetch(request)
        advice = self._manager.advise(context, request, may_prefetch=prefetch)
        self._view.waiting.added(
            request,
            prefetch=prefetch,
            first=advice.prefetch,
            helpers=advice.helpers,
        )

    @timed
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.paused.is_due and not self.paused.compare():
            self._invalidate()
        local, theirs = num_computed_tokens, super().get_num_new_matched_tokens
        cap = self._max_loadable_tokens(request, local)
        found, later = self._view.look_up(request, local, cap, theirs)
        if found is not None:
            self._old_kv.looked_up(request.request_id, local)
        return found, later

    def _may_prefetch(self, request: Any) -> bool:
        both = self._view.sources_of(request) == FROM_CPU | FROM_POOL
        limit = self.scheduler._req_status[request.request_id].max_load_tokens
        return both and limit != 0 and not request.skip_reading_prefix_cache

    @timed
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, **more: Any
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens, **more)
        self._old_kv.admitted(request, blocks, num_external_tokens)
        self._view.waiting.allocated(request.request_id, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        # vLLM's own method would ask the manager about each key.
        state = self.scheduler._req_status[request.request_id]
        first = state.num_locally_computed_tokens
        return self._manager.load_sources(state.req_context, first, num_external_tokens)

    @timed
    def build_connector_meta(self, scheduler_output: Any, **more: Any) -> KVConnectorMetadata:
        if self.paused.undecided and scheduler_output.total_num_scheduled_tokens:
            self.paused.give_up()  # vLLM did not look up this step's requests
            self._manager.reset_cache()
        self._manager.step_scheduled(scheduler_output)
        self._old_kv.step(scheduler_output.preempted_req_ids or ())
        meta = super().build_connector_meta(self._without_resumed(scheduler_output), **more)
        assert isinstance(meta, OffloadingConnectorMetadata)
        self._view.offer_again(self._manager.take_refused())
        return NVMeoFConnectorMetadata(
            load_jobs=meta.load_jobs,
            store_jobs=meta.store_jobs,
            jobs_to_flush=meta.jobs_to_flush,
            commands=tuple(self._manager.take_commands()),
        )

    @timed
    def update_connector_output(self, connector_output: Any, **more: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, NVMeoFWorkerMetadata):
            # Report before vLLM's own update, so that a failed key misses in the next look-up.
            self._manager.report(meta.reports, meta.counters)
        if connector_output.invalid_block_ids or connector_output.failed_recving:
            self._view.store_again()
        super().update_connector_output(connector_output, **more)

    @timed
    def request_finished(self, request: Any, block_ids: Any, **more: Any) -> Any:
        self._finished(request)
        return self._answered(request, super().request_finished(request, block_ids, **more))

    @timed
    def request_finished_all_groups(self, request: Any, block_ids: Any, **more: Any) -> Any:
        self._finished(request)
        done = super().request_finished_all_groups(request, block_ids, **more)
        return self._answered(request, done)

    def _finished(self, request: Any) -> None:
        self._old_kv.finished(request.request_id)
        if headers := getattr(request, "trace_headers", None):
            trace_loads(headers, self._manager.core.request_log.find(request.request_id))

    def _answered(self, request: Any, done: Any) -> Any:
        """Extend `done`, the result of vLLM's `request_finished`, with our answer to the
        request's hints. The answer becomes a part of the HTTP response."""
        state = self.scheduler._req_status.get(request.request_id)
        answers = self._manager.answers(state.req_context) if state is not None else {}
        if not answers:
            return done
        delays_free, params = done
        return delays_free, {**(params or {}), "nvmeof": answers}

    @timed
    def get_kv_connector_stats(self) -> Any:
        # This is the only scheduler-side call that vLLM makes for every step's output.
        if self.connector_scheduler is not None:
            seconds, self._spent_s = self._spent_s, 0.0
            self._manager.step_ended(seconds)
        return super().get_kv_connector_stats()

    def reset_cache(self) -> bool | None:
        return self.paused.keep(has_jobs=bool(self.scheduler._jobs)) or self._invalidate()

    def _invalidate(self) -> bool | None:
        # vLLM asserts that a step followed the last reset, but a paused engine has no steps.
        to_flush = self.scheduler._current_batch_jobs_to_flush
        kept = set(to_flush)
        to_flush.clear()
        if self._manager.config.kv_events:
            # Reset before vLLM does: its reset discards each chunk's blocks, which the chunk's
            # "removed" event must contain. vLLM's reset then has no effect.
            self._manager.reset_cache()
            while self._manager.has_events:
                self._events += self.scheduler.take_events()
        done: bool | None = super().reset_cache()
        to_flush |= kept
        return done

    def take_events(self) -> Iterable[KVCacheEvent]:
        kept, self._events = self._events, []
        yield from kept
        yield from super().take_events()

    def weights_may_have_changed(self, call: str, *, known: bool) -> None:
        """Record that vLLM made `call`, which has changed the weights if `known`, and otherwise may
        have."""
        if self._manager.weights_may_have_changed(known=known):
            if not self.paused.undecided:
                self.reset_cache()
            self._old_kv.began(call, self.scheduler._req_status, known=known)

    def name_weights(self, version: str) -> str:
        """Record the operator's statement that all ranks have this version of the weights. Return
        text that describes the consequences. See `new_weights`."""
        if self._manager.name_weights(version):
            if not self.paused.undecided:
                self.reset_cache()
            # We may have missed the weight change itself.
            call = f"the update to {version!r}"
            self._old_kv.began(call, self.scheduler._req_status, known=True)
        return self._manager.who_shares()

    def _without_resumed(self, scheduler_output: Any) -> Any:
        """Return the output with every request that this step reloads removed from the preempted
        ones.

        `reset_prefix_cache(reset_running_requests=True)` preempts requests between two steps, so
        the next step can both list a request as preempted and load its chunks. vLLM would treat the
        load as a store to flush, and the engine would stop. Removing the request is safe: it has no
        store to flush, because no load is offered while one of its stores is in progress.
        """
        preempted = scheduler_output.preempted_req_ids
        if not preempted:
            return scheduler_output
        loading = {job.req_id for job in self.scheduler._current_batch_load_jobs.values()}
        if loading.isdisjoint(preempted):
            return scheduler_output
        return replace(scheduler_output, preempted_req_ids=preempted - loading)
