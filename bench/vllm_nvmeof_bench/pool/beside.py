# SPDX-License-Identifier: Apache-2.0
"""One demand read at a time beside a writer that never lets its queue run low.

The run is cut into episodes. In each the writer fills its queue; after the first writes have
ended, time starts; reads follow each other with a pause; the writer hands over a new write for
every one that ends, so that `queued_bytes` are always queued. An episode ends when it has
written `episode_bytes` or has the reads it needs; then it drains, and what an arm keeps on
disk beyond its purpose is deleted. Throughput and CPU time are of the timed parts alone.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_nvmeof_bench.pool.arms.base import Job, Mover
from vllm_nvmeof_bench.pool.samples import Figures, percentile
from vllm_nvmeof_bench.pool.settings import BenchError, Settings
from vllm_nvmeof_offload.units import MIB

__all__ = ["run_beside"]

#: Handed over beyond `queued_bytes`, so that they are queued even while writes end.
_EXTRA_BYTES = 16 * MIB
_EPISODES_MAX = 40
_STALL_S = 60.0
#: One read needs little time beside writes; longer waits come back to look at the clock.
_POLL_S_MAX = 0.05


@dataclass
class _Totals:
    seconds: float = 0.0
    cpu_s: float = 0.0
    writes: int = 0
    latencies_s: list[float] = field(default_factory=list)


def run_beside(
    mover: Mover,
    settings: Settings,
    block_bytes: int,
    reads_wanted: int,
    generator: random.Random,
    tidy: Callable[[], bool],
) -> dict[str, Figures]:
    """Reads beside writes; or, with no reads wanted, one episode of writes alone."""
    blocks = settings.blocks_needed(block_bytes)
    split = blocks // 4
    queue = (settings.queued_bytes + _EXTRA_BYTES) // block_bytes
    queue = max(2, min(queue, (blocks - split) // 2))
    mover.prepare([Job(0, True, range(split))])
    totals = _Totals()
    for _ in range(_EPISODES_MAX):
        episode = _Episode(mover, settings, block_bytes, queue, range(split, blocks), generator)
        episode.run(range(split), reads_wanted - len(totals.latencies_s), totals)
        tidy()
        if len(totals.latencies_s) >= reads_wanted:
            break
    else:
        raise BenchError(f"only {len(totals.latencies_s)} of {reads_wanted} reads came through")
    return _figures(totals, block_bytes)


def _figures(totals: _Totals, block_bytes: int) -> dict[str, Figures]:
    reads = len(totals.latencies_s)
    written = totals.writes * block_bytes
    if not reads:
        return {"writes_alone": Figures(written, totals.seconds, totals.cpu_s)}
    # CPU time of both directions at once cannot be told apart: it goes to all bytes moved.
    share = written / (written + reads * block_bytes)
    latencies_us = [1e6 * latency_s for latency_s in totals.latencies_s]
    return {
        "read_beside_writes": Figures(
            reads * block_bytes,
            sum(totals.latencies_s),
            None,
            percentile(latencies_us, 0.5),
            percentile(latencies_us, 0.99),
        ),
        "writes_beside_read": Figures(written, totals.seconds, totals.cpu_s * share),
    }


class _Episode:
    """One filling, timing and draining of the queue."""

    def __init__(
        self,
        mover: Mover,
        settings: Settings,
        block_bytes: int,
        queue: int,
        write_blocks: range,
        generator: random.Random,
    ) -> None:
        self._mover = mover
        self._settings = settings
        self._block_bytes = block_bytes
        self._queue = queue
        self._next_block = itertools.cycle(write_blocks)
        self._tokens = itertools.count(1)
        self._random = generator
        self._outstanding: set[int] = set()

    def run(self, read_blocks: range, reads: int, totals: _Totals) -> None:
        while len(self._outstanding) < self._queue:
            self._write()
        ended = 0
        while ended < max(1, self._queue // 4):
            ended += self._top_up(self._wait(_STALL_S))
        cpu_s, start_s = time.process_time(), time.perf_counter()
        self._timed(read_blocks, reads, totals)
        totals.seconds += time.perf_counter() - start_s
        totals.cpu_s += time.process_time() - cpu_s
        while self._outstanding:
            self._outstanding.difference_update(self._wait(_STALL_S))

    def _timed(self, read_blocks: range, reads: int, totals: _Totals) -> None:
        budget = max(1, self._settings.episode_bytes // self._block_bytes)
        goal = len(totals.latencies_s) + reads
        written, reading, submitted_s = 0, 0, 0.0
        due_s = time.perf_counter() + self._settings.read_gap_s / 4
        end_s = time.perf_counter() + _STALL_S
        # A read that was handed over is waited for, whatever the budget says; and so is the first
        # write: where none ended, there would be no rate.
        while True:
            more = len(totals.latencies_s) < goal
            if written and not reading and (written >= budget or (reads and not more)):
                break
            now_s = time.perf_counter()
            if now_s > end_s and not written:
                raise BenchError(f"no write ended for {_STALL_S:.0f} s beside reads")
            if more and not reading and now_s >= due_s:
                reading, submitted_s = next(self._tokens), now_s
                self._mover.submit(Job(reading, True, (self._random.choice(read_blocks),)))
            pause_s = due_s - now_s if more and not reading else _POLL_S_MAX
            finished = self._mover.poll(min(max(pause_s, 0.0), _POLL_S_MAX))
            if reading in finished:
                now_s = time.perf_counter()
                totals.latencies_s.append(now_s - submitted_s)
                finished.remove(reading)
                reading, due_s = 0, now_s + self._settings.read_gap_s
            written += self._top_up(finished)
        totals.writes += written

    def _write(self) -> None:
        token = next(self._tokens)
        self._outstanding.add(token)
        self._mover.submit(Job(token, False, (next(self._next_block),)))

    def _top_up(self, finished: list[int]) -> int:
        """Writes that have ended: hand over as many new ones."""
        self._outstanding.difference_update(finished)
        for _ in finished:
            self._write()
        return len(finished)

    def _wait(self, timeout_s: float) -> list[int]:
        end_s = time.perf_counter() + timeout_s
        while time.perf_counter() < end_s:
            finished = self._mover.poll(_POLL_S_MAX)
            if finished:
                return finished
        raise BenchError(f"nothing ended for {timeout_s:.0f} s")
