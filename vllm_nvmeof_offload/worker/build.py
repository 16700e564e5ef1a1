# SPDX-License-Identifier: Apache-2.0
"""Builds one rank's worker: pool, staging, engines, pipeline, thread; and says what it built."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from vllm_nvmeof_offload.config import (
    OffloadConfig,
    Replica,
    check_fits,
    check_targets,
    resolve_pool_bytes,
)
from vllm_nvmeof_offload.copy.base import CopyEngine
from vllm_nvmeof_offload.copy.choose import open_device
from vllm_nvmeof_offload.copy.geometry import ChunkGeometry
from vllm_nvmeof_offload.io.base import IoEngine, NoIoEngine
from vllm_nvmeof_offload.io.choose import IoLimits, choose_io_engine
from vllm_nvmeof_offload.io.faults import FaultPlan, FaultyIoEngine
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.keyspace import Keyspace
from vllm_nvmeof_offload.pool.ownership import bytes_of_others, bytes_of_pools
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import AdoptedEntries, RankHello
from vllm_nvmeof_offload.staging import Staging, split_slots
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.targets.reattach import Attachments, Caretaker, TargetWatch
from vllm_nvmeof_offload.units import slot_stride_bytes
from vllm_nvmeof_offload.worker.io_scheduler import PumpConfig
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.runner import PipelineRunner, Waker

__all__ = ["Place", "RankWorker", "build_worker"]

logger = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True)
class Place:
    """Which rank this is, and of what."""

    keyspace: Keyspace
    rank: int
    world_size: int
    #: Why nothing is adopted from this pool; empty: it is.
    volatile: tuple[str, ...] = ()
    replica: Replica = field(default_factory=Replica)

    @property
    def ranks(self) -> int:
        """Of all replicas: as many share `pool_bytes` and `staging_bytes`."""
        return self.world_size * self.replica.count

    def __str__(self) -> str:
        several = self.replica.count > 1
        return f"replica {self.replica.index}, rank {self.rank}" if several else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class RankWorker:
    """The parts of one rank's worker; `vllm_adapter.worker` drives them for vLLM."""

    runner: PipelineRunner
    geometry: ChunkGeometry
    copy: CopyEngine
    io: IoEngine
    staging: Staging
    pool: Pool | None
    caretaker: Caretaker | None = None


def build_worker(
    settings: OffloadConfig, geometry: ChunkGeometry, place: Place, device: str
) -> tuple[RankWorker, RankHello]:
    """Build the worker of one rank. Opens the pool and allocates all staging.

    device: as torch names it, with its number; on the thread on which the model runs.

    Raises:
        ConfigError: staging or pool are too small for one slot.
        PoolError: the pool cannot be opened.
        EngineError: no copy engine for `device`, or CUDA refuses staging.
    """
    kv_device = open_device(device)  # first: nothing is made where it cannot be used
    slot_bytes = slot_stride_bytes(geometry.payload_bytes)
    check_targets(settings)
    pool_bytes = _pool_bytes(settings, place, slot_bytes)
    staging_bytes = settings.staging_bytes // place.ranks
    cache_slots, stream_slots = split_slots(staging_bytes, slot_bytes, settings.stream_slots)
    pool = _open_pool(settings, geometry.payload_bytes, place, pool_bytes)
    staging = Staging(
        slot_bytes,
        cache_slots,
        stream_slots,
        _log_progress("pinned memory"),
        kv_device.numa_node,
    )
    waker = Waker()
    copy = kv_device.copy_engine(settings.copy_backend, staging.map, geometry.starts, waker.wake)
    with contextlib.ExitStack() as undo:
        undo.callback(copy.engine.close)  # else pages stay pinned that nobody owns
        io, io_fallbacks = _io_engine(settings, pool, staging, place.rank)
        began_s = time.monotonic()
        adopted = pool.adopt() if pool else AdoptedEntries()
        adoption_s = time.monotonic() - began_s
        undo.pop_all()
    target_count = pool.target_count if pool else 1
    health = tuple(TargetHealth() for _ in range(target_count)) if pool else None
    pump = _pump_config(settings, place.rank, pool, io, slot_bytes, health)
    pipeline = TransferPipeline(staging.map, copy.engine, io, pump)
    runner = PipelineRunner(pipeline, waker, io.fileno())
    caretaker = _caretaker(pool, io, health, runner) if pool and health else None
    hello = RankHello(
        rank=place.rank,
        engine_index=pool.engine_index if pool else 0,
        keyspace=place.keyspace.digest,
        cache_slots=cache_slots,
        pool_slots=pool.slots if pool else 0,
        target_count=pool.target_count if pool else 1,
        slot_bytes=slot_bytes,
        adopted=adopted,
        fallbacks=(*copy.fallbacks, *(pool.fallbacks if pool else ()), *io_fallbacks),
        stream_slots=stream_slots,
        targets=tuple(str(t) for t in settings.targets) if pool else (),
        io_engine=io.name,
        copy_engine=copy.name + (", memory on its NUMA node" if staging.on_node else ""),
        adoption_s=adoption_s,
        volatile=place.volatile,
        replica=place.replica.index if place.replica.count > 1 else None,
    )
    logger.debug("%s: ready with %d adopted chunks", place, len(adopted))
    for line in kv_device.warnings:
        logger.warning("%s", line)
    parts = RankWorker(runner, geometry, copy.engine, io, staging, pool, caretaker)
    return parts, hello


def _pump_config(
    settings: OffloadConfig,
    rank: int,
    pool: Pool | None,
    io: IoEngine,
    slot_bytes: int,
    health: tuple[TargetHealth, ...] | None,
) -> PumpConfig:
    target_count = pool.target_count if pool else 1
    return PumpConfig(
        rank=rank,
        target_count=target_count,
        reads_in_flight_max=_handed_over_max(
            settings, io, settings.read_bytes_in_flight_max, slot_bytes, target_count
        ),
        writes_in_flight_max=_handed_over_max(
            settings, io, settings.write_bytes_in_flight_max, slot_bytes, target_count
        ),
        read_deadline_s=settings.read_deadline_ms / 1000,
        write_deadline_s=settings.write_deadline_ms / 1000,
        health=health,
        reset_is_durable=lambda: pool is not None and pool.reset_is_durable,
    )


def _caretaker(
    pool: Pool, io: IoEngine, health: tuple[TargetHealth, ...], runner: PipelineRunner
) -> Caretaker:
    """Who watches the targets, and attaches again those that come back."""
    # Links are resolved now: later a look at the path might hang.
    watches = [TargetWatch(os.path.realpath(directory)) for directory in pool.directories]
    sites = Attachments(pool, io, health)
    return Caretaker(sites, watches, lambda call: runner.hand_over(lambda _: call()))


def _pool_bytes(settings: OffloadConfig, place: Place, slot_bytes: int) -> int:
    """Of all ranks and replicas together.

    Raises:
        ConfigError: staging or pool are too small for the slots of each.
    """
    held = 0
    if settings.pool_bytes is None:
        targets = [Path(target) for target in settings.targets]
        others = bytes_of_others(targets, place.replica.server)
        held = max(0, bytes_of_pools(targets) - others)
    check_fits(settings, slot_bytes, place.world_size, place.replica.count, held)
    return resolve_pool_bytes(settings, held)


def _open_pool(
    settings: OffloadConfig, payload_bytes: int, place: Place, pool_bytes: int
) -> Pool | None:
    if not pool_bytes:
        return None
    return Pool.open(
        PoolSpec(
            targets=tuple(Path(t) for t in settings.targets),
            pool_bytes=pool_bytes // place.ranks,
            payload_bytes=payload_bytes,
            keyspace=place.keyspace,
            rank=place.rank,
            world_size=place.world_size,
            engine=place.replica.engine,
            replica=place.replica.index,
            replicas=place.replica.count,
            o_direct=settings.o_direct,
            adopt=settings.adopt and not place.volatile,
            adoptable=not place.volatile,
        ),
        on_progress=_log_progress("pool"),
    )


def _io_engine(
    settings: OffloadConfig, pool: Pool | None, staging: Staging, rank: int
) -> tuple[IoEngine, tuple[str, ...]]:
    """The engine, and what it lacks of the best one."""
    if pool is None:
        return NoIoEngine(), ()
    limits = IoLimits(
        threads=settings.io_threads,
        depth=settings.io_depth,
        split_bytes=settings.io_split_bytes,
        read_bytes_in_flight_max=settings.read_bytes_in_flight_max,
        write_bytes_in_flight_max=settings.write_bytes_in_flight_max,
        write_bytes_beside_reads_max=settings.write_bytes_beside_reads_max,
    )
    address = staging.map.base_address
    chosen = choose_io_engine(settings.io_engine, pool, staging.view, address, limits)
    engine = chosen.engine
    if settings.fault_injection:
        logger.warning(
            "FAULT INJECTION is on: I/O fails and answers may be wrong on purpose, as %s says",
            settings.fault_injection,
        )
        plan = FaultPlan(control_path=Path(settings.fault_injection), rank=rank)
        engine = FaultyIoEngine(engine, plan, pool, staging.view, address)
    return engine, chosen.fallbacks


def _handed_over_max(
    settings: OffloadConfig, engine: IoEngine, bytes_max: int, slot_bytes: int, target_count: int
) -> int:
    """Operations of a kind that the engine holds at a time: twice what it works on.

    Not more: a deadline runs from the hand-over, and time in the engine's queue must not look
    like a target that hangs.
    """
    if "threads" in engine.name:
        return 2 * settings.io_threads
    at_work = min(settings.io_depth, max(1, bytes_max // slot_bytes))
    return 2 * at_work * target_count


def _log_progress(what: str):  # type: ignore[no-untyped-def]
    def log(done: int, total: int) -> None:
        logger.info("%s: %d %% of %s", what, 100 * done // max(1, total), total)

    return log
