# SPDX-License-Identifier: Apache-2.0
"""Paired statistics and goals of `bench cost`, on made-up samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm_nvmeof_bench.cost import Settings
from vllm_nvmeof_bench.reports.cost import (
    goals,
    ratios_of,
    scheduler_share,
    within,
)
from vllm_nvmeof_bench.results import (
    BenchError,
    Goal,
    Paired,
    median_of,
    missed,
    ratios,
)

from tests.unit.bench.made_up_costs import CONDITIONS, everything, rounds, sample
from vllm_nvmeof_offload.units import MIB


def row(rows: list[Goal], start: str) -> Goal:
    (found,) = (one for one in rows if one.name.startswith(start))
    return found


def test_noise_that_hits_both_runs_of_a_pair_cancels() -> None:
    noise = [1.0, 7.0, 0.3, 2.0, 5.0, 11.0]
    found = ratios([1.05 * value for value in noise], noise)
    assert found.middle == pytest.approx(1.05)
    assert found.interval == pytest.approx((1.05, 1.05))
    assert found.n == 6
    assert not found.contains(1.0)


def test_the_interval_is_a_reproducible_bootstrap_of_the_median() -> None:
    values = [0.90, 0.95, 0.99, 1.00, 1.01, 1.02, 1.03, 1.10, 1.20]
    found = ratios(values, [1.0] * 9)
    assert found.middle == pytest.approx(1.01)
    # The median of nine draws is at most the k-th smallest when five draws are: a binomial sum,
    # 0.1 % for the smallest, 3.0 % for the 2nd. So 2.5 % lie below the 2nd; above, the 8th.
    assert found.interval == pytest.approx((0.95, 1.10))
    assert found == ratios(values, [1.0] * 9)
    assert found.contains(1.0)


def test_the_interval_covers_the_median_as_often_as_stated() -> None:
    import numpy as np

    dice = np.random.default_rng(1)
    covered = sum(
        ratios(np.exp(dice.normal(0.03, 0.05, 20)).tolist(), [1.0] * 20).contains(np.exp(0.03))
        for _ in range(40)
    )
    assert covered >= 34


def test_few_rounds_have_a_median_and_no_interval() -> None:
    found = ratios([1.0, 1.1, 1.3], [1.0] * 3)
    assert found.middle == pytest.approx(1.1)
    assert found.interval is None
    assert not found.contains(1.1)


def test_only_rounds_that_both_arms_have_are_paired() -> None:
    samples = [sample("none", "single", i, 1.0) for i in range(6)]
    samples += [sample("ours", "single", i, 2.0) for i in range(3, 9)]
    found = ratios_of(samples, "ours", "none", "single", "ttft_s")
    assert found is not None
    assert (found.n, found.middle) == (3, 2.0)
    assert ratios_of(samples, "ours", "none", "batch", "ttft_s") is None
    assert ratios_of(samples, "ours", "none", "single", "scheduler_us_per_step") is None
    assert ratios_of(samples, "ours", "none", "single", "written_bytes_per_1k_tokens") is None


@pytest.mark.parametrize(
    ("ratio", "more_is_worse", "fine"),
    [
        (Paired(1.019, (1.018, 1.02), 9), True, True),
        (Paired(1.021, (1.005, 1.04), 9), True, False),
        (Paired(1.05, (0.99, 1.12), 9), True, True),  # inside the noise
        (Paired(0.90, (0.88, 0.92), 9), True, True),  # faster
        (Paired(0.90, (0.88, 0.92), 9), False, False),
        (Paired(0.985, (0.983, 0.987), 9), False, True),
        (Paired(1.10, (1.05, 1.15), 9), False, True),
        (Paired(1.03, None, 2), True, False),
    ],
)
def test_within_two_per_cent_or_inside_the_noise(
    ratio: Paired, more_is_worse: bool, fine: bool
) -> None:
    assert within(ratio, more_is_worse) is fine


def test_goals_are_reached_by_good_samples() -> None:
    rows = goals(everything(), CONDITIONS)
    assert len(rows) == 6
    assert all(one.reached is True for one in rows), missed(rows)
    assert row(rows, "TTFT").shown == "1.010 (1.010 to 1.010)"
    assert row(rows, "our scheduler / steps, batch").shown == "1.00%"


def test_a_cost_that_the_noise_does_not_explain_is_missed() -> None:
    rows = goals(everything(ours=1.05), CONDITIONS)
    assert [one.name.split()[0] for one in missed(rows)] == ["TTFT,", "throughput,"]


def test_a_cost_within_the_noise_is_reported_as_such() -> None:
    seconds = (0.5, 2.0, 1.05, 3.0, 0.7, 1.5, 1.1, 0.9)
    samples = rounds("none", "single")
    samples += [sample("ours", "single", i, noise) for i, noise in enumerate(seconds)]
    samples = [
        replace(one, ttft_s=one.ttft_s * 1.2 if one.arm == "ours" else one.ttft_s)
        for one in samples
    ]
    found = row(goals(samples, {}), "TTFT")
    assert found.reached is True
    assert found.shown.endswith(", inside the noise")


def test_an_unfair_run_is_missed() -> None:
    samples = everything()
    for unfair in ({"hits": 32}, {"preemptions": 1}, {"loaded_bytes": 4096}):
        rows = goals([replace(samples[0], **unfair), *samples[1:]], CONDITIONS)  # type: ignore[arg-type]
        assert [one.name for one in missed(rows)] == [row(rows, "cache hits").name]
    rows = goals(samples, {"idle_cores": {"none": 0.0, "ours": 0.9}})
    assert (row(rows, "cores").shown, row(rows, "cores").where) == ("0.900", "ours")
    assert row(rows, "cores").reached is False


def test_an_unmeasured_goal_is_neither_reached_nor_missed() -> None:
    rows = goals([], {})
    assert len(rows) == 6
    assert all(one.reached is None for one in rows)
    unknown = goals(everything(known=False), CONDITIONS)
    assert [one.reached for one in unknown] == [True, True, None, None, True, True]


def test_the_schedulers_share_is_computed_over_all_rounds() -> None:
    samples = [
        sample("ours", "batch", 0, 1.0, scheduler_s=0.1, step_s=1.0),
        sample("ours", "batch", 1, 1.0, scheduler_s=0.1, step_s=3.0),
    ]
    assert scheduler_share(samples, "ours", "batch") == pytest.approx(0.05)
    samples.append(sample("ours", "batch", 2, 1.0))
    assert scheduler_share(samples, "ours", "batch") is None


def test_figures_are_per_step_and_per_1000_tokens() -> None:
    one = sample("ours", "batch", 0, 2.0, tokens=500, scheduler_s=0.01, scheduler_steps=40)
    one = replace(one, step_tokens=2000)
    assert one.scheduler_us_per_step == pytest.approx(250.0)
    assert one.scheduler_us_per_1k_tokens == pytest.approx(5000.0)
    assert one.tokens_per_s == 250.0
    assert median_of([one], "cpu_s_per_1k_tokens", arm="ours", case="batch") == pytest.approx(8.0)
    assert one.stored_bytes_per_1k_tokens == 60 * MIB


def test_settings_refuse_incomparable_runs() -> None:
    with pytest.raises(BenchError, match="no arm 'tier'"):
        Settings(arms=("none", "tier"))
    for arms in (("ours",), ("none",), ()):
        with pytest.raises(BenchError, match="nothing to"):
            Settings(arms=arms)
    with pytest.raises(BenchError, match="pairs"):
        Settings(pairs=0)


def test_everything_fits_in_the_gpu_cache_several_times() -> None:
    settings = Settings()
    assert settings.arms == ("none", "ours", "ours_prompt_only")
    assert (settings.gpu_blocks - 1) * 32 >= 4 * settings.tokens_at_once
    assert settings.model_len > settings.single_prompt_tokens + settings.single_answer_tokens
