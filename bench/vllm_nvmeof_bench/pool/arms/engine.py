# SPDX-License-Identifier: Apache-2.0
"""Our engines as the product runs them: whole slots of a real pool, from populated staging.

A slot is a 4 KiB header page and the payload. Sealing, both checksums, the table entry after
each write and the proof of identity after each read are inside the timing; only the payload
counts. Both engines work on one pool, whose slots were all written before. Their limits are
the product's configuration, so that VLLM_NVMEOF_* variables apply.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_nvmeof_bench.pool.arms.base import Job
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import IoEngine, IoKind, IoLimits, IoOp
from vllm_nvmeof_offload.io.threads import ThreadsIoEngine
from vllm_nvmeof_offload.pool.keyspace import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import SlotIdentity, Urgency
from vllm_nvmeof_offload.units import slot_stride_bytes

if TYPE_CHECKING:
    from vllm_nvmeof_offload.staging import Staging

__all__ = ["EngineMover", "Ground", "limits", "open_engine"]

_TABLE_ENTRY_BYTES = 64
_KEY_BYTES = 36
_STALL_S = 60.0
#: In one call: a slice of the rest at every completion would cost more than the I/O.
_HANDED_OVER_MAX = 1024


def limits() -> dict[str, int]:
    """The bounds that the product's configuration gives its engines."""
    settings = parse_config({})
    return {
        "threads": settings.io_threads,
        "depth": settings.io_depth,
        "split_bytes": settings.io_split_bytes,
        "write_bytes_beside_reads_max": settings.write_bytes_beside_reads_max,
        "read_bytes_in_flight_max": settings.read_bytes_in_flight_max,
        "write_bytes_in_flight_max": settings.write_bytes_in_flight_max,
    }


class Ground:
    """One pool and who lies where in it. `identities[i]` is what slot i was written with."""

    def __init__(self, directory: Path, block_bytes: int, blocks: int, staging: Staging) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = slot_stride_bytes(block_bytes)
        self.staging = staging
        spec = PoolSpec(
            targets=(directory,),
            pool_bytes=blocks * (self.slot_bytes + _TABLE_ENTRY_BYTES),
            payload_bytes=block_bytes,
            keyspace=Keyspace.of({"bench": block_bytes}),
            o_direct="auto",
        )
        self.pool = Pool.open(spec)
        if self.pool.slots < blocks:
            self.pool.close()
            raise BenchError(f"no space for a pool of {blocks} blocks of {block_bytes} bytes")
        self.identities = [
            SlotIdentity(number.to_bytes(_KEY_BYTES, "little"), 0) for number in range(blocks)
        ]
        self.written = False

    def op(self, token: int, is_read: bool, block: int) -> IoOp:
        identity = self.identities[block]
        if not is_read:
            identity = SlotIdentity(identity.key, identity.generation + 1)
            self.identities[block] = identity
        return IoOp(
            token,
            IoKind.READ_SLOT if is_read else IoKind.WRITE_SLOT,
            Urgency.DEMAND if is_read else Urgency.WRITE,
            block,
            self.staging.map.base_address + block * self.slot_bytes,
            identity,
        )


def open_engine(name: str, ground: Ground) -> IoEngine:
    """Build the engine of arm `name`, "ours" or "ours_threads".

    Raises:
        BenchError: it cannot run here, and why.
    """
    memory, address = ground.staging.view, ground.staging.map.base_address
    bounds = IoLimits(**limits())
    if name == "ours_threads":
        return ThreadsIoEngine(ground.pool, memory, address, bounds)
    try:
        from vllm_nvmeof_offload.io.uring import UringIoEngine
    except ImportError as error:
        raise BenchError(f"the io_uring engine is not built here ({error})") from None
    try:
        engine: IoEngine = UringIoEngine(ground.pool, memory, address, bounds)
    except EngineError as error:
        raise BenchError(f"the io_uring engine does not start: {error}") from None
    return engine


class EngineMover:
    """Drives one engine as its only caller: submit, wait on `fileno`, poll."""

    batch_job_bytes: int | None = None

    def __init__(self, engine: IoEngine, ground: Ground) -> None:
        self._engine = engine
        self._ground = ground
        self._token = 0
        #: Of `submit`: operation → job, job → operations left.
        self._job_of: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(engine.fileno(), select.POLLIN)
        if not ground.written:
            # Space that was never written takes writes at half the speed.
            blocks = range(len(ground.identities))
            self.run([Job(0, False, blocks)])
            ground.written = True

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Nothing: all slots are written, and an identity is named as an op is made."""

    def run(self, jobs: Sequence[Job]) -> None:
        make, first = self._ground.op, self._token + 1
        ops = [
            make(token, is_read, block)
            for token, (is_read, block) in enumerate(
                ((job.is_read, block) for job in jobs for block in job.blocks), first
            )
        ]
        self._token += len(ops)
        accepted = self._engine.submit(ops[:_HANDED_OVER_MAX])
        left = len(ops)
        while left:
            left -= len(self._completed(_STALL_S))
            if accepted < len(ops):
                accepted += self._engine.submit(ops[accepted : accepted + _HANDED_OVER_MAX])

    def submit(self, job: Job) -> None:
        ops = []
        for block in job.blocks:
            self._token += 1
            self._job_of[self._token] = job.token
            ops.append(self._ground.op(self._token, job.is_read, block))
        self._left[job.token] = len(ops)
        if self._engine.submit(ops) < len(ops):
            raise BenchError(f"{self._engine.name}: its queue is full")

    def poll(self, timeout_s: float) -> list[int]:
        finished = []
        for token in self._completed(timeout_s, may_be_none=True):
            job = self._job_of.pop(token)
            self._left[job] -= 1
            if not self._left[job]:
                del self._left[job]
                finished.append(job)
        return finished

    def _completed(self, timeout_s: float, may_be_none: bool = False) -> list[int]:
        """Tokens of what has ended well."""
        if not self._poll.poll(timeout_s * 1000) and not may_be_none:
            raise BenchError(f"{self._engine.name}: nothing came for {timeout_s:.0f} s")
        tokens = []
        for completion in self._engine.poll():
            if completion.outcome is None or not completion.outcome.ok:
                raise BenchError(f"{self._engine.name}: an operation ended {completion.outcome}")
            tokens.append(completion.token)
        return tokens

    def tidy(self) -> bool:
        return False

    def close(self) -> None:
        if not self._engine.close():
            raise BenchError(f"{self._engine.name}: I/O hangs in the kernel")
