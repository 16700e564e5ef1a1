# SPDX-License-Identifier: Apache-2.0
"""Admission: load or compute again, from rates and what loads took."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_nvmeof_offload.manager.load_or_recompute import Admission, Decision, Find, Taken
from vllm_nvmeof_offload.manager.types import AdmissionConfig

SLOT_BYTES = 1_000_000
TOKENS_PER_CHUNK = 100


class Clerk:
    """An admission with a clock; a chunk is 1 MB and 100 tokens.

    mb_per_s: by target. At 1000 tokens/s a chunk takes 0.1 s to compute: as reading at 10 MB/s.
    """

    def __init__(
        self, tokens_per_s: float = 1000.0, mb_per_s: Sequence[float] = (10.0,), **config: object
    ) -> None:
        self.now_s = 0.0
        self.admission = Admission(
            AdmissionConfig(**config),  # type: ignore[arg-type]
            lambda: self.now_s,
            SLOT_BYTES,
            TOKENS_PER_CHUNK,
        )
        self.admission.prefill_rate = tokens_per_s
        self.rates(*mb_per_s)

    def rates(self, *mb_per_s: float) -> None:
        self.admission.read_rates = [rate * 1e6 for rate in mb_per_s]

    def decide(self, cpu: int, *pool: int, queued: Sequence[int] | None = None) -> Decision:
        """Of that many leading chunks in the CPU tier, and those in the pool by target."""
        find = Find(cpu + sum(pool), cpu, pool, queued or [0] * len(pool))
        return self.admission.decide(find)

    def took(
        self, seconds: float, read: Sequence[int], queued: Sequence[int], missed: int = 0
    ) -> None:
        self.admission.took(Taken(seconds, read, queued, missed))

    def probed(self, seconds: float) -> None:
        """A probe of one chunk."""
        self.admission.took(Taken(seconds, [1], [0], probe=True))

    def chunks(self, cpu: int, *pool: int, queued: Sequence[int] | None = None) -> int:
        return self.decide(cpu, *pool, queued=queued).chunks


@pytest.mark.parametrize(("tokens_per_s", "mb_per_s"), [(0.0, 1e-9), (1000.0, 0.0), (0.0, 0.0)])
def test_with_a_rate_unknown_everything_is_loaded(tokens_per_s: float, mb_per_s: float) -> None:
    clerk = Clerk(tokens_per_s, [mb_per_s])
    assert clerk.chunks(2, 8) == 10
    assert clerk.admission.reading


def test_before_any_rate_was_reported_everything_is_loaded() -> None:
    clerk = Clerk(mb_per_s=())
    assert clerk.chunks(0, 8) == 8


def test_without_a_prefill_rate_nothing_is_cut_off() -> None:
    assert Clerk(0.0).decide(0, 8) == Decision(8, None)


def test_a_fast_pool_is_read_and_a_slow_one_is_not() -> None:
    assert Clerk(mb_per_s=[100.0]).chunks(0, 8) == 8
    assert Clerk(mb_per_s=[1.0]).chunks(0, 8) == 0


def test_leading_chunks_of_the_cpu_tier_are_always_loaded() -> None:
    clerk = Clerk(mb_per_s=[1.0])
    assert clerk.decide(3, 8) == Decision(3)
    assert clerk.decide(11) == Decision(11)
    # Behind a chunk that is not loaded the CPU tier's are of no use.
    assert clerk.admission.decide(Find(10, 3, (2,), (0,))).chunks == 3


def test_what_the_cpu_tier_has_says_nothing_about_the_pool() -> None:
    clerk = Clerk(mb_per_s=[1.0])
    clerk.chunks(0, 8)
    assert not clerk.admission.reading
    assert clerk.chunks(5, 0) == 5
    assert not clerk.admission.reading


def test_the_pool_is_given_up_when_slower_and_taken_up_when_clearly_faster() -> None:
    clerk = Clerk(mb_per_s=[10.1])  # 0.99 of computing
    assert clerk.chunks(0, 8) == 8
    clerk.rates(9.9)
    assert clerk.chunks(0, 8) == 0
    clerk.rates(12.4)  # 0.81: sooner, but not by enough
    assert clerk.chunks(0, 8) == 0
    clerk.rates(12.6)  # 0.79
    assert clerk.chunks(0, 8) == 8
    clerk.rates(10.1)
    assert clerk.chunks(0, 8) == 8


def test_the_slowest_target_decides() -> None:
    assert Clerk(mb_per_s=[1000.0, 1.0]).chunks(0, 4, 4) == 0
    assert Clerk(mb_per_s=[1000.0, 1.0]).chunks(0, 8, 0) == 8, "it has none of them"
    assert Clerk(mb_per_s=[1000.0, 0.0]).chunks(0, 4, 4) == 8, "its rate is unknown"
    # Targets read side by side: 4 chunks at 7 MB/s take as long as 8 at 14.
    assert Clerk(mb_per_s=[7.0, 7.0]).chunks(0, 4, 4) == 8
    assert Clerk(mb_per_s=[7.0, 7.0]).chunks(0, 8, 0) == 0


def test_what_other_loads_have_yet_to_read_counts_where_it_stands_in_the_way() -> None:
    clerk = Clerk(mb_per_s=[100.0, 100.0])
    assert clerk.chunks(0, 8, 0, queued=[50, 0]) == 8
    assert clerk.chunks(0, 8, 0, queued=[100, 0]) == 0
    assert Clerk(mb_per_s=[100.0, 100.0]).chunks(0, 8, 0, queued=[0, 1000]) == 8


def test_automatic_off_loads_whatever_is_found() -> None:
    clerk = Clerk(mb_per_s=[0.001], automatic=False)
    assert not clerk.admission.automatic
    assert clerk.decide(1, 8) == Decision(9, None)


def test_pinned_rates_go_before_learned_ones() -> None:
    clerk = Clerk(1000.0, [1000.0], read_bytes_per_s=1e6)
    assert clerk.admission.bytes_per_s == 1e6
    assert clerk.chunks(0, 8) == 0
    clerk = Clerk(1e9, [10.0], prefill_tokens_per_s=100.0)
    assert clerk.admission.tokens_per_s == 100.0
    assert clerk.chunks(0, 8) == 8
    clerk = Clerk(0.0, (), prefill_tokens_per_s=1000.0, read_bytes_per_s=1e6)
    assert clerk.chunks(0, 8) == 0, "both pinned: nothing need be learned"


def test_a_pinned_read_rate_is_that_of_all_targets_together() -> None:
    clerk = Clerk(mb_per_s=[0.0, 0.0], read_bytes_per_s=20e6)
    assert clerk.chunks(0, 8, 8) == 16
    assert clerk.chunks(0, 8, 8, queued=[0, 40]) == 0


def test_learned_rates_are_told_all_targets_together() -> None:
    clerk = Clerk(1000.0, [3.0, 4.0])
    assert (clerk.admission.tokens_per_s, clerk.admission.bytes_per_s) == (1000.0, 7e6)


def test_what_a_load_takes_beyond_its_bytes_is_learned() -> None:
    clerk = Clerk(mb_per_s=[100.0])
    clerk.took(0.58, [8], [0])  # 0.08 s of bytes
    assert clerk.admission.overhead_s == pytest.approx(0.5)
    clerk.took(0.3, [8], [12])  # 0.2 s of bytes, with those before it
    assert clerk.admission.overhead_s == pytest.approx(0.5 + 0.5 * (0.1 - 0.5))
    clerk.took(0.0, [8], [0])  # sooner than its rate allows: no negative overhead
    assert clerk.admission.overhead_s == pytest.approx(0.3 - 0.5 * 0.3)


def test_a_load_that_was_cut_off_teaches_that_the_pool_is_slow() -> None:
    """However fast its rate is said to be: of 8 chunks 1 came in 1.6 s."""
    clerk = Clerk(mb_per_s=[1000.0])
    assert clerk.chunks(0, 8) == 8
    clerk.took(0.01, [8], [0])
    clerk.took(1.6, [1], [0], missed=7)
    assert clerk.admission.overhead_s == pytest.approx(1.6), "believed at once"
    assert clerk.chunks(0, 8) == 0
    assert clerk.chunks(0, 30) == 30, "an overhead weighs less in a long load"


def test_the_first_that_comes_whole_says_more_than_what_was_cut_off() -> None:
    clerk = Clerk(mb_per_s=[1000.0])
    clerk.took(1.6, [1], [0], missed=7)
    assert clerk.chunks(0, 8) == 0
    clerk.probed(0.021)
    assert clerk.admission.overhead_s == pytest.approx(0.02)
    assert clerk.chunks(0, 8) == 8


def test_a_load_that_came_whole_but_late_is_believed_too() -> None:
    """Probes of a target that is fast for a moment alone look like a fast target."""
    clerk = Clerk(mb_per_s=[1000.0])
    clerk.took(0.75, [8], [0])  # computing takes 0.8 s
    assert clerk.chunks(0, 8) == 8
    for probes in (1, 2, 4):
        clerk.took(1.5, [8], [0])
        assert clerk.chunks(0, 8) == 0
        assert clerk.chunks(0, 30) == 30, "computing these takes longer than that"
        for _ in range(probes):
            assert clerk.chunks(0, 8) == 0
            clerk.probed(0.001)
        assert clerk.admission.overhead_s < 1.5


def test_what_a_load_waited_for_others_is_not_held_against_it() -> None:
    clerk = Clerk(mb_per_s=[11.0])
    clerk.took(2.5, [8], [20])
    assert clerk.chunks(0, 8) == 8


def test_a_pool_that_hangs_again_and_again_is_believed_less_and_less() -> None:
    clerk = Clerk(mb_per_s=[1000.0])
    probes_needed = []
    for _ in range(11):
        assert clerk.chunks(0, 8) == 8
        clerk.took(1.6, [0], [0], missed=8)
        probes = 0
        while not clerk.chunks(0, 8):
            clerk.probed(0.021)
            probes += 1
        probes_needed.append(probes)
    assert probes_needed == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512]
    for _ in range(9):  # loads that go well
        clerk.took(0.028, [8], [0])
    clerk.took(1.6, [0], [0], missed=8)
    assert clerk.chunks(0, 8) == 0
    clerk.probed(0.021)
    assert clerk.chunks(0, 8) == 8


def test_one_that_was_cut_off_sooner_than_another_does_not_make_the_pool_look_faster() -> None:
    clerk = Clerk(mb_per_s=[1000.0])
    clerk.took(1.6, [1], [0], missed=7)
    clerk.took(0.3, [1], [0], missed=1)
    assert clerk.admission.overhead_s == pytest.approx(1.6)


def test_what_was_cut_off_before_any_rate_was_known_counts_in_full() -> None:
    clerk = Clerk(mb_per_s=[0.0])
    clerk.took(1.6, [1], [0], missed=7)
    assert clerk.chunks(0, 8) == 0


def test_an_overhead_does_not_pay_for_few_chunks() -> None:
    clerk = Clerk(mb_per_s=[1000.0])
    clerk.took(0.5, [0], [0])
    assert clerk.chunks(4, 2) == 4
    assert clerk.chunks(0, 8) == 8


def test_an_estimate_that_nothing_confirms_loses_half_its_weight_in_half_a_minute() -> None:
    clerk = Clerk(mb_per_s=[1000.0])
    clerk.took(2.0, [0], [0])  # computing 8 chunks takes 0.8 s
    assert clerk.chunks(0, 8) == 0
    clerk.now_s = 30.0  # counts as 1 s
    assert clerk.chunks(0, 8) == 0
    clerk.now_s = 60.0  # 0.5 s
    assert clerk.chunks(0, 8) == 8
    clerk.took(2.0, [0], [0])  # it was right
    assert clerk.chunks(0, 8) == 0


def test_a_sample_renews_an_estimate() -> None:
    clerk = Clerk(mb_per_s=[1000.0])
    for _ in range(20):
        clerk.took(2.0, [0], [0])
        clerk.now_s += 10.0
        assert clerk.chunks(0, 8) == 0


def test_a_load_from_before_the_rate_was_known_teaches_no_overhead() -> None:
    clerk = Clerk(mb_per_s=[0.0])
    clerk.took(1.0, [100], [0])
    clerk.rates(100.0)
    assert clerk.admission.overhead_s == 0.0
    assert clerk.chunks(0, 8) == 8


def test_a_rate_that_was_never_confirmed_by_a_load_loses_its_weight_too() -> None:
    clerk = Clerk(mb_per_s=[1.0])  # learned from prefetches
    assert clerk.chunks(0, 8) == 0
    clerk.now_s = 3600.0
    assert clerk.chunks(0, 8) == 8


def test_a_load_is_cut_off_at_twice_what_computing_takes_and_not_before_a_quarter_second() -> None:
    clerk = Clerk(mb_per_s=[100.0])
    assert clerk.decide(2, 8).limit_s == pytest.approx(1.6)
    assert clerk.decide(0, 1).limit_s == 0.25
    assert clerk.decide(9).limit_s is None, "nothing of it is read"
    clerk.rates(0.1)
    assert clerk.decide(2, 8).limit_s is None, "nothing of the pool is loaded"
