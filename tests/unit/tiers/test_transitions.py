# SPDX-License-Identifier: Apache-2.0
"""The one table of transitions, native/common/transitions.def, as C++ and Python have it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from vllm_nvmeof_offload.native._tiers_mutants import after  # type: ignore[attr-defined]

import vllm_nvmeof_offload.native as native
from vllm_nvmeof_offload.manager.ledger import State

from .model import STATES, TABLE

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
