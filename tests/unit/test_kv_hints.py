# SPDX-License-Identifier: Apache-2.0
"""A request's hints: four actions are read; all others are counted and ignored."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.vllm_adapter.kv_hints import (
    Advice,
    Retention,
    TokenRange,
    advice_of,
    helpers_of,
    retention_of,
)

REQUEST = SimpleNamespace(num_prompt_tokens=100, session_id="agent-1", request_id="cmpl-9")


def action(kind: str, payload: object = None, version: str = "1.0") -> Any:
    return SimpleNamespace(
        action_id="a", action_type=kind, action_version=version, payload=payload or {}
    )


FETCH = {"source_control_endpoint": "tcp://10.0.0.7:25000", "block_hashes": [7, 8]}


def read(*actions: Any) -> tuple[Advice, Counter[str]]:
    """The advice, which the same envelope as JSON gives too, and the counts; without answers."""
    seen: Counter[str] = Counter()
    envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))
    advice = advice_of(envelope, REQUEST, lambda kind: seen.update([kind]))
    assert over_http(*actions) == (advice, seen)
    return replace(advice, answers=()), seen


def over_http(*actions: Any, **more: Any) -> tuple[Advice, Counter[str]]:
    """The same envelope as a router sends it in JSON."""
    seen: Counter[str] = Counter()
    as_json = [vars(one) if isinstance(one, SimpleNamespace) else one for one in actions]
    envelope = json.loads(json.dumps({"protocol_version": "0.1", "actions": as_json}))
    return advice_of(envelope, REQUEST, lambda kind: seen.update([kind]), **more), seen


def retain(*directives: dict[str, Any], **more: Any) -> Any:
    return action("kv.retain", {"scope": None, "directives": list(directives), **more})


def test_three_actions_are_read_together() -> None:
    advice, seen = read(
        action("kv.prefetch"),
        retain({"start": 0, "end": 64, "priority": 90, "duration": 30.0}),
        action("kv.demote", {"session_id": "agent-1"}, "1.3"),
    )
    (tokens,) = advice.retain
    assert advice == Advice(True, (tokens,), True)
    assert tokens[:2] == (0, 64) and tokens.retention and tokens.retention[:2] == (30, 90)
    assert seen == Counter(prefetch=1, retain=1, demote=1)


def test_what_is_retained_ends_in_a_range() -> None:
    advice, _ = read(
        retain(
            {"start": 16, "end": 48, "priority": 50},
            {"start": 48, "end": 64, "priority": 0},
            {"start": 64, "end": 80, "priority": 9, "duration": 0},
            {"covers_output": True, "priority": 1, "duration": None},
        )
    )
    assert advice.retain == ((16, 48, None), (100, None, None))
    assert advice.kept([16, 32, 48, 64, 80, 96, 112, 128]) == [1, 2, 6, 7]
    assert advice.retentions() == []


def test_a_duration_retains_each_range_in_its_own_session_for_at_most_a_week() -> None:
    ranges = [
        {"start": 0, "end": 48, "priority": 50, "duration": 0.5},
        {"start": 16, "end": 32, "priority": 7, "duration": float("inf")},
        {"start": 48, "end": 64, "priority": 9},
    ]
    advice = advice_of({"actions": [vars(retain(*ranges))]}, REQUEST, lambda kind: None)
    assert advice.kept([16, 32, 48, 64]) == [3]
    asked, tokens = zip(*advice.retentions(), strict=True)
    assert [one[:2] for one in asked] == [(1, 50), (7 * 24 * 3600, 7)]
    assert [list(map(one.contains, (16, 32, 48, 64))) for one in tokens] == [
        [True, True, True, False],
        [False, True, False, False],
    ]
    assert len({one.session for one in asked}) == 2
    assert len({one.session.client for one in asked}) == 1
    without = advice_of(
        {"actions": [vars(retain(*ranges))]}, REQUEST, lambda kind: None, may_retain=False
    )
    assert without.retentions() == []
    assert without.kept([16, 32, 48, 64]) == [0, 1, 2, 3], "as if another request had used them"


@pytest.mark.parametrize(
    "unknown",
    [
        action("kv.fetch", FETCH, "2.0"),
        action("kv.deref"),
        action("retain"),
        action("kv.retain", {"directives": []}, "2.0"),
        action("kv.prefetch", version="one"),
        action("kv.prefetch", {"block_hashes": ["00"]}),
        action("kv.demote", {"session_id": "agent-2"}),
        SimpleNamespace(),
        "kv.prefetch",
    ],
)
def test_others_are_counted_and_do_not_hide_ours(unknown: Any) -> None:
    advice, seen = read(unknown, action("kv.prefetch"))
    assert advice == Advice(prefetch=True)
    assert seen == Counter(unknown=1, prefetch=1)


@pytest.mark.parametrize(
    "payload",
    [
        {"directives": 3},
        {"priority": 50, "ttl_seconds": 10},
        {"directives": [{"start": 0, "end": 16}]},
        {"directives": ["all"]},
        {"directives": [{"priority": 101}]},
        {"directives": [{"priority": True}]},
        {"directives": [{"priority": 5, "start": -1}]},
        {"directives": [{"priority": 5, "start": 16, "end": 16}]},
        {"directives": [{"priority": 5, "duration": float("nan")}]},
        {"directives": [{"priority": 5, "duration": "long"}]},
        {"directives": [{"priority": 5, "covers_output": True, "end": 9}]},
        {"directives": [{"priority": 5, "colour": "red"}]},
        {"directives": [{"priority": 5}] * 129},
        [1],
    ],
)
def test_a_malformed_payload_retains_nothing(payload: object) -> None:
    advice, seen = read(action("kv.retain", payload), action("kv.demote"))
    assert advice == Advice(demote=True)
    assert seen == Counter(malformed=1, demote=1)


def test_an_envelope_is_read_up_to_a_bound() -> None:
    _, seen = read(*[action("kv.prefetch")] * 20)
    assert seen == Counter(prefetch=16, unknown=4)
    counted: Counter[str] = Counter()
    for envelope in (None, SimpleNamespace(actions=7), {"actions": []}, {}):
        advice = advice_of(envelope, REQUEST, lambda kind: counted.update([kind]))
        assert replace(advice, answers=()) == Advice()
    assert counted == Counter(malformed=3)


def test_a_fetch_is_a_prefetch_and_the_answer_says_what_was_ignored() -> None:
    """The one message of Dynamo's router, followed by actions that its envelope may also have."""
    advice, seen = over_http(
        {**vars(action("kv.fetch", FETCH)), "action_id": "replica-local"},
        retain({"start": 0, "priority": 9}),
        action("kv.demote"),
        action("kv.teleport"),
        action("kv.fetch", {"block_hashes": [7]}),
    )
    assert replace(advice, answers=()) == Advice(True, (TokenRange(0, None),), True)
    assert seen == Counter(prefetch=1, retain=1, demote=1, unknown=1, malformed=1)
    first, *others = advice.answers
    ignored = ["source_control_endpoint", "block_hashes"]
    assert first == {"action_id": "replica-local", "done": "prefetch", "ignored": ignored}
    assert others == [
        {"action_id": "a", "done": done} for done in ("retain", "demote", "unknown", "malformed")
    ]


def test_an_answer_is_short_and_no_prefetch_is_claimed_that_the_request_forbids() -> None:
    advice, seen = over_http(*[{**vars(action("kv.fetch", FETCH)), "action_id": "x" * 129}] * 20)
    assert seen == Counter(prefetch=16, unknown=4)
    assert [one["action_id"] for one in advice.answers] == [None] * 16
    advice, seen = over_http(action("kv.prefetch"), may_prefetch=False)
    assert [one["done"] for one in advice.answers] == ["nothing"]
    for envelope in (7, {}):
        advice = advice_of(envelope, REQUEST, lambda _: None)
        assert advice.answers == ({"action_id": None, "done": "malformed"},)


PEERS = ("d0:7000", "d1:7000", "[fe80::1]:7000")


def named(helpers: Any) -> tuple[int | None, Counter[str]]:
    seen: Counter[str] = Counter()
    params = {"nvmeof": {"helpers": helpers}, "do_remote_decode": True}
    return helpers_of(params, PEERS, lambda how: seen.update([how])), seen


def test_helpers_are_those_of_the_peers_that_are_named_by_their_letters() -> None:
    assert named(["[fe80::1]:7000", "d0:7000"]) == (0b101, Counter(known=2))
    assert named(["d1:7000", "d1:7000", "D0:7000", ""]) == (0b10, Counter(known=2, unknown=2))
    assert named([]) == (0, Counter())
    assert named(["d7:7000"]) == (0, Counter(unknown=1))


@pytest.mark.parametrize("helpers", [None, "d0:7000", {"d0:7000": 1}, ["d0:7000", 7], ["x"] * 65])
def test_a_malformed_hint_of_helpers_is_ignored(helpers: Any) -> None:
    assert named(helpers) == (None, Counter(malformed=1))


def test_what_is_no_hint_of_helpers_is_none() -> None:
    counted: Counter[str] = Counter()
    for params in (None, [], {}, {"nvmeof": {}}, {"nvmeof": {"helper": []}}, {"other": 1}):
        assert helpers_of(params, PEERS, lambda how: counted.update([how])) is None
    assert not counted
    assert helpers_of({"nvmeof": 1}, PEERS, lambda how: counted.update([how])) is None
    assert counted == Counter(malformed=1)


def retention(salt: str | None = None, **asked: Any) -> Retention | None:
    request = SimpleNamespace(request_id="r", cache_salt=salt)
    advice = retention_of({"nvmeof": asked}, request, lambda _: None)
    return advice.retention


def test_a_session_is_named_together_with_its_salt() -> None:
    named = retention(retain_s=60, session="a", priority=7)
    assert named == retention("", retain_s=59.1, session="a", priority=7)
    assert named is not None and named.priority == 7 and named.seconds == 60
    others = [
        retention("salt", retain_s=60, session="a"),
        retention(retain_s=60, session="salta"),
        retention(retain_s=60, session="r"),
        retention(retain_s=60),
        retention("s\ud800", retain_s=60, session="\ud800"),
    ]
    assert len({named.session.session, *(one.session.session for one in others if one)}) == 6
    salted = retention("salt", retain_s=0, session="a")
    assert salted is not None and salted.seconds == 0
    assert salted.session == others[0].session if others[0] else None
    assert salted.session.client != named.session.client


@pytest.mark.parametrize(
    "asked",
    [
        {"session": "a"},
        {"priority": 3},
        {"retain_s": 0},
        *({"retain_s": value} for value in (-1, True, "60", None, float("nan"), 604_801)),
        *({"retain_s": 60, "priority": value} for value in (0, 101, 1.5, "high", None)),
        *({"retain_s": 60, "session": value} for value in ("", 7, "x" * 257)),
    ],
)
def test_a_malformed_retention_is_counted_and_ignored(asked: dict[str, Any]) -> None:
    seen: list[str] = []
    advice = retention_of({"nvmeof": asked}, SimpleNamespace(request_id="r"), seen.append)
    assert advice == Advice(retention_answer="malformed") and seen == ["malformed"]


@pytest.mark.parametrize("params", [None, 7, {}, {"nvmeof": 7}, {"nvmeof": {"explain": True}}])
def test_without_keys_of_a_retention_there_is_no_answer(params: Any) -> None:
    assert retention_of(params, REQUEST, pytest.fail) == Advice()
