# SPDX-License-Identifier: Apache-2.0
"""A pool, staging memory and an engine of each kind for the contract tests.

To add an engine: one more entry in `ENGINES`.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from vllm_nvmeof_bench.servers.faults import FaultPlan, FaultyIoEngine

from tests.chunks import number_in, place_in
from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.io.base import Completion, IoEngine, IoOp, reset_op
from vllm_nvmeof_offload.io.engine import How, NativeIoEngine, UringDeniedError
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.lease import Permits
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import OURS, OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.units import HEADER_BYTES, KIB, PAGE_BYTES

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native._native import StartGate

PAYLOAD_BYTES = 24_000  # not a multiple of 4 KiB: the padding is exercised
STAGING_SLOTS = 32
WAIT_S = 120.0
#: The rings of all processes count against an ordinary user's limit of locked memory, and the
#: kernel gives the memory of a closed ring back some time later.
_MEMORY_S = 30.0


class Gate:
    """Operations on slots that are shut start, and do not touch the slab.

    `started`: the numbers of the slots in the order in which operations started.
    """

    def __init__(self, engine: NativeIoEngine, gate: StartGate, targets: int) -> None:
        self._kick, self._gate, self._targets = engine.kick, gate, targets

    @property
    def started(self) -> list[int]:
        return [number_in(place, self._targets) for place in self._gate.starts()]

    def shut(self, numbers: Iterable[int], owner: int = OURS) -> None:
        self._gate.shut([place_in(number, self._targets, owner) for number in numbers])

    def open_all(self) -> None:
        self._gate.shut([])
        self._kick()

    def wait_started(self, count: int) -> None:
        end_s = time.monotonic() + WAIT_S
        while len(self.started) < count:
            assert time.monotonic() < end_s, f"{self.started} started, not {count}"
            os.sched_yield()


MakeEngine = Callable[..., tuple[IoEngine, Gate]]


@dataclass
class Rig:
    """One engine over one pool. Slots of staging are numbered; `token`s count up."""

    engine: IoEngine
    pool: Pool
    gate: Gate
    memory: mmap.mmap
    base_address: int
    spec: PoolSpec
    tokens: int = 0
    #: Completions that were polled while `submit` waited for room.
    early: list[Completion] = field(default_factory=list)

    def op(
        self,
        kind: OpKind,
        number: int = 0,
        staging_slot: int = 0,
        identity: SlotIdentity | None = None,
        urgency: Urgency | None = None,
        payload_bytes: int = PAYLOAD_BYTES,
        payload_crc: int | None = None,
        single_copy: bool = False,
        client: int = 0,
        owner: int = OURS,
        header_only: bool = False,
    ) -> IoOp:
        self.tokens += 1
        default = Urgency.WRITE if kind is OpKind.WRITE else Urgency.DEMAND
        address = self.base_address + staging_slot * self.pool.slot_bytes
        return IoOp(
            token=self.tokens,
            kind=kind,
            urgency=default if urgency is None else urgency,
            place=place_in(number, self.pool.target_count, owner),
            address=address,
            identity=identity,
            payload_bytes=payload_bytes,
            stamp=self.engine.stamp,
            payload_crc=payload_crc,
            single_copy=single_copy,
            client=client,
            header_only=header_only,
        )

    def write(self, number: int, staging_slot: int, name: SlotIdentity, **kw: object) -> IoOp:
        return self.op(OpKind.WRITE, number, staging_slot, name, **kw)  # type: ignore[arg-type]

    def read(self, number: int, staging_slot: int, name: SlotIdentity, **kw: object) -> IoOp:
        return self.op(OpKind.FETCH, number, staging_slot, name, **kw)  # type: ignore[arg-type]

    def resets(self, tag: bytes | None = None, named: bool = True) -> list[IoOp]:
        """Begin a reset; return its operations, one per target."""
        self.engine.begin_reset(self.engine.stamp.tag if tag is None else tag, named)
        first, self.tokens = self.tokens + 1, self.tokens + self.pool.target_count
        return [reset_op(first + target, target) for target in range(self.pool.target_count)]

    def reset(self, tag: bytes | None = None, named: bool = True) -> None:
        ops = self.resets(tag, named)
        assert [completion.outcome for completion in self.run(*ops)] == [OK] * len(ops)

    def payload(self, staging_slot: int) -> memoryview:
        start = staging_slot * self.pool.slot_bytes + HEADER_BYTES
        return memoryview(self.memory)[start : start + PAYLOAD_BYTES]

    def damage(self, number: int, at: int) -> None:
        """Flip a bit of one byte of a slot on the disk."""
        slot, target = divmod(number, self.pool.target_count)
        with (self.pool.directories[target] / "slab").open("r+b") as slab:
            slab.seek(slot * self.pool.slot_bytes + at)
            byte = slab.read(1)[0]
            slab.seek(-1, os.SEEK_CUR)
            slab.write(bytes([byte ^ 0x40]))
            slab.flush()
            os.fsync(slab.fileno())

    def fill(self, staging_slot: int, identity: SlotIdentity) -> None:
        self.payload(staging_slot)[:] = content(identity)

    def zero(self, staging_slot: int) -> None:
        start = staging_slot * self.pool.slot_bytes
        self.memory[start : start + self.pool.slot_bytes] = bytes(self.pool.slot_bytes)

    def submit(self, *ops: IoOp) -> None:
        """Submit, in turn, as many as there is room for; wait for nothing but room."""
        for op in ops:
            if op.kind is not OpKind.RESET:
                self._wait_room(op)
            self.engine.submit([op])

    def _wait_room(self, op: IoOp) -> None:
        end_s = time.monotonic() + WAIT_S
        while not (self.engine.room().reads if op.is_read else self.engine.room().writes):
            assert time.monotonic() < end_s, "there is no room"
            select.select([self.engine.fileno()], [], [], 0.01)
            self.early += self.engine.poll()

    def wait(self, done: Callable[[list[Completion]], bool]) -> list[Completion]:
        """Poll, woken by `fileno`, until `done` of all completions since the last call."""
        found, self.early = self.early, []
        end_s = time.monotonic() + WAIT_S
        while not done(found):
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"nothing more came; so far {found}"
            select.select([self.engine.fileno()], [], [], left_s)
            found.extend(self.engine.poll())
        return found

    def run(self, *ops: IoOp) -> list[Completion]:
        """Submit, wait for as many completions and return them in the order of `ops`."""
        self.submit(*ops)
        found = self.wait(lambda completions: len(completions) >= len(ops))
        by_token = {completion.token: completion for completion in found}
        return [by_token[op.token] for op in ops]

    def store(self, number: int, identity: SlotIdentity, staging_slot: int = 0) -> None:
        self.fill(staging_slot, identity)
        (completion,) = self.run(self.write(number, staging_slot, identity))
        assert completion.outcome.ok, completion

    def reopen(self) -> Pool:
        """Stop engine and pool, and open the pool again as a new process would."""
        self.gate.open_all()
        assert self.engine.close(WAIT_S)
        self.pool.close()
        self.pool = Pool.open(self.spec)
        return self.pool


def content(identity: SlotIdentity) -> bytes:
    """The one right payload of an identity."""
    seed = int.from_bytes(identity.key[:8], "little") ^ identity.generation
    return np.random.default_rng(seed).bytes(PAYLOAD_BYTES)


def name(number: int, generation: int = 1) -> SlotIdentity:
    """An identity with a key of vLLM's usual length."""
    return SlotIdentity(number.to_bytes(36, "little"), generation)


def _pool(
    path: Path, o_direct: str, targets: int, slots: int, rank: int, log_pages: int
) -> tuple[Pool, PoolSpec]:
    spec = PoolSpec(
        targets=tuple(path / f"target-{i}" for i in range(targets)),
        pool_bytes=1,
        payload_bytes=PAYLOAD_BYTES,
        keyspace=Keyspace.of({"test": 1}),
        rank=rank,
        world_size=2,
        o_direct=o_direct,
        log_pages=log_pages,
    )
    size = slots * (spec.slot_bytes + 64) + targets * log_pages * PAGE_BYTES
    spec = PoolSpec(**{**vars(spec), "pool_bytes": size})
    return Pool.open(spec), spec


def _rig(engine_of: MakeEngine, o_direct: str, *, faulty: bool = False) -> Callable[..., Rig]:
    def make(
        path: Path,
        *,
        targets: int = 1,
        slots: int = 64,
        rank: int = 0,
        leased: bool = False,
        log_pages: int = 0,
        **options: int,
    ) -> Rig:
        """leased: the regions have permits, which the test grants."""
        pool, spec = _pool(path, o_direct, targets, slots, rank, log_pages)
        if leased:
            permits = Permits.new(targets)
            pool.permits = tuple(permits.word(target) for target in range(targets))
            permits.close()
        memory = mmap.mmap(-1, STAGING_SLOTS * pool.slot_bytes)
        base_address = np.frombuffer(memory, np.uint8).ctypes.data
        view = memoryview(memory)
        engine, gate = engine_of(pool, view, base_address, **options)
        if faulty:
            engine = FaultyIoEngine(engine, FaultPlan(), pool, view, base_address)
        return Rig(engine, pool, gate, memory, base_address, spec)

    return make


def _native(how: How, split_bytes: int = 512 * KIB) -> MakeEngine:
    def make(
        pool: Pool,
        view: memoryview,
        base_address: int,
        threads: int = 8,
        operations_max: int = 4096,
    ) -> tuple[IoEngine, Gate]:
        gate = core.StartGate()
        tuning = Tuning(io_threads=threads, io_depth=1024, io_split_bytes=split_bytes)
        until_s = time.monotonic() + _MEMORY_S
        while True:
            try:
                engine = NativeIoEngine(
                    pool, view, base_address, tuning, how, operations_max=operations_max, gate=gate
                )
            except UringDeniedError as error:
                if error.errno != errno.ENOMEM or time.monotonic() > until_s:
                    raise
                time.sleep(0.1)
                continue
            return engine, Gate(engine, gate, pool.target_count)

    return make


ENGINES: dict[str, Callable[..., Rig]] = {
    "threads-direct": _rig(_native(How.THREADS), "on"),
    "threads-buffered": _rig(_native(How.THREADS), "off"),
    "faulty-threads": _rig(_native(How.THREADS), "auto", faulty=True),
    "uring-direct": _rig(_native(How.REGISTERED), "on"),
    "uring-unregistered": _rig(_native(How.UNREGISTERED), "on"),
    "uring-buffered": _rig(_native(How.REGISTERED), "off"),
    "uring-split": _rig(_native(How.REGISTERED, split_bytes=4 * KIB), "on"),
    "faulty-uring": _rig(_native(How.REGISTERED), "auto", faulty=True),
}
