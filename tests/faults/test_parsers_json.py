# SPDX-License-Identifier: Apache-2.0
"""Random and mutated bytes in the keyspace's facts, a pool's JSON file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.survey import model_name, read_facts

from .mutations import changes, mutated, of_file, same_directory

numbers = st.one_of(st.integers(), st.floats())
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
records = st.fixed_dictionaries({}, optional=dict.fromkeys(("model", "layers", "dtype"), values))
jsons = st.one_of(values, records).map(lambda value: json.dumps(value).encode())
DEEP = b"[" * 200_000


def any_bytes(valid: bytes) -> st.SearchStrategy[bytes]:
    damaged = changes.map(lambda mutations: mutated(valid, mutations))
    return st.one_of(st.binary(max_size=600), jsons, damaged)


FACTS = json.loads(Keyspace.of({"model": "m", "layers": [1, 2], "dtype": "bf16"}).canonical)
#: The facts that an earlier release wrote, whose slots did not name their place.
OLD_FACTS: dict[str, object] = {"model": "m", "layers": [1, 2]}


@same_directory
@given(any_bytes(Keyspace.of(FACTS).canonical.encode()))
@example(DEEP)
@example(b'{"model": NaN}')
def test_facts_of_another_digest_are_not_believed(tmp_path: Path, data: bytes) -> None:
    space = tmp_path / Keyspace.of(FACTS).digest
    space.mkdir(exist_ok=True)
    of_file(space / "keyspace.json", data)
    facts = read_facts(space)
    assert facts is None or facts == FACTS
    assert model_name(space) == ("?" if facts is None else "m")


@pytest.mark.parametrize("facts", [FACTS, OLD_FACTS])
def test_facts_are_read_back(tmp_path: Path, facts: dict[str, object]) -> None:
    space = tmp_path / Keyspace.exactly(facts).digest
    space.mkdir()
    assert read_facts(space) is None
    of_file(space / "keyspace.json", json.dumps(facts, indent=2).encode())
    assert read_facts(space) == facts
