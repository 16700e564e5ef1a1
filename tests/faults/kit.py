# SPDX-License-Identifier: Apache-2.0
"""A pool, staging memory and one engine over it; the one right content of every identity.

Used inside pytest and inside the child processes that tests stop, kill and deprive.
"""

from __future__ import annotations

import mmap
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.chunks import entries_of, place_in
from vllm_nvmeof_offload.config import TUNING, Tuning
from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.io.base import Completion, IoEngine, IoOp, reset_op
from vllm_nvmeof_offload.io.engine import How, NativeIoEngine
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.units import HEADER_BYTES, KIB

#: (pool, staging memory, its address, options that all engines have) → engine.
Factory = Callable[..., IoEngine]


def _native(how: How, limits: Tuning) -> Factory:
    def make(pool: Pool, memory: memoryview, base_address: int, **options: object) -> IoEngine:
        return NativeIoEngine(pool, memory, base_address, limits, how, **options)  # type: ignore[arg-type]

    return make


ENGINES: dict[str, Factory] = {
    "threads": _native(How.THREADS, Tuning(io_threads=4)),
    "uring": _native(How.REGISTERED, TUNING),
    # Small, so that a slot of these tests is moved in several pieces.
    "uring-unregistered": _native(How.UNREGISTERED, Tuning(io_split_bytes=16 * KIB)),
}


WAIT_S = 120.0
PAYLOAD_BYTES = 61_000  # not a multiple of 4 KiB, to exercise the padding


def make_spec(*targets: Path, slots: int = 16, **changes: object) -> PoolSpec:
    """slots: per target."""
    spec = PoolSpec(
        targets=targets,
        pool_bytes=1,
        payload_bytes=PAYLOAD_BYTES,
        keyspace=Keyspace.of({"faults": 1}),
    )
    spec = replace(spec, **changes)  # type: ignore[arg-type]
    return replace(spec, pool_bytes=len(targets) * slots * (spec.slot_bytes + ENTRY_BYTES))


def name(number: int, generation: int = 1) -> SlotIdentity:
    """An identity with a key of vLLM's usual length."""
    return SlotIdentity(number.to_bytes(36, "little"), generation)


def content(identity: SlotIdentity, size: int = PAYLOAD_BYTES) -> bytes:
    """The one right payload of an identity."""
    seed = int.from_bytes(identity.key, "little") * 1_000_003 + identity.generation
    return np.random.default_rng(seed).bytes(size)


class Bench:
    """One engine over an open pool. Staging slots are numbered; tokens count up."""

    def __init__(self, engine: str, pool: Pool, staging_slots: int = 16, **options: object) -> None:
        self.pool = pool
        self.memory = mmap.mmap(-1, staging_slots * pool.slot_bytes)
        self.view = memoryview(self.memory)
        self.base_address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.engine = ENGINES[engine](pool, self.view, self.base_address, **options)
        self.is_uring = engine.startswith("uring")
        self.in_pieces = engine == "uring-unregistered"
        self.tokens = 0
        self._others: list[Completion] = []  # that `run` did not wait for

    def _op(
        self,
        kind: OpKind,
        urgency: Urgency,
        number: int,
        staging_slot: int,
        identity: SlotIdentity | None,
    ) -> IoOp:
        self.tokens += 1
        place = place_in(number, self.pool.target_count)
        address = self.base_address + staging_slot * self.pool.slot_bytes
        what = kind, urgency, place, address, identity, self.pool.payload_bytes
        return IoOp(self.tokens, *what, stamp=self.engine.stamp)

    def write(self, number: int, staging_slot: int, identity: SlotIdentity) -> IoOp:
        """A write of the identity's right content, which this call puts into the staging slot."""
        self.payload(staging_slot)[:] = content(identity, self.pool.payload_bytes)
        return self._op(OpKind.WRITE, Urgency.WRITE, number, staging_slot, identity)

    def read(self, number: int, staging_slot: int, identity: SlotIdentity) -> IoOp:
        """A read into a staging slot, which this call zeroes first."""
        start = staging_slot * self.pool.slot_bytes
        self.view[start : start + self.pool.slot_bytes] = bytes(self.pool.slot_bytes)
        return self._op(OpKind.FETCH, Urgency.DEMAND, number, staging_slot, identity)

    def reset(self, named: bool = True, tag: bytes | None = None) -> list[Outcome]:
        """Reset, to the same weights if there is no `tag`; return the outcomes by target."""
        self.engine.begin_reset(tag or self.engine.stamp.tag, named)
        first, self.tokens = self.tokens + 1, self.tokens + self.pool.target_count
        ops = [reset_op(first + target, target) for target in range(self.pool.target_count)]
        return [completion.outcome for completion in self.run(*ops)]

    def payload(self, place: int) -> memoryview:
        start = place * self.pool.slot_bytes + HEADER_BYTES
        return self.view[start : start + self.pool.payload_bytes]

    def right(self, place: int, identity: SlotIdentity) -> bool:
        return self.payload(place) == content(identity, self.pool.payload_bytes)

    def submit(self, *ops: IoOp) -> None:
        """Submit at once, whatever the engine's room: the caller bounds what it submits."""
        for op in ops:
            self.engine.submit([op])

    def wait(
        self, done: Callable[[list[Completion]], bool], wait_s: float = WAIT_S
    ) -> list[Completion]:
        """Poll, woken by `fileno`, until `done` accepts all completions since the last call."""
        found, self._others = self._others, []
        end_s = time.monotonic() + wait_s
        while not done(found):
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"no further completion in {wait_s:g} s; so far {found}"
            select.select([self.engine.fileno()], [], [], left_s)
            found.extend(self.engine.poll())
        return found

    def run(self, *ops: IoOp, wait_s: float = WAIT_S) -> list[Completion]:
        """Submit and wait for one completion per op; return them in the order of `ops`."""
        self.submit(*ops)
        tokens = {op.token for op in ops}
        found = self.wait(lambda found: tokens <= {one.token for one in found}, wait_s)
        self._others += [one for one in found if one.token not in tokens]
        by_token = {completion.token: completion for completion in found}
        return [by_token[op.token] for op in ops]

    def store(self, identities: Iterable[tuple[int, SlotIdentity]]) -> None:
        """Write the chunks one after the other; all must succeed."""
        for number, identity in identities:
            (completion,) = self.run(self.write(number, 0, identity))
            assert completion.outcome.ok, completion

    def close(self, timeout_s: float = WAIT_S) -> bool:
        """Close the engine and then the pool, as the worker does."""
        closed = self.engine.close(timeout_s)
        self.pool.close(abandon=not closed)
        return closed


def adopted(pool: Pool) -> dict[int, SlotIdentity]:
    """The entries that the pool adopts, by pool slot."""
    return entries_of(pool.adopt(), pool.target_count)
