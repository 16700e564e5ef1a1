# SPDX-License-Identifier: Apache-2.0
"""The construction of one rank's worker (pool, staging, engines, pipeline) and its handshake."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import (
    OffloadConfig,
    Replica,
    Tuning,
    check_fits,
    check_memory_left,
    check_targets,
    resolve_pool_bytes,
    serve_slots,
    share_secret,
)
from vllm_nvmeof_offload.copy.base import CopyEngine
from vllm_nvmeof_offload.copy.calibration import open_device
from vllm_nvmeof_offload.copy.geometry import CacheGeometry
from vllm_nvmeof_offload.copy.gpu_checksums import STRIPE_BYTES
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.fabric import discover
from vllm_nvmeof_offload.groups import RankGroup
from vllm_nvmeof_offload.io.base import IoEngine, NoIoEngine, Waker
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.peers.base import Common
from vllm_nvmeof_offload.pool.format import Keyspace, share_tag
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.ownership import usable_bytes
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import AdoptedEntries, RankHello
from vllm_nvmeof_offload.staging import SetMemory, Staging, split_slots
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.targets.reattach import Attachments, TargetWatcher
from vllm_nvmeof_offload.units import slot_stride_bytes
from vllm_nvmeof_offload.worker.membership import NoSetError, SetLayout, join_set
from vllm_nvmeof_offload.worker.peer_reads import (
    OwnRegion,
    PeerLinks,
    Peers,
    Serve,
    ServeQueue,
    open_links,
)
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline
from vllm_nvmeof_offload.worker.regions import RegionFiles

_INJECTOR = "vllm_nvmeof_bench.servers.faults"


@dataclass(frozen=True)
class RankIdentity:
    """One rank in one replica, and the keyspace of its model."""

    keyspace: Keyspace
    rank: int
    world_size: int
    #: Reasons why no later start may adopt this rank's chunks; empty if adoption is allowed.
    volatile: tuple[str, ...] = ()
    replica: Replica = field(default_factory=Replica)

    @property
    def ranks(self) -> int:
        """The number of ranks in all replicas, which share `pool_bytes` and `staging_bytes`."""
        return self.world_size * self.replica.count

    def __str__(self) -> str:
        several = self.replica.count > 1
        return f"replica {self.replica.index}, rank {self.rank}" if several else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class RankWorker:
    """The parts of one rank's worker. `vllm_adapter.worker` drives them for vLLM."""

    runner: PipelineRunner
    geometry: CacheGeometry
    copy: CopyEngine
    io: IoEngine
    staging: Staging
    pool: Pool | None
    watcher: TargetWatcher | None = None
    regions: RegionFiles | None = None  # other engines'; None without a pool
    links: PeerLinks | None = None  # to peers; None if this rank has none


def build_worker(
    settings: OffloadConfig, geometry: CacheGeometry, identity: RankIdentity, device: str
) -> tuple[RankWorker, RankHello]:
    """Build one rank's worker and its handshake: open the pool, and allocate all staging.

    `device` is torch's device name with its index. Call this on the model's thread.

    Raises:
        ConfigError: staging or the pool is too small for one slot.
        PoolError: the pool cannot be opened.
        EngineError: `device` has no copy engine, or CUDA cannot register staging.
    """
    kv_device = open_device(device)  # first, so that an unusable device fails at once
    tuning = settings.tuning
    checksum_at, odd = _checksum_at(tuning, geometry)
    slot_bytes = slot_stride_bytes(geometry.payload_bytes)
    check_targets(settings)
    pool_bytes = _pool_bytes(settings, identity, slot_bytes)
    slots = _, cache_slots, stream_slots, served = _slots(settings, identity, slot_bytes)
    shared, groups, alone = _join_set(geometry.groups, identity, slots)
    pool = _open_pool(settings, geometry.payload_bytes, groups, identity, pool_bytes)
    progress = _log_progress("pinned memory")
    staging = Staging(*slots[:3], progress, kv_device.numa_node, shared, served)
    waker = Waker()
    copy, copy_fallbacks = kv_device.copy_engine(
        tuning.copy_backend, staging.map, geometry.starts, waker, checksum_at
    )
    with contextlib.ExitStack() as undo:
        undo.callback(copy.close)  # otherwise its pages would stay pinned
        io, io_fallbacks = _io_engine(settings, pool, staging, identity.rank)
        adopted, adoption_s = _adopt(pool)
        serve = Serve(ServeQueue(waker.wake), _own(pool)) if pool and served else None
        links = _links(settings, identity, pool, staging, serve, waker)
        undo.pop_all()
    health = tuple(TargetHealth() for _ in range(pool.target_count)) if pool else None
    limits = _transfer_limits(settings, identity.rank, pool, io, geometry, health)
    regions = RegionFiles(pool, waker.wake) if pool else None
    peers = _peers(settings, pool, links)
    parts = staging.map, copy, io, limits
    pipeline = TransferPipeline(*parts, opener=regions, peers=peers, serve=serve)
    runner = PipelineRunner(pipeline, waker, io.fileno(), links)
    watcher = _watcher(pool, io, health, runner) if pool and health else None
    targets = tuple(settings.targets) if pool else ()
    hello = RankHello(
        rank=identity.rank,
        engine_index=pool.engine_index if pool else 0,
        keyspace=identity.keyspace.digest,
        cache_slots=cache_slots,
        pool_slots=pool.slots if pool else 0,
        target_count=pool.target_count if pool else 1,
        slot_bytes=slot_bytes,
        groups=groups,
        adopted=adopted,
        tag=b"" if identity.volatile else share_tag(identity.keyspace.digest),
        fallbacks=(*odd, *copy_fallbacks, *(pool.fallbacks if pool else ()), *io_fallbacks, *alone),
        stream_slots=stream_slots,
        targets=targets,
        remote=tuple(discover(os.path.realpath(target)).is_remote for target in targets),
        io_engine=io.name,
        checksums=core.choose_crc(staging.map.base_address, len(staging.view)) if pool else "",
        copy_engine=_name_of(copy, kv_device.engine_name(tuning.copy_backend), staging, limits),
        adoption_s=adoption_s,
        volatile=identity.volatile,
        replica=identity.replica.index if identity.replica.count > 1 else None,
        lease_name=pool.lease_name if pool else "",
        sessions=pool.sessions() if pool else b"",
    )
    for line in kv_device.warnings:
        logger.warning("%s", line)
    return RankWorker(runner, geometry, copy, io, staging, pool, watcher, regions, links), hello


def _checksum_at(tuning: Tuning, geometry: CacheGeometry) -> tuple[str, tuple[str, ...]]:
    """Return where to compute checksums (on the CPU if the GPU cannot), and the fallbacks."""
    pages = [page for group in geometry.by_group for _, _, page, _ in group.columns[0]]
    odd = [page for page in pages if page % STRIPE_BYTES]
    if tuning.checksum_at != "gpu" or not odd:
        return tuning.checksum_at, ()
    why = f"a block has {odd[0]} contiguous bytes; the GPU needs multiples of {STRIPE_BYTES}"
    return "cpu", (f"checksums: on the CPU ({why})",)


def _name_of(copy: CopyEngine, name: str, staging: Staging, limits: TransferLimits) -> str:
    if staging.on_node:
        name += ", memory on its NUMA node"
    return name + (", checksums there" if limits.copies_check and copy.makes_checksums else "")


def _transfer_limits(
    settings: OffloadConfig,
    rank: int,
    pool: Pool | None,
    io: IoEngine,
    geometry: CacheGeometry,
    health: tuple[TargetHealth, ...] | None,
) -> TransferLimits:
    tuning = settings.tuning
    target_count = pool.target_count if pool else 1

    # Allow twice as many operations as the engine works on, because a completed operation is
    # replaced only in the next turn of the pipeline's thread. Do not allow more: deadlines run from
    # submission, and time in the engine's queue must not make a target look hung.
    by_threads = "threads" in io.name
    at_work = tuning.io_threads if by_threads else tuning.io_depth * target_count
    sharing = target_count if by_threads else 1  # targets that share one limit on bytes

    return TransferLimits(
        group_bytes=geometry.group_bytes,
        rank=rank,
        target_count=target_count,
        reads_in_flight_max=2 * at_work,
        writes_in_flight_max=2 * at_work,
        read_bytes_in_flight_max=tuning.read_bytes_in_flight_max // sharing,
        write_bytes_in_flight_max=tuning.write_bytes_in_flight_max // sharing,
        write_bytes_beside_reads_max=tuning.write_bytes_beside_reads_max // sharing,
        read_deadline_s=settings.read_deadline_ms / 1000,
        write_deadline_s=tuning.write_deadline_ms / 1000,
        health=health,
        copies_check=_checksum_at(tuning, geometry)[0] == "gpu",
    )


def _own(pool: Pool) -> dict[bytes, OwnRegion]:
    return {
        one.place(0).region_uuid: OwnRegion(target, one.slots)
        for target, one in enumerate(pool.superblocks)
    }


def _links(
    settings: OffloadConfig,
    identity: RankIdentity,
    pool: Pool | None,
    staging: Staging,
    serve: Serve | None,
    waker: Waker,
) -> PeerLinks | None:
    if pool is None or not (settings.peers or serve):
        return None
    parts = identity.keyspace.digest, identity.rank, identity.world_size, staging.map.slot_bytes
    replica = identity.replica
    common = Common(*parts, share_secret(settings), replica.index, replica.count)
    port = None if serve is None else serve.queue
    return open_links(settings, common, pool.stamp.tag, port, waker.wake, staging)


def _peers(settings: OffloadConfig, pool: Pool | None, links: PeerLinks | None) -> Peers | None:
    if pool is None or links is None or links.clients is None:
        return None
    return Peers(links.clients, len(settings.peers), pool.slot_place, links.landing)


def _watcher(
    pool: Pool, io: IoEngine, health: tuple[TargetHealth, ...], runner: PipelineRunner
) -> TargetWatcher:
    # Resolve symbolic links now, because a later access to the path might hang.
    targets = [os.path.realpath(directory) for directory in pool.directories]
    attachments = Attachments(pool, io, health)
    return TargetWatcher(attachments, targets, lambda call: runner.hand_over(lambda _: call()))


def _slots(
    settings: OffloadConfig, identity: RankIdentity, slot_bytes: int
) -> tuple[int, int, int, int]:
    """Return the bytes per slot, and the numbers of cache, stream and serve slots. Raises
    ConfigError if this rank's container has too little memory."""
    check_memory_left(settings.staging_bytes // identity.ranks)
    served = serve_slots(settings, slot_bytes)
    staging_bytes = settings.staging_bytes // identity.ranks - served * slot_bytes
    # Peers double the stream slots, because their connections can carry as much as the targets.
    streams = settings.tuning.stream_slots * (2 if settings.peers else 1)
    return slot_bytes, *split_slots(staging_bytes, slot_bytes, streams), served


def _pool_bytes(settings: OffloadConfig, identity: RankIdentity, slot_bytes: int) -> int:
    """Return `pool_bytes` for all ranks and replicas. Raises ConfigError if it is too small."""
    held = 0
    if settings.pool_bytes is None:
        targets = [Path(target) for target in settings.targets]
        held = usable_bytes(targets, identity.replica.server)
    check_fits(settings, slot_bytes, identity.world_size, identity.replica.count, held)
    return resolve_pool_bytes(settings, held)


def _join_set(
    groups: tuple[RankGroup, ...], identity: RankIdentity, slots: tuple[int, int, int, int]
) -> tuple[SetMemory | None, tuple[RankGroup, ...], tuple[str, ...]]:
    """Let this rank share memory with the ranks that hold equal KV. `slots` are the bytes per slot,
    then the numbers of cache, stream and serve slots. If memory cannot be shared, each rank forms a
    separate set, and the reason is returned after the groups."""
    sizes = tuple(group.set_size for group in groups)
    members = max(sizes, default=1)
    if members == 1:
        return None, groups, ()
    number, member = divmod(identity.rank, members)
    # All ranks of an engine on this host share a parent process that no other engine has.
    name = f"{identity.replica.engine}/{os.getppid()}/{number}"
    layout = SetLayout(name, identity.keyspace.digest, members, sizes, *slots)
    try:
        return join_set(layout, member), groups, ()
    except NoSetError as error:
        line = f"one_copy: each rank keeps its own copy of KV that other ranks also have ({error})"
        logger.warning("%s: %s", identity, line)
        return None, tuple(replace(group, set_size=1) for group in groups), (line,)


def _open_pool(
    settings: OffloadConfig,
    payload_bytes: int,
    groups: tuple[RankGroup, ...],
    identity: RankIdentity,
    pool_bytes: int,
) -> Pool | None:
    if not pool_bytes:
        return None
    name = settings.server_name or socket.gethostname()
    leasing = Leasing(name, in_group=bool(settings.share_group))
    return Pool.open(
        PoolSpec(
            targets=tuple(Path(t) for t in settings.targets),
            pool_bytes=pool_bytes // identity.ranks,
            payload_bytes=payload_bytes,
            groups=groups,
            keyspace=identity.keyspace,
            rank=identity.rank,
            world_size=identity.world_size,
            engine=identity.replica.engine,
            replica=identity.replica.index,
            replicas=identity.replica.count,
            # This host's page cache may not show what other hosts write.
            o_direct="on" if leasing.in_group else settings.o_direct,
            adopt=settings.adopt,
            named=not identity.volatile,
            leasing=leasing,
        ),
        on_progress=_log_progress("pool"),
    )


def _io_engine(
    settings: OffloadConfig, pool: Pool | None, staging: Staging, rank: int
) -> tuple[IoEngine, tuple[str, ...]]:
    if pool is None:
        return NoIoEngine(), ()
    address, tuning = staging.map.base_address, settings.tuning
    engine, fallbacks = choose_io_engine(settings.io_engine, pool, staging.view, address, tuning)
    if control := settings.tuning.fault_injection:
        faults = _injector_of_faults(control)
        engine = faults(engine, control, rank, pool, staging.view, address)
    return engine, fallbacks


def _adopt(pool: Pool | None) -> tuple[AdoptedEntries, float]:
    began_s = time.monotonic()
    adopted = pool.adopt() if pool else AdoptedEntries()
    return adopted, time.monotonic() - began_s


def _injector_of_faults(control: str) -> Callable[..., IoEngine]:
    """Return `inject` from the benchmark package, which is not part of a server."""
    logger.warning(
        "FAULT INJECTION is on: I/O fails on purpose, and answers may be wrong; see %s", control
    )
    try:
        inject: Callable[..., IoEngine] = importlib.import_module(_INJECTOR).inject
    except ImportError as error:
        remedy = f"{_INJECTOR} cannot be imported ({error}); leave fault_injection out"
        raise ConfigError("fault_injection", control, remedy) from error
    return inject


def _log_progress(what: str) -> Callable[[int, int], None]:
    def log(done: int, total: int) -> None:
        logger.info("%s: %d %% of %s", what, 100 * done // max(1, total), total)

    return log
