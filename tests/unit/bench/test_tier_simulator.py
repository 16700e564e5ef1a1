# SPDX-License-Identifier: Apache-2.0
"""The readers of public traces, and the tier simulator on tiny made-up ones. Its manager is the
product's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.simulate import Ask, Settings, Shape, World, asks_of, run
from vllm_nvmeof_bench.traces import Pace, Request, read_trace, virtual

from tests.unit.bench.made_up import agentic, entry, mooncake, session_file
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.manager.eviction import credit_share
from vllm_nvmeof_offload.manager.handshake import CoreConfig

ORDERS = ("lru", "credited_lru")


def prompts(*asks: list[int]) -> list[Ask]:
    return [Ask(float(at), tuple(ask), ()) for at, ask in enumerate(asks)]


def hit_rates(slots: int, asks: list[Ask]) -> dict[str, float]:
    """The share of the prompts' chunks that a CPU tier of `slots` chunks finds, by policy."""
    found = {}
    for policy in ORDERS:
        world = World(Shape(gpu=0, cache=slots, pool=0, policy=policy))
        for ask in asks:
            world.serve(ask.prompt, ask.answer)
        found[policy] = world.counts["cpu"] / sum(len(ask.prompt) for ask in asks)
    return found


def test_chunks_are_whole_and_answers_fill_separate_chunks(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "trace.jsonl"))
    asks = asks_of(trace, Pace(), 1)
    assert [ask.prompt for ask in asks] == [(0,), (0, 1), (0,)]  # 1000 tokens: one whole block
    assert [len(ask.answer) for ask in asks] == [0, 2, 0]  # 1500 + 900 tokens: four blocks
    assert all(chunk < 0 for ask in asks for chunk in ask.answer)
    assert [ask.prompt for ask in asks_of(trace, Pace(), 2)] == [(), (1,), ()]


def test_chunks_evicted_by_the_gpu_are_found_in_the_cpu_tier_and_then_in_the_pool() -> None:
    world = World(Shape(gpu=2, cache=4, pool=8))
    world.serve([1, 2], [])
    world.serve([1, 2], [])
    assert world.counts["gpu"] == 2 and world.counts["miss"] == 2
    world.serve([3, 4], [])
    world.serve([1, 2], [])
    assert world.counts["cpu"] == 2
    world.serve([5, 6, 7, 8], [])
    world.serve([3, 4], [])
    assert world.counts["pool"] == 2
    assert world.counts["written"] == 8
    assert world.chunks() == {1, 2, 3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize(("threshold", "stored"), [(1, 4), (2, 0)])
def test_a_threshold_and_writing_on_eviction_write_less(threshold: int, stored: int) -> None:
    world = World(Shape(2, 8, 8, store_threshold=threshold, write_policy="on_eviction"))
    world.serve([1, 2], [-1, -2])
    assert world.counts["stored"] == stored
    assert world.counts["written"] == 0


def test_a_circle_larger_than_the_tier_finds_nothing_by_lru() -> None:
    circle = prompts(*([[n] for n in (1, 2, 3)] * 20))
    assert hit_rates(2, circle)["lru"] == 0.0  # each is lost just before its turn


def test_a_scan_does_not_empty_credited_lru() -> None:
    hot = [[1, 2], [3, 4]]
    scan = [[100 + n, 200 + n] for n in range(6)]
    found = hit_rates(12, prompts(*(hot * 3 + scan) * 5))
    assert found["lru"] < found["credited_lru"]


def test_a_request_never_evicts_its_own_prefix() -> None:
    long = prompts([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert hit_rates(4, long) == dict.fromkeys(ORDERS, pytest.approx(4 / 12))


def test_the_default_policy_is_the_product_s() -> None:
    default = parse_config({}).eviction_policy
    assert default in Settings().policies
    assert (CoreConfig().eviction_policy, CoreConfig().credit_share) == (
        default,
        credit_share(default),
    )


def test_a_users_policy_is_simulated_beside_ours(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no_such_module cannot be imported"):
        Settings(policies=("lru", "no_such_module:Own"))
    own = "04_custom_policy:SecondChance"
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    settings = Settings(
        Pace(users=3), 64, cpu=0.3, pools=(0.0,), cpus=(0.3,), policies=("lru", own),
        trace=traces,
    )  # fmt: skip
    samples, _ = run(settings)
    assert {one.policy for one in samples} == {"lru", own}
    found = {one.policy: one for one in samples if one.sweep == "cpu"}
    assert 0 < found[own].hit <= 1


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = agentic(tmp_path / "traces")
    for number in range(4):
        ids = list(range(1, 30))
        turns = [entry(10.0 * n, ids[: 9 + 5 * n], think_time=1.0) for n in range(4)]
        session_file(folder, f"more_{number}", turns)
    return folder


def test_a_run_covers_every_sweep(traces: Path) -> None:
    pace = Pace(users=3)
    sizes = {"cpu": 0.5, "pools": (0.0, 1.5), "cpus": (0.5,)}
    settings = Settings(pace, 64, **sizes, trace=traces)
    reported: list[str] = []
    samples, conditions = run(settings, lambda done, total, what: reported.append(what))
    assert {one.sweep for one in samples} == {"pool", "cpu", "writes"}
    assert len(reported) == len(samples) + 2
    big = [one for one in samples if one.sweep == "pool" and one.pool_tokens]
    assert all(one.hit == pytest.approx(conditions["reusable"]) for one in big)
    assert all(
        one.hit_pool == one.written == 0
        for one in samples
        if one.sweep == "pool" and not one.pool_tokens
    )
    assert (conditions["sessions"], conditions["requests"]) == (6, 23)


# Readers of public traces: the sessions they read, and the errors for a bad file.


#: A folder with kv-cache-tester's *.json, or a *.jsonl of Mooncake's: the real files.
_REAL = "VLLM_NVMEOF_TRACES"


def test_a_folder_of_sessions_is_read(tmp_path: Path) -> None:
    trace = read_trace(agentic(tmp_path / "traces"))
    assert trace.block_tokens == 64
    assert [one.name for one in trace.sessions] == ["trace_1", "trace_2"]
    first, children, second, third = trace.sessions[0].steps
    assert isinstance(first, Request) and isinstance(second, Request)
    assert isinstance(third, Request) and isinstance(children, tuple)
    assert (first.input_tokens, first.output_tokens) == (138, 5)
    assert [child.name for child in children] == ["a", "b"]
    assert second.think_s == 6.0 and second.service_s == 2.0
    assert third.think_s == 9.0  # not in the file: from the answer before, at 30 + 2 s
    shared = np.concatenate([one.blocks for one in trace.sessions[0].requests()])
    other = np.concatenate([one.blocks for one in trace.sessions[1].requests()])
    assert not set(shared.tolist()) & set(other.tolist())  # ids of scope "local"
    assert trace.unique_tokens() == 64 * (4 + 3 + 5)


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "trace.jsonl"))
    assert trace.block_tokens == 512
    assert [one.start_s for one in trace.sessions] == [0.0, 1.5, 3.0]
    assert [one.blocks.tolist() for one in trace.requests()] == [[0, 1], [0, 1, 2], [0]]


@pytest.mark.parametrize(
    ("name", "text", "needed"),
    [
        ("a.json", '{"block_size": 64,\n "requests": [}', "a.json, line 2"),
        ("a.json", '{"requests": []}', "a.json: not a session of kv-cache-tester: KeyError"),
        ("a.json", '{"block_size": 0, "requests": []}', "block_size 0 is not positive"),
        ("a.json", '{"block_size": 64, "requests": [{"t": 0}]}', "a.json, requests[0]: KeyError"),
        ("a.json", "[]", "a.json: not a session"),
        ("m.jsonl", '\n{"timestamp": 1}\n', "m.jsonl, line 2: KeyError"),
        ("m.jsonl", "{]\n", "m.jsonl, line 1"),
        (
            "m.jsonl",
            '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}',
            "m.jsonl, line 1: ValueError('1 hash_ids for 513 tokens')",
        ),
        ("m.jsonl", "", "the file has no requests"),
        ("m.csv", "", "give a folder of kv-cache-tester's"),
    ],
)
def test_a_bad_file_is_named_with_its_place(
    tmp_path: Path, name: str, text: str, needed: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BenchError) as found:
        read_trace(path)
    assert needed in str(found.value)
    assert len(str(found.value).splitlines()) == 1


def test_missing_and_mixed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no such file or folder"):
        read_trace(tmp_path / "none")
    with pytest.raises(BenchError, match=r"no \*\.json files"):
        read_trace(tmp_path)
    session_file(tmp_path, "a", [entry(0, [1])])
    session_file(tmp_path, "b", [entry(0, [1])], block_size=16)
    with pytest.raises(BenchError, match=r"b\.json.* 64 in earlier files"):
        read_trace(tmp_path)


def test_an_id_behind_two_prefixes_is_refused(tmp_path: Path) -> None:
    path = session_file(tmp_path, "a", [entry(0, [1, 2]), entry(1, [3, 2])])
    with pytest.raises(BenchError, match="two different prefixes"):
        read_trace(path)


def test_a_cap_ends_sessions_and_scaling_keeps_the_structure(tmp_path: Path) -> None:
    trace = read_trace(agentic(tmp_path / "traces"))
    capped = trace.capped(3 * 64 + 15)
    assert [len(one.steps) for one in capped.sessions] == [3, 1]
    assert trace.capped(64).sessions == ()
    small = trace.scaled(16)
    assert small.block_tokens == 16
    assert [one.input_tokens for one in small.sessions[1].requests()] == [50, 82]
    both = zip(small.requests(), trace.requests(), strict=True)
    assert all((one.blocks == other.blocks).all() for one, other in both)


def test_users_come_think_and_wait_for_their_sub_agents(tmp_path: Path) -> None:
    trace = read_trace(agentic(tmp_path / "traces"))
    pace = Pace(users=1, time_scale=0.5, think_s_max=4.0)
    events = list(virtual(trace, pace))
    assert len(events) == len(list(trace.requests())) == 7
    assert [at_s for at_s, _ in events] == sorted(at_s for at_s, _ in events)
    # First and, 4 s later, both sub-agents; then the parent has thought for 6 × 0.5 s.
    times = {id(request): at_s for at_s, request in events}
    sessions = [[times[id(one)] for one in s.requests()] for s in trace.sessions]
    begun = sessions[0][0]
    assert [at_s - begun for at_s in sessions[0]] == [0.0, 4.0, 4.0, 7.0, 13.0]
    other = sessions[1]
    assert other[1] - other[0] == 3.5
    assert min(sessions[0]) >= max(other) or min(other) >= max(sessions[0])  # one user
    together = list(virtual(trace, Pace(users=2, ramp_s=1.0)))
    assert {at_s for at_s, _ in together} >= {0.0, 1.0}


def test_requests_with_arrival_times_do_not_wait_for_answers(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "trace.jsonl"))
    pace = Pace(users=1, time_scale=2.0)
    assert [at_s for at_s, _ in virtual(trace, pace)] == [0.0, 3.0, 6.0]


def test_the_seed_decides_only_the_order(tmp_path: Path) -> None:
    for number in range(8):
        session_file(tmp_path, f"s{number}", [entry(0, [number + 1])])
    trace = read_trace(tmp_path)

    def order(seed: int) -> list[int]:
        events = virtual(trace, Pace(users=1, seed=seed))
        return [int(request.blocks[0]) for _, request in events]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


@pytest.mark.skipif(_REAL not in os.environ, reason=f"{_REAL} names no folder or file of traces")
def test_the_real_files_are_read_completely() -> None:
    trace = read_trace(Path(os.environ[_REAL]))
    requests = list(trace.requests())
    assert requests and trace.unique_tokens() > 0
    for one in requests:
        whole = one.input_tokens // trace.block_tokens
        assert len(one.blocks) in (whole, whole + 1)
