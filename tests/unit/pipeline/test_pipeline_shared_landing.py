# SPDX-License-Identifier: Apache-2.0
"""Two loads of one chunk: the first lands it in a cache slot, the second waits for that read."""

from __future__ import annotations

import pytest

from tests.chunks import Reported
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, OK, STALE, Outcome

from .bench import Bench, identity


def _shared(*, queued: bool) -> Bench:
    """Load 1 is cut off, queued here or with the engine; load 2 waits at its cache slot."""
    bench = Bench()
    bench.io.busy = queued
    bench.load(1, 7, cache=0, pool=3)
    bench.load(2, 7, cache=0, pool=None)
    bench.pipeline.cancel(1)
    bench.io.busy = False
    bench.pipeline.step()
    assert bench.finished() == [(1, ((0, CANCELLED),))], "it does not wait for the read"
    return bench


@pytest.mark.parametrize("queued", [True, False])
def test_cutting_one_load_leaves_the_other_its_read(queued: bool) -> None:
    bench = _shared(queued=queued)
    assert bench.io.cancelled == []
    assert [op.identity for op in bench.io.started] == [identity(7)]
    bench.io_done()
    assert list(bench.copy.open) == [0], "copied only for the second load"
    bench.copy.finish(0)
    bench.pipeline.step()
    assert bench.finished() == [(2, ())]
    reports = bench.reports()
    assert Reported(1, 0, CANCELLED) in reports
    assert bench.idle()


@pytest.mark.parametrize("outcome", [CHECKSUM_MISMATCH, DEADLINE])
def test_a_continued_read_that_fails_ends_the_loads_that_wait(outcome: Outcome) -> None:
    bench = _shared(queued=False)
    if outcome == DEADLINE:
        bench.hang()
    else:
        bench.io_done(outcome)
    assert bench.finished() == [(2, ((0, STALE),))]
    if outcome == DEADLINE:
        bench.io_done()
    assert bench.idle()
    assert not bench.copy.submitted


def test_a_read_that_only_the_cut_load_waits_for_is_cancelled() -> None:
    bench = Bench()
    bench.load(1, 7, cache=0, pool=3)
    bench.pipeline.cancel(1)
    assert bench.io.cancelled == [next(iter(bench.io.ops))]
    bench.io_done(OK)
    bench.load(2, 7, cache=0, pool=None)
    assert bench.finished() == [(1, ((0, CANCELLED),)), (2, ((0, STALE),))]
