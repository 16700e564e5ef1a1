# SPDX-License-Identifier: Apache-2.0
"""A fact of a row holds when all ranks have reported it, in any order and in any parts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.native import Batch, Tiers

from .model import CANCELLED, EIO, OK, RELEASED, STALE

STORE, LOAD = 0, 1
IO_ERROR = 1
CODES = (OK, OK, IO_ERROR, STALE, CANCELLED)
Event = tuple[int, int, int, bool]  # row, code, errno, released


def planned(kind: int, rows: int, ranks: int) -> tuple[Tiers, Batch]:
    """A store, or a load of what was stored."""
    tiers = Tiers(rows, [], key_bytes=8, ranks=ranks, writes=False)
    keys = [bytes([row]) * 4 + bytes(4) for row in range(rows)]
    batch = tiers.plan_store(keys, None, 0)[0]
    if kind == LOAD:
        for _ in range(ranks):
            tiers.report(STORE, batch)
        batch = tiers.plan_load(keys, 0)
    return tiers, batch


def events_of(rng: random.Random, rows: int, ranks: int) -> Iterator[Event]:
    """What the ranks report, mixed: each its outcome of each row, and its release, in order."""
    queues = []
    for row in [row for row in range(rows) for _rank in range(ranks)]:
        code, at_once = rng.choice(CODES), rng.random() < 0.6
        queue = [(row, code, EIO if code == IO_ERROR else 0, at_once)]
        queues.append(queue if at_once else [*queue, (row, RELEASED, 0, True)])
    while queues:
        queue = rng.choice(queues)
        yield queue.pop(0)
        queues = [queue for queue in queues if queue]


def parts(rng: random.Random, events: Iterator[Event]) -> Iterator[list[Event]]:
    """The same events in reports, which have each row once."""
    part: list[Event] = []
    for event in events:
        if part and (event[0] in {row for row, *_ in part} or rng.random() < 0.3):
            yield part
            part = []
        part.append(event)
    yield part


@given(
    st.sampled_from([STORE, LOAD]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 1 << 32)
)
def test_the_last_rank_decides_and_releases_each_row(
    kind: int, rows: int, ranks: int, seed: int
) -> None:
    rng = random.Random(seed)
    tiers, batch = planned(kind, rows, ranks)
    slots = batch.cache.tolist()
    outcomes, releases = [ranks] * rows, [ranks] * rows
    reported: list[list[int]] = [[] for _ in range(rows)]
    for part in parts(rng, events_of(rng, rows, ranks)):
        decided = []
        for row, code, _, released in part:
            if code != RELEASED:
                outcomes[row] -= 1
                reported[row].append(code)
                if not outcomes[row]:
                    decided.append(row)
            releases[row] -= released
        index, code, errno, free = zip(*part, strict=True)
        _, now_decided, now_failed, now_ended = tiers.report(
            kind,
            batch,
            np.array(index, np.uint32),
            np.array(code, np.uint8),
            np.array(errno, np.int16),
            np.array(free, np.uint8),
        )
        if now_decided is None:
            assert sorted(decided) == list(range(rows))
        else:
            assert now_decided == decided
        assert now_ended == (bool(decided) and not any(outcomes))
        assert now_failed == [row for row in decided if any(reported[row])]
        assert batch.undecided == sum(map(bool, outcomes))
        assert batch.unreleased == sum(map(bool, releases))
        assert [tiers.cache_users(slot) for slot in slots] == [int(n > 0) for n in releases]
    for row in range(rows):
        failures = [code for code in reported[row] if code]
        real = [code for code in failures if code != CANCELLED]
        assert batch.codes[row] == (real + failures + [OK])[0], "a real failure outweighs"
        assert batch.errors[row] == (EIO if batch.codes[row] == IO_ERROR else 0)
        dooms = failures if kind == STORE else real
        assert tiers.lookup(batch.key(row)) == (0 if dooms else 1)
    assert tiers.cache_in_use == tiers.cache_orphans == 0
    assert tiers.cache_taken == len(tiers)


def test_a_report_without_columns_is_of_all_rows_that_are_ok_and_released() -> None:
    tiers, batch = planned(STORE, 3, 2)
    assert tiers.report(STORE, batch) == ([], [], [], False)
    assert tiers.report(STORE, batch) == ([], None, [], True)
    assert (batch.undecided, batch.unreleased) == (0, 0)


def test_one_report_too_many_is_an_assertion() -> None:
    tiers, batch = planned(STORE, 1, 1)
    row = np.zeros(1, np.uint32)
    with pytest.raises(AssertionError, match="before its outcome"):
        tiers.report(STORE, batch, row, np.array([RELEASED], np.uint8))
    tiers.report(STORE, batch)
    with pytest.raises(AssertionError, match="twice"):
        tiers.report(STORE, batch)
    with pytest.raises(AssertionError, match="before its outcome"):
        tiers.report(STORE, batch, row, np.array([RELEASED], np.uint8))
