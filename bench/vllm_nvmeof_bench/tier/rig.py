# SPDX-License-Identifier: Apache-2.0
"""The real pipeline over a real pool, without vLLM; beside it a bare engine of each kind.

"GPU memory" is an ordinary array of blocks; the chunks' blocks lie in it in an order drawn
from the seed. Chunk i lies in pool slot i, all were written once. Before each load the blocks
are zeroed, after it they are compared with what was written: no figure is of wrong bytes.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.tier.paced import PacedCopyEngine
from vllm_nvmeof_bench.tier.settings import Settings
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.io.base import IoEngine, IoKind, IoLimits, IoOp, Waker
from vllm_nvmeof_offload.io.choose import choose_io_engine
from vllm_nvmeof_offload.pool.keyspace import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    Command,
    LoadChunk,
    LoadCommand,
    OpReport,
    SlotIdentity,
    StoreChunk,
    StoreCommand,
    Urgency,
    WriteCommand,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.worker.io_scheduler import SchedulerConfig
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.runner import PipelineRunner

__all__ = ["NO_PIECES", "Rig"]

NO_PIECES: Descriptors = np.empty((0, 3), np.uint64)
_TABLE_ENTRY_BYTES = 64
_KEY_BYTES = 36
_STALL_S = 120.0
_POLL_S = 0.002


class Rig:
    """Open it, `write_all`, then load; `close` at the end."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.settings = settings
        self._stack = contextlib.ExitStack()
        self._ops = 0
        try:
            self._open(directory, settings)
        except BaseException:
            self.close()
            raise

    def _open(self, directory: Path, settings: Settings) -> None:
        count, per_chunk = settings.chunks_max, settings.chunk_bytes // settings.block_bytes
        rng = np.random.default_rng(settings.seed)
        self._written = np.frombuffer(rng.bytes(count * settings.chunk_bytes), np.uint8)
        self._written = self._written.reshape(count * per_chunk, settings.block_bytes)
        self._ids = rng.permutation(count * per_chunk).astype(np.int32).reshape(count, per_chunk)
        tensor = CacheTensor(
            self._allocate(), settings.block_bytes, settings.block_bytes, count * per_chunk
        )
        self._geometry = ChunkGeometry([tensor], per_chunk)
        self.identities = [
            SlotIdentity(number.to_bytes(_KEY_BYTES, "little"), 1) for number in range(count)
        ]
        pool = Pool.open(
            PoolSpec(
                targets=(directory,),
                pool_bytes=count * (settings.slot_bytes + _TABLE_ENTRY_BYTES),
                payload_bytes=settings.chunk_bytes,
                keyspace=Keyspace.of({"bench": "tier"}),
            )
        )
        self._stack.callback(pool.close)
        if pool.slots < count:
            raise BenchError(f"no space for a pool of {count} chunks in {directory}")
        staging = Staging(
            settings.slot_bytes,
            settings.cache_slots,
            settings.stream_slots,
            numa_node=self._numa_node(),
        )
        self._stack.callback(staging.close)
        self.staging = staging.map
        waker = Waker()
        self.copy = self._copy_engine(waker)
        self._stack.callback(self.copy.close)
        self.bare_copy = PacedCopyEngine(on_done=(bare_waker := Waker()).wake)
        self._bare_waker = bare_waker
        self._stack.callback(self.bare_copy.close)
        io, self._bare_io = (self._engine(pool, staging) for _ in range(2))
        self.engine = io.name
        self._reads_max = self._handed_over_max(io)
        pump = SchedulerConfig(
            reads_in_flight_max=self._reads_max, read_deadline_s=_STALL_S, write_deadline_s=_STALL_S
        )
        pipeline = TransferPipeline(staging.map, self.copy, io, pump)
        self.runner = PipelineRunner(pipeline, waker, io.fileno())
        self._stack.callback(self.runner.stop)

    # -- "GPU memory" and its copies: a subclass has them on a GPU -----------------------

    def _allocate(self) -> int:
        self._blocks = np.zeros_like(self._written)
        return self._blocks.ctypes.data

    def _numa_node(self) -> int | None:
        return None

    def _copy_engine(self, waker: Waker) -> Any:
        return PacedCopyEngine(on_done=waker.wake)

    def fill(self) -> None:
        """Every block holds what is to be written."""
        self._blocks[self._ids.ravel()] = self._written

    # -- the pool ---------------------------------------------------------------------

    def _engine(self, pool: Pool, staging: Staging) -> IoEngine:
        """One with the product's limits, closed before what it works on."""
        limits, base = IoLimits.of(parse_config({})), staging.map.base_address
        engine, _ = choose_io_engine(self.settings.io_engine, pool, staging.view, base, limits)
        self._stack.callback(engine.close)
        return engine

    def _handed_over_max(self, engine: IoEngine) -> int:
        """As `worker.build` has it: twice what the engine works on."""
        config = parse_config({})
        if "threads" in engine.name:
            return 2 * config.io_threads
        at_work = config.read_bytes_in_flight_max // self.settings.slot_bytes
        return 2 * min(config.io_depth, max(1, at_work))

    def close(self) -> None:
        """The thread first, then engines, memory, files."""
        self._stack.close()

    # -- transfers --------------------------------------------------------------------

    def op(self) -> int:
        self._ops += 1
        return self._ops

    def pieces(self, chunk: int) -> Descriptors:
        return self._geometry.pieces(self._ids[chunk], 0)

    def start(self, chunks: Sequence[LoadChunk], pieces: Sequence[Descriptors]) -> int:
        """Hand over one load; return its op."""
        command = LoadCommand(self.op(), tuple(chunks))
        fence = self.copy.record_fence()
        self.runner.hand_over(lambda p: p.load(command, pieces, fence), command.op)
        return command.op

    def obey(self, command: Command) -> None:
        self.runner.hand_over(lambda p: p.command(command))

    def check(self) -> int:
        """Take what has finished; return how many reports came.

        Raises:
            BenchError: a chunk failed.
        """
        finished, reports, _ = self.runner.take()
        outcomes = [report for report in reports if isinstance(report, OpReport)]
        failures = [job.failures for job in finished] + [one.failures for one in outcomes]
        for failure in filter(None, failures):
            raise BenchError(f"a transfer failed: {failure[0][1]}")
        return len(outcomes)

    def write_all(self) -> None:
        """Store every chunk and write it to its pool slot, one CPU tier after the other."""
        self.fill()
        tier = self.settings.cache_slots
        for first in range(0, len(self.identities), tier):
            numbers = range(first, min(first + tier, len(self.identities)))
            named = [(number, self.identities[number], number - first) for number in numbers]
            store = StoreCommand(
                self.op(), tuple(StoreChunk(identity, slot) for _, identity, slot in named)
            )
            pieces = [self.pieces(number) for number in numbers]
            fence = self.copy.record_fence()
            self.runner.hand_over(
                lambda p, s=store, parts=pieces, f=fence: p.store(s, parts, f),  # type: ignore[misc]
                store.op,
            )
            for number, identity, slot in named:
                self.obey(WriteCommand(self.op(), identity, slot, number))
            left, end_s = 1 + len(named), time.monotonic() + _STALL_S
            while left := left - self.check():
                if time.monotonic() > end_s:
                    raise BenchError("writing the pool takes too long")
                time.sleep(_POLL_S)

    def read_bare(self, count: int) -> None:
        """The I/O engine alone reads and checks the first chunks, into all of staging."""
        free = deque(range(self.staging.cache_slots + self.staging.stream_slots))
        ready = select.poll()
        ready.register(self._bare_io.fileno(), select.POLLIN)
        slots: dict[int, int] = {}
        following, left = 0, count
        while left:
            while following < count and free and len(slots) < self._reads_max:
                slot = free.popleft()
                address = self.staging.base_address + slot * self.staging.slot_bytes
                read = IoOp(
                    following,
                    IoKind.READ_SLOT,
                    Urgency.DEMAND,
                    following,
                    address,
                    self.identities[following],
                )
                if not self._bare_io.submit([read]):
                    free.appendleft(slot)
                    break
                slots[following] = slot
                following += 1
            if not ready.poll(_STALL_S * 1000):
                raise BenchError(f"{self._bare_io.name}: nothing came for {_STALL_S:.0f} s")
            for completion in self._bare_io.poll():
                if completion.outcome is None or not completion.outcome.ok:
                    raise BenchError(f"{self._bare_io.name}: a read ended {completion.outcome}")
                free.append(slots.pop(completion.token))
                left -= 1

    def copy_bare(self, pieces: Descriptors) -> None:
        """The copy engine alone; `pieces` name staging addresses."""
        ready = select.poll()
        ready.register(self._bare_waker.fd, select.POLLIN)
        ticket = self.bare_copy.submit(Direction.LOAD, pieces, None)
        while not any(done == ticket for done, _ in self.bare_copy.poll()):
            ready.poll(1000)
            self._bare_waker.clear()

    def staged_pieces(self, count: int) -> Descriptors:
        """Of the first chunks, each out of some cache slot."""
        parts = []
        for number in range(count):
            part = self.pieces(number).copy()
            address = self.staging.cache_address(number % self.staging.cache_slots)
            part[:, 1] += np.uint64(address + HEADER_BYTES)
            parts.append(part)
        return np.concatenate(parts)

    # -- contents ---------------------------------------------------------------------

    def zero(self, count: int) -> None:
        """The first chunks' blocks."""
        self._blocks[self._ids[:count].ravel()] = 0

    def same(self, count: int) -> bool:
        """Whether the first chunks' blocks hold what was written."""
        per_chunk = self._ids.shape[1]
        return all(
            np.array_equal(self._blocks[ids], self._written[i * per_chunk : (i + 1) * per_chunk])
            for i, ids in enumerate(self._ids[:count])
        )
