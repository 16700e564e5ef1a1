# SPDX-License-Identifier: Apache-2.0
"""Pulls by NIXL over RDMA: the engine that moves the bytes, and a pull that never ends.

tests/fabric/pulls.py runs these tests in the guest, because they cut its links.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fabric.nvmet import RdmaLinks
from tests.fabric.pulls import LENDING, LINK
from tests.process import listening
from vllm_nvmeof_offload.errors import DEADLINE, OK
from vllm_nvmeof_offload.peers import clients
from vllm_nvmeof_offload.peers.transport import NixlTransport

from . import kit
from .conftest import MakePair
from .kit import D_SLOTS, P_SLOTS, Puller

pytestmark = pytest.mark.parametrize("transport", ["verbs"], indirect=True)

RDMA_PACKET_BYTES = 4096
#: A device sends a request again after about a second.
SENT_AGAIN_S = 5.0


@contextmanager
def cut_link() -> Iterator[None]:
    RdmaLinks.cut(LINK)
    try:
        yield
    finally:
        RdmaLinks.mend(LINK)


def sent() -> tuple[int, int, int]:
    """RDMA packets of the lending device, and bytes of its link and of the loopback interface."""
    counters = Path(f"/sys/class/infiniband/r{LENDING}/ports/1/hw_counters")
    links = [Path(f"/sys/class/net/{one}/statistics/tx_bytes") for one in (LENDING, "lo")]
    packets, *bytes_sent = (int(one.read_text()) for one in (counters / "sent_pkts", *links))
    return packets, *bytes_sent


def test_the_device_sends_the_chunks(make_pair: MakePair) -> None:
    serving, puller = make_pair()
    puller.wait_usable()
    before = sent()
    for _ in range(10):
        assert puller.run(*[puller.read(number) for number in range(D_SLOTS)]) == [OK] * D_SLOTS
    packets, link, messages = (now - then for now, then in zip(sent(), before, strict=True))
    pulled = 10 * D_SLOTS * puller.slots.slot_bytes
    print(f"{pulled} pulled: {packets} RDMA packets; {link} bytes on the link, {messages} on lo")
    assert packets * RDMA_PACKET_BYTES >= pulled
    assert pulled <= link <= 1.2 * pulled, "once"
    assert messages < pulled / 10
    assert listening() == []
    assert listening(serving.pid) == [int(serving.address.rpartition(":")[2])]


@pytest.mark.parametrize("agent", ["ends", "stays"])
def test_a_buffer_is_released_when_nothing_can_write_into_it(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    """The bytes of a pull whose agent stays arrive when the link is back."""
    _, puller = make_pair()
    puller.wait_usable()
    assert puller.run(puller.read(0)) == [OK]
    kept: list[NixlTransport] = []
    if agent == "stays":
        monkeypatch.setattr(NixlTransport, "close", lambda self: not kept.append(self))
    with cut_link():
        token, took_s = _hang(puller, within_s=1.0)
        assert puller.outcomes[token] == DEADLINE
        print(f"released {took_s:.2f} s after the deadline")
        buffer = puller.buffer(token)
        buffer[:] = 0x5A
        puller.free.reverse()  # the next read has another buffer
    puller.wait_usable()
    assert puller.run(puller.read(2)) == [OK]
    end_s = time.monotonic() + SENT_AGAIN_S
    while time.monotonic() < end_s and all(buffer == 0x5A):
        puller.pause()
        for transport in kept:
            transport.progress()
    assert all(buffer == 0x5A) == (agent == "ends")


def test_pulls_from_a_host_that_is_lost_end_before_their_deadline(make_pair: MakePair) -> None:
    serving, puller = make_pair()
    puller.wait_usable()
    assert puller.run(puller.read(0)) == [OK]
    with cut_link():
        began_s = time.monotonic()
        tokens = [puller.read(number, within_s=20.0) for number in range(D_SLOTS)]
        puller.ask(*tokens)
        puller.until(lambda: serving.ask()["served_bytes"] == (1 + D_SLOTS) * 24_000)
        serving.signal(signal.SIGSTOP)
        puller.until(lambda: len(puller.outcomes) == 1 + D_SLOTS)
        assert time.monotonic() - began_s < clients.STALLED_S + 2 * kit.LATE_S * kit.PACE
        assert {puller.outcomes[token] for token in tokens} == {clients.LOST}
        puller.until(lambda: len(puller.free) == P_SLOTS)
        serving.signal(signal.SIGCONT)
    puller.wait_usable()
    assert puller.run(puller.read(1)) == [OK]


def _hang(puller: Puller, within_s: float) -> tuple[int, float]:
    """Read a chunk over the cut link; return its token, and when its buffer was released."""
    token = puller.read(1, within_s=within_s)
    puller.ask(token)
    puller.until(lambda: token in puller.outcomes)
    decided_s = time.monotonic()
    assert len(puller.free) == P_SLOTS - 1
    puller.until(lambda: len(puller.free) == P_SLOTS)
    return token, time.monotonic() - decided_s
