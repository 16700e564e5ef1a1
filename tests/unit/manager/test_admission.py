# SPDX-License-Identifier: Apache-2.0
"""Admission: load or recompute, decided from rates and the time of earlier loads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from vllm_nvmeof_offload.manager.handshake import CoreConfig
from vllm_nvmeof_offload.manager.load_or_recompute import Admission, Decision
from vllm_nvmeof_offload.protocol import PeerReport

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
            SLOT_BYTES,
        )
        self.admission.prefill_rate = tokens_per_s

    def peer(
        self,
        mb_per_s: float,
        queued: float = 0.0,
        *,
        usable: bool = True,
        rank: int = 0,
        peer: int = 0,
    ) -> None:
        """A rank says this of a peer. queued: chunks before ours."""
        size = int(queued * SLOT_BYTES)
        self.admission.heard(PeerReport(rank, peer, usable, mb_per_s * 1e6, size))

    def rates(self, *mb_per_s: float) -> None:
        self.admission.read_rates = [rate * 1e6 for rate in mb_per_s]

    def decide(
        self, *read: int, queued: Sequence[int] | None = None, helpers: int | None = None
    ) -> Decision:
        """The cost of reading so many chunks per lane, behind those of other loads."""
        queued_bytes = [count * SLOT_BYTES for count in queued or [0] * len(read)]
        tokens = sum(read) * TOKENS_PER_CHUNK
        read_bytes = [count * SLOT_BYTES for count in read]
        return self.admission.decide(read_bytes, queued_bytes, tokens, helpers)

    def loads(self, *read: int, queued: Sequence[int] | None = None) -> bool:
        return self.decide(*read, queued=queued).load

    def took(
        self,
        seconds: float,
        read: Sequence[int],
        queued: Sequence[int] | None = None,
        missed: bool = False,
        probe: bool = False,
    ) -> None:
        """End a load or a probe of so many chunks per lane."""
        self.admission.took(
            seconds,
            [count * SLOT_BYTES for count in read],
            [count * SLOT_BYTES for count in queued or [0] * len(read)],
            tokens=None if probe else sum(read) * TOKENS_PER_CHUNK,
            missed=missed,
        )

    def probed(self, seconds: float) -> None:
        """End a probe of one chunk."""
        self.took(seconds, [1], probe=True)

    def probes_until(self, *read: int) -> int:
        """Count the fast probes until these chunks are loaded again."""
        count = 0
        while not self.loads(*read):
            self.probed(0.021)
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
    assert decide(50_000).token_s == pytest.approx(1e-3 + 5e-8 * 40_050)


def test_a_load_is_judged_by_the_time_of_computing_at_its_depth() -> None:
    rig = AdmissionRig()
    load = {"tokens": TOKENS_PER_CHUNK, "token_s": 1e-2}
    rig.admission.took(0.9, [SLOT_BYTES], [0], **load)
    assert rig.admission.reading, "computing would have taken 1 s"
    rig.admission.took(0.9, [SLOT_BYTES], [0], tokens=TOKENS_PER_CHUNK)
    assert not rig.admission.reading, "0.1 s by the measured rate"


def test_without_a_prefill_rate_nothing_is_cut_off() -> None:
    assert AdmissionRig(0.0).decide(8) == Decision(load=True)


def test_a_fast_pool_is_read_and_a_slow_one_is_not() -> None:
    assert AdmissionRig(mb_per_s=[100.0]).loads(8)
    assert not AdmissionRig(mb_per_s=[1.0]).loads(8)


def test_the_estimate_is_the_overhead_and_the_bytes_of_the_busiest_lane() -> None:
    rig = AdmissionRig(mb_per_s=[100.0, 20.0])
    assert rig.decide(8, 0).reading_s == pytest.approx(0.08)
    assert rig.decide(8, 4).reading_s == pytest.approx(0.2)
    assert rig.decide(8, 4, queued=[0, 8]).reading_s == pytest.approx(0.6)
    assert rig.decide(8, 0, queued=[0, 8]).reading_s == pytest.approx(0.08)
    rig.took(0.14, [4, 0])
    assert rig.decide(8, 0).reading_s == pytest.approx(rig.admission.overhead_s + 0.08)


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


def test_the_time_of_a_load_beyond_its_bytes_is_learned() -> None:
    rig = AdmissionRig(mb_per_s=[100.0])
    rig.took(0.58, [8])  # 0.08 s of bytes
    assert rig.admission.overhead_s == pytest.approx(0.25)
    rig.took(0.3, [8], [12])  # 0.2 s of bytes, with those before it
    assert rig.admission.overhead_s == pytest.approx(0.25 + 0.5 * (0.1 - 0.25))
    rig.took(0.0, [8])  # less than its rate allows: no negative overhead
    assert rig.admission.overhead_s == pytest.approx(0.175 - 0.5 * 0.175)
    for _ in range(20):
        rig.took(0.58, [8])
    assert rig.admission.overhead_s == pytest.approx(0.5)


def test_a_load_that_was_cut_off_teaches_that_the_pool_is_slow() -> None:
    """A high reported rate does not help: only 1 of 8 chunks came in 1.6 s."""
    rig = AdmissionRig(mb_per_s=[1000.0])
    assert rig.loads(8)
    rig.took(0.01, [8])
    rig.took(1.6, [1], missed=True)
    assert rig.admission.overhead_s == pytest.approx(1.6, abs=0.002), "believed at once"
    assert not rig.loads(8)
    assert rig.loads(30), "an overhead weighs less in a long load"


def test_completed_probes_outweigh_loads_that_were_cut_off() -> None:
    """One declined request brings enough probes."""
    rig = AdmissionRig(mb_per_s=[1000.0])
    rig.took(1.6, [1], missed=True)
    assert not rig.loads(8)
    assert 1 <= rig.probes_until(8) <= PROBES
    assert rig.admission.overhead_s < 0.8


def test_a_complete_but_late_load_counts_too() -> None:
    """A target that is fast only for a moment looks fast to probes."""
    rig = AdmissionRig(mb_per_s=[1000.0])
    rig.took(0.75, [8])  # computing takes 0.8 s
    assert rig.loads(8)
    needed = []
    for _ in range(3):
        rig.took(1.5, [8])
        assert not rig.loads(8)
        needed.append(rig.probes_until(8))
    assert needed[0] <= PROBES
    assert needed[0] < needed[1] < needed[2]


def test_time_waiting_for_other_loads_does_not_count_against_a_load() -> None:
    rig = AdmissionRig(mb_per_s=[11.0])
    rig.took(2.5, [8], [20])
    assert rig.loads(8)


def test_a_load_faster_than_its_rate_does_not_disappoint() -> None:
    """The rate may have fallen since the load was decided on."""
    rig = AdmissionRig(mb_per_s=[100.0])
    assert rig.loads(8)
    rig.rates(1.0)
    rig.took(0.1, [8])
    assert rig.admission.reading


def test_a_pool_that_hangs_repeatedly_needs_more_and_more_probes() -> None:
    rig = AdmissionRig(mb_per_s=[1000.0])
    needed = []
    for _ in range(11):
        assert rig.loads(8)
        rig.took(1.6, [0], missed=True)
        needed.append(rig.probes_until(8))
    assert needed[0] <= PROBES, "the first time the next request will do"
    assert all(1.5 * few < more < 3 * few for few, more in pairwise(needed[:8]))
    assert 256 < needed[-1] == needed[-2] <= 512, "and never more than that"
    for _ in range(9):  # loads that go well
        rig.took(0.028, [8])
    rig.took(1.6, [0], missed=True)
    assert not rig.loads(8)
    assert rig.probes_until(8) <= PROBES


def test_an_earlier_cutoff_does_not_make_the_pool_look_faster() -> None:
    rig = AdmissionRig(mb_per_s=[1000.0])
    rig.took(1.6, [1], missed=True)
    rig.took(0.3, [1], missed=True)
    assert rig.admission.overhead_s == pytest.approx(1.6, abs=0.002)


def test_a_load_cut_off_before_any_rate_was_known_counts_in_full() -> None:
    rig = AdmissionRig(mb_per_s=[0.0])
    rig.took(1.6, [1], missed=True)
    assert not rig.loads(8)


def test_a_high_overhead_makes_short_loads_not_worth_it() -> None:
    rig = AdmissionRig(mb_per_s=[1000.0])
    for _ in range(9):
        rig.took(0.5, [8])
    assert not rig.loads(2)
    assert rig.loads(8)


def test_a_disappointing_pool_stays_avoided_until_probes_are_fast() -> None:
    """A wrong estimate cannot keep the pool switched off: declined loads are probed."""
    rig = AdmissionRig(mb_per_s=[1000.0])
    for _ in range(20):
        rig.took(2.0, [1], probe=True)
        assert not rig.loads(8)
    assert rig.probes_until(8) <= PROBES


def test_a_load_from_before_the_rate_was_known_teaches_no_overhead() -> None:
    rig = AdmissionRig(mb_per_s=[0.0])
    rig.took(1.0, [100])
    rig.rates(100.0)
    assert rig.admission.overhead_s == 0.0
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
    rig.admission.step_s = 0.3
    assert rig.decide(1).limit_s == pytest.approx(0.8)


def test_loads_decided_on_together_count_as_one_bad_load() -> None:
    needed = []
    for loads in (1, 4):  # at once, each 0.8 s to compute
        rig = AdmissionRig(mb_per_s=[100.0])
        for _ in range(2):
            assert rig.loads(8)
            for _ in range(loads):
                rig.took(1.05, [8])
            assert not rig.loads(8)
            needed.append(rig.probes_until(8))
    assert needed[:2] == needed[2:]
    assert needed[0] < needed[1], "the second time takes more"


def test_a_probe_that_fails_makes_the_pool_look_slow_again() -> None:
    rig = AdmissionRig(mb_per_s=[100.0])
    rig.took(1.05, [8])
    rig.probed(0.01)
    rig.took(5.0, [0], missed=True, probe=True)
    rig.probed(0.01)
    assert not rig.loads(8)
    assert rig.admission.reading is False
    assert rig.probes_until(8) > 1


def test_a_pool_that_always_loses_a_little_time_is_tried_less_and_less() -> None:
    """A chunk is computed in 0.1 s. Loading one takes 0.03 s longer, and a probe much less."""
    rig = AdmissionRig(mb_per_s=[100.0])
    probes = []
    for _ in range(4):
        while rig.loads(1):
            rig.took(0.13, [1])
        probes.append(rig.probes_until(1))
    assert all(later > earlier for earlier, later in pairwise(probes))


@pytest.mark.parametrize(("seconds", "reading"), [(0.14, True), (0.16, False)])
def test_a_small_load_that_lost_little_time_does_not_disappoint(
    seconds: float, reading: bool
) -> None:
    """A chunk is computed in 0.1 s; a loss of up to 0.05 s does not count."""
    rig = AdmissionRig(mb_per_s=[100.0])
    rig.took(seconds, [1])
    assert rig.admission.reading is reading


def test_a_peer_reads_beside_our_lane() -> None:
    rig = AdmissionRig(mb_per_s=[9.0])
    assert rig.decide(8).reading_s == pytest.approx(8 / 9)
    rig.peer(27.0)
    assert rig.decide(8).reading_s == pytest.approx(8 / 36)


def test_a_busy_engine_loads_what_a_peer_can_bring() -> None:
    rig = AdmissionRig(mb_per_s=[20.0])
    assert not rig.loads(8, queued=[100])
    rig.peer(20.0)
    assert not rig.loads(8, queued=[100]), "108 chunks at 40 MB/s take longer than computing 8"
    rig.peer(400.0)
    assert rig.loads(8, queued=[100])


def test_a_peer_helps_once_it_has_read_for_others() -> None:
    rig = AdmissionRig(mb_per_s=[10.0])
    rig.peer(10.0, queued=4)
    assert rig.decide(10).reading_s == pytest.approx(0.4 + 6 / 20)
    rig.peer(10.0, queued=10)
    assert rig.decide(10).reading_s == pytest.approx(1.0), "it comes too late"
    rig.peer(10.0, queued=1000)
    assert rig.decide(10).reading_s == pytest.approx(1.0)


def test_peers_even_out_several_lanes() -> None:
    rig = AdmissionRig(mb_per_s=[10.0, 10.0])
    rig.peer(10.0)
    assert rig.decide(8, 2).reading_s == pytest.approx(0.4), "all of it on the longer lane"
    assert rig.decide(8, 7).reading_s == pytest.approx(0.5)
    rig.peer(10.0, peer=1, queued=3)
    assert rig.decide(8, 7).reading_s == pytest.approx(0.45)
    assert rig.decide(8, 0).reading_s == pytest.approx(11 / 30)


def test_small_loads_go_to_no_peer() -> None:
    rig = AdmissionRig(mb_per_s=[10.0])
    rig.peer(1000.0)
    assert rig.decide(3).reading_s == pytest.approx(0.3)
    assert rig.decide(4).reading_s == pytest.approx(4 / 1010)


def test_a_peer_counts_if_all_ranks_have_it_and_as_their_slowest() -> None:
    rig = AdmissionRig(mb_per_s=[10.0], world_size=2)
    rig.peer(30.0, rank=0)
    assert rig.decide(8).reading_s == pytest.approx(0.8)
    rig.peer(10.0, rank=1)
    assert rig.decide(8).reading_s == pytest.approx(0.4)
    rig.peer(30.0, rank=0, usable=False)
    assert rig.decide(8).reading_s == pytest.approx(0.8)


def test_peers_that_a_request_has_not_named_do_not_count() -> None:
    rig = AdmissionRig(mb_per_s=[10.0])
    rig.peer(10.0, peer=0)
    rig.peer(30.0, peer=2)
    assert rig.decide(10).reading_s == pytest.approx(0.2)
    assert rig.decide(10, helpers=0b001).reading_s == pytest.approx(0.5)
    assert rig.decide(10, helpers=0b110).reading_s == pytest.approx(0.25)
    assert rig.decide(10, helpers=0).reading_s == pytest.approx(1.0)


def test_a_peer_of_unknown_rate_counts_as_one_of_our_lanes() -> None:
    rig = AdmissionRig(mb_per_s=[10.0])
    rig.peer(0.0)
    assert rig.decide(8).reading_s == pytest.approx(0.4)
