# SPDX-License-Identifier: Apache-2.0
"""Waiting requests between a fake queue and the real core, their remembered answers and records."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.boundary import wanted
from vllm_nvmeof_offload.manager.core import FROM_CPU, FROM_POOL
from vllm_nvmeof_offload.manager.load_or_recompute import Attempt, Decision
from vllm_nvmeof_offload.manager.look_up import Answer, Question, Queue, RequestLookUps
from vllm_nvmeof_offload.manager.request_log import RequestLog, Start
from vllm_nvmeof_offload.manager.requests import WaitingRequests
from vllm_nvmeof_offload.protocol import (
    FetchCommand,
    RateReport,
    Verdict,
    VerdictReport,
)

from .bench import Bench, keys_of, numbers_of
from .test_holds import HoldsBench

#: Tokens in a chunk.
T = 10
GROUPS = (Group(0, GroupKind.FULL, T),)


class Lobby:
    """Requests by name; `run` passes one step to the real `WaitingRequests`."""

    def __init__(self, cache: int = 8, by_priority: bool = False, **config: object) -> None:
        self.bench = HoldsBench(cache, tokens_per_chunk=T, **config)  # type: ignore[arg-type]
        self.core = self.bench.core
        self.keys: dict[str, list[bytes]] = {}
        self.answers: dict[str, Answer] = {}
        self.in_gpu: set[tuple[str, int]] = set()
        self.waiting = WaitingRequests(
            self.core,
            Queue(self._keys_of, self._ends_of, self._is_cached, GROUPS, by_priority),
            lambda: self.bench.now_s,
        )

    @property
    def look_ups(self) -> RequestLookUps:
        return self.waiting.look_ups

    def _keys_of(self, name: str) -> list[list[bytes]] | None:
        return [self.keys[name]] if name in self.keys else None

    def _ends_of(self, name: str, keys: Sequence[bytes]) -> list[int]:
        return [T * (self.keys[name].index(key) + 1) for key in keys]

    def _is_cached(self, request: Any, key: bytes) -> bool:
        name = request.request_id
        return (name, self.keys[name].index(key)) in self.in_gpu

    def slow(self) -> None:
        """The pool reads slower than the model computes."""
        self.core.admission.prefill_rate = 1e9
        self.core.report([RateReport(rank, 0, 0.0, 1.0) for rank in range(self.bench.ranks)])

    def add(self, name: str, *numbers: int, prefetch: bool = True, **more: object) -> None:
        self.keys[name] = keys_of(*numbers)
        fields: dict[str, object] = {"priority": 0, "arrival_time": 0.0, **more}
        fields.setdefault("num_tokens", T * len(numbers) + 1)
        self.waiting.added(SimpleNamespace(request_id=name, **fields), prefetch=prefetch)

    def look_up(self, name: str, question: Question) -> int:
        """vLLM's look-up of a request with full attention only, which is remembered."""
        hits: list[bytes] = []
        misses: list[bytes] = []
        for one in self.keys[name][question.local // T : (question.cap or 10**9) // T]:
            if self.core.lookup(one, question.sources) is None:
                misses.append(one)
                break
            hits.append(one)
        found = max(0, (question.local // T + len(hits)) * T - question.local)
        self.answers[name] = self.look_ups.asked(name, Answer(question, found, hits, misses))
        return found

    def decide(self, name: str, local: int, found: int) -> Attempt:
        """Decide on the last look-up's answer, or on another one, whose look-up the test leaves
        out."""
        answer = self.answers.get(name)
        if answer is None or (answer.question.local, answer.found) != (local, found):
            question = Question(local + found + 1, b"hash", local, None, FROM_CPU | FROM_POOL)
            answer = Answer(question, found, self._taken(name, local, local + found), ())
        return self.look_ups.decide(name, answer)

    def _taken(self, name: str, local: int, end: int) -> list[bytes]:
        """The keys that a load takes."""
        return self.keys[name][local // T : end // T]

    def allocated(self, name: str) -> Attempt | None:
        attempt = self.look_ups.attempt(name)
        return self.waiting.allocated(name, attempt.tokens if attempt else 0)

    def admit(self, name: str, local: int, found: int) -> Attempt:
        """The whole decision: if it is declined, the CPU tier is looked up."""
        if self.decide(name, local, found).declined:
            question = Question(local + found + 1, b"hash", local, None, FROM_CPU)
            self.look_ups.declined(name, self.look_up(name, question))
        attempt = self.look_ups.attempt(name)
        assert attempt is not None
        return attempt

    def run(
        self,
        new: dict[str, int] | None = None,
        preempted: tuple[str, ...] = (),
        finished: tuple[str, ...] = (),
        cached: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        """A step that schedules new requests with so many tokens, and old ones (computed before,
        tokens)."""
        new, cached = new or {}, cached or {}
        scheduled = {**new, **{name: count for name, (_, count) in cached.items()}}
        self.waiting.step(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(cached), num_computed_tokens=[c for c, _ in cached.values()]
                ),
                scheduled_spec_decode_tokens={},
                preempted_req_ids=set(preempted),
                finished_req_ids=set(finished),
            )
        )

    def fetched(self) -> list[int]:
        """The chunks that this step's commands fetch."""
        self.core.turn()
        fetches = [c for c in self.core.take_commands() if isinstance(c, FetchCommand)]
        return [number for fetch in fetches for number in numbers_of(fetch.batch.keys)]


def test_nothing_is_fetched_without_prefetch_or_without_keys() -> None:
    lobby = Lobby()
    lobby.bench.in_the_pool(0)
    lobby.add("a", 0, prefetch=False)
    lobby.add("b")
    lobby.waiting.added(SimpleNamespace(request_id="unknown", num_tokens=11))
    assert lobby.fetched() == []
    lobby.run(new={"a": 11})
    lobby.run(preempted=("a",))
    assert lobby.fetched() == [], "preempted, it may use them as little"


@pytest.mark.parametrize(("by_priority", "first"), [(False, [0, 1]), (True, [1, 0])])
def test_the_order_is_that_of_vllms_policy(by_priority: bool, first: list[int]) -> None:
    lobby = Lobby(by_priority=by_priority)
    lobby.bench.in_the_pool(0, 1)
    lobby.add("a", 0, priority=2, arrival_time=1.0)
    lobby.add("b", 1, priority=1, arrival_time=2.0)
    assert lobby.fetched() == first


def test_a_hit_that_vllm_does_not_have_us_load_is_no_admission() -> None:
    """Another connector has it, or GPU memory has as much."""
    lobby = GroupsLobby(16)
    lobby.bench.in_the_pool(2, 3, 52, 53)
    lobby.bench.in_both_tiers(0, 1, 50, 51)
    lobby.slow()
    lobby.add("a", 0, 1, 2, 3, prefetch=False)
    lobby.decide("a", 0, 2 * T)
    lobby.waiting.allocated("a", 0)
    counts = lobby.core.counters
    assert not any(counts["admissions", how] for how in ("load", "partial", "recompute"))
    assert counts["recomputed_tokens", "no_boundary"] == 0
    lobby.decide("a", 0, 4 * T)  # declined, so that there is nothing to load
    lobby.waiting.allocated("a", 0)
    assert counts["admissions", "recompute"] == 1
    assert counts["recomputed_tokens", "declined"] == 4 * T


def test_automatic_admission_off_loads_everything() -> None:
    lobby = Lobby(admission=False)
    lobby.bench.in_the_pool(0)
    lobby.slow()
    lobby.add("a", 0, prefetch=False)
    assert lobby.decide("a", 0, 10) == Attempt(0, 10, 0, Decision(load=True))


def test_a_victims_chunks_in_gpu_memory_are_not_fetched() -> None:
    lobby = Lobby(prefetch_cache_share=0.0)
    lobby.bench.in_the_pool(0, 1)
    lobby.add("a", 0, 1)
    lobby.in_gpu = {("a", 0)}
    lobby.run(new={"a": 21})
    lobby.run(preempted=("a",))
    assert lobby.fetched() == [1]


def test_ended_requests_leave_nothing_behind() -> None:
    lobby = Lobby()
    lobby.bench.in_the_pool(0, 1)
    for name in ("waits", "decided", "victim", "both"):
        lobby.add(name, 0, 1)
    lobby.run(new={"victim": 21, "both": 21})
    lobby.decide("decided", 0, 20)
    lobby.run(preempted=("victim", "both"), finished=("both",))
    lobby.fetched()
    lobby.run(finished=("waits", "decided", "victim", "unknown"))
    assert lobby.core.gauges()["requests_waiting"] == 0
    assert (lobby.bench.held(), lobby.allocated("decided")) == ([], None)
    assert lobby.look_ups.attempt("decided") is None
    lobby.run(preempted=("victim",))  # too late: the request is not known any more
    assert lobby.core.gauges()["requests_waiting"] == 0


def test_a_victim_whose_keys_are_gone_is_not_followed() -> None:
    lobby = Lobby()
    lobby.add("a", 0)
    lobby.run(new={"a": 11})
    del lobby.keys["a"]
    lobby.run(preempted=("a",))
    assert lobby.core.gauges()["requests_waiting"] == 0


def test_a_changed_decision_is_logged_at_most_once_per_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lobby = Lobby()
    lobby.bench.in_the_pool(0)
    lobby.add("a", 0, prefetch=False)
    caplog.set_level(logging.INFO, LOGGER_NAME)

    def decide(now_s: float, rate: float) -> int:
        lobby.bench.now_s = now_s
        lobby.core.admission.prefill_rate = rate
        lobby.decide("a", 0, 10)
        return len(caplog.records)

    lobby.slow()
    assert decide(0.0, 0.0) == 0, "it loads, as the decision at the start was"
    assert decide(1.0, 1e9) == 1
    assert "recomputed, which is faster" in caplog.records[-1].getMessage()
    assert decide(2.0, 1e-6) == 1, "too soon"
    assert decide(3.0, 1e9) == 1
    assert decide(62.0, 1e-6) == 2
    assert "loaded again" in caplog.records[-1].getMessage()
    assert decide(200.0, 1e-6) == 2, "nothing new"


# -- several groups -----------------------------------------------------------------------

#: Full attention, and a window of two chunks.
FULL_AND_WINDOW = (
    Group(0, GroupKind.FULL, T),
    Group(0, GroupKind.WINDOW, T, 1, 2, 2 * T - 1),
)


class GroupsLobby(Lobby):
    """The window's chunks have the numbers of the full chunks and 50."""

    def __init__(self, cache: int = 8, **config: object) -> None:
        super().__init__(cache, **config)
        queue = Queue(self._by_group, self._ends_of, self._is_cached, FULL_AND_WINDOW)
        self.waiting = WaitingRequests(self.core, queue, lambda: self.bench.now_s)

    def _by_group(self, name: str) -> list[list[bytes]]:
        window = [number + 50 for number in numbers_of(b"".join(self.keys[name]))]
        return [self.keys[name], keys_of(*window)]

    def _taken(self, name: str, local: int, end: int) -> list[bytes]:
        return wanted(FULL_AND_WINDOW, self._by_group(name), local, end)

    def _is_cached(self, request: Any, key: bytes) -> bool:
        return key in self.keys[request.request_id] and super()._is_cached(request, key)


def test_of_a_window_only_the_last_reach_is_fetched() -> None:
    lobby = GroupsLobby(16)
    lobby.bench.in_the_pool(*range(4), *range(50, 54))
    lobby.add("a", *range(4))
    assert lobby.fetched() == [0, 1, 2, 3, 52, 53]


def test_a_preempted_request_gets_windows_although_gpu_memory_has_its_prefix() -> None:
    lobby = GroupsLobby(16, prefetch_cache_share=0.0)
    lobby.add("a", *range(4))
    lobby.bench.in_the_pool(*range(4), *range(50, 54))
    lobby.in_gpu |= {("a", chunk) for chunk in range(3)}
    lobby.run(new={"a": 41})
    lobby.run(preempted=("a",))
    assert lobby.fetched() == [3, 52, 53]


def test_what_is_found_is_weighed_over_all_groups() -> None:
    lobby = GroupsLobby(16)
    lobby.bench.in_the_pool(*range(4), *range(50, 54))
    lobby.slow()
    lobby.add("a", *range(4), prefetch=False)
    assert lobby.decide("a", 0, 40).result == "recompute"
    lobby.run()
    assert lobby.fetched() == [0, 1, 2, 3]


def test_full_attention_behind_the_boundary_is_counted_once_per_admitted_request() -> None:
    lobby = GroupsLobby(16)
    lobby.bench.in_the_pool(*range(3), 50, 51)
    lobby.add("a", *range(4), prefetch=False)
    for _ in range(2):  # each step looks the request up again
        lobby.decide("a", 0, 2 * T)
    lobby.allocated("a")
    assert lobby.core.counters["recomputed_tokens", "no_boundary"] == T
    lobby.allocated("a")  # its load has ended
    assert lobby.core.counters["recomputed_tokens", "no_boundary"] == T


# -- a look-up's answer is remembered until another one is possible -------------------

ALL = FROM_CPU | FROM_POOL
QUESTION = Question(tokens=3 * T + 1, last_hash=b"c", local=0, cap=None, sources=ALL)


class Asked(Lobby):
    """A request with three chunks, of which a look-up has found the first two."""

    def __init__(self, cache: int = 8, *, pooled: bool = False, **config: object) -> None:
        super().__init__(cache, prefetch_cache_share=0.0, **config)
        (self.bench.in_the_pool if pooled else self.bench.in_both_tiers)(0, 1)
        self.add("a", 0, 1, 2, prefetch=False)
        self.ask()

    def ask(self, question: Question = QUESTION) -> int:
        return self.look_up("a", question)

    def recall(self, question: Question = QUESTION, name: str = "a") -> int | None:
        answer = self.look_ups.recall(name, question)
        return None if answer is None else answer.found


def test_a_verdict_a_reset_and_a_failure_void_it() -> None:
    asked = Asked(pooled=True)
    asked.core.report([VerdictReport(0, 0, Verdict.GONE)])
    assert asked.recall() is None
    asked.core.report([VerdictReport(0, 0, Verdict.OK)])
    assert asked.recall() is None, "there was nothing to remember"
    asked.ask()
    assert asked.recall() == 2 * T
    load = asked.bench.load(0, 1)
    asked.ask()
    asked.bench.report(load.op, (1, CHECKSUM_MISMATCH), rows=(0, 1))
    assert asked.recall() is None
    asked.ask()
    assert asked.recall() == T
    asked.core.reset()
    assert asked.recall() is None


def test_a_request_that_got_blocks_ran_or_ended_is_looked_up_again() -> None:
    asked = Asked()
    asked.allocated("a")
    assert asked.recall() is None
    for step in ({"new": {"a": 1}}, {"preempted": ("a",)}, {"finished": ("a",)}):
        asked.ask()
        asked.run(**step)  # type: ignore[arg-type]
        assert asked.recall() is None
        asked.add("a", 0, 1, 2, prefetch=False)
    asked.ask()
    asked.add("a", 0, 1, 2, prefetch=False)
    assert asked.recall() is None, "another request of the same name"


def test_admission_decides_again_after_50_ms_or_when_it_has_changed() -> None:
    asked = Asked(pooled=True, admission=True)
    admission, bench = asked.core.admission, asked.bench
    asked.core.report([RateReport(rank, 0, 1e6, 1e6) for rank in range(bench.ranks)])
    admission.prefill_rate = 1.0
    first = asked.decide("a", 0, 2 * T)
    assert first.result == "load"
    bench.now_s += 0.03
    assert asked.decide("a", 0, 2 * T) == first
    admission.prefill_rate = 1e9  # computing is faster now
    assert asked.decide("a", 0, 2 * T) == first
    bench.now_s += 0.03
    assert asked.decide("a", 0, 2 * T).result == "recompute"
    declined = asked.look_ups.take_declined()
    assert declined
    assert asked.decide("a", 0, 2 * T).result == "recompute"
    assert asked.look_ups.take_declined() == declined, "they are probed in each step"
    admission.reading = True  # another request's decision
    admission.prefill_rate = 1.0
    assert asked.decide("a", 0, 2 * T).result == "load"


# -- records of requests, and the time that loads save --------------------------------


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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no tier has the first chunk that is not in GPU memory"),
        ({"gpu_tokens": 90}, "10 tokens are left, and a chunk has 16"),
        ({"limits": "max_load_tokens=0"}, "the request limits its loads: max_load_tokens=0"),
        ({"found_tokens": 64}, "vLLM took the matched tokens from another source"),
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
    assert why == ["computing would have been 3.000 s faster"]


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
