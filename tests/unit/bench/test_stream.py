# SPDX-License-Identifier: Apache-2.0
"""`bench stream`: goals on made-up samples, prompts and servers, real loads of tiny sizes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from vllm_nvmeof_bench.reports.stream import (
    admission_ratio,
    goals,
    load_ratio,
    places,
    round_ratios,
)
from vllm_nvmeof_bench.results import BenchError, Goal, select, spread_of
from vllm_nvmeof_bench.servers.client import Answer
from vllm_nvmeof_bench.servers.server import split_extra
from vllm_nvmeof_bench.stream import (
    ADMISSION,
    ARMS,
    PARTS,
    PREFETCH,
    SHAPE,
    Agreement,
    PacedCopyEngine,
    ReturnPlan,
    Settings,
    run,
    steps,
)

from tests.unit.bench.stream_made_up import CONDITIONS, everything, load, times
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.units import GIB, KIB, MIB


def row(rows: list[Goal], start: str) -> Goal:
    (found,) = (one for one in rows if one.name.startswith(start))
    return found


def test_every_goal_is_listed_and_reached_by_good_samples() -> None:
    rows = goals(everything(), CONDITIONS)
    assert len(rows) == 5
    assert all(one.reached is True for one in rows), rows


def test_a_load_is_compared_with_the_larger_of_its_own_round() -> None:
    samples = [
        *times("load", "memory", "ours", [[1.0], [3.0], [9.0]], 4),
        *times("load", "memory", "read", [[0.5], [2.0], [9.0]], 4),
        *times("load", "memory", "copy", [[0.8], [1.0], [10.0]], 4),
    ]
    assert round_ratios(samples, "ours", ("read", "copy"), "memory", 4) == pytest.approx(
        [1.25, 1.5, 0.9]
    )
    ratio = load_ratio(samples, "memory", 4)
    assert ratio is not None
    assert (ratio.value, ratio.n) == (pytest.approx(1.25), 3)


def test_a_round_that_lacks_an_arm_does_not_count() -> None:
    samples = load(1, [1.0, 1.0])
    gone = select(samples, part="load", arm="copy")[0]
    samples.remove(gone)
    assert len(round_ratios(samples, "ours", ("read", "copy"), "memory", 1)) == 1


def test_the_worst_size_decides_and_is_named() -> None:
    samples = [*load(0.5, [0.5] * 3), *load(8, [9.6, 8.0, 9.6])]
    found = row(goals(samples, {"settings": {"parts": ["load"]}}), "load / larger")
    assert (found.measured, found.where) == (pytest.approx(1.2), "8× the CPU tier")
    assert found.reached is False


def test_copies_as_slow_as_the_disk_have_a_separate_row() -> None:
    samples = [*load(2, [2.0] * 3), *load(2, [3.0] * 3, "paced")]
    rows = goals(samples, {"settings": {"parts": ["load"]}})
    assert [one.reached for one in rows] == [True, False]


@pytest.mark.parametrize(
    ("at", "auto", "better", "value"),
    [(10, 0.55, "recomputing", 1.1), (200, 0.3, "loading", 1.5)],
)
def test_admission_is_measured_against_the_better_of_both(
    at: float, auto: float, better: str, value: float
) -> None:
    samples = [
        *times("admission", "ttft", "never", [[0.5, 0.5]]),
        *times("admission", "ttft", "always", [[1.0]], 10),
        *times("admission", "ttft", "always", [[0.2]], 200),
        *times("admission", "ttft", "auto", [[auto]], at),
    ]
    ratio = admission_ratio(samples, at)
    assert ratio is not None
    assert ratio.value == pytest.approx(value)
    assert better in ratio.where


def test_each_side_of_the_crossover_is_judged_by_itself() -> None:
    samples = [one for one in everything() if (one.arm, one.at) != ("auto", 10)]
    found = row(goals(samples, {}), "admission")
    assert found.measured is None
    assert found.reached is None


def test_unrequested_parts_have_no_rows() -> None:
    rows = goals([], {"settings": {"parts": ["resume"]}})
    assert [(one.name, one.reached) for one in rows] == [
        ("resume after preemption / recomputed", None)
    ]


def test_a_different_answer_misses_a_goal() -> None:
    part = {"answers": {"compared": 10, "different": 1}}
    found = row(goals([], {"parts": {"resume": part, "prefetch": part}}), "answers")
    assert (found.measured, found.n, found.reached) == (2, 20, False)


def test_throttles_and_sizes_ascend_and_none_is_last() -> None:
    assert places(everything(), "admission") == [10, 200, 0]
    assert places(everything(), "load", "paced") == [0.5, 1, 8]


def test_few_values_show_their_extremes_many_their_percentiles() -> None:
    few, many = spread_of([3.0, 1.0, 2.0]), spread_of([float(i) for i in range(1, 101)])
    assert few is not None
    assert (few.low, few.median, few.high) == (1.0, 2.0, 3.0)
    assert many is not None
    assert (many.low, many.high, many.n) == (5.0, 95.0, 100)
    assert spread_of([]) is None


def test_settings_split_the_tier_as_the_product_does() -> None:
    settings = Settings(tier_bytes=64 * MIB)
    assert (settings.cache_slots, settings.stream_slots) == (128, 42)
    assert settings.chunks(0.25) == 32
    assert settings.chunks_max == 1024
    assert ("paced", 2) in settings.cases
    assert not [case for case, _ in Settings(throttle_mb_per_s=0).cases if case == "paced"]
    with pytest.raises(BenchError, match="rounds"):
        Settings(rounds=0)


PLAN = ADMISSION


def answer(*tokens: int) -> Answer:
    return Answer(sent=0.0, tokens=list(tokens))


def test_answers_agree_as_far_as_both_reach() -> None:
    agreement = Agreement()
    agreement.add("a", answer(1, 2))
    assert agreement.facts() == {"compared": 0, "different": 0}
    agreement.add("a", answer(1, 2, 3))
    agreement.add("b", answer(1))
    agreement.add("a", answer(1, 3))
    assert agreement.facts() == {"compared": 2, "different": 1}


def test_prompts_are_the_same_for_a_seed_and_differ_from_each_other() -> None:
    prompts = PLAN.prompts(3)
    assert prompts == PLAN.prompts(3) != PLAN.prompts(4)
    assert len({tuple(prompt[:128]) for prompt in prompts}) == PLAN.count
    assert {len(prompt) for prompt in prompts} == {PLAN.prompt_tokens}


@pytest.mark.parametrize(
    ("plan", "arm"),
    [(PLAN, "always"), (replace(PLAN, answer_tokens=64), "auto"), (PREFETCH, "off")],
)
def test_a_server_gets_valid_keys_and_sizes_that_fit(
    tmp_path: Path, plan: ReturnPlan, arm: str
) -> None:
    spec = plan.server(tmp_path / "models", tmp_path, arm)
    assert spec.offload is not None
    assert spec.offload.size_gib is not None
    settings = parse_config(*split_extra(spec.offload.extra))
    prompt_bytes = plan.prompt_tokens * SHAPE.kv_bytes_per_token
    assert settings.pool_bytes is not None
    assert settings.pool_bytes > plan.count * prompt_bytes > spec.offload.size_gib * GIB
    needed = plan.prompt_tokens + plan.answer_tokens
    assert needed <= spec.gpu_tokens < 2 * plan.prompt_tokens
    assert spec.max_model_len > needed
    assert PLAN.server(tmp_path / "models", tmp_path, "never").offload is None


def test_every_part_knows_how_much_it_measures() -> None:
    settings = Settings(rounds=2)
    parts = [Settings(parts=(part,), rounds=2) for part in PARTS]
    assert steps(settings) == sum(map(steps, parts))
    assert list(map(steps, parts[1:])) == [4, 2 * (1 + 2 * 4)]
    assert Settings(rounds=9).server_rounds == 3


TINY = Settings(
    parts=("load",),
    rounds=2,
    throttle_mb_per_s=0,
    tier_bytes=MIB,
    chunk_bytes=64 * KIB,
    block_bytes=16 * KIB,
    sizes=(0.5, 4),
    pause_s=0.0,
)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_every_arm_moves_real_bytes_once_per_round_and_leaves_nothing(
    tmp_path: Path, engine: str
) -> None:
    settings = replace(TINY, io_engine=engine, directory=tmp_path / "disk")
    reported: list[tuple[int, int, str]] = []
    parts = []
    samples, conditions = run(
        settings,
        lambda *progress: reported.append(progress),
        lambda found, _: parts.append(len(found)),
    )
    measured = [(one.round, one.at, one.arm) for one in samples]
    expected = {(r, at, arm) for r in range(2) for at in (0.5, 4.0) for arm in ARMS["load"]}
    assert set(measured) == expected
    assert len(measured) == len(expected) == steps(settings) == parts[-1]
    assert all(one.seconds > 0 and one.cpu_s is not None for one in samples)
    assert {one.payload_bytes for one in samples} == {MIB // 2, 4 * MIB}
    assert reported[-1] == (steps(settings), steps(settings), "done")
    assert conditions["parts"]["load"]["throttle"] == "none"
    assert '"/' not in json.dumps(conditions), "no absolute path"
    assert list(tmp_path.iterdir()) == [], "the run cleans up"


def test_too_little_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give another --dir"):
        run(replace(TINY, tier_bytes=1 << 60, directory=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_paced_copy_ends_when_its_bytes_would_have_passed() -> None:
    source, destination = np.arange(MIB, dtype=np.uint8), np.zeros(MIB, np.uint8)
    half = MIB // 2
    pieces = [
        np.array([[destination.ctypes.data + at, source.ctypes.data + at, half]], np.uint64)
        for at in (0, half)
    ]
    done = Event()
    engine = PacedCopyEngine(on_done=done.set)
    try:
        engine.bytes_per_s = 20 * MIB
        begin_s = time.perf_counter()
        tickets = [engine.submit(Direction.LOAD, part, None) for part in pieces]
        finished: list[int] = []
        while len(finished) < 2:
            assert done.wait(10)
            done.clear()
            finished += [ticket for ticket, outcome in engine.poll() if outcome.ok]
        assert time.perf_counter() - begin_s >= 0.05
    finally:
        engine.close()
    assert finished == tickets
    assert np.array_equal(destination, source)
