# SPDX-License-Identifier: Apache-2.0
"""Slots, the reports that release them, the table of transitions, and the memory used."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_nvmeof_offload.native._tiers_mutants import after

import vllm_nvmeof_offload.native as native
from vllm_nvmeof_offload.manager.ledger import State
from vllm_nvmeof_offload.native import Batch, Tiers
from vllm_nvmeof_offload.protocol import place_of

from .model import CANCELLED, EIO, OK, RELEASED, STALE, STATES, TABLE

KINDS = ("store", "load", "write", "fetch")
KEYS = [bytes([number]) * 4 + bytes(4) for number in range(24)]


@pytest.mark.parametrize(
    "places", [[place_of(0, 1), place_of(0, 1)], [place_of(0, 2)], [place_of(1, 1)]]
)
def test_adopting_a_slot_twice_or_out_of_range_is_an_assertion(places: list[int]) -> None:
    tiers = Tiers(1, [2, 1], key_bytes=8)
    generations = np.arange(len(places), dtype=np.uint64)
    with pytest.raises(AssertionError, match="adopted"):
        tiers.adopt(np.array(places), generations, b"".join(KEYS[: len(places)]))


def test_adopting_after_slots_were_taken_is_an_assertion() -> None:
    tiers = Tiers(1, [2], key_bytes=8)
    tiers.report(0, tiers.plan_store(KEYS[:1], None, 0)[0])
    tiers.drain()
    assert len(tiers.take_writes()) == 1
    with pytest.raises(AssertionError, match="adopted"):
        tiers.adopt(np.array([place_of(0, 1)]), np.ones(1, np.uint64), KEYS[1])


# -- a fact of a row holds when all ranks have reported it ----------------------------

STORE, LOAD = 0, 1
IO_ERROR = 1
ROW_CODES = (OK, OK, IO_ERROR, STALE, CANCELLED)
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
        code, at_once = rng.choice(ROW_CODES), rng.random() < 0.6
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
        assert tiers.cache_in_use == sum(map(bool, releases))
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


# -- the one table of transitions, as C++ and Python have it --------------------------

EVENTS = (
    *("STORE_BEGIN", "ADOPT", "COPIED", "WRITE_BEGIN", "WRITTEN", "WRITE_FAILED"),
    *("EVICT_CACHE", "EVICT_POOL", "CACHE_LOST", "FETCH_BEGIN", "BORROW_BEGIN", "FETCHED"),
    *("FETCH_CANCELLED", "DOOM"),
)


def test_the_model_has_every_line_of_the_table() -> None:
    text = (Path(native.__file__).parent / "common/transitions.def").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("//")]
    assert len(TABLE) == len(lines) == len(set(lines))
    assert all(re.fullmatch(r"STEP\(\w+, \w+, \w+\)", line) for line in lines)
    assert {state for state, _ in TABLE} | set(TABLE.values()) == set(STATES)
    assert {event for _, event in TABLE} == set(EVENTS)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_every_state_with_every_event(state: str, event: str) -> None:
    numbers = STATES.index(state), EVENTS.index(event)
    if (state, event) in TABLE:
        assert STATES[after(*numbers)] == TABLE[state, event]
    else:
        with pytest.raises(AssertionError, match=f"^{event} on {state}$"):
            after(*numbers)


def test_the_states_that_are_shown_have_the_tables_names() -> None:
    assert {state.name: state.value for state in State} == {
        name: number for number, name in enumerate(STATES) if name not in ("ABSENT", "DOOMED")
    }


def test_a_doomed_entry_is_gone_and_every_entry_can_be_doomed() -> None:
    assert not any(state == "DOOMED" for state, _ in TABLE)
    assert {state for state, event in TABLE if event == "DOOM"} == {state.name for state in State}


# -- slots that hold nothing take no memory -------------------------------------------

#: So many that the rest of a huge page in each column counts little.
CHUNKS = 800_000
#: What docs/architecture.md promises for each chunk, by the members that share a slot.
CHUNK_BYTES_MAX = {1: 127, 2: 150, 8: 150}

#: Prints the bytes of resident memory that the tiers take at first, and once every slot is full.
CHILD = """
import sys
import numpy as np
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, places_of

slots, members = map(int, sys.argv[1:])
chunks = slots * members
numbers = np.arange(chunks, dtype=np.int64)
each = numbers % members if members > 1 else np.full(chunks, EVERY_MEMBER)
places = places_of(0, numbers // members, each)
keys = np.zeros((chunks, 36), np.uint8)
keys[:, :8] = numbers.view(np.uint8).reshape(-1, 8)
generations = numbers.view(np.uint64) + 1
keys = keys.tobytes()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


before = resident()
tiers = Tiers(16, [slots], key_bytes=36, set_sizes=[members])
empty = resident()
assert tiers.adopt(places, generations, keys) == chunks
print(empty - before, resident() - before)
"""


@pytest.mark.parametrize("members", CHUNK_BYTES_MAX)
def test_slots_take_memory_once_they_hold_a_chunk(members: int) -> None:
    slots = CHUNKS // members
    command = [sys.executable, "-c", CHILD, str(slots), str(members)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    empty, full = map(int, done.stdout.split())
    assert empty < slots * 8
    assert full < CHUNKS * CHUNK_BYTES_MAX[members]


def test_rows_of_the_last_keys_are_used_only_while_they_have_those_keys() -> None:
    tiers = Tiers(4, [], key_bytes=8, writes=False)
    looks = native.LookUps(tiers, lambda sources: 3, True, False)
    context = SimpleNamespace(load_tier_filter=None)
    old, new = KEYS[:4], KEYS[4:8]

    def store(keys: list[bytes]) -> None:
        batch = tiers.plan_store(keys, None, 0)[0]
        tiers.report(KINDS.index("store"), batch)

    def look_up(keys: list[bytes]) -> list[bool]:
        looks.begin(3, [keys])
        found = [looks.lookup(key, context) for key in keys]
        looks.end()
        return found

    store(old)
    assert look_up(old) == [True] * 4
    assert tiers.present(new) == bytes(4)
    assert look_up(old[:2]) == [True] * 2
    assert tiers.present([old[0], new[0], *old[1:]]) == bytes([1, 0, 1, 1, 1])
    store(new)  # evicts the old ones and takes their rows
    for _ in range(2):
        assert tiers.present(old) == bytes(4)
        assert tiers.present(new) == bytes([1] * 4)
    assert look_up(new) == [True] * 4
    tiers.reset()
    assert tiers.present(new) == bytes(4)
    assert tiers.plan_load(new, 0).rows.tolist() == [2**32 - 1] * 4
