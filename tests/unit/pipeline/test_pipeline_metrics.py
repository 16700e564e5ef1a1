# SPDX-License-Identifier: Apache-2.0
"""Bytes, time and queue lengths as the pipeline reports them."""

from __future__ import annotations

import errno
from dataclasses import replace

from vllm_nvmeof_offload.errors import io_error

from .bench import STRIDE, Bench


def test_a_store_and_a_load_are_metered_by_stage() -> None:
    bench = Bench()
    bench.store(1, 0, 7)
    bench.now_s += 0.25
    bench.copy.finish(bench.copy.submitted[-1][0])
    bench.pipeline.step()
    counters = bench.pipeline.counters
    assert counters["transfer_operations", "store", "gpu"] == 1
    assert counters["transfer_seconds", "store", "gpu"] == 0.25
    assert counters["transfer_bytes", "store", "gpu"] > 0
    bench.load(2, 8, None, 3)
    bench.now_s += 0.5
    bench.io_done()
    counters = bench.pipeline.counters
    assert counters["transfer_seconds", "load", "pool"] == 0.5
    assert counters["transfer_bytes", "load", "pool"] == STRIDE
    assert counters["transfer_operations", "load", "gpu"] == 0, "its copy is under way"


def test_a_failed_read_moves_no_bytes() -> None:
    bench = Bench()
    bench.load(1, 8, None, 3)
    bench.io_done(io_error(errno.ENODATA))
    assert bench.pipeline.counters["transfer_operations", "load", "pool"] == 1
    assert bench.pipeline.counters["transfer_bytes", "load", "pool"] == 0


def test_queue_lengths_come_with_other_reports_and_end_at_zero() -> None:
    bench = Bench(stream_slots=2, reads_in_flight_max=1)
    bench.stream(1, range(4))
    bench.pipeline.step()
    bench.store(2, 0, 7)
    bench.copy.finish(bench.copy.submitted[-1][0])
    bench.pipeline.step()
    bench.reports()
    (level,) = bench.levels
    assert (level.stream_slots_used, level.stream_slot_waiting) == (2, 2)
    assert (level.reads_in_flight, level.read_waiting) == (1, 1)
    assert bench.pipeline.read_queues() == [(4 * STRIDE, 0.0)], "what is under way counts"
    while bench.turn():
        pass
    bench.reports()
    assert bench.pipeline.read_queues() == [(0, 0.0)]
    assert bench.levels[-1].read_waits_s == (0.0,)
    assert replace(bench.levels[-1], read_waits_s=()) == type(level)(0), (
        "the last report is of empty queues"
    )
