# SPDX-License-Identifier: Apache-2.0
"""A fact holds when all ranks have reported it, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, STALE
from vllm_nvmeof_offload.manager.ledger import Ledger
from vllm_nvmeof_offload.protocol import OpKind, OpReport, ReleaseReport

_OUTCOMES = st.sampled_from([CANCELLED, CHECKSUM_MISMATCH, DEADLINE, STALE])
_RANK = st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 2), _OUTCOMES), max_size=3))


@given(st.lists(_RANK, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_last_rank_decides_and_releases(ranks, random) -> None:  # type: ignore[no-untyped-def]
    ledger = Ledger(len(ranks), lambda: 0.0)
    op = ledger.open(OpKind.LOAD)
    queues = [
        [OpReport(op.number, tuple(failures), at_once)]
        + ([] if at_once else [ReleaseReport(op.number)])
        for at_once, failures in ranks
    ]
    outcomes = releases = 0
    failed: dict[int, set[object]] = {}
    while any(queues):
        report = random.choice([queue for queue in queues if queue]).pop(0)
        same, decided, released = ledger.apply(report)
        assert same is op
        if isinstance(report, OpReport):
            outcomes += 1
            for index, outcome in report.failures:
                failed.setdefault(index, set()).add(outcome)
        assert decided == (isinstance(report, OpReport) and outcomes == len(ranks))
        releases += not isinstance(report, OpReport) or report.released
        assert released == (releases == len(ranks) and not any(queues))
    assert len(ledger) == 0
    assert op.failures.keys() == failed.keys()
    for index, outcome in op.failures.items():
        assert outcome in failed[index]
        assert outcome != CANCELLED or failed[index] == {CANCELLED}, "a real failure outweighs"


def test_one_report_too_many_is_an_assertion() -> None:
    ledger = Ledger(1, lambda: 0.0)
    op = ledger.open(OpKind.WRITE)
    ledger.apply(OpReport(op.number, released=False))
    with pytest.raises(AssertionError):
        ledger.apply(OpReport(op.number))


def test_a_withdrawn_op_is_gone_and_its_number_is_not_used_again() -> None:
    ledger = Ledger(2, lambda: 0.0)
    first = ledger.open(OpKind.WRITE)
    assert ledger.withdraw(first.number) is first
    assert ledger.open(OpKind.WRITE).number > first.number
    assert len(ledger) == 1
