# SPDX-License-Identifier: Apache-2.0
"""The tier simulator, on tiny made-up traces; its manager is the product's."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_nvmeof_bench.simulate import Ask, Settings, Shape, World, asks_of, run
from vllm_nvmeof_bench.traces import Pace, read_trace

from tests.unit.bench.trace_files import agentic, entry, mooncake, session_file
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
