# SPDX-License-Identifier: Apache-2.0
"""What `make test` has names tests that exist, and the mutants of what differs."""

from __future__ import annotations

import pytest

from tests import gate
from tests.contract.rig import ENGINES
from tests.fabric.scenarios import BOOTS
from tests.sim import test_mutants
from tests.sim.mutants import MUTANTS

assert test_mutants  # importing it registers the mutants


@pytest.mark.parametrize("name", [*gate.END_TO_END, *gate.SLOW, *gate.NOT])
def test_what_is_named_exists(name: str) -> None:
    file, *parts = name.partition("[")[0].rstrip(":").split("::")
    assert (gate.ROOT / file).exists()
    text = (gate.ROOT / file).read_text() if parts else ""
    for part in parts:
        assert f"def {part}" in text or f"class {part}" in text


def test_engines_are_those_of_the_contract() -> None:
    assert ENGINES.keys() > gate.ENGINES


def test_scenarios_are_played() -> None:
    assert {name for boot in BOOTS for name in boot} >= gate.SCENARIOS


@pytest.mark.parametrize(
    ("file", "mutant"),
    [
        ("vllm_nvmeof_offload/manager/look_up.py", "first_miss_is_not_asked_again"),
        ("vllm_nvmeof_offload/native/tiers/index.h", "doom_ignores_the_generation"),
    ],
)
def test_a_file_has_the_mutants_that_break_something_in_it(file: str, mutant: str) -> None:
    found = gate.mutants_of([file, "README.md"])
    assert mutant in found
    assert len(found) < len(MUTANTS) / 2


def test_the_simulator_has_all_mutants() -> None:
    assert gate.mutants_of(["tests/sim/world.py"]) == set(MUTANTS)
    assert gate.mutants_of(["README.md"]) == set()
