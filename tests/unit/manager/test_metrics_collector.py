# SPDX-License-Identifier: Apache-2.0
"""Every declared series is exported: counters from 0 on, gauges when they change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, io_error
from vllm_nvmeof_offload.manager.core import CoreConfig
from vllm_nvmeof_offload.manager.requests import Suspension
from vllm_nvmeof_offload.manager.telemetry import (
    PERIOD_S,
    FailureLog,
    MetricsCollector,
    config_labels,
    start_line,
)
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES, METRICS, PREFIX, Series, exported
from vllm_nvmeof_offload.protocol import (
    LevelReport,
    RankHello,
    RateReport,
    VerdictReport,
    target_of,
)

from .bench import Bench, hello, keys_of

TOKENS = 16
TARGETS = ("/mnt/one", "/mnt/two")


def hellos(ranks: int = 1, **changes: object) -> list[RankHello]:
    one = hello(0, 4, 8, (), target_count=2)
    one = replace(one, targets=TARGETS, stream_slots=3, io_engine="io_uring", copy_engine="memcpy")
    return [replace(one, rank=rank, **changes) for rank in range(ranks)]  # type: ignore[arg-type]


def collector(bench: Bench, **changes: object) -> MetricsCollector:
    ranks_hellos = hellos(bench.ranks, **changes)
    config = {"prompts_only": "no", "vllm": "0.32", **config_labels(ranks_hellos, CoreConfig())}
    return MetricsCollector(bench.core, Suspension(), ranks_hellos, config)


def names(values: dict[Series, float]) -> set[str]:
    return {exported(series)[0].removeprefix(PREFIX) for series in values}


def test_the_first_time_every_series_is_exported() -> None:
    metrics = collector(Bench(targets=2, tokens_per_chunk=TOKENS))
    counters, gauges = metrics.take_increases(), metrics.take_gauges()
    assert names(counters) == set(COUNTERS)
    assert names(gauges) == set(GAUGES)
    assert set(counters.values()) == {0}
    for series in (*counters, *gauges):
        name, labels = exported(series)
        declared = METRICS[name.removeprefix(PREFIX)].labels
        for label, value in zip(declared, labels, strict=True):
            assert value in label.values or label.source
    assert gauges["target_info", "1", "/mnt/two"] == 1
    assert gauges["capacity_tokens", "pool"] == 8 * TOKENS


def test_afterwards_only_changed_series_are_exported() -> None:
    bench = Bench(targets=2)
    metrics = collector(bench)
    metrics.take_increases(), metrics.take_gauges()
    assert (metrics.take_increases(), metrics.take_gauges()) == ({}, {})
    bench.store(1)
    assert metrics.take_increases() == {"stored_chunks": 1}
    changed = {"entries", "slots_used", "writes_pending"}
    assert names(metrics.take_gauges()) == changed
    assert names(metrics.take_gauges(unchanged_too=True)) == set(GAUGES)


def test_failures_are_counted_by_operation_outcome_and_target() -> None:
    bench = Bench(pool=8, targets=2, tokens_per_chunk=TOKENS)
    metrics = collector(bench)
    metrics.take_increases()
    bench.store(1)
    (write,) = bench.writes()
    bench.done(write.op, (0, io_error(5)))
    load = bench.core.prepare_load(keys_of(1))
    bench.done(load.op, (0, CHECKSUM_MISMATCH))
    increases = metrics.take_increases()
    target = str(target_of(int(write.batch.places[0])))
    assert increases["failed_chunks", "write", "io_error", target] == 1
    assert increases["failed_chunks", "load", "checksum_mismatch", "none"] == 1
    assert increases["recomputed_tokens", "load_failed"] == TOKENS


def test_every_failure_was_exported_as_0_before() -> None:
    bench = Bench(pool=8, targets=2)
    metrics = collector(bench)
    first = metrics.take_increases()
    bench.store(1)
    (write,) = bench.writes()
    bench.done(write.op, (0, io_error(5)))
    bench.core.reset()
    (reset,) = bench.core.take_commands()
    bench.done(reset.op, (0, CHECKSUM_MISMATCH))
    assert metrics.take_increases().keys() <= first.keys()


def test_queue_lengths_and_rates_of_all_ranks_are_exported() -> None:
    bench = Bench(ranks=2, targets=2)
    metrics = collector(bench)
    bench.core.report([LevelReport(0, 1, read_waiting=2), LevelReport(1, 3, writes_in_flight=1)])
    bench.core.report([RateReport(0, 1, 50.0, 70.0), RateReport(1, 1, 40.0, 90.0)])
    gauges = metrics.take_gauges()
    assert gauges["slots_used", "stream"] == 4
    assert gauges["queued_operations", "read"] == 2
    assert gauges["operations_in_flight", "store"] == 1
    assert gauges["target_bytes_per_second", "1", "store"] == 40, "the slowest rank's"
    assert gauges["target_bytes_per_second", "1", "load"] == 70


def test_fallbacks_are_exported_by_part() -> None:
    lines = ("io_uring registered→unregistered: ENOMEM", "o_direct→buffered on /mnt/one: EINVAL")
    gauges = collector(Bench(ranks=2, targets=2), fallbacks=lines).take_gauges()
    seen = [gauges["fallbacks", part] for part in ("io_uring", "registration", "o_direct")]
    assert seen == [0, 2, 2]


# -- the start line -----------------------------------------------------------------------


def test_the_start_line_names_sizes_engines_and_fallbacks() -> None:
    bench = Bench(ranks=2, targets=2, tokens_per_chunk=TOKENS)
    ranks_hellos = hellos(
        2, volatile=("hashes are seeded",), fallbacks=("io_uring→threads: EPERM",)
    )
    ranks_hellos[1] = replace(
        ranks_hellos[1], io_engine="threads", volatile=("hashes are seeded", "files moved")
    )
    ranks_hellos = [replace(one, checksums="256 B ahead") for one in ranks_hellos]
    line = start_line(ranks_hellos, bench.core)
    assert "\n" not in line
    for part in (
        "CPU tier of 64 tokens (4 cache slots of 8.0 KiB) and 3 stream slots",
        "on 2 ranks",
        "pool of 128 tokens (8 slots",
        "/mnt/one, /mnt/two",
        "engine io_uring on rank 0, threads on rank 1",
        "checksums read 256 B ahead",
        "copies by memcpy",
        "evicts by credited_lru",
        "0 chunks adopted (0 tokens)",
        "NOTHING IS ADOPTED: hashes are seeded; files moved",
    ):
        assert part in line
    assert line.count("FALLBACK") == 1, "once, not once per rank"
    assert "no pool" in start_line(hellos(), Bench(pool=0).core)
    assert "lease" not in line


@pytest.mark.parametrize(
    ("alone", "group", "said"),
    [
        ("", "", "loads chunks stored by other servers of this host"),
        ("", "team-a", "loads chunks stored by other servers of group team-a"),
        ("there is no pool", "team-a", "SHARES NOTHING: there is no pool"),
    ],
)
def test_the_start_line_names_who_shares_and_who_leases(alone: str, group: str, said: str) -> None:
    core = Bench(ranks=2, targets=2).core
    assert start_line(hellos(2), core, alone, group).endswith(f"; {said}")
    leased = [replace(one, lease_name="host-a") for one in hellos(2)]
    parts = start_line(leased, core, alone, group).split("; ")
    assert parts[-2:] == ["holds its pool by lease as host-a", said]


# -- failures as log lines ----------------------------------------------------------------


@pytest.fixture
def logger(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """`caplog` gets our records even if vLLM's logger, the parent of ours, does not propagate."""
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


def test_a_failure_is_logged_at_once_and_then_once_per_minute(
    caplog: pytest.LogCaptureFixture, logger: None
) -> None:
    bench = Bench(pool=0)
    failure_log = FailureLog(bench.core, (), lambda: bench.now_s)
    failure_log.log_new()
    fail(bench, 1, CHECKSUM_MISMATCH)
    failure_log.log_new()
    for number in (2, 3, 4):
        fail(bench, number, CHECKSUM_MISMATCH)
        bench.now_s += 1
        failure_log.log_new()
    bench.now_s += PERIOD_S
    failure_log.log_new()
    failure_log.log_new()
    fail(bench, 5, CANCELLED)
    failure_log.log_new()
    follows = "could not be loaded: checksum_mismatch; their tokens are recomputed"
    assert caplog.messages == [f"1 chunk {follows}", f"3 chunks {follows}"]


def test_the_first_chunk_that_is_lost_before_its_write_is_logged(
    caplog: pytest.LogCaptureFixture, logger: None
) -> None:
    bench = Bench(cache=2)
    failure_log = FailureLog(bench.core, TARGETS, lambda: bench.now_s)
    bench.core.report([VerdictReport(0, 0, "suspect")])
    bench.store(1, 2)
    failure_log.log_new()
    for number in (3, 4):
        bench.store(number)
        failure_log.log_new()
    (line,) = caplog.messages
    assert "before they are written (1 so far)" in line


def test_a_failed_write_names_its_target(caplog: pytest.LogCaptureFixture, logger: None) -> None:
    bench = Bench(targets=2)
    failure_log = FailureLog(bench.core, TARGETS, lambda: bench.now_s)
    bench.store(1)
    (write,) = bench.writes()
    bench.done(write.op, (0, io_error(5)))
    failure_log.log_new()
    (line,) = caplog.messages
    assert TARGETS[target_of(int(write.batch.places[0]))] in line
    assert "EIO" in line
