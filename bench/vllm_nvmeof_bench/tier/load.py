# SPDX-License-Identifier: Apache-2.0
"""The part "load": how long a load takes against reading alone, copying alone, two phases.

Every round measures every size and case; at each, all arms one after the other, in an order
drawn from the seed. While they run this process alone is throttled, reads only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.pool.run import sync_file_system
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_bench.tier.rig import NO_PIECES, Rig
from vllm_nvmeof_bench.tier.samples import Sample
from vllm_nvmeof_bench.tier.settings import ARMS, MB, Settings
from vllm_nvmeof_offload.protocol import FetchCommand, LoadChunk, Urgency

__all__ = ["measure_arm", "measure_load", "steps"]

_CHECKED = ("ours", "two_phase")


def steps(settings: Settings) -> int:
    return settings.rounds * len(settings.cases) * len(ARMS["load"])


def measure_load(
    settings: Settings, home: Path, tell: Callable[[str], None]
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and what ran.

    Raises:
        BenchError: a transfer failed, or brought other bytes than were written.
        ThrottleError: this machine cannot throttle.
    """
    directory = home / "load"
    with _throttle(settings, home) as throttle, contextlib.closing(Rig(directory, settings)) as rig:
        tell("load · writing the pool once")
        rig.write_all()
        sync_file_system(home)
        if throttle is not None:
            throttle.add(os.getpid())
            throttle.limit(read_bytes_per_s=settings.throttle_mb_per_s * MB)
        samples = []
        with _no_collection():
            for number in range(settings.rounds):
                samples += _round(rig, settings, number, tell)
        return samples, {
            "engine": rig.engine,
            "throttle": "none" if throttle is None else throttle.kind,
            "cache_slots": settings.cache_slots,
            "stream_slots": settings.stream_slots,
        }


@contextlib.contextmanager
def _throttle(settings: Settings, home: Path) -> Iterator[Throttle | None]:
    if not settings.throttle_mb_per_s:
        yield None
        return
    with Throttle(home) as throttle:
        yield throttle


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside a measurement."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _round(rig: Rig, settings: Settings, number: int, tell: Callable[[str], None]) -> list[Sample]:
    dice = random.Random(f"{settings.seed} {number}")
    samples = []
    for case, size in settings.cases:
        rate = settings.throttle_mb_per_s * MB if case == "paced" else None
        rig.copy.bytes_per_s = rig.bare_copy.bytes_per_s = rate
        for arm in dice.sample(ARMS["load"], len(ARMS["load"])):
            tell(f"load · round {number + 1} · {size:g}× the CPU tier, {case} · {arm}")
            seconds, cpu_s = measure_arm(rig, arm, settings.chunks(size))
            payload = settings.chunks(size) * settings.chunk_bytes
            samples.append(
                Sample("load", case, arm, size, number, 0, round(seconds, 6), payload, cpu_s)
            )
    return samples


def measure_arm(rig: Rig, arm: str, count: int) -> tuple[float, float]:
    """(seconds, CPU seconds) of one load of the first `count` chunks."""
    run = _prepare(rig, arm, count)
    rig.zero(count)
    gc.collect()
    time.sleep(rig.settings.pause_s)
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    run()
    end_s, cpu_end_s = time.perf_counter(), time.process_time()
    rig.check()
    if arm in _CHECKED and not rig.same(count):
        raise BenchError(f"{arm}: the blocks do not hold what was written")
    return end_s - begin_s, round(cpu_end_s - cpu_s, 6)


def _prepare(rig: Rig, arm: str, count: int) -> Callable[[], None]:
    """What is to be timed; what a model's step would have ready is made here."""
    if arm == "read":
        return lambda: rig.read_bare(count)
    if arm == "copy":
        staged = rig.staged_pieces(count)
        return lambda: rig.copy_bare(staged)
    pieces = [rig.pieces(number) for number in range(count)]
    if arm == "two_phase":
        return lambda: _two_phase(rig, count, pieces)
    settings = rig.settings
    landing = int(settings.land_cache_share * settings.cache_slots)
    chunks = [
        LoadChunk(identity, number if number < landing else None, number)
        for number, identity in enumerate(rig.identities[:count])
    ]
    return lambda: rig.runner.wait([rig.start(chunks, pieces)])


def _two_phase(rig: Rig, count: int, pieces: list[Any]) -> None:
    """Into the CPU tier, then from there; what exceeds it in rounds of one tier."""
    tier = rig.settings.cache_slots
    for first in range(0, count, tier):
        numbers = range(first, min(first + tier, count))
        chunks = [LoadChunk(rig.identities[i], i - first, None) for i in numbers]
        for chunk, number in zip(chunks, numbers, strict=True):
            assert chunk.cache_slot is not None
            rig.obey(
                FetchCommand(rig.op(), chunk.identity, number, chunk.cache_slot, Urgency.DEMAND)
            )
        # A load that moves nothing stands behind the fetches: it ends when the last has.
        rig.runner.wait([rig.start(chunks, [NO_PIECES] * len(chunks))])
        rig.runner.wait([rig.start(chunks, [pieces[i] for i in numbers])])
