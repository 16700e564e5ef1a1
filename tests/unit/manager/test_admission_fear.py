# SPDX-License-Identifier: Apache-2.0
"""What admission takes for a bad experience, and how soon it trusts the pool again."""

from __future__ import annotations

import pytest

from vllm_nvmeof_offload.manager.load_or_recompute import Taken

from .test_admission import Clerk


def test_loads_that_were_decided_on_together_are_one_bad_experience() -> None:
    clerk = Clerk(mb_per_s=[100.0])
    for _ in range(4):  # a batch of requests, each 0.8 s to compute
        clerk.took(1.05, [8], [0])
    assert clerk.chunks(0, 8) == 0
    clerk.probed(0.01)
    assert clerk.chunks(0, 8) == 8, "one probe, as after one load"
    clerk.took(1.05, [8], [0])  # 0.8 s to compute
    clerk.probed(0.01)
    assert clerk.chunks(0, 8) == 0, "the second time it takes two"
    clerk.probed(0.01)
    assert clerk.chunks(0, 8) == 8


def test_doubts_begin_anew_with_a_probe_that_fails() -> None:
    clerk = Clerk(mb_per_s=[100.0])
    clerk.took(1.05, [8], [0])  # 0.8 s to compute
    clerk.probed(0.01)
    clerk.took(1.05, [8], [0])  # 0.8 s to compute
    clerk.probed(0.01)
    clerk.admission.took(Taken(5.0, [0], [0], missed=1, probe=True))
    clerk.probed(0.01)
    assert clerk.chunks(0, 8) == 0
    clerk.probed(0.01)
    assert clerk.chunks(0, 8) == 8


@pytest.mark.parametrize(("seconds", "loaded"), [(0.14, 8), (0.16, 0)])
def test_a_small_load_that_lost_little_is_not_feared(seconds: float, loaded: int) -> None:
    """A chunk is computed in 0.1 s; 0.05 s is what nobody regrets."""
    clerk = Clerk(mb_per_s=[100.0])
    clerk.took(seconds, [1], [0])
    clerk.admission._overhead_s = 0.0
    assert clerk.chunks(0, 1) == min(1, loaded)
