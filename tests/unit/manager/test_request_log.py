# SPDX-License-Identifier: Apache-2.0
"""Records of requests: bounded, complete, and with the reasons; and the time that loads save."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE
from vllm_nvmeof_offload.manager.request_log import RequestLog, Start
from vllm_nvmeof_offload.metrics import Counts

from .bench import Bench, keys_of
from .test_waiting_requests import Lobby, T


def record(**more: Any) -> Any:
    fields = {"tokens": 100, "gpu_tokens": 0, "found_tokens": 0, "loaded_tokens": 0}
    return Start(**{**fields, "chunk_tokens": 16, **more})


def test_the_number_of_records_and_their_sizes_are_bounded() -> None:
    log = RequestLog(records_max=10)
    for number in range(100):
        for _ in range(20):
            log.started(f"{number}-" + "x" * 1000, record(limits="y" * 1000))
    assert log.find("89") == []
    assert len(log.find("90")) == 1
    assert len(json.dumps(log.find(None))) < 10_000
    (last,) = log.find(None)
    assert len(last["starts"]) == 8


def test_a_whole_id_names_one_record() -> None:
    log = RequestLog()
    for name in ("a", "a-0-12ab", "b-0-12ab", "b-1-34cd"):
        log.started(name, record())
    assert [one["request"] for one in log.find("a")] == ["a"]
    assert [one["request"] for one in log.find("b")] == ["b-0-12ab", "b-1-34cd"]
    assert log.find("") == []


def test_an_id_names_the_records_of_all_answers_to_a_request() -> None:
    log = RequestLog()
    names = ["0_cmpl-a-0-12ab", "1_cmpl-a-0-12ab", "10_cmpl-a-1-34cd"]
    for name in (*names, "0_cmpl-ab-0-12ab", "x_cmpl-a-0-12ab", "1_cmpl-a"):
        log.started(name, record())
    assert [one["request"] for one in log.find("cmpl-a")] == names
    assert [one["request"] for one in log.find("cmpl-a-0")] == names[:2]
    assert [one["request"] for one in log.find(names[1])] == names[1:2]


def test_the_first_start_and_the_last_ones_are_kept() -> None:
    log = RequestLog()
    for number in range(20):
        log.started("a", record(tokens=number))
    (one,) = log.find(None)
    assert [start["tokens"] for start in one["starts"]] == [0, 13, 14, 15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no tier has the first chunk that GPU memory lacks"),
        ({"gpu_tokens": 90}, "10 tokens are left, and a chunk has 16"),
        ({"limits": "max_load_tokens=0"}, "the request limits its loads: max_load_tokens=0"),
        ({"found_tokens": 64}, "vLLM took the found tokens from elsewhere"),
        ({"found_tokens": 64, "loaded_tokens": 64, "no_boundary_tokens": 5}, "5 more tokens were"),
        (
            {
                "found_tokens": 64,
                "declined_tokens": 64,
                "expected_load_seconds": 2.0,
                "expected_compute_seconds": 1.0,
            },
            "64 tokens were found but computed: loading was expected to take 2.000 s, compu",
        ),
    ],
)
def test_each_reason_is_given(fields: dict[str, Any], reason: str) -> None:
    (given,) = record(**fields).describe()["why"]
    assert given.startswith(reason)


def test_a_whole_load_needs_no_reason() -> None:
    assert record(found_tokens=96, loaded_tokens=96).describe()["why"] == []


# -- by the core and the queue ------------------------------------------------------------


def the_start(lobby: Lobby, name: str = "a") -> dict[str, Any]:
    (one,) = lobby.core.request_log.find(name)
    found: dict[str, Any] = one["starts"][-1]
    return found


def test_a_request_without_hits_is_recorded_once_vllm_has_blocks() -> None:
    lobby = Lobby()
    lobby.add("a", 1, 2)
    assert lobby.core.request_log.find(None) == []
    lobby.decide("a", 0, 0)
    lobby.allocated("a")
    start = the_start(lobby)
    assert (start["tokens"], start["gpu_tokens"], start["found_tokens"]) == (2 * T + 1, 0, 0)
    assert (start["computed_tokens"], start["load"]) == (2 * T + 1, None)


def test_a_declined_hit_is_recorded_with_the_estimates() -> None:
    lobby = Lobby()
    lobby.bench.in_the_pool(1, 2)
    lobby.slow()
    lobby.add("a", 1, 2, prefetch=False)
    assert lobby.admit("a", 0, 2 * T).declined == 2 * T
    lobby.allocated("a")
    start = the_start(lobby)
    assert (start["found_tokens"], start["declined_tokens"]) == (2 * T, 2 * T)
    assert start["expected_load_seconds"] > start["expected_compute_seconds"] > 0
    assert start["why"][0].startswith("20 tokens were found but computed: loading was expected")


def test_a_load_is_recorded_with_its_tiers_and_limits() -> None:
    lobby = Lobby()
    lobby.bench.in_the_pool(1)
    lobby.bench.store(2)
    params = {"max_load_tokens": 20}
    lobby.add("a", 1, 2, 3, kv_transfer_params=params, skip_reading_prefix_cache=True)
    lobby.decide("a", 0, 2 * T)
    lobby.core.prepare_load(keys_of(1, 2))
    lobby.allocated("a")
    start = the_start(lobby)
    assert (start["load"]["cpu_tokens"], start["load"]["pool_tokens"]) == (T, T)
    assert start["load"]["seconds"] is None
    assert (start["loaded_tokens"], start["computed_tokens"]) == (2 * T, T + 1)
    assert start["limits"].startswith("max_load_tokens=20, it computes its whole prompt")
    lobby.waiting.allocated("a", 0)
    assert len(lobby.core.request_log.find(None)[0]["starts"]) == 1, "its load has ended"


# -- what loads are worth -----------------------------------------------------------------


class Worth:
    """A core whose model computes ten tokens per second, and a load of two chunks."""

    def __init__(
        self, ranks: int = 1, *, in_pool: bool = False, prefill_rate: float = 10.0
    ) -> None:
        self.bench = Bench(cache=8, ranks=ranks, tokens_per_chunk=T)
        self.core = self.bench.core
        self.core.admission.prefill_rate = prefill_rate
        self.bench.store(1, 2)
        if in_pool:
            self.bench.write_all()
            self.bench.store(*range(10, 18))
        self.op = self.core.prepare_load(keys_of(1, 2), 10.0 if in_pool else None).op
        self.load = self.core.planned

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        counters = self.core.counters
        return {series[1:]: n for series, n in counters.items() if series[0] == name and n}


def test_a_load_saves_the_time_of_computing_less_its_own() -> None:
    worth = Worth(ranks=2)
    worth.bench.now_s += 0.5
    worth.bench.done(worth.op)
    assert worth.counted("prefill_seconds") == {("saved", "cpu"): 1.5}
    assert worth.counted("gpu_seconds") == {("saved", "cpu"): 3.0}, "on each rank"
    assert worth.load is not None
    assert (worth.load.seconds, worth.load.saved_seconds) == (0.5, 1.5)


def test_a_load_that_computing_would_have_beaten_counts_as_lost() -> None:
    worth = Worth(in_pool=True)
    worth.bench.now_s += 5.0
    worth.bench.done(worth.op)
    assert worth.counted("prefill_seconds") == {("lost", "pool"): 3.0}
    assert worth.counted("gpu_seconds") == {("lost", "pool"): 3.0}
    assert worth.load is not None
    why = record(found_tokens=2 * T, loaded_tokens=2 * T, load=worth.load).describe()["why"]
    assert why == ["computing would have been faster by 3.000 s"]


def test_time_in_which_the_model_computes_prompts_is_not_lost() -> None:
    worth = Worth(in_pool=True)
    worth.bench.now_s, worth.bench.prompts_s = 5.0, 4.0
    worth.bench.done(worth.op)
    assert worth.counted("prefill_seconds") == {("saved", "pool"): 1.0}


def test_tokens_that_did_not_arrive_save_nothing() -> None:
    worth = Worth(in_pool=True)
    worth.bench.now_s += 0.25
    worth.bench.done(worth.op, (1, DEADLINE))
    assert worth.counted("prefill_seconds") == {("saved", "pool"): 0.75}
    assert worth.load is not None
    assert (worth.load.failed_tokens, worth.load.failed_chunks) == (T, {"deadline": 1})


def test_a_load_that_is_cut_off_is_recorded_and_counts_as_lost() -> None:
    worth = Worth(in_pool=True)
    worth.bench.now_s += 11.0
    worth.core.turn()
    worth.core.take_commands()
    worth.bench.done(worth.op, (0, CANCELLED), (1, CANCELLED))
    assert worth.counted("prefill_seconds") == {("lost", "pool"): 11.0}
    assert worth.load is not None and worth.load.was_cut_off
    start = record(found_tokens=2 * T, loaded_tokens=2 * T, load=worth.load).describe()
    assert start["computed_tokens"] == 100
    assert start["why"][0].startswith("the load was cut off")


def test_nothing_is_counted_while_the_prefill_rate_is_unknown() -> None:
    worth = Worth(prefill_rate=0.0)
    worth.bench.done(worth.op)
    assert worth.counted("prefill_seconds") == {}
    assert worth.load is not None and worth.load.saved_seconds is None
    assert isinstance(worth.core.counters, Counts)
