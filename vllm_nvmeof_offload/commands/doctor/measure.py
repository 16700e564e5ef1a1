# SPDX-License-Identifier: Apache-2.0
"""Measurement of a target with the product's own I/O code and a small temporary pool.

Whole slots are written, read back and verified, so the times include checksumming. New data may
still be in the target's cache: reads of old data and sustained writes can be slower.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.errors import EngineError, PoolError
from vllm_nvmeof_offload.io.base import IoEngine, IoOp
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency, place_of
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import MIB, format_bytes, slot_stride_bytes

PAYLOAD_BYTES = 2 * MIB
#: The slots take less than 128 MiB, including headers. They are written twice, because first writes
#: into new space are slower and do not count.
SLOTS = 62
_DEPTH = 16
_FILL_S_MAX, _WRITE_S_MAX, _READ_S_MAX, _SINGLE_S_MAX = 0.8, 0.6, 0.7, 0.4
_SINGLES_MAX = 100
#: The time without progress after which a target counts as hung.
_STALL_S = 5.0
_SEED = 1

Progress = Callable[[str], None]


class MeasureError(EngineError):
    """Raised if a target cannot be measured. The message states the reason."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured payload rates, and the latencies of `singles` separate reads."""

    engine: str
    chunk_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    read_latency_s_median: float
    read_latency_s_max: float
    singles: int


def measure(target: str, on_progress: Progress) -> Measured:
    """Measure the directory `target` in about three seconds, writing at most 256 MiB. Raises
    MeasureError if an operation fails or hangs, or if there is too little space."""
    try:
        with _pool(target) as pool:
            staging = Staging(pool.slot_bytes, _DEPTH, 0)
            # No device can compress random bytes.
            staging.view[:] = np.random.default_rng(_SEED).bytes(staging.size_bytes)
            address = staging.map.base_address
            engine, _ = choose_io_engine("auto", pool, staging.view, address, TUNING)
            runner = _Runner(engine, pool, address)
            try:
                return _phases(runner, engine.name, on_progress)
            finally:
                if not engine.close():
                    raise MeasureError(f"{target}: I/O hangs in the kernel")
    except (OSError, PoolError) as error:
        raise MeasureError(f"{target}: {error}") from error


def _phases(runner: _Runner, engine: str, on_progress: Progress) -> Measured:
    on_progress("first writes")
    filled, _ = runner.run(OpKind.WRITE, range(runner.slots), _DEPTH, _FILL_S_MAX)
    on_progress("writes")
    written, write_s = runner.run(OpKind.WRITE, range(filled), _DEPTH, _WRITE_S_MAX)
    generator = random.Random(_SEED)
    at_random = iter(lambda: generator.randrange(filled), None)
    on_progress("reads")
    read, read_s = runner.run(OpKind.FETCH, at_random, _DEPTH, _READ_S_MAX)
    on_progress("reads one at a time")
    runner.latencies_s.clear()
    singles = itertools.islice(at_random, _SINGLES_MAX)
    runner.run(OpKind.FETCH, singles, 1, _SINGLE_S_MAX)
    return Measured(
        engine=engine,
        chunk_bytes=PAYLOAD_BYTES,
        write_bytes_per_s=written * PAYLOAD_BYTES / write_s,
        read_bytes_per_s=read * PAYLOAD_BYTES / read_s,
        read_latency_s_median=statistics.median(runner.latencies_s),
        read_latency_s_max=max(runner.latencies_s),
        singles=len(runner.latencies_s),
    )


@contextlib.contextmanager
def _pool(target: str) -> Iterator[Pool]:
    needed = SLOTS * (slot_stride_bytes(PAYLOAD_BYTES) + ENTRY_BYTES)
    too_little = f"{target}: {format_bytes(needed)} of free space are needed to measure"
    # A pool that does not fit would shrink and fill all free space, which running servers need.
    if shutil.disk_usage(target).free < needed:
        raise MeasureError(too_little)
    directory = Path(tempfile.mkdtemp(prefix=".vllm-nvmeof-doctor-", dir=target))
    try:
        pool = Pool.open(
            PoolSpec(
                targets=(directory,),
                pool_bytes=needed,
                payload_bytes=PAYLOAD_BYTES,
                keyspace=Keyspace.of({"doctor": PAYLOAD_BYTES}),
                named=False,
                log_pages=0,  # no follower reads the log
            )
        )
    finally:
        # Delete the files while they are open, so that they disappear when this process exits.
        shutil.rmtree(directory, ignore_errors=True)
    try:
        if pool.slots < SLOTS:
            raise MeasureError(too_little)
        yield pool
    finally:
        pool.close()
        shutil.rmtree(directory, ignore_errors=True)


class _Runner:
    def __init__(self, engine: IoEngine, pool: Pool, address: int) -> None:
        self.slots = pool.slots
        self.latencies_s: list[float] = []
        self._engine = engine
        self._slot_bytes = pool.slot_bytes
        self._address = address
        self._token = 0
        self._poll = select.poll()
        self._poll.register(engine.fileno(), select.POLLIN)

    def run(
        self, kind: OpKind, slots: Iterable[int], depth: int, seconds_max: float
    ) -> tuple[int, float]:
        """Keep `depth` operations in flight until the time is up or `slots` is exhausted. Return
        the number of operations and the seconds until the last completion."""
        remaining, free = iter(slots), list(range(depth))
        running: dict[int, tuple[int, float]] = {}  # token → (buffer, start time)
        start_s, done = time.perf_counter(), 0
        while True:
            # Run at least one operation.
            in_time = time.perf_counter() - start_s < seconds_max or not (done or running)
            while in_time and free and (slot := next(remaining, None)) is not None:
                buffer = free.pop()
                running[self._submit(kind, slot, buffer)] = (buffer, time.perf_counter())
            if not running:
                return done, time.perf_counter() - start_s
            for token in self._ended():
                buffer, began_s = running.pop(token)
                self.latencies_s.append(time.perf_counter() - began_s)
                free.append(buffer)
                done += 1

    def _submit(self, kind: OpKind, slot: int, buffer: int) -> int:
        self._token += 1
        urgency = Urgency.WRITE if kind is OpKind.WRITE else Urgency.DEMAND
        identity = SlotIdentity(slot.to_bytes(36, "little"), 1)
        address = self._address + buffer * self._slot_bytes
        what = kind, urgency, place_of(0, slot), address, identity, PAYLOAD_BYTES
        op = IoOp(self._token, *what, stamp=self._engine.stamp)
        self._engine.submit([op])
        return self._token

    def _ended(self) -> list[int]:
        if not self._poll.poll(_STALL_S * 1000):
            raise MeasureError(f"no operation completed for {_STALL_S:.0f} s")
        tokens = []
        for completion in self._engine.poll():
            if completion.outcome is None or not completion.outcome.ok:
                raise MeasureError(f"an operation failed: {completion.outcome}")
            tokens.append(completion.token)
        return tokens
