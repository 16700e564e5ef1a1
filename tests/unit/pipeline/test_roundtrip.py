# SPDX-License-Identifier: Apache-2.0
"""A rank's worker on real files, without vLLM: manager, pipeline, host copies and I/O."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import begin, geometry_of
from vllm_nvmeof_offload.config import EXPERIMENT, TUNING, parse_config
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.io.engine import How, NativeIoEngine
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import RankHello, slot_of
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import MIB, slot_stride_bytes
from vllm_nvmeof_offload.worker.build import RankIdentity, build_worker
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

PAGE = 3000  # bytes: slots are padded to 4 KiB
LAYERS, BLOCKS, PER_CHUNK = 3, 400, 2
CACHE_SLOTS, STREAM_SLOTS = 12, 3
KEY_BYTES = len(b"key-0000") + GROUP_ID_BYTES


class Rank:
    """One rank over a directory, and a manager that exchanges messages with it step by step."""

    def __init__(self, directory: Path) -> None:
        self.cache = [
            np.random.default_rng(layer).integers(0, 256, (BLOCKS, PAGE), np.uint8)
            for layer in range(LAYERS)
        ]
        tensors = [CacheTensor(a.ctypes.data, PAGE, PAGE, BLOCKS) for a in self.cache]
        self.geometry = geometry_of(tensors, PER_CHUNK)
        payload = self.geometry.payload_bytes
        keyspace = Keyspace.of({"test": "roundtrip"})
        self.pool = Pool.open(PoolSpec((directory,), 4 * MIB, payload, keyspace))
        self.staging = Staging(slot_stride_bytes(payload), CACHE_SLOTS, STREAM_SLOTS)
        waker = Waker()
        self.copy = HostCopyEngine(on_done=waker.wake)
        memory = self.staging.view, self.staging.map.base_address
        self.io = NativeIoEngine(self.pool, *memory, TUNING, How.THREADS)
        config = TransferLimits(group_bytes=(payload,))
        pipeline = TransferPipeline(self.staging.map, self.copy, self.io, config)
        self.runner = PipelineRunner(pipeline, waker, self.io.fileno())
        hello = RankHello(
            rank=0,
            engine_index=0,
            keyspace=keyspace.digest,
            cache_slots=CACHE_SLOTS,
            pool_slots=self.pool.slots,
            target_count=1,
            slot_bytes=slot_stride_bytes(payload),
            adopted=self.pool.adopt(),
        )
        self.manager = ManagerCore(CoreConfig(key_bytes=KEY_BYTES), agree([hello]))

    def store(self, keys: list[bytes], blocks: np.ndarray) -> None:
        plan = self.manager.prepare_store(keys)
        assert plan.command is not None
        command = plan.command
        assert command.batch.key_list() == keys
        self.runner.hand_over(lambda p: begin(p, self.geometry, command, blocks), command.op)
        self.runner.wait([command.op])

    def load(self, keys: list[bytes], blocks: np.ndarray) -> tuple[tuple[int, object], ...]:
        command = self.manager.prepare_load(keys)
        self.runner.hand_over(lambda p: begin(p, self.geometry, command, blocks), command.op)
        self.runner.wait([command.op])
        finished = self.step()
        (job,) = [job for job in finished if job.op == command.op]
        return job.failures

    def step(self) -> list:
        """One engine step without work: reports up, commands down."""
        finished, reports, _ = self.runner.take()
        self.manager.report(reports)
        for command in self.manager.take_commands():
            self.runner.hand_over(lambda p, c=command: p.command(c))
        return finished

    def settle(self) -> None:
        deadline = time.monotonic() + 120
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, self.manager.gauges()
            self.step()
            self.runner.wait([])
            os.sched_yield()


@contextmanager
def rank_on(directory: Path) -> Iterator[Rank]:
    rank = Rank(directory)
    try:
        yield rank
    finally:
        rank.runner.stop()
        assert rank.io.close()
        rank.copy.close()
        rank.pool.close()
        rank.staging.close()


def test_chunks_come_back_from_every_tier_and_after_a_restart(tmp_path: Path) -> None:
    keys = [b"key-%04d" % i + bytes(GROUP_ID_BYTES) for i in range(60)]
    blocks = np.arange(60 * PER_CHUNK, dtype=np.int32)
    elsewhere = blocks + 60 * PER_CHUNK
    with rank_on(tmp_path) as rank:
        original = [layer[blocks].copy() for layer in rank.cache]
        for start in range(0, 60, 10):  # five times what the cache slots hold
            part = slice(start * PER_CHUNK, (start + 10) * PER_CHUNK)
            rank.store(keys[start : start + 10], blocks[part])
            rank.settle()
        sources = [rank.manager.lookup(key) for key in keys]
        assert sources.count(Source.CPU) == CACHE_SLOTS
        assert sources.count(Source.POOL) == 60 - CACHE_SLOTS
        for layer in rank.cache:
            layer[elsewhere] = 0xEE
        assert rank.load(keys, elsewhere) == ()
        for layer, expected in zip(rank.cache, original, strict=True):
            assert (layer[elsewhere] == expected).all()
        rank.settle()
        assert rank.manager.gauges()["ops"] == 0
    with rank_on(tmp_path) as rank:
        assert [rank.manager.lookup(key) for key in keys] == [Source.POOL] * 60
        for layer in rank.cache:
            layer[:] = 0
        assert rank.load(keys, elsewhere) == ()
        for layer, expected in zip(rank.cache, original, strict=True):
            assert (layer[elsewhere] == expected).all()


def test_a_reset_also_voids_everything_on_disk(tmp_path: Path) -> None:
    keys = [b"key-%04d" % i + bytes(GROUP_ID_BYTES) for i in range(8)]
    blocks = np.arange(8 * PER_CHUNK, dtype=np.int32)
    with rank_on(tmp_path) as rank:
        rank.store(keys, blocks)
        rank.settle()
        rank.manager.reset()
        assert [rank.manager.lookup(key) for key in keys] == [None] * 8
        rank.settle()
        rank.store(keys[:4], blocks[: 4 * PER_CHUNK])
        rank.settle()
        assert rank.load(keys[:4], blocks[: 4 * PER_CHUNK] + 40) == ()
    with rank_on(tmp_path) as rank:
        # Chunks stored after the reset are not adopted either: weights_never_change is not set.
        assert [rank.manager.lookup(key) for key in keys] == [None] * 8


def test_a_damaged_slot_fails_only_its_chunk(tmp_path: Path) -> None:
    keys = [b"key-%04d" % i + bytes(GROUP_ID_BYTES) for i in range(30)]
    blocks = np.arange(30 * PER_CHUNK, dtype=np.int32)
    with rank_on(tmp_path) as rank:
        for start in (0, 10, 20):
            part = slice(start * PER_CHUNK, (start + 10) * PER_CHUNK)
            rank.store(keys[start : start + 10], blocks[part])
            rank.settle()
        (slab,) = tmp_path.rglob("slab")
        victim = 5
        assert rank.manager.lookup(keys[victim]) is Source.POOL
        (entry,) = [e for e in rank.manager.entries() if e.key == keys[victim]]
        assert entry.place >= 0
        with slab.open("r+b") as file:
            file.seek(slot_of(entry.place) * rank.pool.slot_bytes + 4096 + 100)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x10]))
        original = [layer[blocks].copy() for layer in rank.cache]
        failures = rank.load(keys, blocks + 100)
        assert [index for index, _ in failures] == [victim]
        rank.settle()
        assert rank.manager.lookup(keys[victim]) is None, "a failed entry misses at once"
        good = np.array([i for i in range(60) if i // PER_CHUNK != victim], np.int32)
        for layer, expected in zip(rank.cache, original, strict=True):
            assert (layer[good + 100] == expected[good]).all()


@pytest.mark.parametrize(("before_s", "after_s"), [(0.005, 0.0005), (0.0001, 0.0001)])
def test_a_busy_engine_lets_the_pipeline_in_soon(
    tmp_path: Path, before_s: float, after_s: float
) -> None:
    found_s = sys.getswitchinterval()
    sys.setswitchinterval(before_s)
    try:
        with rank_on(tmp_path):
            assert sys.getswitchinterval() == pytest.approx(after_s, abs=2e-6)  # whole µs, cut
    finally:
        sys.setswitchinterval(found_s)


CACHE_BLOCKS = 8
ODD = "checksums: on the CPU (a block has 3000 contiguous bytes; the GPU needs multiples of 512)"


def _hello(directory: Path, checksum_at: str, *pages: int) -> RankHello:
    cache = [np.zeros((CACHE_BLOCKS, page), np.uint8) for page in pages]
    tensors = [
        CacheTensor(one.ctypes.data, page, page, CACHE_BLOCKS)
        for one, page in zip(cache, pages, strict=True)
    ]
    geometry = CacheGeometry([(Group(0, GroupKind.FULL, 32, 2), tensors)])
    keys = {
        "staging_bytes": 2 * MIB,
        "targets": [str(directory / "target")],
        "allow_root_file_system": True,
        "pool_bytes": 2 * MIB,
    }
    env = {EXPERIMENT: json.dumps({"stream_slots": 2, "checksum_at": checksum_at})}
    identity = RankIdentity(Keyspace.of({"test": "checksums"}), 0, 1)
    parts, hello = build_worker(parse_config(keys, env), geometry, identity, "cpu")
    parts.runner.stop()
    if parts.watcher is not None:
        parts.watcher.stop()
    assert parts.io.close()
    parts.copy.close()
    assert parts.pool is not None
    parts.pool.close()
    parts.staging.close()
    return hello


@pytest.mark.parametrize(
    ("checksum_at", "pages", "there", "odd"),
    [
        ("cpu", (4096, 4096), False, False),
        ("gpu", (4096, 4096), True, False),
        ("gpu", (4096, 3000), False, True),
        ("cpu", (3000,), False, False),
    ],
)
def test_the_copies_make_checksums_where_they_can(
    tmp_path: Path, checksum_at: str, pages: tuple[int, ...], there: bool, odd: bool
) -> None:
    hello = _hello(tmp_path, checksum_at, *pages)
    assert hello.copy_engine.endswith(", checksums there") == there
    assert (ODD in hello.fallbacks) == odd
