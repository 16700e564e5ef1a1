# SPDX-License-Identifier: Apache-2.0
"""kv_hints, as vLLM passes them, change the order of eviction and of fetches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="hints come in vLLM's types")

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.core import CoreConfig, Source
from vllm_nvmeof_offload.manager.look_up import Answer, Question, Queue
from vllm_nvmeof_offload.pool.format import client_of
from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager

from .bench import KEY_BYTES, attached, hello, key, keys_of

CHUNK = 16
GROUPS = (Group(0, GroupKind.FULL, CHUNK),)


def hints(kind: str, **payload: Any) -> KvHintsEnvelope:
    action = KvHintAction("a", f"kv.{kind}", "1.0", payload)
    return KvHintsEnvelope("0.1", "m", [action])


class Server:
    """Four cache slots, eight of the pool; requests have the chunks of given numbers."""

    def __init__(self, **more: Any) -> None:
        self.numbers: dict[str, tuple[int, ...]] = {}
        config = CoreConfig(credit_share=2.0, peers=("d0:7000", "d1:7000"), **more)
        self.manager = NVMeoFOffloadingManager(config)
        queue = Queue(
            lambda request: [keys_of(*self.numbers[request])],
            lambda *_: [],
            lambda *_: False,
            GROUPS,
        )
        self.bench = attached(self.manager, hello(0, 4, 8, ()), KEY_BYTES, GROUPS, queue)

    def arrives(
        self,
        name: str,
        *numbers: int,
        kv_hints: Any = None,
        params: Any = None,
        salt: str | None = None,
    ) -> ReqContext:
        """As the connector does it."""
        self.numbers[name] = numbers
        context = ReqContext(name, kv_hints=kv_hints)
        for at, number in enumerate(numbers):
            context.set_offload_key_position(OffloadKey(key(number)), (at + 1) * CHUNK)
        tokens = len(numbers) * CHUNK + 1
        request = SimpleNamespace(
            request_id=name,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            session_id="s",
            cache_salt=salt,
            kv_transfer_params=params,
        )
        advice = self.manager.advise(context, request)
        assert self.manager.waiting is not None
        self.manager.waiting.added(request, first=advice.prefetch, helpers=advice.helpers)
        return context

    def serves(self, name: str, *numbers: int, kv_hints: Any = None, params: Any = None) -> Any:
        """A request stores its chunks, which are written, and ends; returns its answers."""
        context = self.arrives(name, *numbers, kv_hints=kv_hints, params=params)
        output = self.manager.prepare_store([OffloadKey(k) for k in keys_of(*numbers)], context)
        assert output is not None
        if output.keys_to_store:
            self.bench.done(output.store_spec.command.op)
        self.bench.write_all()
        answers = self.manager.answers(context).get("kv_hint", [])
        self.manager.on_request_finished(context)
        return answers

    def in_cpu(self, *numbers: int) -> list[int]:
        return [n for n in numbers if self.bench.source(n) is Source.CPU]

    @property
    def counted(self) -> dict[str, float]:
        counters = self.manager.core.counters
        return {s[1]: n for s, n in counters.items() if isinstance(s, tuple) and s[0] == "kv_hints"}


def test_what_found_no_room_is_offered_again_and_counted_at_the_end() -> None:
    server = Server()
    manager, counters = server.manager, server.manager.core.counters
    context = server.arrives("a", 1, 2, 3, 4, 5, 6)

    def offer(*numbers: int) -> Any:
        return manager.prepare_store([OffloadKey(one) for one in keys_of(*numbers)], context)

    first = offer(1, 2, 3, 4, 5, 6)
    assert list(first.keys_to_store) == keys_of(1, 2, 3, 4)
    assert manager.take_refused() == {"a": keys_of(5, 6)}
    assert not offer(5, 6).keys_to_store
    assert manager.take_refused() == {"a": keys_of(5, 6)}
    server.bench.done(first.store_spec.command.op)
    assert server.bench.write_all() == [1, 2, 3, 4]
    assert list(offer(5, 6, 7).keys_to_store) == keys_of(5, 6, 7)
    assert manager.take_refused() == {}
    assert not offer(8, 9, 10).keys_to_store[1:]
    manager.on_request_finished(context)
    assert counters["unstored_chunks", "no_room"] == 2, "the end of the request, once"


def test_without_advice_the_older_request_leaves_first() -> None:
    server = Server()
    server.serves("a", 1, 2)
    server.serves("b", 3, 4)
    server.serves("c", 5, 6)
    assert server.in_cpu(1, 2, 3, 4, 5, 6) == [3, 4, 5, 6]
    assert not server.counted


def test_what_is_retained_outlives_what_came_later() -> None:
    server = Server()
    directives = [{"start": 0, "end": CHUNK, "priority": 80}]
    server.serves("a", 1, 2, kv_hints=hints("retain", scope=None, directives=directives))
    server.serves("b", 3, 4)
    server.serves("c", 5, 6)
    assert server.in_cpu(1, 2, 3, 4, 5, 6) == [1, 3, 5, 6]
    assert server.counted == {"retain": 1}


@pytest.mark.parametrize("payload", [{}, {"session_id": "s"}])
def test_what_is_demoted_leaves_first_and_is_in_the_pool(payload: dict[str, str]) -> None:
    server = Server()
    server.serves("a", 1, 2)
    server.serves("b", 3, 4, kv_hints=hints("demote", **payload))
    server.serves("c", 5, 6)
    assert server.in_cpu(1, 2, 3, 4, 5, 6) == [1, 2, 5, 6]
    assert server.bench.hits([3, 4]) == [3, 4]
    assert server.counted == {"demote": 1}


def test_a_hinted_request_is_fetched_for_before_those_that_waited_longer() -> None:
    fetched = []
    for advice in (None, hints("prefetch")):
        server = Server()
        for name, numbers in (("a", (1, 2)), ("b", (3, 4)), ("c", (5, 6)), ("d", (7, 8))):
            server.serves(name, *numbers)
        server.arrives("first", 1, 2)
        server.arrives("second", 3, 4, kv_hints=advice)
        server.manager.core.turn()
        commands = server.manager.core.take_commands()
        fetched.append([k for command in commands for k in command.batch.key_list()])
    assert fetched[0][0] == key(1)
    assert fetched[1][0] == key(3)
    assert sorted(fetched[0]) != sorted(fetched[1]), "there is no room for both"


def test_a_router_advises_over_http_and_gets_an_answer() -> None:
    """Dynamo's `kv.fetch`, and an action in vLLM's own field, which gets no answer."""
    server = Server()
    for name, numbers in (("a", (1, 2)), ("b", (3, 4)), ("c", (5, 6)), ("d", (7, 8))):
        server.serves(name, *numbers)
    server.arrives("first", 1, 2)
    fetch = {"source_control_endpoint": "tcp://10.0.0.7:25000", "block_hashes": [3, 4]}
    kinds = (("kv.fetch", fetch), ("kv.teleport", {}))
    actions = [
        {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}
        for kind, payload in kinds
    ]
    params = {"kv_hint": {"protocol_version": "0.1", "message_id": "m", "actions": actions}}
    context = server.arrives("second", 3, 4, kv_hints=hints("demote"), params=params)
    server.manager.core.turn()
    commands = server.manager.core.take_commands()
    assert next(k for command in commands for k in command.batch.key_list()) == key(3)
    assert server.manager.answers(context) == {
        "kv_hint": [
            {"action_id": "kv.fetch", "done": "prefetch", "ignored": [*fetch]},
            {"action_id": "kv.teleport", "done": "unknown"},
        ]
    }
    assert server.counted == {"demote": 1, "prefetch": 1, "unknown": 1}
    assert server.serves("e", 9, kv_hints=hints("demote")) == []
    assert server.serves("f", 10, params={"kv_hint": None, "nvmeof": {}}) == []


def test_a_hints_duration_retains_and_without_one_it_only_keeps_longer() -> None:
    server = Server(retain_share=0.5)
    held = {"start": 0, "end": CHUNK, "priority": 80, "duration": 60}
    longer = {"start": CHUNK, "end": 2 * CHUNK, "priority": 80}
    hint = hints("retain", scope=None, directives=[held, longer])
    server.serves("a", 1, 2, kv_hints=hint)
    for number in range(7, 37, 2):
        server.serves(f"d{number}", number, number + 1)
    assert server.bench.hits([1, 2]) == [1]
    assert server.manager.core.gauges()["sessions"] == 1
    server = Server(retain_share=0.0)
    server.serves("a", 1, 2, kv_hints=hint)
    assert server.manager.core.gauges()["sessions"] == 0


def test_chunks_are_written_with_their_requests_salts() -> None:
    server, written = Server(), dict[bytes, int]()

    def write() -> None:
        for command in server.bench.writes():
            clients = np.frombuffer(command.clients, np.uint32).tolist()
            written.update(zip(command.batch.key_list(), clients, strict=True))
            server.bench.done(command.op)

    for name, salt, number in (("a", "tenant", 1), ("b", None, 2)):
        context = server.arrives(name, number, salt=salt)
        output = server.manager.prepare_store([OffloadKey(key(number))], context)
        assert output is not None
        server.bench.done(output.store_spec.command.op)
        write()
        server.manager.on_request_finished(context)
    assert written == {key(1): client_of("tenant"), key(2): client_of("")}


def test_a_session_is_retained_and_dropped_over_http() -> None:
    def answer(name: str, *numbers: int, **ours: Any) -> Any:
        context = server.arrives(name, *numbers, params={"nvmeof": ours})
        return server.manager.answers(context)

    server = Server()
    server.serves("a", 1, 2, params={"nvmeof": {"retain_s": 60, "session": "s"}})
    server.serves("b", 3, 4)
    server.serves("c", 5, 6)
    assert server.in_cpu(1, 2, 3, 4, 5, 6) == [1, 3, 5, 6], "a quarter of four slots"
    for number in range(7, 27, 2):
        server.serves(f"d{number}", number, number + 1)
    assert server.bench.hits([1, 2, 3, 4]) == [1, 2]
    assert answer("e", 1, retain_s=60) == {"retention": "retain"}
    assert answer("f", 1, retain_s="60") == {"retention": "malformed"}
    assert answer("g", 30, retain_s=0, session="s") == {"retention": "drop"}
    assert server.counted == {"retain": 2, "malformed": 1, "drop": 1}
    assert server.manager.core.gauges()["sessions"] == 1
    server.manager.core.turn()
    assert server.manager.core.gauges()["sessions"] == 0
    server = Server(retain_share=0.0)
    assert answer("a", 1, retain_s=60) == {"retention": "nothing"}
    server.serves("b", 1, params={"nvmeof": {"retain_s": 60}})
    assert server.manager.core.gauges()["sessions"] == 0


@pytest.mark.parametrize("kv_hint", [7, "x", [], {}, {"actions": "all"}])
def test_a_kv_hint_of_another_shape_is_malformed_and_harms_nothing(kv_hint: Any) -> None:
    server = Server()
    answers = server.serves("a", 1, 2, params={"kv_hint": kv_hint})
    assert [one["done"] for one in answers] == ["malformed"]
    assert server.counted == {"malformed": 1}
    assert server.in_cpu(1, 2) == [1, 2]


def test_what_is_unknown_is_counted_and_the_request_is_served() -> None:
    server = Server()
    server.serves("a", 1, 2, kv_hints=hints("teleport", to="elsewhere"))
    server.serves("b", 3, kv_hints=hints("retain", directives="all"))
    assert server.in_cpu(1, 2, 3) == [1, 2, 3]
    assert server.counted == {"unknown": 1, "malformed": 1}


@pytest.mark.parametrize(
    ("params", "helpers", "counted"),
    [
        (None, None, {}),
        ({"nvmeof": {"helpers": ["d9:1", "d0:7000"]}}, 0b01, {"known": 1, "unknown": 1}),
        ({"nvmeof": {"helpers": "d0:7000"}}, None, {"malformed": 1}),
    ],
)
def test_a_load_has_the_helpers_that_its_request_named(
    params: Any, helpers: int | None, counted: dict[str, int]
) -> None:
    server = Server()
    server.serves("a", 1, 2)
    context = server.arrives("b", 1, 2, params=params)
    waiting = server.manager.waiting
    assert waiting is not None
    answer = Answer(Question(33, b"hash", 0, None, 3), 2 * CHUNK, keys_of(1, 2), ())
    assert waiting.look_ups.decide("b", answer).helpers == helpers
    spec = server.manager.prepare_load([OffloadKey(k) for k in keys_of(1, 2)], context)
    assert spec.command.helpers == helpers
    counters = server.manager.core.counters
    kinds = ("known", "unknown", "malformed")
    assert {one: counters["peer_hints", one] for one in kinds if counters["peer_hints", one]} == (
        counted
    )
