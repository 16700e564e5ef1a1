# SPDX-License-Identifier: Apache-2.0
"""Every declared series is told, counters from their zero, gauges when they change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, io_error
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.suspension import Suspension
from vllm_nvmeof_offload.manager.telemetry import (
    PERIOD_S,
    Complaints,
    Figures,
    config_of,
    start_line,
)
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.protocol import LevelReport, RankHello, RateReport

from .bench import Bench, hello, keys_of

TOKENS = 16
TARGETS = ("/mnt/one", "/mnt/two")


def hellos(ranks: int = 1, **changes: object) -> list[RankHello]:
    one = hello(0, 4, 8, (), target_count=2)
    one = replace(one, targets=TARGETS, stream_slots=3, io_engine="io_uring", copy_engine="memcpy")
    return [replace(one, rank=rank, **changes) for rank in range(ranks)]  # type: ignore[arg-type]


def figures_of(bench: Bench, **changes: object) -> Figures:
    said = hellos(bench.ranks, **changes)
    labels = {"prompts_only": "no", **config_of(said, CoreConfig())}
    return Figures(bench.core, Suspension(), said, labels)


def test_the_first_time_every_series_is_told() -> None:
    told = figures_of(Bench(tokens_per_chunk=TOKENS, targets=2)).take()
    assert {name for name, _ in told.counters} == set(COUNTERS)
    assert {name for name, _ in told.gauges} == set(GAUGES)
    assert set(told.counters.values()) == {0}
    for metrics, said in ((COUNTERS, told.counters), (GAUGES, told.gauges)):
        for name, labels in said:
            assert len(labels) == len(metrics[name].labels)
            for label, value in zip(metrics[name].labels, labels, strict=True):
                assert value in label.values or label.of
    assert told.gauges["target_info", ("1", "/mnt/two")] == 1
    assert told.gauges["capacity_tokens", ("pool",)] == 8 * TOKENS


def test_afterwards_only_what_changes() -> None:
    bench = Bench(tokens_per_chunk=TOKENS, targets=2)
    figures = figures_of(bench)
    figures.take()
    again = figures.take()
    assert (again.counters, again.gauges) == ({}, {})
    bench.store(1)
    told = figures.take()
    assert told.counters == {("stored_chunks", ()): 1}
    changed = {"cache_slots_used", "entries", "pool_slots_used", "writes_pending"}
    assert {name for name, _ in told.gauges} == changed
    assert {name for name, _ in figures.take(all_gauges=True).gauges} == set(GAUGES)


def test_failures_are_told_by_operation_outcome_and_target() -> None:
    bench = Bench(tokens_per_chunk=TOKENS, pool=8, targets=2)
    figures = figures_of(bench)
    figures.take()
    bench.store(1)
    (write,) = bench.writes()
    bench.done(write.op, (0, io_error(5)))
    load = bench.core.prepare_load(keys_of(1))
    bench.done(load.op, (0, CHECKSUM_MISMATCH))
    told = figures.take().counters
    target = str(write.pool_slot % 2)
    assert told["failed_chunks", ("write", "io_error", target)] == 1
    assert told["failed_chunks", ("load", "checksum_mismatch", "none")] == 1
    assert told["failed_load_tokens", ()] == TOKENS


def test_what_the_workers_say_is_added_up() -> None:
    bench = Bench(tokens_per_chunk=TOKENS, ranks=2, targets=2)
    figures = figures_of(bench)
    figures.take()
    figures.add_from_workers({"transfer_us:load:pool": 1_500_000, "written_bytes:1": 7, "x": 1})
    bench.core.report([LevelReport(0, 1, read_waiting=2), LevelReport(1, 3, writes_in_flight=1)])
    bench.core.report([RateReport(0, 1, 50.0, 70.0), RateReport(1, 1, 40.0, 90.0)])
    told = figures.take()
    assert told.counters["transfer_seconds", ("load", "pool")] == 1.5
    assert told.counters["written_bytes", ()] == told.counters["target_written_bytes", ("1",)] == 7
    assert told.gauges["stream_slots_used", ()] == 4
    assert told.gauges["queued_operations", ("read",)] == 2
    assert told.gauges["operations_in_flight", ("store",)] == 1
    assert told.gauges["target_write_bytes_per_second", ("1",)] == 40, "the slowest rank's"
    assert told.gauges["target_read_bytes_per_second", ("1",)] == 70


def test_fallbacks_are_told_by_part() -> None:
    lines = ("io_uring registered→unregistered: ENOMEM", "o_direct→buffered on /mnt/one: EINVAL")
    bench = Bench(tokens_per_chunk=TOKENS, ranks=2, targets=2)
    told = figures_of(bench, fallbacks=lines).take().gauges
    seen = [told["fallbacks", (part,)] for part in ("io_uring", "registration", "o_direct")]
    assert seen == [0, 2, 2]


# -- the start line -----------------------------------------------------------------------


def test_the_start_line_names_what_an_operator_asks_for() -> None:
    bench = Bench(tokens_per_chunk=TOKENS, ranks=2, targets=2)
    said = hellos(2, volatile=("hashes are seeded",), fallbacks=("io_uring→threads: EPERM",))
    said[1] = replace(said[1], io_engine="threads", volatile=("hashes are seeded", "files moved"))
    line = start_line(said, bench.core)
    assert "\n" not in line
    for part in (
        "CPU tier of 64 tokens (4 cache slots of 8.0 KiB) and 3 stream slots",
        "on 2 ranks",
        "pool of 128 tokens (8 slots",
        "/mnt/one, /mnt/two",
        "engine io_uring on rank 0, threads on rank 1",
        "copies by memcpy",
        "evicts by credited_lru",
        "0 chunks adopted (0 tokens)",
        "NOTHING IS ADOPTED: hashes are seeded; files moved",
    ):
        assert part in line
    assert line.count("FALLBACK") == 1, "once, not once a rank"
    assert "no pool" in start_line(hellos(), Bench(tokens_per_chunk=TOKENS, pool=0).core)


# -- failures as log lines ----------------------------------------------------------------


@pytest.fixture
def logger(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """`caplog` hears us even where vLLM's logger, above ours, tells nobody."""
    ours = logging.getLogger(LOGGER_NAME)
    propagates, ours.propagate = ours.propagate, False
    ours.addHandler(caplog.handler)
    yield
    ours.removeHandler(caplog.handler)
    ours.propagate = propagates


def fail(bench: Bench, number: int, outcome: object) -> None:
    bench.store(number)
    load = bench.core.prepare_load(keys_of(number))
    bench.done(load.op, (0, outcome))  # type: ignore[arg-type]


def test_a_failure_is_said_at_once_and_then_once_a_minute(
    caplog: pytest.LogCaptureFixture, logger: None
) -> None:
    bench = Bench(tokens_per_chunk=TOKENS, pool=0)
    complaints = Complaints(bench.core, (), lambda: bench.now_s)
    complaints.look()
    fail(bench, 1, CHECKSUM_MISMATCH)
    complaints.look()
    for number in (2, 3, 4):
        fail(bench, number, CHECKSUM_MISMATCH)
        bench.now_s += 1
        complaints.look()
    bench.now_s += PERIOD_S
    complaints.look()
    complaints.look()
    fail(bench, 5, CANCELLED)
    complaints.look()
    follows = "could not be loaded: checksum_mismatch; their tokens are computed again"
    assert caplog.messages == [f"1 chunk {follows}", f"3 chunks {follows}"]


def test_a_failed_write_names_its_target(caplog: pytest.LogCaptureFixture, logger: None) -> None:
    bench = Bench(tokens_per_chunk=TOKENS, targets=2)
    complaints = Complaints(bench.core, TARGETS, lambda: bench.now_s)
    bench.store(1)
    (write,) = bench.writes()
    bench.done(write.op, (0, io_error(5)))
    complaints.look()
    (line,) = caplog.messages
    assert TARGETS[write.pool_slot % 2] in line
    assert "EIO" in line
