# SPDX-License-Identifier: Apache-2.0
"""Which servers read for others: `vllm-nvmeof peers`, and the doctor's findings about peers.

A server refuses whoever does not match it, names one value that differs, and keeps no session.
Greeted again with that value, it names the next one. So it tells what it is without serving. One
that has a share secret tells only those who have it too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import zmq

from vllm_nvmeof_offload.commands import print_json, table, wide_console
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.fabric.findings import Finding, ok, warning
from vllm_nvmeof_offload.peers.messages import (
    NOT_PROVEN,
    STRANGER,
    VERSION,
    Channel,
    Hello,
    MalformedError,
    Refused,
    lock,
)
from vllm_nvmeof_offload.peers.server import host_and_port
from vllm_nvmeof_offload.peers.transport import has_rdma, why_no_pulls
from vllm_nvmeof_offload.units import human_bytes

_ANSWER_MS = 2000
_COLUMNS = 160
#: A server's answer to what is not in common.
_FACTS_MAX = 5
_DIFFERS = re.compile(r"(version|keyspace|world_size|rank|slot_bytes) (\w+) here, not ")


@dataclass
class Answer:
    """What one rank of a server says. error: why it says nothing."""

    address: str
    rank: int = 0
    replica: int = 0
    replicas: int = 1
    answers_ms: float = 0.0
    error: str = ""
    is_stranger: bool = False  # it and we have not the same share secret
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(self.facts.get("world_size", 1))


class _StrangerError(Exception):
    """The server and we have not the same share secret."""


def ask(address: str, rank: int = 0, secret: bytes = b"", *, before: int = 0) -> Answer:
    """Greet one rank of a server until it has said all that it has.

    before: the ports of its replicas that lie between the address and the rank's replica.
    """
    answer, began_s = Answer(address, rank), time.monotonic()
    place = host_and_port(address, before + rank)
    with zmq.Context() as context:
        for _ in range(_FACTS_MAX + 1):
            try:
                text = _greet(context, place, answer, secret)
            except _StrangerError as error:
                answer.error, answer.is_stranger = str(error), True
                break
            except (MalformedError, zmq.ZMQError, ValueError) as error:
                answer.error = str(error)
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
    """Return the refusal. Nobody has our tag, so that there is one."""
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
        failed.close()
        if failed in ready:
            raise _StrangerError(STRANGER)
        if not ready:
            raise ValueError(f"no answer within {_ANSWER_MS / 1000:.0f} s")
        answer = channel.decode(socket.recv())
    if not isinstance(answer, Refused):
        return ""
    known.replica, known.replicas = answer.replica, answer.replicas
    return answer.text


def ask_all(addresses: Sequence[str], secret: bytes = b"") -> Iterator[Answer]:
    """Ask every rank of every server: of the replica at its address, and of those behind it."""
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


def show(addresses: Sequence[str], secret: bytes, as_json: bool) -> int:
    """Print who answers; return 0 if all do, else 1. OffloadError: nobody is named."""
    if not addresses:
        raise OffloadError("name servers as HOST:PORT, or set VLLM_NVMEOF_PEERS")
    answers = list(ask_all(addresses, secret))
    if as_json:
        print_json([asdict(one) for one in answers])
    else:
        headings = ("peer", "replica", "rank", "answers", "ranks", "slot", "keyspace")
        wide_console(_COLUMNS).print(table(headings, map(_row, answers)))
    return int(any(one.error for one in answers))


def _row(one: Answer) -> tuple[str, ...]:
    who = one.address, f"{one.replica} of {one.replicas}", str(one.rank)
    if one.error:
        return *who, one.error, "", "", ""
    slot = one.facts.get("slot_bytes", "")
    return (
        *who,
        f"{one.answers_ms:.0f} ms",
        str(one.ranks),
        human_bytes(int(slot)) if slot else "",
        one.facts.get("keyspace", ""),
    )


def check(addresses: Sequence[str], secret: bytes = b"") -> list[Finding]:
    """Find out what connections with peers would use here, and which of these peers answer."""
    findings = [_check_transport()]
    for one in ask_all(addresses, secret):
        replica = f"replica {one.replica}, " if one.replicas > 1 else ""
        subject = f"{one.address} {replica}rank {one.rank}"
        if one.is_stranger:
            remedy = "name the servers' share_secret_file"
            findings.append(warning("peer", f"{subject}: {one.error}", remedy))
        elif one.error:
            remedy = "start it with peer_listen, and let this host reach the port"
            findings.append(warning("peer", f"{subject}: {one.error}", remedy))
        else:
            evidence = f"{subject} answers in {one.answers_ms:.0f} ms: keyspace "
            findings.append(ok("peer", evidence + one.facts.get("keyspace", "unknown")))
    return findings


def _check_transport() -> Finding:
    """What moves a peer's bytes here."""
    why_not = why_no_pulls()
    if not why_not:
        return ok("peer_transport", "RDMA, to peers that have it too; from others in messages")
    if has_rdma():
        remedy = "pip install 'vllm-nvmeof-offload[peers]' on both sides"
        return warning("peer_transport", f"{why_not}; chunks of peers come in messages", remedy)
    return ok("peer_transport", f"{why_not}; chunks of peers come in messages")
