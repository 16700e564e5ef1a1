# SPDX-License-Identifier: Apache-2.0
"""The process under test: the real pool, engine, pipeline and runner under a steady load.

A minimal manager sends commands: it stores chunks into cache slots, has them written to pool
slots, and loads them from the pool slots into other memory. It follows the protocol's rules on
the reuse of slots, has the one right content of every chunk, and sends its parent the outcome of
each operation.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.fabric.loadspec import LoadSpec, OpEnd
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.copy.base import Descriptors
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.io.base import IoLimits, Waker
from vllm_nvmeof_offload.io.choose import choose_io_engine
from vllm_nvmeof_offload.manager.eviction import LruPolicy
from vllm_nvmeof_offload.manager.target_choice import Targets
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    LoadChunk,
    LoadCommand,
    OpReport,
    RateReport,
    ReleaseReport,
    SlotIdentity,
    StoreChunk,
    StoreCommand,
    VerdictReport,
    WriteCommand,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.targets.reattach import Attachments, TargetWatcher
from vllm_nvmeof_offload.units import KIB, MIB
from vllm_nvmeof_offload.worker.io_scheduler import SchedulerConfig
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferPipeline

PAYLOAD_BYTES = 124 * KIB
CACHE_SLOTS = 24
LOADS_MAX = 8
TICK_S = 0.02
_BASE = np.random.default_rng(7).integers(0, 1 << 63, PAYLOAD_BYTES // 8, np.uint64)
_MIX = 0x9E3779B97F4A7C15


class _Parent(logging.Handler):
    """The parent process, which receives all messages and log lines from any thread."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self.pipe = pipe
        self._turn = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        self.send("log", record.getMessage())

    def send(self, what: str, *rest: Any) -> None:
        with self._turn:
            self.pipe.send((what, time.monotonic(), *rest))


@dataclass
class _Op:
    kind: str
    began_s: float
    identity: SlotIdentity
    pool_slot: int
    cache_slot: int | None = None
    page: int | None = None
    decided: bool = False


@dataclass
class _Load:
    """The minimal manager; it runs only on the child's main thread."""

    spec: LoadSpec
    parent: _Parent
    #: pool slot → the contents it may have, also after a failed write. Any other is wrong.
    stored: dict[int, SlotIdentity] = field(default_factory=dict)
    ops: dict[int, _Op] = field(default_factory=dict)
    busy_slots: set[int] = field(default_factory=set)
    counters: Counts = field(default_factory=Counts)
    next_op: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        count = len(spec.targets)
        slot_bytes = PoolSpec(spec.targets, 1, PAYLOAD_BYTES, KEYSPACE).slot_bytes
        pool_bytes = spec.slots * (slot_bytes + KIB)
        self.pool = Pool.open(PoolSpec(spec.targets, pool_bytes, PAYLOAD_BYTES, KEYSPACE))
        self.staging = Staging(slot_bytes, CACHE_SLOTS, 2 * LOADS_MAX)
        waker = Waker()
        copy = HostCopyEngine(on_done=waker.wake)
        base = self.staging.map.base_address
        limits = IoLimits(threads=8, depth=16, read_bytes_in_flight_max=8 * MIB)
        self.io, fallbacks = choose_io_engine(
            spec.engine, self.pool, self.staging.view, base, limits
        )
        assert not fallbacks, fallbacks
        self.health = tuple(TargetHealth() for _ in range(count))
        config = SchedulerConfig(
            target_count=count,
            health=self.health,
            reads_in_flight_max=LOADS_MAX * count,
            writes_in_flight_max=8 * count,
            read_deadline_s=spec.read_deadline_s,
            write_deadline_s=spec.write_deadline_s,
        )
        pipeline = TransferPipeline(self.staging.map, copy, self.io, config)
        self.runner = PipelineRunner(pipeline, waker, self.io.fileno())
        self.watcher = TargetWatcher(
            Attachments(self.pool, self.io, self.health),
            [os.path.realpath(directory) for directory in self.pool.directories],
            lambda call: self.runner.hand_over(lambda _: call()),
        )
        # In place of vLLM's KV cache: one page per chunk that is stored and one per load.
        self.pages = np.zeros((CACHE_SLOTS + LOADS_MAX, PAYLOAD_BYTES // 8), np.uint64)
        self.free_cache = list(range(CACHE_SLOTS))
        self.free_pages = list(range(CACHE_SLOTS, CACHE_SLOTS + LOADS_MAX))
        self.placement = Targets(self.pool.slots, count, LruPolicy)
        self.dice = random.Random(11)

    # -- commands ---------------------------------------------------------------------

    def open(self, op: _Op) -> int:
        self.next_op += 1
        self.ops[self.next_op] = op
        return self.next_op

    def store(self) -> None:
        """Store KV memory to a cache slot; its write starts when the store is done."""
        free = [p for p in range(self.pool.slots) if p not in self.busy_slots]
        if not self.free_cache or not free:
            return
        pool_slot = self.place(free)
        if pool_slot is None:
            return
        cache_slot = self.free_cache.pop(0)
        self.generation += 1
        identity = SlotIdentity(b"chunk %d" % pool_slot, self.generation)
        self.stored.pop(pool_slot, None)
        self.busy_slots.add(pool_slot)
        self.pages[cache_slot] = content(identity)
        op = self.open(_Op("store", time.monotonic(), identity, pool_slot, cache_slot))
        command = StoreCommand(op, (StoreChunk(identity, cache_slot),))
        pieces = self.pieces(cache_slot)
        self.runner.hand_over(lambda pipeline: pipeline.store(command, [pieces], None), op)

    def place(self, free: list[int]) -> int | None:
        """Choose a pool slot: at random, or by the manager's rule."""
        if self.spec.loads:
            return self.dice.choice(free)
        target = self.placement.choose()
        on_it = [p for p in free if p % self.placement.count == target]
        return self.dice.choice(on_it) if on_it else None

    def write(self, stored: _Op) -> None:
        assert stored.cache_slot is not None
        now_s, target = time.monotonic(), stored.pool_slot % self.placement.count
        write = _Op("write", now_s, stored.identity, stored.pool_slot, stored.cache_slot)
        command = WriteCommand(
            self.open(write), stored.identity, stored.cache_slot, stored.pool_slot
        )
        self.placement.pending[target] += 1
        self.runner.hand_over(lambda pipeline: pipeline.command(command))

    def load(self) -> None:
        """Load a pool slot into other KV memory, which is wiped first."""
        ready = [p for p in self.stored if p not in self.busy_slots]
        if not ready or not self.free_pages:
            return
        pool_slot, page = self.dice.choice(ready), self.free_pages.pop(0)
        self.busy_slots.add(pool_slot)
        self.pages[page] = 0
        identity = self.stored[pool_slot]
        op = self.open(_Op("load", time.monotonic(), identity, pool_slot, page=page))
        command = LoadCommand(op, (LoadChunk(identity, None, pool_slot),))
        pieces = self.pieces(page)
        self.runner.hand_over(lambda pipeline: pipeline.load(command, [pieces], None), op)

    def pieces(self, page: int) -> Descriptors:
        return np.array([[self.pages[page].ctypes.data, 0, PAYLOAD_BYTES]], np.uint64)

    # -- reports ----------------------------------------------------------------------

    def take_reports(self) -> None:
        _, reports, counters = self.runner.take()
        self.counters.add(counters)
        for report in reports:
            match report:
                case OpReport():
                    self.ended(report)
                case ReleaseReport():
                    self.released(self.ops.pop(report.op))
                case VerdictReport():
                    self.placement.verdict(report)
                    reason = self.health[report.target].reason
                    self.parent.send("verdict", report.target, report.verdict, reason)
                case RateReport():
                    self.placement.rate(report)

    def ended(self, report: OpReport) -> None:
        op = self.ops[report.op]
        failure = report.failures[0][1] if report.failures else None
        outcome = f"miss: {failure}" if failure else "ok"
        target = op.pool_slot % self.placement.count
        if op.kind == "load":
            assert op.page is not None
            right = np.array_equal(self.pages[op.page], content(op.identity))
            if failure is None and not right:
                outcome = "WRONG BYTES"
            self.free_pages.append(op.page)
            self.busy_slots.discard(op.pool_slot)
        elif op.kind == "write":
            # A failed write may still have reached the disk: right bytes and a miss are allowed.
            self.stored[op.pool_slot] = op.identity
            self.placement.pending[target] -= 1
        self.parent.send("op", OpEnd(op.kind, target, op.began_s, time.monotonic(), outcome))
        if op.kind == "store" and failure is None:
            self.write(op)
            del self.ops[report.op]
        elif report.released:
            self.released(self.ops.pop(report.op))

    def released(self, op: _Op) -> None:
        """The op's buffers are free: no engine uses them."""
        if op.cache_slot is not None:
            self.free_cache.append(op.cache_slot)
            self.busy_slots.discard(op.pool_slot)

    # -- the loop ---------------------------------------------------------------------

    def run(self) -> None:
        due_s, turn = time.monotonic(), 0
        tick_s = max(TICK_S, self.spec.interval_s / 4)
        while not self.parent.pipe.poll(tick_s):
            self.take_reports()
            now_s = time.monotonic()
            due_s = max(due_s, now_s - tick_s)  # missed operations are not caught up
            while due_s <= now_s:
                due_s, turn = due_s + self.spec.interval_s, turn + 1
                if self.spec.loads and turn % 2:
                    self.load()
                else:
                    self.store()
        self.parent.pipe.recv()
        self.end()

    def end(self) -> None:
        """Wait until all operations have ended, then close as the worker does."""
        end_s = time.monotonic() + self.spec.write_deadline_s + self.spec.read_deadline_s
        while self.ops and time.monotonic() < end_s:
            self.take_reports()
            time.sleep(TICK_S)
        self.watcher.stop()
        self.runner.stop()
        closed = self.io.close(1.0)
        self.pool.close(abandon=not closed)
        counted = {str(series): amount for series, amount in self.counters.items()}
        self.parent.send("end", counted, len(self.ops))


KEYSPACE = Keyspace.of({"tests": "fabric"})


def content(identity: SlotIdentity) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The one right payload of an identity."""
    return _BASE + np.uint64(_MIX * identity.generation % (1 << 64))


def run_load(spec: LoadSpec, pipe: Connection) -> None:
    """The child process; runs until the parent requests the end."""
    parent = _Parent(pipe)
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.addHandler(parent)
    load = _Load(spec, parent)
    parent.send("ready", load.io.name)
    load.run()
