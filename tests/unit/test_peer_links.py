# SPDX-License-Identifier: Apache-2.0
"""What starts and ends a rank's connections with peers: here it is a peer of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zmq
from vllm_nvmeof_bench.servers.server import ReservedPort

from tests.listening import listening
from tests.unit.test_doctor_peers import Idle
from tests.wait import wait_until
from vllm_nvmeof_offload.commands.doctor.peers import ask
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.peers.base import Common
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.worker.peer_reads import PeerLinks, open_links

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


def test_without_addresses_there_is_nothing_to_start(staging: Staging) -> None:
    assert links_of(staging) is None


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
