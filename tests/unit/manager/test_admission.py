# SPDX-License-Identifier: Apache-2.0
"""Admission: load or recompute, decided from rates and the time of earlier loads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from vllm_nvmeof_offload.manager.handshake import CoreConfig
from vllm_nvmeof_offload.manager.load_or_recompute import Admission, Decision

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
    assert rig.loads(8)
    assert rig.admission.reading


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


def test_without_a_prefill_rate_nothing_is_cut_off() -> None:
    assert AdmissionRig(0.0).decide(8) == Decision(load=True)


def test_a_fast_pool_is_read_and_a_slow_one_is_not() -> None:
    assert AdmissionRig(mb_per_s=[100.0]).loads(8)
    assert not AdmissionRig(mb_per_s=[1.0]).loads(8)


def test_the_estimate_is_a_step_and_the_bytes_of_the_busiest_lane() -> None:
    rig = AdmissionRig(mb_per_s=[100.0, 20.0])
    assert rig.decide(8, 0).predicted_s == pytest.approx(0.08)
    assert rig.decide(8, 4).predicted_s == pytest.approx(0.2)
    assert rig.decide(8, 4, queued=[0, 8]).predicted_s == pytest.approx(0.6)
    assert rig.decide(8, 0, queued=[0, 8]).predicted_s == pytest.approx(0.08)
    rig.admission.step_s = 0.03
    assert rig.decide(8, 0).predicted_s == pytest.approx(0.11)


def test_loads_from_the_cpu_tier_do_not_count_for_the_pools_speed() -> None:
    rig = AdmissionRig(mb_per_s=[1.0])
    rig.loads(8)
    assert not rig.admission.reading
    assert rig.decide(0) == Decision(load=True)
    assert not rig.admission.reading


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


def test_the_slowest_target_decides() -> None:
    assert not AdmissionRig(mb_per_s=[1000.0, 1.0]).loads(4, 4)
    assert AdmissionRig(mb_per_s=[1000.0, 1.0]).loads(8, 0), "it has none of them"
    assert AdmissionRig(mb_per_s=[1000.0, 0.0]).loads(4, 4), "its rate is unknown"
    # Targets read side by side: 4 chunks at 7 MB/s take as long as 8 at 14.
    assert AdmissionRig(mb_per_s=[7.0, 7.0]).loads(4, 4)
    assert not AdmissionRig(mb_per_s=[7.0, 7.0]).loads(8, 0)


def test_reads_queued_by_other_loads_count_only_on_the_same_lane() -> None:
    rig = AdmissionRig(mb_per_s=[100.0, 100.0])
    assert rig.loads(8, 0, queued=[50, 0])
    assert not rig.loads(8, 0, queued=[100, 0])
    assert AdmissionRig(mb_per_s=[100.0, 100.0]).loads(8, 0, queued=[0, 1000])


def test_automatic_off_loads_every_hit() -> None:
    rig = AdmissionRig(mb_per_s=[0.001], admission=False)
    assert not rig.admission.automatic
    assert rig.decide(8) == Decision(load=True)


def test_learned_rates_are_reported_for_all_targets_together() -> None:
    rig = AdmissionRig(1000.0, [3.0, 4.0])
    assert (rig.admission.prefill_rate, rig.admission.bytes_per_s) == (1000.0, 7e6)


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


def test_loads_that_are_slower_than_predicted_and_faster_than_computing_do_no_harm() -> None:
    rig = AdmissionRig(mb_per_s=[100.0])
    for _ in range(20):
        rig.load(0.75, 8)
    assert rig.admission.slowness == 1.0


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


def test_a_load_that_only_peers_make_fast_is_tried_after_a_few_probes() -> None:
    """Probes are read from the pool alone, and a load in half of the time."""
    rig = AdmissionRig(mb_per_s=[8.0])
    assert not rig.loads(8)
    assert rig.probes_until(8) <= PROBES
    for _ in range(9):
        rig.load(0.5, 8)
    rig = AdmissionRig(mb_per_s=[4.0])
    assert not rig.loads(8)
    for _ in range(100):
        rig.probed()
    assert not rig.loads(8), "it would take 1.25 times as long as computing, if all went well"


@pytest.mark.parametrize("mb_per_s", [100.0, 10_000.0])
def test_a_load_that_was_cut_off_teaches_that_the_pool_is_slow(mb_per_s: float) -> None:
    """However fast it should be."""
    rig = AdmissionRig(mb_per_s=[mb_per_s])
    rig.load(1.7, 8, missed=True)
    assert not rig.admission.reading
    assert not rig.loads(8), "believed at once"
    assert 1 <= rig.probes_until(8) <= PROBES, "one declined request brings enough probes"


def test_a_complete_but_late_load_counts_too() -> None:
    """A target that is fast only for a moment looks fast to probes."""
    rig = AdmissionRig(mb_per_s=[100.0])
    rig.load(0.75, 8)  # computing takes 0.8 s
    assert rig.loads(8)
    needed = []
    for _ in range(4):
        rig.load(1.5, 8)
        assert not rig.loads(8)
        needed.append(rig.probes_until(8))
    assert needed[0] <= PROBES
    assert needed[0] < needed[2] < needed[3]


def test_time_waiting_for_other_loads_does_not_count_against_a_load() -> None:
    """It is predicted."""
    rig = AdmissionRig(mb_per_s=[50.0])
    rig.load(0.56, 8, queued=[20])
    assert rig.admission.slowness == pytest.approx(1.0)


def test_a_load_is_measured_by_what_was_predicted_when_it_was_decided_on() -> None:
    """The rate has fallen since: a pool that is fast only for a moment is not slow as predicted."""
    rig = AdmissionRig(mb_per_s=[100.0])
    decision = rig.decide(8)
    rig.rates(5.0)
    rig.ended(1.6, decision)
    rig.rates(100.0)
    assert not rig.loads(8)


def test_a_load_faster_than_its_rate_does_not_disappoint() -> None:
    """The rate may have fallen since the load was decided on."""
    rig = AdmissionRig(mb_per_s=[100.0])
    decision = rig.decide(8)
    rig.rates(1.0)
    rig.ended(0.1, decision)
    assert rig.admission.reading


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


def test_an_earlier_cutoff_does_not_make_the_pool_look_faster() -> None:
    rig = AdmissionRig(mb_per_s=[100.0])
    first, second = rig.decide(8), rig.decide(1)
    rig.ended(1.7, first, missed=True)
    slowness = rig.admission.slowness
    rig.ended(0.03, second, missed=True)
    assert rig.admission.slowness == slowness


def test_a_load_cut_off_before_any_rate_was_known_counts_in_full() -> None:
    rig = AdmissionRig(mb_per_s=[0.0])
    rig.load(1.6, 8, missed=True)
    assert not rig.loads(8)


def test_slow_steps_make_short_loads_not_worth_it() -> None:
    rig = AdmissionRig(mb_per_s=[1000.0])
    rig.admission.step_s = 0.3
    assert not rig.loads(2)
    assert rig.loads(8)


def test_a_disappointing_pool_stays_avoided_until_probes_go_well() -> None:
    """A wrong estimate cannot keep the pool switched off: declined loads are probed."""
    rig = AdmissionRig(mb_per_s=[100.0])
    for _ in range(20):
        rig.probed(missed=True)
    assert not rig.loads(8)
    assert rig.probes_until(8) <= PROBES


def test_a_load_from_before_the_rate_was_known_teaches_nothing() -> None:
    rig = AdmissionRig(mb_per_s=[0.0])
    rig.load(1.0, 100)
    rig.rates(100.0)
    assert rig.admission.slowness == 1.0
    assert rig.loads(8)


def test_a_load_is_cut_off_at_twice_the_compute_time_but_not_before_250_ms() -> None:
    rig = AdmissionRig(mb_per_s=[100.0])
    assert rig.decide(8).limit_s == pytest.approx(1.6)
    assert rig.decide(1).limit_s == 0.25
    rig.rates(0.1)
    assert rig.decide(8).limit_s is None, "nothing of the pool is loaded"


def test_slow_steps_without_prompts_give_a_load_more_time() -> None:
    """A load begins when the step that brings it ends, and the next one's output reports it."""
    rig = AdmissionRig(mb_per_s=[100.0])
    rig.admission.step_s = 0.08
    assert rig.decide(1).limit_s == pytest.approx(0.36)


def test_loads_decided_on_together_count_as_one_bad_load() -> None:
    trusts = []
    for loads in (1, 4):  # at once, each 0.8 s to compute
        rig = AdmissionRig(mb_per_s=[20.0])
        decisions = [rig.decide(8) for _ in range(loads)]
        for decision in decisions:
            rig.ended(1.05, decision)
        assert not rig.loads(8)
        rig.probed()
        for _ in range(50):
            rig.probed()
        rig.load(1.7, 8, missed=True)
        trusts.append(rig.probes_until(8))
    assert trusts[0] == trusts[1]


def test_a_probe_that_fails_makes_the_pool_look_slow_again() -> None:
    rig = AdmissionRig(mb_per_s=[20.0])
    rig.load(1.05, 8)
    rig.probed(missed=True)
    rig.probed()
    assert not rig.loads(8)
    assert rig.admission.reading is False
    assert rig.probes_until(8) > 1


def test_a_pool_that_always_loses_time_is_tried_less_and_less() -> None:
    """A chunk is computed in 0.1 s. Loading one takes 0.03 s longer, and a probe much less."""
    rig = AdmissionRig(mb_per_s=[100.0])
    probes = []
    for _ in range(6):
        while rig.loads(1):
            rig.load(0.13, 1)
        probes.append(rig.probes_until(1))
    assert all(later > earlier for earlier, later in pairwise(probes[2:]))


@pytest.mark.parametrize(("seconds", "reading"), [(0.12, True), (0.13, False)])
def test_a_small_load_that_lost_little_time_does_not_disappoint(
    seconds: float, reading: bool
) -> None:
    """A chunk is computed in 0.1 s; half of the least limit does not count."""
    rig = AdmissionRig(mb_per_s=[100.0])
    rig.load(seconds, 1)
    assert rig.admission.reading is reading
