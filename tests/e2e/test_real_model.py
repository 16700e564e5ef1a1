# SPDX-License-Identifier: Apache-2.0
"""A real model reads real text: the same words with offloading as without, whatever happens.

Chats about documents leave the caches and return, a crowd is preempted, the server is killed and
starts again, reads fail, a second server loads what the first has stored, and reads for it over a
link of its own. Facts that are hidden in long texts are found as often. The tests go on from one
another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pydoc_data.topics import topics

import pytest
from vllm_nvmeof_bench.demo.report import LOGPROB_TOLERANCE, compare
from vllm_nvmeof_bench.demo.workload import (
    CrowdPlan,
    Plan,
    Runs,
    Session,
    offload_spec,
    server_spec,
)
from vllm_nvmeof_bench.servers import smollm2
from vllm_nvmeof_bench.servers.client import Answer, Client, Message
from vllm_nvmeof_bench.servers.server import ReservedPort, Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import FAILED, LOADED

pytestmark = [pytest.mark.slow]  # some 4,000 tokens of a real model are computed

PLAN = Plan(
    main=2,
    others=2,
    prompt_tokens=800,
    answer_tokens=16,
    gpu_tokens=1088,
    cpu_tier_conversations=2.0,
    crowd=CrowdPlan(count=6, prompt_tokens=160, answer_tokens=64, answer_step=8),
)
PULLED = "vllm:nvmeof_peer_bytes_total"
#: A prompt takes some seconds by one link.
LINK_BYTES_PER_S = 20_000_000
ROUNDS_MAX = 5
#: Who, where, and after which share of the text it says so.
NEEDLES = [
    ("Marta", "Lisbon", 0.1),
    ("Piotr", "Oslo", 0.3),
    ("Amina", "Cairo", 0.5),
    ("Kenji", "Kyoto", 0.7),
    ("Laura", "Berlin", 0.9),
]
NEEDLE_CHARACTERS = 3000


@dataclass(frozen=True)
class Servers:
    """Two on one pool, the first of which may be killed and started again, and their faults."""

    specs: tuple[ServerSpec, ServerSpec]
    faults: tuple[rig.Faults, rig.Faults]
    running: dict[str, Server]

    def start(self, name: str) -> Server:
        self.running[name] = rig.start(self.specs[name == "b"], f"real-{name}")
        return self.running[name]


@pytest.fixture(scope="module")
def plain() -> ServerSpec:
    try:
        model = smollm2.make()
    except smollm2.NoRealModelError as error:
        pytest.skip(f"no real model: {error}")
    return replace(server_spec(PLAN, model), env={"VLLM_SERVER_DEV_MODE": "1"})


@pytest.fixture(scope="module")
def expected(plain: ServerSpec) -> tuple[Session, list[Answer]]:
    """Of a server without offloading."""
    with rig.start(plain, "real-plain") as server:
        found = asyncio.run(Runs(PLAN, smollm2.SHAPE).baseline(server))
        return found, find_needles(server)


@pytest.fixture(scope="module")
def servers(
    plain: ServerSpec, expected: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("real-model")
    faults = rig.Faults(directory / "a.json"), rig.Faults(directory / "b.json")
    secret = directory / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of both servers\n")
    sized = offload_spec(PLAN, smollm2.SHAPE, directory / "pool")
    with ReservedPort() as port:
        address = f"127.0.0.1:{port.number}"
        extra = {
            **sized.extra,
            "share": "host",
            "weights_never_change": True,
            "share_secret_file": str(secret),
            "admission": "always",
            "read_deadline_ms": 20_000,
        }
        serves = {"peer_listen": address, "serve_bytes": 24 * 2**20}
        of_a, of_b = (
            replace(sized, extra={**extra, **more, "fault_injection": str(control.path)})
            for more, control in zip(({"peers": [address]}, serves), faults, strict=True)
        )
        specs = (replace(plain, offload=of_a), replace(plain, offload=of_b))
        made = Servers(specs, faults, {})
        yield made
        for server in made.running.values():
            server.stop()


def assert_same(session: Session, expected: Session) -> None:
    seen = compare(expected.answers(), session.answers())
    assert seen.differences == ()
    assert seen.logprob_difference_max <= LOGPROB_TOLERANCE
    for name, answer in session.answers().items():
        assert answer.text == expected.answers()[name].text


def test_it_speaks(expected: tuple[Session, list[Answer]]) -> None:
    first = expected[0].turns[0].answer.text
    assert len(first.split()) >= 8
    assert "format" in first


def test_chats_return_from_every_tier_and_a_crowd_is_preempted(
    servers: Servers, expected: tuple[Session, list[Answer]]
) -> None:
    got = asyncio.run(Runs(PLAN, smollm2.SHAPE).offloaded(servers.start("a")))
    assert_same(got, expected[0])
    cases = [turn.case for turn in got.turns]
    assert cases.count("cold") == PLAN.main + PLAN.others
    assert {"cpu_tier", "pool"} <= set(cases)
    assert got.crowd.preemptions > 0


def returning(server: Server) -> Session:
    """The opening of each chat, once more."""
    return asyncio.run(Runs(PLAN, smollm2.SHAPE).restarted(server))


def test_after_sigkill(servers: Servers, expected: tuple[Session, list[Answer]]) -> None:
    servers.running["a"].kill()
    got = returning(servers.start("a"))
    assert_same(got, expected[0])
    assert {turn.case for turn in got.turns} == {"pool"}


def test_while_reads_fail(servers: Servers, expected: tuple[Session, list[Answer]]) -> None:
    a = servers.running["a"]
    rig.forget_gpu(a)
    before = rig.metrics(a)
    servers.faults[0].set(read_eio=0.3, seed=5)
    got = returning(a)
    servers.faults[0].set()
    assert servers.faults[0].fired("read_eio") > 0
    assert rig.grown(a, before, FAILED, operation="load") > 0
    assert_same(got, expected[0])


def test_a_second_server_loads_what_the_first_has_stored(
    servers: Servers, expected: tuple[Session, list[Answer]]
) -> None:
    a = servers.running["a"]
    chunks = rig.settle(a).value("vllm:nvmeof_slots_used", kind="pool")
    b = servers.start("b")
    rig.wait_for(b, "chunks of others", lambda m: m.value("vllm:nvmeof_shared_entries") >= chunks)
    before = rig.metrics(b)
    assert_same(returning(b), expected[0])
    assert rig.grown(b, before, LOADED, source="shared") > PLAN.prompt_tokens


def haystack(who: str, where: str, depth: float) -> list[Message]:
    text = topics["types"]
    at = text.index("\n", int(depth * NEEDLE_CHARACTERS))
    needle = f"\n\n{who} lives in the city of {where}.\n\n"
    whole = text[:at] + needle + text[at:NEEDLE_CHARACTERS]
    return [
        {"role": "user", "content": f"{whole}\n\nWhere does {who} live?"},
        {"role": "assistant", "content": f"{who} lives in the city of"},
    ]


def find_needles(server: Server) -> list[Answer]:
    async def run() -> list[Answer]:
        async with Client(server.url) as client:
            return [await client.chat(haystack(*one), 5) for one in NEEDLES]

    return asyncio.run(run())


def found(answers: list[Answer]) -> int:
    return sum(where in answer.text for (_, where, _), answer in zip(NEEDLES, answers, strict=True))


def test_hidden_facts_are_found_as_often(
    servers: Servers, expected: tuple[Session, list[Answer]]
) -> None:
    """Computed, then from the CPU tier or the pool, then through the second server's link, too."""
    a, wanted = servers.running["a"], expected[1]
    assert found(wanted) == len(NEEDLES), "without offloading, too"
    for _ in range(2):
        before = rig.metrics(a)
        got = find_needles(a)
        assert found(got) == found(wanted)
        assert rig.same(got, wanted)
        rig.settle(a)
        rig.forget_gpu(a)
    assert rig.grown(a, before, LOADED) > 0
    for control in servers.faults:
        control.set(bytes_per_s=LINK_BYTES_PER_S)
    before = rig.metrics(a)
    for _ in range(ROUNDS_MAX):
        rig.forget_gpu(a)
        got = find_needles(a)
        assert found(got) == found(wanted)
        assert rig.same(got, wanted)
        if rig.grown(a, before, PULLED, direction="pulled"):
            break
    for control in servers.faults:
        control.set()
    pulled = rig.grown(a, before, PULLED, direction="pulled")
    assert pulled > 0, "nothing came through the other server"
