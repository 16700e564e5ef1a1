# SPDX-License-Identifier: Apache-2.0
"""Peers: their messages, the check of NIXL, and the start and end of connections."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from vllm_nvmeof_bench.servers.server import ReservedPort

from tests.process import listening, wait_until
from tests.unit.commands.test_doctor import Idle
from vllm_nvmeof_offload.commands.doctor.peers import ask
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    STALE,
    ConfigError,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.peers import transport
from vllm_nvmeof_offload.peers.base import Common
from vllm_nvmeof_offload.peers.session import (
    MESSAGE_BYTES_MAX,
    READS_MAX,
    TOKENS_MAX,
    AnyMessage,
    BackOff,
    Beat,
    BusyRate,
    Bye,
    Cancel,
    Channel,
    Done,
    Failed,
    FailedRead,
    Hello,
    Lent,
    Listening,
    MalformedError,
    Read,
    Ready,
    Reason,
    Refused,
    Sent,
    WantedRead,
    Welcome,
    failed_read,
    key_pair,
    outcome_of_failed,
)
from vllm_nvmeof_offload.peers.transport import has_rdma, why_no_pulls
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.worker.peer_reads import PeerLinks, open_links

u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
sixteen = st.binary(min_size=16, max_size=16)
tokens = st.lists(u64, max_size=20)
rate = st.floats(0, 1e15)
wanted = st.builds(WantedRead, u64, sixteen, u32, st.binary(min_size=1, max_size=46), u64, u64, u32)
reads = st.lists(wanted, max_size=READS_MAX)
failed = st.lists(st.builds(FailedRead, u64, st.sampled_from(Reason), u32), max_size=9)
messages: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(
        Hello,
        version=u32,
        keyspace=st.text(max_size=64),
        tag=sixteen,
        rank=u32,
        world_size=u32,
        slot_bytes=u64,
        pulls=st.booleans(),
    ),
    st.builds(
        Welcome,
        metadata=st.binary(max_size=999),
        address=u64,
        slots=st.integers(1, TOKENS_MAX),
        credits=st.integers(1, TOKENS_MAX),
    ),
    st.builds(Refused, text=st.text(max_size=256)),
    st.builds(Read, inline=st.booleans(), reads=reads),
    st.builds(
        Ready,
        lent=st.lists(st.builds(Lent, u64, u32), max_size=9),
        queued_bytes=u64,
        bytes_per_s=rate,
        credits=st.integers(0, TOKENS_MAX),
    ),
    st.builds(Sent, token=u64),
    st.builds(Failed, failed=failed),
    st.builds(Done, tokens=tokens),
    st.builds(Cancel, tokens=tokens),
    st.builds(Beat, queued_bytes=u64, bytes_per_s=rate),
    st.builds(Bye, text=st.text(max_size=256)),
)

WELCOME = Welcome(metadata=b"m" * 300, address=1 << 40, slots=16, credits=16)


@given(st.lists(messages, max_size=5))
def test_what_is_encoded_is_decoded(sent: list[AnyMessage]) -> None:
    ours, theirs = Channel(), Channel()
    assert [theirs.decode(ours.encode(message)) for message in sent] == sent
    assert [message.n for message in sent] == list(range(len(sent)))


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_malformed(raw: bytes) -> None:
    try:
        Channel().decode(raw)
    except MalformedError:
        return


@given(messages, st.data())
def test_a_damaged_message_is_a_message_or_malformed(
    message: AnyMessage, data: st.DataObject
) -> None:
    raw = bytearray(Channel().encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for part in (bytes(raw), bytes(raw[:cut])):
        try:
            again = Channel().decode(part)
        except MalformedError:
            continue
        assert again.n == 0


def test_a_gap_in_the_numbers_is_malformed() -> None:
    ours, theirs = Channel(), Channel()
    first, second, third = (ours.encode(Beat()) for _ in range(3))
    theirs.decode(first)
    for raw in (third, first):
        with pytest.raises(MalformedError, match="instead of 1"):
            theirs.decode(raw)
    theirs.decode(second)


def test_a_field_of_a_later_release_is_ignored() -> None:
    raw = msgspec.msgpack.encode({"type": "done", "n": 0, "tokens": [3], "news": {"a": [1]}})
    assert Channel().decode(raw) == Done(tokens=[3])


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "done", "tokens": list(range(TOKENS_MAX + 1))},
        {
            "type": "read",
            "inline": False,
            "reads": [[1, b"r" * 16, 1, b"k", 1, 1, 1]] * (READS_MAX + 1),
        },
        {"type": "read", "inline": False, "reads": [[1, b"r" * 15, 1, b"k", 1, 1, 1]]},
        {"type": "read", "inline": False, "reads": [[1, b"r" * 16, 1, b"k" * 47, 1, 1, 1]]},
        {"type": "read", "inline": False, "reads": [[-1, b"r" * 16, 1, b"k", 1, 1, 1]]},
        msgspec.to_builtins(WELCOME, builtin_types=(bytes,)) | {"slots": 0},
        msgspec.to_builtins(WELCOME, builtin_types=(bytes,)) | {"credits": 99_999},
        {"type": "beat", "bytes_per_s": float("nan")},
        {"type": "beat", "bytes_per_s": float("inf")},
        {"type": "another"},
        {"type": "bye", "text": "x" * 257},
    ],
    ids=lambda fields: fields["type"],
)
def test_what_is_out_of_bounds_is_malformed(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedError):
        Channel().decode(msgspec.msgpack.encode({"n": 0, **fields}))


def test_a_damage_that_is_reported_is_one_short_line() -> None:
    kind = "x" * 50_000 + "\n"
    with pytest.raises(MalformedError) as found:
        Channel().decode(msgspec.msgpack.encode({"n": 0, "type": kind}))
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 500


def test_keys_are_made_from_the_secret_and_the_side() -> None:
    """All servers with one secret have the same, and they are of this release's protocol."""
    public, secret = key_pair(b"a secret of this test", serves=True)
    assert public == zmq.curve_public(secret)
    pairs = {
        key_pair(one, serves=side)
        for one in (b"a secret of this test", b"a secret of another test")
        for side in (True, False)
    }
    assert len(pairs) == 4
    assert (public, secret) in pairs


def test_a_message_that_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(MalformedError, match="bytes"):
        Channel().decode(b"\x81" + bytes(MESSAGE_BYTES_MAX))


def test_the_largest_messages_fit() -> None:
    largest = WantedRead(*[(1 << 64) - 1, b"r" * 16, 9, b"k" * 46, (1 << 64) - 1, 1 << 40, 9])
    assert Channel().encode(Read(inline=True, reads=[largest] * READS_MAX))
    assert Channel().encode(Done(tokens=[(1 << 64) - 1] * TOKENS_MAX))


@pytest.mark.parametrize(
    "outcome", [STALE, CHECKSUM_MISMATCH, DEADLINE, CANCELLED, io_error(5), io_error(0)], ids=str
)
def test_a_failure_crosses_as_it_is(outcome: Outcome) -> None:
    assert outcome_of_failed(failed_read(1, outcome)) == outcome


def test_what_only_a_peer_can_say_is_an_error_of_the_slot_or_of_nothing() -> None:
    assert failed_read(1, None) == FailedRead(1, Reason.NOT_ATTACHED)
    for reason in Reason:
        assert not outcome_of_failed(FailedRead(1, reason)).ok


def test_a_peer_that_is_not_there_is_greeted_every_few_seconds() -> None:
    back_off, now_s = BackOff(), 0.0
    greeted = []
    while now_s < 60.0:
        if back_off.is_over(now_s):
            greeted.append(now_s)
            back_off.begin(now_s)
        now_s += 0.1
    gaps = [later - sooner for sooner, later in itertools.pairwise(greeted)]
    assert gaps[0] < 0.5
    assert max(gaps) == pytest.approx(2.0, abs=0.2)


def test_a_peer_whose_session_has_lasted_is_greeted_soon() -> None:
    back_off, now_s = BackOff(), 0.0
    for _ in range(6):
        while not back_off.is_over(now_s):
            now_s += 0.1
        back_off.begin(now_s)
    assert not back_off.is_over(now_s + 1.9)
    now_s += 2.0 + 3.0  # the session
    back_off.begin(now_s)
    assert back_off.is_over(now_s + 0.3)


def test_time_in_which_a_thread_was_kept_from_running_is_not_listened() -> None:
    listening = Listening(10.0)
    for now_s in (10.025, 10.06, 10.085):  # one turn is a little late
        listening.turn(now_s, 0.025)
    assert listening.now_s == pytest.approx(10.085)
    listening.turn(13.0, 0.025)
    assert listening.now_s == pytest.approx(10.085, abs=0.08)
    before_s = listening.now_s
    for now_s in (13.001, 13.002):
        listening.turn(now_s, 0.0)
    assert listening.now_s == pytest.approx(before_s + 0.002)


def test_a_rate_counts_the_time_in_which_something_moves() -> None:
    rate = BusyRate()
    now_s = 0.0
    for _ in range(20):
        rate.moves(now_s)
        rate.moves(now_s + 0.01)
        rate.moved(100, now_s + 0.015, more=True)
        rate.moved(200, now_s + 0.03, more=False)
        now_s += 1.0  # nothing moves
    assert rate.bytes_per_s == pytest.approx(10_000)
    rate.moves(now_s)
    rate.stop()
    rate.moves(now_s + 100)
    rate.moved(200, now_s + 100.02, more=False)
    assert rate.bytes_per_s == pytest.approx(10_000)


def test_a_rate_is_forgotten_when_nothing_has_moved_for_long() -> None:
    rate = BusyRate()
    rate.moves(10.0)
    rate.moved(300, 10.03, more=False)
    assert rate.recent(15.0) == pytest.approx(10_000)
    assert rate.recent(15.1) == 0.0
    assert rate.bytes_per_s == pytest.approx(10_000)


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("state", "in_use"), [("4: ACTIVE", True), ("1: DOWN", False), ("2: INIT", False)]
)
def test_a_port_that_is_not_active_is_no_rdma(tmp_path: Path, state: str, in_use: bool) -> None:
    assert not has_rdma(str(tmp_path))
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    assert not has_rdma(str(tmp_path))
    (port / "state").write_text(state + "\n")
    assert has_rdma(str(tmp_path)) == in_use


#: What stands for NIXL.
AGENT = "from tests.faults.peers.stand_in import Agent; nixl_agent, nixl_agent_config = Agent, dict"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('no such CUDA')", "no such CUDA"),
        ("import os; os.abort()", "exits with -6"),
        (f"{AGENT}\nAgent.create_backend = None", "cannot create an agent (TypeError"),
        (AGENT, ""),
    ],
    ids=["raises", "aborts", "refuses", "works"],
)
def test_a_library_that_does_not_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    (tmp_path / "nixl.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(transport, "has_rdma", lambda: True)
    found = why_no_pulls()
    assert says in found
    assert bool(found) == bool(says)
    assert "\n" not in found


def test_the_environment_is_set_before_the_library_is_loaded(tmp_path: Path) -> None:
    name = "UCX_RCACHE_MAX_UNRELEASED"
    (tmp_path / "nixl.py").write_text(f"import os; seen = os.environ.get({name!r})")
    script = "from vllm_nvmeof_offload.peers.transport import load_nixl; print(load_nixl().seen)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop(name, None)
    assert printed(script, environment) == "1024"


def printed(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_without_rdma_nothing_imports_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "has_rdma", lambda: False)
    monkeypatch.setattr(transport.subprocess, "run", None)
    assert "RDMA" in why_no_pulls()


#: With RDMA the agent is made, without it NIXL refuses; either way it listens nowhere. The process
#: ends without the libraries' destructors (docs/troubleshooting.md).
MAKE_AGENT = """
import ctypes, os
from tests.process import listening
from vllm_nvmeof_offload.peers.base import SlotMemory
from vllm_nvmeof_offload.peers.transport import NixlTransport, TransportError
memory = ctypes.create_string_buffer(8192)
before = dict(os.environ)
try:
    made = NixlTransport(SlotMemory(ctypes.addressof(memory), 8192, 1))
except TransportError:
    pass
changed = {key for key in set(before) ^ set(os.environ)}
print(listening(), changed - {"UCX_RCACHE_MAX_UNRELEASED", "NIXL_LOG_LEVEL"}, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
def test_an_agent_listens_nowhere_and_leaves_the_environment_as_it_is() -> None:
    assert printed(MAKE_AGENT, dict(os.environ)).splitlines()[-1] == "[] set()"


SLOT_BYTES = 8192
COMMON = Common("k" * 32, 0, 1, SLOT_BYTES)
TAG, OTHER_TAG = b"t" * 16, b"o" * 16


@pytest.fixture
def staging() -> Staging:
    return Staging(SLOT_BYTES, 4, 4, serve_slots=2)


def links_of(staging: Staging, common: Common = COMMON, **extra: object) -> PeerLinks | None:
    settings = parse_config(extra, {})
    port = Idle() if settings.peer_listen else None
    return open_links(settings, common, TAG, port, lambda: None, staging)


def is_usable(links: PeerLinks) -> bool:
    assert links.clients is not None
    return links.clients.state(0).usable


def test_a_session_begins_ends_with_other_weights_and_begins_again(staging: Staging) -> None:
    with ReservedPort() as port:
        address = f"127.0.0.1:{port.number}"
        links = links_of(staging, peers=address, peer_listen=address)
        assert links is not None
        assert len(links.fds) == 1
        wait_until("a session", lambda: is_usable(links))
        assert links.clients is not None
        links.clients.set_tag(OTHER_TAG)
        assert not is_usable(links), "at once, and until the server has these weights too"
        links.set_tag(OTHER_TAG)
        wait_until("another session", lambda: is_usable(links))
        assert not links.take_counts(), "nothing was loaded, and nobody was lost"
        assert links.close()
        staging.close()  # fails while anything refers to the memory


def test_a_server_listens_at_its_address_and_nowhere_else(staging: Staging) -> None:
    """Once it has a session, for which both sides have made whatever they make."""
    before = listening()
    with ReservedPort() as port:
        address = f"127.0.0.1:{port.number}"
        links = links_of(staging, peers=address, peer_listen=address)
        assert links is not None
        wait_until("a session", lambda: is_usable(links))
        assert sorted(set(listening()) - set(before)) == [port.number]
        assert links.close()
    staging.close()


def test_a_secret_refuses_a_library_that_cannot_use_it(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    common = replace(COMMON, secret=b"a secret of this test")
    with pytest.raises(ConfigError, match=r"share_secret_file='/s': .*CURVE.*install pyzmq"):
        links_of(staging, common, peers="127.0.0.1:1", share_secret_file="/s")


def test_addresses_that_cannot_be_used_are_refused_by_key(staging: Staging) -> None:
    with ReservedPort() as port:
        port.listen()
        address = f"127.0.0.1:{port.number}"
        with pytest.raises(ConfigError, match=r"peer_listen=.*in use.*; name an address"):
            links_of(staging, peer_listen=address)
    third = Common("k" * 32, 3, 4, SLOT_BYTES)
    for key in ("peers", "peer_listen"):
        with pytest.raises(ConfigError, match="no port is left for rank 3; use 65532 or lower"):
            links_of(staging, third, **{key: "127.0.0.1:65533"})
    again = replace(third, replica=1, replicas=2)
    with pytest.raises(ConfigError, match="left for replica 1, rank 3; use 65528 or lower"):
        links_of(staging, again, peer_listen="127.0.0.1:65529")


def test_each_rank_of_each_replica_listens_at_a_port_of_its_own() -> None:
    ranks = [replace(COMMON, world_size=2, rank=r, replica=d) for d in range(3) for r in range(2)]
    assert [one.port_offset for one in ranks] == [0, 1, 2, 3, 4, 5]
    with ReservedPort() as port:
        first = f"127.0.0.1:{port.number - 1}"
        staging = Staging(SLOT_BYTES, 4, 4, serve_slots=2)
        links = links_of(staging, replace(COMMON, replica=1, replicas=3), peer_listen=first)
        assert links is not None
        answer = ask(f"127.0.0.1:{port.number}")
        assert (answer.error, answer.replica, answer.replicas) == ("", 1, 3)
        assert links.close()
        staging.close()
