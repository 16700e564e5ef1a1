# SPDX-License-Identifier: Apache-2.0
"""Checks of servers that read for peers, and of the transport to this machine.

A server refuses a greeting that contains wrong values, names one of them, and keeps no session.
Each new greeting contains the correct values named so far, until the server has named them all. A
server with a share secret answers only peers with the same secret.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import zmq

from vllm_nvmeof_offload.errors import install_extra
from vllm_nvmeof_offload.fabric import Finding, ok, warning
from vllm_nvmeof_offload.peers.server import host_and_port
from vllm_nvmeof_offload.peers.session import (
    NOT_PROVEN,
    STRANGER,
    VERSION,
    Channel,
    Hello,
    MalformedError,
    Refused,
    lock,
)
from vllm_nvmeof_offload.peers.transport import has_rdma, why_no_pulls
from vllm_nvmeof_offload.units import human_bytes

_ANSWER_MS = 2000
#: The number of values that may differ between a server and a peer.
_FACTS_MAX = 5
_DIFFERS = re.compile(r"(version|keyspace|world_size|rank|slot_bytes) (\w+) here, not ")


@dataclass
class Answer:
    """The answer from one rank of a server, or the `error` if there was no answer."""

    address: str
    rank: int = 0
    replica: int = 0
    replicas: int = 1
    answers_ms: float = 0.0
    error: str = ""
    remedy: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(self.facts.get("world_size", 1))


def ask(address: str, rank: int = 0, secret: bytes = b"", *, before: int = 0) -> Answer:
    """Greet one rank of a server until it has named all its values. `before` is the number of
    ports, from `address` on, that earlier replicas use."""
    answer, began_s = Answer(address, rank), time.monotonic()
    place = host_and_port(address, before + rank)
    with zmq.Context() as context:
        for _ in range(_FACTS_MAX + 1):
            try:
                text = _greet(context, place, answer, secret)
            except PermissionError as error:
                answer.error, answer.remedy = str(error), "give the servers' share_secret_file"
                break
            except (MalformedError, zmq.ZMQError, ValueError) as error:
                answer.error = str(error)
                answer.remedy = "start the server with peer_listen, and open the port to this host"
                break
            answer.answers_ms = answer.answers_ms or 1000 * (time.monotonic() - began_s)
            found = _DIFFERS.match(text)
            if found is None or found[1] in answer.facts:
                break
            answer.facts[found[1]] = found[2]
    return answer


def _greet(
    context: zmq.Context[zmq.Socket[bytes]], place: str, known: Answer, secret: bytes
) -> str:
    """Greet a server once; return the text of its refusal. Every server refuses, because none has
    the greeting's tag. Raises PermissionError if the server's share secret differs from ours."""
    facts = known.facts
    hello = Hello(
        version=int(facts.get("version", VERSION)),
        keyspace=facts.get("keyspace", ""),
        tag=bytes(16),
        rank=int(facts.get("rank", known.rank)),
        world_size=int(facts.get("world_size", 0)),
        slot_bytes=int(facts.get("slot_bytes", 0)),
    )
    channel = Channel()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        lock(socket, secret, serves=False)
        failed = socket.get_monitor_socket(NOT_PROVEN)
        socket.connect(place)
        socket.send(channel.encode(hello))
        poller = zmq.Poller()
        for one in (socket, failed):
            poller.register(one, zmq.POLLIN)
        ready = dict(poller.poll(_ANSWER_MS))
        socket.disable_monitor()  # otherwise the next greeting may find its address in use
        failed.close()
        if failed in ready:
            raise PermissionError(STRANGER)
        if not ready:
            raise ValueError(f"no answer within {_ANSWER_MS / 1000:.0f} s")
        answer = channel.decode(socket.recv())
    if not isinstance(answer, Refused):
        return ""
    known.replica, known.replicas = answer.replica, answer.replicas
    return answer.text


def ask_all(addresses: Sequence[str], secret: bytes = b"") -> Iterator[Answer]:
    for address in addresses:
        first = ask(address, secret=secret)
        yield first
        behind = 1 if first.error else max(1, first.replicas - first.replica)
        for number in range(1, behind * first.ranks):
            replica, rank = divmod(number, first.ranks)
            answer = ask(address, rank, secret, before=replica * first.ranks)
            if answer.error:
                answer.replica, answer.replicas = first.replica + replica, first.replicas
            yield answer


def judge_answer(one: Answer) -> Finding:
    replica = f"replica {one.replica} of {one.replicas}, " if one.replicas > 1 else ""
    evidence = f"{one.address} {replica}rank {one.rank}"
    if one.error:
        return warning("peer", f"{evidence}: {one.error}", one.remedy)
    evidence += f" of {one.ranks} answers in {one.answers_ms:.0f} ms"
    slots = human_bytes(int(one.facts.get("slot_bytes", 0)))
    return ok("peer", f"{evidence}: keyspace {one.facts.get('keyspace', 'unknown')}, slots {slots}")


def check_transport() -> Finding:
    why_not = why_no_pulls()
    if not why_not:
        return ok("peer_transport", "RDMA with peers that support RDMA, messages with others")
    if has_rdma():
        remedy = f"{install_extra('peers')} on both sides"
        if find_spec("nixl") is not None:
            remedy = "give NIXL's UCX a driver for this RDMA device: docs/dual-path.md"
        return warning("peer_transport", f"{why_not}; peers send chunks in messages", remedy)
    return ok("peer_transport", f"{why_not}; peers send chunks in messages")
