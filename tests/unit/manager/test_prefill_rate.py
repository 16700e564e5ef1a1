# SPDX-License-Identifier: Apache-2.0
"""The time of steps and the rate of prefill, with an engine that schedules ahead."""

from __future__ import annotations

import pytest

from vllm_nvmeof_offload.manager.handshake import CoreConfig
from vllm_nvmeof_offload.manager.load_or_recompute import Admission
from vllm_nvmeof_offload.manager.prefill_rate import StepMeter


class Engine:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.meter = StepMeter(lambda: self.now_s)

    def scheduled(self, now_s: float, *tokens: int) -> None:
        self.now_s = now_s
        self.meter.scheduled({f"r{number}": count for number, count in enumerate(tokens)})

    def prompt(self, tokens: int, *, step_tokens: int, token_s: float, pair_s: float) -> None:
        """Compute a prompt in steps: a token takes `token_s`, and `pair_s` for each before it."""
        for before in range(0, tokens, step_tokens):
            count = min(step_tokens, tokens - before)
            self.meter.scheduled({"a": count}, lambda before=before: {"a": before})
            self.ended(self.now_s + count * (token_s + pair_s * (before + count / 2)))

    def token_s(self, tokens: int, before: int) -> float:
        """What admission makes of the measurements."""
        admission = Admission(CoreConfig(), [1.0])
        admission.prefill_rate, admission.prefill_depth = self.meter.prefill_rate, self.meter.depth
        admission.depth_s = self.meter.depth_s
        return admission.token_s(tokens, before)

    def ended(self, now_s: float) -> None:
        self.now_s = now_s
        self.meter.ended()

    def figures(self) -> tuple[int, float, int]:
        return self.meter.steps, round(self.meter.seconds, 9), self.meter.tokens


def test_a_step_lasts_from_its_scheduling_to_its_output() -> None:
    engine = Engine()
    engine.scheduled(1.0, 100)
    engine.ended(1.5)
    engine.scheduled(7.0, 1, 1)
    engine.ended(7.1)
    assert engine.figures() == (2, 0.6, 102)


def test_a_step_scheduled_ahead_lasts_from_the_end_of_the_previous_one() -> None:
    engine = Engine()
    engine.scheduled(0.0, 100)
    engine.scheduled(0.1, 120)
    engine.ended(1.0)
    engine.scheduled(1.1, 80)
    engine.ended(3.0)
    engine.ended(4.0)
    assert engine.figures() == (3, 4.0, 300)
    assert engine.meter.prefill_rate == pytest.approx(
        (0.64 * 100 + 0.8 * 120 + 80) / (0.64 * 1 + 0.8 * 2 + 1)
    )


def test_empty_steps_do_not_count_and_take_no_time_from_others() -> None:
    engine = Engine()
    engine.scheduled(0.0)
    engine.ended(0.5)
    engine.scheduled(0.6, 64)
    engine.scheduled(0.7)
    engine.ended(0.8)
    engine.ended(0.9)
    assert engine.figures() == (1, 0.2, 64)


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        ((1, 1, 1), False),
        ((63,), False),
        ((64,), True),
        ((32, 32), True),
        ((64, 1, 1, 1, 1), True),
        ((79, 1, 1, 1, 1, 1), False),  # 16 for each that decodes
        ((80, 1, 1, 1, 1, 1), True),
        ((), False),
    ],
)
def test_steps_that_mostly_compute_prompts_give_the_prefill_rate(
    tokens: tuple[int, ...], counts: bool
) -> None:
    engine = Engine()
    engine.scheduled(0.0, *tokens)
    engine.ended(2.0)
    assert engine.meter.prefill_rate == (sum(tokens) / 2.0 if counts else 0.0)


def test_speculative_decoding_is_not_prefill() -> None:
    engine = Engine()
    engine.scheduled(0.0, 8192)
    engine.ended(1.0)
    for step in range(20):
        engine.scheduled(1.0 + step, *[5] * 32)
        engine.ended(2.0 + step)
    assert engine.meter.prefill_rate == 8192


def test_old_samples_fade() -> None:
    engine = Engine()
    for step in range(40):
        rate = 1000 if step < 20 else 4000
        engine.scheduled(float(step), rate)
        engine.ended(step + 1.0)
    assert engine.meter.prefill_rate == pytest.approx(4000, rel=0.02)


def test_the_small_steps_of_a_server_that_loads_do_not_make_computing_look_slow() -> None:
    """A step takes 0.1 s plus 1 ms per token, so the rest of a prompt by itself takes longer
    per token.
    """
    engine = Engine()
    engine.scheduled(0.0, 2000)
    engine.ended(2.1)
    for _ in range(100):
        engine.scheduled(engine.now_s, 80)
        engine.ended(engine.now_s + 0.18)
    assert engine.meter.prefill_rate == pytest.approx(2000 / 2.1)
    engine.scheduled(engine.now_s, 1900)
    engine.ended(engine.now_s + 4.2)
    assert engine.meter.prefill_rate == pytest.approx((0.8 * 2000 + 1900) / (0.8 * 2.1 + 4.2))


def test_prefill_time_is_counted() -> None:
    engine = Engine()
    assert engine.meter.prompts_s() == 0.0
    engine.scheduled(1.0, 100)
    engine.now_s = 1.5
    assert engine.meter.prompts_s() == 0.5, "the step that is under way"
    engine.ended(2.0)
    engine.now_s = 9.0
    assert engine.meter.prompts_s() == 1.0, "nothing runs"
    engine.scheduled(9.0, 1, 1, 1)
    engine.ended(10.0)
    assert engine.meter.prompts_s() == 1.0, "only decodes"
    engine.scheduled(10.0, 97, 1, 1, 1)
    engine.scheduled(10.5, 50)
    engine.ended(11.0)
    assert engine.meter.prompts_s() == pytest.approx(1.97), "their share"
    engine.now_s = 12.0
    assert engine.meter.prompts_s() == pytest.approx(2.97), "since the step before has ended"
    engine.meter.clear()
    assert engine.meter.prompts_s() == pytest.approx(2.97)


def test_the_longest_recent_step_is_counted_without_its_prompts() -> None:
    engine = Engine()
    engine.scheduled(0.0, 1, 1)
    engine.ended(0.3)
    engine.scheduled(0.3, 1, 1)
    engine.ended(0.4)
    assert engine.meter.decode_s == pytest.approx(0.8 * 0.3)
    engine.scheduled(0.4, 1000)
    engine.ended(9.0)
    assert engine.meter.decode_s == pytest.approx(0.64 * 0.3), "prompts do not count"


def test_restarting_the_count_keeps_the_learned_rate() -> None:
    engine = Engine()
    engine.scheduled(0.0, 500)
    engine.ended(1.0)
    engine.scheduled(1.0, 500)
    engine.meter.clear()
    assert engine.figures() == (0, 0.0, 0)
    assert engine.meter.prefill_rate == 500
    engine.ended(2.0)
    assert engine.figures() == (1, 1.0, 500)


def test_unmatched_outputs_and_steps_are_ignored() -> None:
    engine = Engine()
    engine.ended(1.0)
    for step in range(100):
        engine.scheduled(float(step), 1)
    for _ in range(100):
        engine.ended(200.0)
    assert engine.meter.steps == 8, "those that an engine may be ahead"


def test_a_step_of_zero_time_does_not_change_the_rate() -> None:
    engine = Engine()
    engine.scheduled(0.0, 500)
    engine.ended(0.0)
    assert (engine.meter.prefill_rate, engine.meter.steps) == (0.0, 1)


def test_tokens_behind_many_others_take_longer() -> None:
    """As attention makes them: the end of a long prompt takes several times its beginning."""
    engine = Engine()
    for _ in range(3):
        engine.prompt(32_768, step_tokens=8192, token_s=5e-6, pair_s=7e-10)
    assert engine.meter.depth_s == pytest.approx(7e-10)
    for tokens, before in ((8192, 0), (8192, 24_576), (1000, 100_000)):
        expected = 5e-6 + 7e-10 * (before + tokens / 2)
        assert engine.token_s(tokens, before) == pytest.approx(expected)
    assert 8192 / engine.meter.prefill_rate > 1.5 * 8192 * engine.token_s(8192, 0)


def test_short_prompts_in_between_leave_the_slope() -> None:
    """Their steps are at one depth; the rate follows them, and what is deep still takes longer."""
    engine = Engine()
    engine.prompt(32_768, step_tokens=8192, token_s=5e-6, pair_s=7e-10)
    for _ in range(500):
        engine.prompt(8192, step_tokens=8192, token_s=5e-6, pair_s=7e-10)
    assert engine.token_s(8192, 0) == pytest.approx(5e-6 + 7e-10 * 4096, rel=0.02)
    assert engine.token_s(8192, 24_576) == pytest.approx(5e-6 + 7e-10 * 28_672, rel=0.02)


def test_a_slower_model_is_followed_at_the_slope_that_is_known() -> None:
    engine = Engine()
    engine.prompt(32_768, step_tokens=8192, token_s=5e-6, pair_s=7e-10)
    for _ in range(30):
        engine.prompt(8192, step_tokens=8192, token_s=9e-6, pair_s=7e-10)
    assert engine.token_s(8192, 0) == pytest.approx(9e-6 + 7e-10 * 4096, rel=0.05)


@pytest.mark.parametrize("pair_s", [0.0, -1e-12])
def test_a_rate_that_no_depth_lowers_has_no_slope(pair_s: float) -> None:
    """Windows and states do not read what is far behind; a slope below 0 is noise."""
    engine = Engine()
    engine.prompt(32_768, step_tokens=8192, token_s=5e-6, pair_s=pair_s)
    assert engine.meter.depth_s == pytest.approx(0.0, abs=1e-18)
    assert engine.token_s(8192, 100_000) == pytest.approx(1 / engine.meter.prefill_rate)


def test_depths_too_near_to_each_other_give_no_slope() -> None:
    engine = Engine()
    for number in range(20):
        engine.meter.scheduled({"a": 1000}, lambda number=number: {"a": number % 2 * 400})
        engine.ended(engine.now_s + 1.0 + number % 2)
    assert engine.meter.depth_s == 0.0


def test_a_steep_slope_leaves_the_first_tokens_a_time() -> None:
    """Two slow steps at a depth, by chance: nothing is ever computed in no time."""
    engine = Engine()
    for before, seconds in ((0, 0.1), (9000, 5.0), (18_000, 20.0)) * 3:
        engine.meter.scheduled({"a": 1000}, lambda before=before: {"a": before})
        engine.ended(engine.now_s + seconds)
    assert engine.token_s(1, 0) > 0


def test_depths_are_asked_for_only_where_a_step_counts() -> None:
    meter = StepMeter(lambda: 0.0)

    def asked() -> dict[str, int]:
        raise AssertionError("a step of decodes needs no depths")

    meter.scheduled(dict.fromkeys("abcd", 1), asked)
    meter.scheduled({"a": 17, **dict.fromkeys("bcdefgh", 1)}, asked)
