# SPDX-License-Identifier: Apache-2.0
"""The host's copies make the payloads' checksums, and each goes with what its cache slot holds."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from vllm_nvmeof_bench.servers.faults import lanes_of

from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.copy.base import Descriptors, Direction, Payloads, Pieces
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.io.base import IoOp, Lanes, Waker
from vllm_nvmeof_offload.io.native import How, NativeIoEngine
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    ChunkBatch,
    LoadCommand,
    OpReport,
    StoreCommand,
    WriteCommand,
    place_of,
    slot_of,
    unpacked,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import HEADER_BYTES, MIB, slot_stride_bytes
from vllm_nvmeof_offload.worker.pipeline import TransferLimits, TransferPipeline

PAGE, LAYERS, BLOCKS, PER_CHUNK = 3000, 3, 40, 2
CHUNKS = BLOCKS // PER_CHUNK
WAIT_S = 30.0


def copied(
    parts: Sequence[Descriptors],
    addresses: Sequence[int],
    size: int,
    direction: Direction = Direction.STORE,
) -> list[int | None]:
    """Copy these pieces, whose second column is offsets; return the checksums."""
    done = threading.Event()
    engine = HostCopyEngine(on_done=done.set)
    counts = np.array([len(part) for part in parts], np.uint32)
    payloads = Payloads.of(
        counts, np.array(addresses, np.uint64), np.full(len(counts), size, np.uint64)
    )
    assert engine.makes_checksums
    ticket = engine.submit(direction, Pieces.of(parts).at(addresses), None, payloads)
    assert done.wait(WAIT_S)
    assert engine.poll() == [(ticket, OK)]
    engine.close()
    return [None if crc < 0 else crc for crc in payloads.crcs.tolist()]


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=12), st.integers(0, 63))
def test_a_payload_of_any_pieces_has_its_checksum(sizes: list[int], shift: int) -> None:
    total = sum(sizes)
    source = np.random.default_rng(total).integers(0, 256, total + 1, np.uint8)
    target = np.full(total + shift + 1, 0xEE, np.uint8)
    base, at = target.ctypes.data + shift, np.cumsum([0, *sizes[:-1]])
    pieces = np.array([at + source.ctypes.data, at, sizes], np.uint64).T
    (crc,) = copied([pieces], [base], total)
    assert crc == crc32c(source[:total].tobytes())
    assert (target[shift : shift + total] == source[:total]).all()
    assert target[-1] == 0xEE


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=8), st.randoms())
def test_a_loaded_payload_has_its_checksum_wherever_its_pieces_go(
    sizes: list[int], dice: random.Random
) -> None:
    total = sum(sizes)
    payload = np.random.default_rng(total).integers(0, 256, total, np.uint8)
    cache = [np.zeros(size, np.uint8) for size in sizes]
    dice.shuffle(cache)  # so that neighbours in the payload are none in the KV cache
    sizes = [len(page) for page in cache]
    at = np.cumsum([0, *sizes[:-1]])
    pieces = np.array([[page.ctypes.data for page in cache], at, sizes], np.uint64).T
    (crc,) = copied([pieces], [payload.ctypes.data], total, Direction.LOAD)
    assert crc == crc32c(payload.tobytes())
    assert (np.concatenate(cache) == payload).all()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "rows",
    [[(0, 0, 2000), (2000, 2001, 2000)], [(2000, 2000, 2000), (0, 0, 2000)], [(0, 0, 3999)], []],
    ids=["gap", "order", "short", "none"],
)
def test_only_a_payload_that_is_covered_in_order_has_a_checksum(
    rows: list[tuple[int, int, int]], direction: Direction
) -> None:
    cache, staging = np.zeros(9000, np.uint8), np.zeros(9000, np.uint8)
    source, target = (cache, staging) if direction is Direction.STORE else (staging, cache)
    source[:] = np.arange(9000) % 251
    parts = [np.array(part, np.uint64).reshape(-1, 3) for part in (rows, [(5000, 0, 4000)])]
    for part in parts:
        part[:, 0] += np.uint64(cache.ctypes.data)
    places = [staging.ctypes.data, staging.ctypes.data + 5000]
    crcs = copied(parts, places, 4000, direction)
    assert crcs == [None, crc32c(source[5000:].tobytes())]
    for in_cache, offset, count in rows:
        of_cache, of_staging = slice(in_cache, in_cache + count), slice(offset, offset + count)
        assert (cache[of_cache] == staging[of_staging]).all()
        assert source[of_cache].any() and target[of_cache].any()


class SpyEngine(NativeIoEngine):
    """Keeps the operations that it was given."""

    seen: list[IoOp]

    def attach(self) -> Lanes:
        return lanes_of(self)

    def submit(self, ops: Sequence[IoOp]) -> None:
        self.seen.extend(ops)
        super().submit(ops)


class Bench:
    """One rank's pipeline over real memory and files."""

    def __init__(self, directory: Path) -> None:
        self.cache = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, PAGE), np.uint8)
        tensors = [CacheTensor(layer.ctypes.data, PAGE, PAGE, BLOCKS) for layer in self.cache]
        self.geometry = ChunkGeometry(tensors, PER_CHUNK)
        self.size = self.geometry.payload_bytes
        spec = PoolSpec((directory,), 4 * MIB, self.size, Keyspace.of({"test": "crc"}))
        self.pool = Pool.open(spec)
        self.staging = Staging(slot_stride_bytes(self.size), CHUNKS, 2)
        self.waker = Waker()
        self.copy = HostCopyEngine(on_done=self.waker.wake)
        address = self.staging.map.base_address
        self.io = SpyEngine(
            self.pool, self.staging.view, address, Tuning(io_threads=2), How.THREADS
        )
        self.io.seen = []
        config = TransferLimits(group_bytes=(self.size,))
        self.pipeline = TransferPipeline(self.staging.map, self.copy, self.io, config)
        self.ops = 0

    def batch(self, slots: Sequence[int], generation: int, *, pool: bool, cpu: bool) -> ChunkBatch:
        """The chunk of generation g in slot s has blocks s * PER_CHUNK on, and place s."""
        count = len(slots)
        return ChunkBatch.of(
            b"".join(b"key-%04d\0\0\0\0" % slot for slot in slots),
            np.full(count, generation, np.uint64),
            np.array(slots if cpu else [-1] * count, np.int32),
            np.array([place_of(0, slot) if pool else -1 for slot in slots], np.int64),
            np.zeros(count, np.uint8),
        )

    def pieces(self, slots: Sequence[int]) -> Pieces:
        return Pieces.of([self.geometry.pieces(self.blocks(slot), 0) for slot in slots])

    def blocks(self, slot: int) -> np.ndarray:
        return np.arange(slot * PER_CHUNK, (slot + 1) * PER_CHUNK, dtype=np.int32)

    def run(self) -> None:
        """Step until nothing is under way; every row must be OK."""
        while not self.pipeline.idle():
            self.waker.clear()
            self.pipeline.step()
            for report in unpacked(self.pipeline.take_reports()):
                if isinstance(report, OpReport):
                    assert report.codes is None, report
            if not self.pipeline.idle():
                waited = select.select([self.waker.fd, self.io.fileno()], [], [], WAIT_S)
                assert waited[0]
        self.pipeline.take_finished()

    def store(self, slots: Sequence[int], generation: int) -> None:
        self.ops += 1
        batch = self.batch(slots, generation, pool=False, cpu=True)
        self.pipeline.store(StoreCommand(self.ops, batch), self.pieces(slots), None)

    def write(self, slots: Sequence[int], generation: int) -> None:
        self.ops += 1
        batch = self.batch(slots, generation, pool=True, cpu=True)
        self.pipeline.command(WriteCommand(self.ops, batch))

    def load(self, slots: Sequence[int], generation: int, *, cpu: bool) -> None:
        """From the pool; `cpu`: it lands in the cache slots."""
        self.ops += 1
        batch = self.batch(slots, generation, pool=True, cpu=cpu)
        self.pipeline.load(LoadCommand(self.ops, batch), self.pieces(slots), None)

    def payload(self, slot: int) -> bytes:
        start = slot * self.staging.map.slot_bytes + HEADER_BYTES
        return bytes(self.staging.view[start : start + self.size])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert bench.io.close()
    bench.copy.close()
    bench.pool.close()
    bench.staging.close()


def test_a_write_brings_the_checksum_of_its_store(bench: Bench) -> None:
    slots = list(range(CHUNKS))
    bench.store(slots, 1)
    bench.write(slots, 1)  # it waits at the gates for the store
    bench.run()
    assert len(bench.io.seen) == CHUNKS
    for op in bench.io.seen:
        assert op.payload_crc == crc32c(bench.payload(slot_of(op.place)))
    original = bench.cache.copy()
    bench.cache[:] = 0
    bench.load(slots, 1, cpu=False)
    bench.run()
    assert (bench.cache == original).all()


def test_a_checksum_ends_with_what_its_slot_holds(bench: Bench) -> None:
    bench.store([3], 1)
    bench.write([3], 1)
    bench.run()
    bench.cache[:, bench.blocks(3)] ^= 0xFF
    bench.store([3], 2)
    bench.write([3], 2)
    bench.run()
    first, second = bench.io.seen
    assert first.payload_crc != second.payload_crc == crc32c(bench.payload(3))
    bench.load([3], 2, cpu=True)  # lands: a fill without a copy, so that nobody made a checksum
    bench.write([3], 2)
    bench.run()
    assert bench.io.seen[-1].payload_crc is None
