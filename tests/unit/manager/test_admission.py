# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: the rates of reading and of prefill, and when a load is overdue."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import pairwise

import pytest

from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.manager.handshake import CoreConfig
from vllm_nvmeof_offload.manager.load_or_recompute import Admission, Decision
from vllm_nvmeof_offload.manager.prefill_rate import StepMeter
from vllm_nvmeof_offload.protocol import CancelCommand

from .bench import Bench, keys_of
from .test_holds import HoldsBench

SLOT_BYTES = 1_000_000
TOKENS_PER_CHUNK = 100
#: Probes that one declined request brings.
PROBES = 4


class AdmissionRig:
    """An admission; a chunk is 1 MB and 100 tokens.

    mb_per_s: by lane. At 1000 tokens/s a chunk takes 0.1 s to compute: as reading at 10 MB/s.
    """

    def __init__(
        self, tokens_per_s: float = 1000.0, mb_per_s: Sequence[float] = (10.0,), **config: object
    ) -> None:
        self.admission = Admission(
            CoreConfig(**config),  # type: ignore[arg-type]
            [rate * 1e6 for rate in mb_per_s],
        )
        self.admission.prefill_rate = tokens_per_s

    def rates(self, *mb_per_s: float) -> None:
        self.admission.read_rates = [rate * 1e6 for rate in mb_per_s]

    def decide(self, *read: int, queued: Sequence[int] | None = None) -> Decision:
        """The cost of reading so many chunks per lane, behind those of other loads."""
        queued_bytes = [count * SLOT_BYTES for count in queued or [0] * len(read)]
        tokens = sum(read) * TOKENS_PER_CHUNK
        return self.admission.decide([count * SLOT_BYTES for count in read], queued_bytes, tokens)

    def loads(self, *read: int, queued: Sequence[int] | None = None) -> bool:
        return self.decide(*read, queued=queued).load

    def load(
        self, seconds: float, *read: int, queued: Sequence[int] | None = None, missed: bool = False
    ) -> None:
        """Load so many chunks per lane, in this time."""
        decision = self.decide(*read, queued=queued)
        assert decision.load
        self.ended(seconds, decision, missed)

    def ended(self, seconds: float, decision: Decision, missed: bool = False) -> None:
        """A load that was decided on ends."""
        assert decision.limit_s is not None
        late = seconds > decision.limit_s / 2
        self.admission.loaded(seconds, decision.predicted_s, missed=missed, late=late)

    def probed(self, missed: bool = False) -> None:
        """A probe ends."""
        self.admission.probed(missed=missed)

    def probes_until(self, *read: int) -> int:
        """Count the probes that go well until these chunks are loaded again."""
        count = 0
        while not self.loads(*read):
            self.probed()
            count += 1
        return count


@pytest.mark.parametrize(("tokens_per_s", "mb_per_s"), [(0.0, 1e-9), (1000.0, 0.0), (0.0, 0.0)])
def test_with_a_rate_unknown_everything_is_loaded(tokens_per_s: float, mb_per_s: float) -> None:
    rig = AdmissionRig(tokens_per_s, [mb_per_s])
    decision = rig.decide(8)
    assert decision.load and rig.admission.reading
    assert (decision.limit_s is None) is (tokens_per_s == 0), "nothing is cut off"


def test_what_is_behind_many_tokens_is_loaded_and_what_is_behind_few_computed() -> None:
    """0.1 s to compute a chunk behind 10,000 tokens, 5 µs more or less for each token more or less
    before one of its tokens; 0.1 s to read it."""
    rig = AdmissionRig()
    admission = rig.admission
    admission.prefill_depth, admission.depth_s = 10_000.0, 5e-8

    def decide(before: int) -> Decision:
        admission.reading = True
        return admission.decide([SLOT_BYTES], [0], TOKENS_PER_CHUNK, before=before)

    assert not decide(0).load and not decide(9_900).load
    assert decide(10_000).load and decide(50_000).load
    assert admission.token_s(100, 50_000) == pytest.approx(1e-3 + 5e-8 * 40_050)


def test_the_estimate_is_a_step_and_the_bytes_of_the_busiest_lane() -> None:
    rig = AdmissionRig(mb_per_s=[100.0, 20.0])
    assert rig.decide(8, 0).predicted_s == pytest.approx(0.08)
    assert rig.decide(8, 4).predicted_s == pytest.approx(0.2)
    assert rig.decide(8, 4, queued=[0, 8]).predicted_s == pytest.approx(0.6)
    assert rig.decide(8, 0, queued=[0, 8]).predicted_s == pytest.approx(0.08)
    rig.admission.step_s = 0.03
    assert rig.decide(8, 0).predicted_s == pytest.approx(0.11)


def test_the_pool_is_avoided_when_slower_and_used_again_when_clearly_faster() -> None:
    rig = AdmissionRig(mb_per_s=[10.1])  # 0.99 of computing
    assert rig.loads(8)
    rig.rates(9.9)
    assert not rig.loads(8)
    rig.rates(12.4)  # 0.81: faster, but not by enough
    assert not rig.loads(8)
    rig.rates(12.6)  # 0.79
    assert rig.loads(8)
    rig.rates(10.1)
    assert rig.loads(8)


def test_how_much_longer_loads_take_than_predicted_is_learned() -> None:
    rig = AdmissionRig(mb_per_s=[20.0])
    decision = rig.decide(8)  # 0.4 s of bytes, and 0.8 s to compute
    rig.ended(1.2, decision)
    assert rig.admission.slowness == pytest.approx(2.0)
    rig.ended(2.0, decision)
    assert rig.admission.slowness == pytest.approx(3.5)
    rig.ended(1.2, decision)
    assert rig.admission.slowness == pytest.approx(3.5), "it is late, so the pool is no faster"
    rig.ended(0.6, decision)
    assert rig.admission.slowness == pytest.approx(2.5)


def test_loads_that_hide_or_that_peers_help_with_are_loaded_from_a_slower_pool() -> None:
    """At best a load counts half of what is predicted: it will not hide for ever."""
    rig = AdmissionRig(mb_per_s=[11.0])
    for _ in range(20):
        rig.load(0.05, 8)
    assert rig.admission.slowness == pytest.approx(0.5)
    rig.rates(5.5)
    assert rig.loads(8)
    rig.rates(4.5)
    assert not rig.loads(8)


def test_a_pool_that_hangs_repeatedly_needs_more_and_more_probes() -> None:
    rig = AdmissionRig(mb_per_s=[100.0])
    needed = []
    for _ in range(12):
        rig.load(1.7, 8, missed=True)
        needed.append(rig.probes_until(8))
    assert needed[0] <= PROBES, "the first time the next request will do"
    assert all(1.5 * few < more < 3 * few for few, more in pairwise(needed[3:9]))
    assert 128 < needed[-1] == needed[-2] <= 1024, "and never more than that"
    for _ in range(9):  # loads that go well
        rig.load(0.08, 8)
    rig.load(1.7, 8, missed=True)
    assert not rig.loads(8)
    assert rig.probes_until(8) <= PROBES


def test_a_load_cut_off_before_any_rate_was_known_counts_in_full() -> None:
    rig = AdmissionRig(mb_per_s=[0.0])
    rig.load(1.6, 8, missed=True)
    assert not rig.loads(8)


def test_a_disappointing_pool_stays_avoided_until_probes_go_well() -> None:
    """A wrong estimate cannot keep the pool switched off: declined loads are probed."""
    rig = AdmissionRig(mb_per_s=[100.0])
    for _ in range(20):
        rig.probed(missed=True)
    assert not rig.loads(8)
    assert rig.probes_until(8) <= PROBES


def test_a_load_is_cut_off_at_twice_the_compute_time_but_not_before_250_ms() -> None:
    rig = AdmissionRig(mb_per_s=[100.0])
    assert rig.decide(8).limit_s == pytest.approx(1.6)
    assert rig.decide(1).limit_s == 0.25
    rig.admission.step_s = 0.08  # a load begins when the step that brings it ends
    assert rig.decide(1).limit_s == pytest.approx(0.36)
    rig.admission.step_s = 0.0
    rig.rates(0.1)
    assert rig.decide(8).limit_s is None, "nothing of the pool is loaded"


@pytest.mark.parametrize(("seconds", "reading"), [(0.12, True), (0.13, False)])
def test_a_small_load_that_lost_little_time_does_not_disappoint(
    seconds: float, reading: bool
) -> None:
    """A chunk is computed in 0.1 s; half of the least limit does not count."""
    rig = AdmissionRig(mb_per_s=[100.0])
    rig.load(seconds, 1)
    assert rig.admission.reading is reading


# -- when a load is overdue, and how its time changes the estimates -------------------

#: How slow a load or a probe counts of which nothing came, and for which no time was predicted.
HANGS = 16.0


def slowness(bench: Bench) -> float:
    return bench.core.gauges()["load_slowness"]


class Watch:
    """A core with loads that have limits, and a model that computes prompts."""

    def __init__(self, chunks: int = 4) -> None:
        self.bench = HoldsBench()
        self.core = self.bench.core
        self.bench.in_the_pool(*range(chunks))
        self.core.take_commands()

    def load(self, number: int, limit_s: float | None) -> int:
        return self.core.prepare_load(keys_of(number), limit_s).op

    def cut(self, now_s: float, prompts_s: float = 0.0) -> list[int]:
        """The loads that a step cuts off at this time."""
        self.bench.now_s, self.bench.prompts_s = now_s, prompts_s
        self.core.turn()
        commands = self.core.take_commands()
        return [command.target_op for command in commands if isinstance(command, CancelCommand)]


def test_a_load_without_a_limit_is_never_cut_off() -> None:
    watch = Watch()
    watch.load(0, None)
    assert watch.cut(1e6) == []


def test_a_load_that_takes_longer_than_its_limit_is_cut_off_and_teaches() -> None:
    bench = HoldsBench()
    core = bench.core
    core.admission.prefill_rate = 100.0
    bench.in_the_pool(0, 1)
    core.take_commands()
    command = core.prepare_load(keys_of(0, 1), limit_s=0.5, predicted_s=0.1)
    core.turn()
    bench.now_s = 0.4
    core.turn()
    assert core.take_commands() == []
    bench.now_s = 0.6
    core.turn()
    (cancel,) = core.take_commands()
    assert isinstance(cancel, CancelCommand)
    assert (cancel.target_op, cancel.indexes) == (command.op, None), "all of it"
    assert core.counters["loads_cut"] == 1
    bench.report(command.op, (0, CANCELLED), (1, CANCELLED))
    assert slowness(bench) == pytest.approx(6), "at once, because it is at least so slow"
    assert bench.hits([0, 1]) == [0, 1]
    assert bench.source(0) is Source.POOL


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.0])
def test_prompts_computed_after_a_load_has_ended_do_not_make_it_look_fast(after_s: float) -> None:
    """Its report waits for the step that computes them. The load takes 1 s, and computing 0.4 s."""
    bench = HoldsBench(tokens_per_chunk=100)
    core, bench.prompts_s = bench.core, 100.0
    bench.in_the_pool(*range(4))
    load = core.prepare_load(keys_of(*range(4)), 0.8, predicted_s=0.2)
    bench.now_s += 1.0
    bench.now_s += after_s
    bench.prompts_s += after_s
    bench.report(load.op, seconds=1.0)
    assert slowness(bench) == pytest.approx((1 + 5) / 2)
    assert not core.admission.reading


def test_a_cache_slot_with_the_wrong_content_says_nothing_of_the_pools_copy() -> None:
    bench = Bench(cache=4, pool=4)
    bench.store(1)
    bench.write_all()
    bench.done(bench.load(1).op, (0, STALE))
    assert bench.source(1) is Source.POOL
    gauges = bench.core.gauges()
    assert (gauges["slots_used", "cache"], gauges["slots_used", "pool"]) == (0, 1)


def test_a_cache_slot_with_the_wrong_content_dooms_a_chunk_that_is_nowhere_else() -> None:
    bench = Bench(cache=4, pool=0)
    bench.store(1)
    bench.done(bench.load(1).op, (0, STALE))
    assert bench.source(1) is None


@pytest.mark.parametrize(
    ("outcome", "seconds", "expected"),
    [
        (io_error(errno.EIO), 0.7, 1.0),  # at once or not, it is no measurement of reading
        (CANCELLED, 0.7, 1.0),  # by a reset, not by its limit
        (DEADLINE, 5.0, 10.0),  # at least so slow
        (CHECKSUM_MISMATCH, 0.3, (1 + 0.6) / 2),  # it was read to its end
    ],
)
def test_a_failed_load_changes_the_slowness_by_its_outcome(
    outcome: Outcome, seconds: float, expected: float
) -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    command = bench.core.prepare_load(keys_of(0), limit_s=10.0, predicted_s=0.5)
    bench.now_s += seconds
    bench.report(command.op, (0, outcome))
    assert slowness(bench) == pytest.approx(expected)


def test_a_probe_that_met_its_deadline_teaches_that_the_pool_is_slow() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.core.reload.probe(keys_of(0))
    fetch = bench.fetch()
    bench.now_s += 5.0
    bench.report(fetch.op, (0, DEADLINE), released=False)
    assert slowness(bench) == pytest.approx((1 + HANGS) / 2)


def test_a_probe_counts_once_when_all_of_its_chunks_have_come() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0, 1, 2, 3)
    bench.core.admission.slowness = 4.5
    bench.core.reload.probe(keys_of(0, 1, 2))
    fetch = bench.fetch()
    for row in range(3):
        assert slowness(bench) == 4.5
        bench.report(fetch.op, rows=[row])
    assert slowness(bench) == pytest.approx(2.5)
    bench.core.reload.probe(keys_of(3))
    fetch = bench.fetch()
    bench.report(fetch.op, (0, io_error(errno.EIO)))
    assert slowness(bench) == pytest.approx(2.5), "it is no measurement of reading"


# -- the time of steps and the rate of prefill, with an engine that schedules ahead ---


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
        ((5,) * 32, False),  # speculative decoding
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
