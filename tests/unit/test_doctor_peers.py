# SPDX-License-Identifier: Apache-2.0
"""The doctor's findings about peers, against a server that runs here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.servers.server import ReservedPort

from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.commands.doctor.peers import ask, ask_all, judge_answer
from vllm_nvmeof_offload.fabric.findings import Severity
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.peers.base import Common, Levels, PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.peers.server import PeerServer

KEYSPACE = "0123456789abcdef" * 2
SLOT_BYTES, SLOTS = 8192, 2
runner = CliRunner()


class Idle:
    """A `ServePort` that nobody asks for anything."""

    def __init__(self) -> None:
        self._waker = Waker()

    def serve(self, reads: Sequence[PeerRead]) -> None:
        raise AssertionError

    def cancel(self, tokens: Sequence[int]) -> None:
        assert not tokens

    def poll(self) -> list[Served]:
        return []

    def levels(self) -> Levels:
        return Levels(0, 0.0)

    def fileno(self) -> int:
        return self._waker.fd


SECRET = b"a secret of this test"


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server with two ranks, of which the first one runs. Its parameter may be its secret, or
    the number of its replicas, of which it is the second one."""
    memory = np.zeros(SLOTS * SLOT_BYTES, np.uint8)
    slots = SlotMemory(memory.ctypes.data, SLOT_BYTES, SLOTS)
    with ReservedPort() as port:
        place = f"127.0.0.1:{port.number}"
        given = getattr(request, "param", b"")
        more = (given, 0, 1) if isinstance(given, bytes) else (b"", 1, given)
        common = Common(KEYSPACE, 0, 2, SLOT_BYTES, *more)
        parts = common, b"t" * 16, slots, memoryview(memory), Idle()
        server = PeerServer(f"tcp://{place}", *parts, by_nixl=False)
        yield place
        assert server.counts.sessions == 0
        assert server.counts.malformed == 0
        assert server.close()


def test_a_server_says_what_it_serves(address: str) -> None:
    answer = ask(address)
    facts = {"keyspace": KEYSPACE, "world_size": "2", "slot_bytes": str(SLOT_BYTES)}
    assert (answer.error, answer.facts) == ("", facts)
    assert answer.ranks == 2
    assert answer.answers_ms > 0
    host, _, port = address.rpartition(":")
    wrong = ask(f"{host}:{int(port) - 1}", rank=1)
    assert wrong.facts["rank"] == "0", "this port is another rank's"


def test_a_greeting_leaves_nothing_in_the_way_of_the_next_one(address: str) -> None:
    """ZMQ names what watches a socket by its descriptor, which the next greeting may get."""
    assert {ask(address).error for _ in range(200)} == {""}


def doctor(tmp_path: Path, *words: str, code: int | None = None) -> Any:
    """What the doctor says with these options, as JSON; with code 2: on stderr."""
    arguments = ["doctor", "--target", str(tmp_path), *words]
    done = runner.invoke(app, [*arguments, "--json"], env={"COLUMNS": "300"})
    assert code in (None, done.exit_code), done.output
    return done.stderr if code == 2 else json.loads(done.stdout)


def test_the_doctor_lists_every_rank_and_warns_of_one_that_is_silent(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = doctor(tmp_path, "--peer", address, code=1)
    first, second = shown["peers"]
    assert first["facts"]["keyspace"] == KEYSPACE
    assert (second["rank"], second["error"]) == (1, "no answer within 2 s")
    found = {(one["check"], one["severity"]): one for one in shown["findings"]}
    assert found["peer", "ok"]["evidence"].startswith(f"{address} rank 0 of 2 answers in ")
    assert found["peer", "ok"]["evidence"].endswith(f": keyspace {KEYSPACE}, slots 8 KiB")
    assert "rank 1: no answer" in found["peer", "warning"]["evidence"]
    assert {name for name, _ in found} >= {"peer_transport", "peer"}
    monkeypatch.setenv("VLLM_NVMEOF_PEERS", address)
    assert len(doctor(tmp_path, code=1)["peers"]) == 2
    text = runner.invoke(app, ["doctor", "--target", str(tmp_path)], env={"COLUMNS": "300"})
    assert f"keyspace {KEYSPACE}, slots 8 KiB" in text.stdout


@pytest.mark.slow  # starts three processes that serve
@pytest.mark.parametrize("address", [3], indirect=True)
def test_all_ranks_of_the_replicas_behind_an_address_are_asked(address: str) -> None:
    """Of three replicas the address names the second one, whose first rank runs."""
    answers = list(ask_all([address]))
    shown = [(one.replica, one.rank, bool(one.error)) for one in answers]
    assert shown == [(1, 0, False), (1, 1, True), (2, 0, True), (2, 1, True)]
    evidence = [judge_answer(one).evidence for one in answers]
    assert "replica 1 of 3, rank 0 of 2 answers" in evidence[0]
    assert "replica 2 of 3, rank 1: no answer" in evidence[3]


def test_without_peers_none_are_asked_and_no_address_is_a_plain_error(tmp_path: Path) -> None:
    shown = doctor(tmp_path)
    assert shown["peers"] == []
    assert not [one for one in shown["findings"] if one["check"].startswith("peer")]
    assert "no host before a port" in doctor(tmp_path, "--peer", "d0", code=2)


@pytest.mark.parametrize("address", [SECRET], indirect=True)
def test_a_server_with_a_secret_answers_those_who_have_it(address: str, tmp_path: Path) -> None:
    for wrong in (b"", b"x" * 20):
        answer = ask(address, secret=wrong)
        assert "its share secret differs" in answer.error
        assert not answer.facts, "it does not say what it serves"
        warned = judge_answer(answer)
    assert warned.severity is Severity.WARNING
    assert "share_secret_file" in warned.remedy
    assert ask(address, secret=SECRET).facts["keyspace"] == KEYSPACE

    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    options = ["--peer", address, "--share-secret-file", str(file)]
    file.chmod(0o644)
    assert "chmod 0600" in doctor(tmp_path, *options, code=2)
    file.chmod(0o600)
    assert doctor(tmp_path, *options, code=1)["peers"][0]["facts"]["keyspace"] == KEYSPACE


@pytest.mark.parametrize("address", [b""], indirect=True)
def test_a_server_without_a_secret_says_so_to_those_who_have_one(address: str) -> None:
    assert "its share secret differs" in ask(address, secret=SECRET).error
