# SPDX-License-Identifier: Apache-2.0
"""Only equal facts give equal digests."""

from __future__ import annotations

import json

from vllm_nvmeof_offload.pool.format import FORMAT_VERSION, Keyspace


def test_a_digest_depends_on_every_fact_and_not_on_their_order() -> None:
    digest = Keyspace.of({"dtype": "bf16", "layers": 2}).digest
    assert digest == Keyspace.of({"layers": 2, "dtype": "bf16"}).digest
    assert len(digest) == 32
    assert int(digest, 16) >= 0
    for other in (
        {"dtype": "bf16"},
        {"dtype": "bf16", "layers": "2"},
        {"dtype": "f16", "layers": 2},
    ):
        assert Keyspace.of(other).digest != digest


def test_facts_come_back() -> None:
    facts = {"a": [1, None, "x"]}
    assert json.loads(Keyspace.exactly(facts).canonical) == facts
    assert json.loads(Keyspace.of(facts).canonical) == {**facts, "format": FORMAT_VERSION}


def test_a_pool_whose_slots_do_not_name_their_place_is_another_keyspace() -> None:
    facts = {"model": "m"}
    before = Keyspace.exactly(facts)
    assert before.canonical == '{"model":"m"}'
    assert Keyspace.of(facts).digest != before.digest
    assert Keyspace.of(facts) == Keyspace.exactly(json.loads(Keyspace.of(facts).canonical))
