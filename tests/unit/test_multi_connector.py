# SPDX-License-Identifier: Apache-2.0
"""Each of several connectors gets its own handshake back, and ours follows the others' layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from vllm_nvmeof_offload import MULTI_CONNECTOR_NAME, multi_connector
from vllm_nvmeof_offload.connector import NVMeoFOffloadingConnector
from vllm_nvmeof_offload.multi_connector import NVMeoFMultiConnector


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    of: str


class Child:
    """A connector of vLLM's interface, as far as handshakes go."""

    def __init__(self, handshake: Handshake | None) -> None:
        self.handshake = handshake
        self.got: dict[tuple[int, int], Any] | None = None

    def get_handshake_metadata(self) -> Handshake | None:
        return self.handshake

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        assert self.got is None
        self.got = metadata


def combined(*children: Child) -> NVMeoFMultiConnector:
    made = object.__new__(NVMeoFMultiConnector)  # vLLM's constructor wants a whole configuration
    made._connectors = list(children)  # type: ignore[assignment]
    return made


def test_vllm_finds_it_by_both_names() -> None:
    assert multi_connector.MultiConnector is getattr(multi_connector, MULTI_CONNECTOR_NAME)


def test_each_connector_gets_its_own_handshakes_of_all_workers() -> None:
    of_workers = {
        (0, rank): combined(
            Child(Handshake(f"ours {rank}")), Child(None), Child(Handshake(f"theirs {rank}"))
        ).get_handshake_metadata()
        for rank in (0, 1)
    }
    ours, silent, theirs = children = [Child(None), Child(None), Child(None)]
    combined(*children).set_xfer_handshake_metadata_pp_aware(of_workers)  # type: ignore[arg-type]
    assert ours.got == {(0, rank): Handshake(f"ours {rank}") for rank in (0, 1)}
    assert theirs.got == {(0, rank): Handshake(f"theirs {rank}") for rank in (0, 1)}
    assert silent.got is None


def connector_with(layout: str | None, base: type = object) -> tuple[type, Any]:
    """A connector's class and its configuration, which nobody looks at here."""
    asks = classmethod(lambda _cls, _config: layout)
    return type("Connector", (base,), {"get_required_kvcache_layout": asks}), None


@pytest.mark.parametrize(
    ("ours", "others", "layout"),
    [("BLHNC", [], "BLHNC"), ("BLHNC", [None], "BLHNC"), ("BLHNC", ["LBHNC", None], "LBHNC")],
)
def test_ours_follows_the_layout_of_the_others(
    ours: str, others: list[str | None], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [connector_with(ours, NVMeoFOffloadingConnector), *map(connector_with, others)]
    monkeypatch.setattr(
        NVMeoFMultiConnector, "_get_connector_classes_and_configs", lambda _config: found
    )
    assert NVMeoFMultiConnector.get_required_kvcache_layout(None) == layout


def test_others_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [connector_with("LBHNC"), connector_with("BLHNC")]
    monkeypatch.setattr(
        NVMeoFMultiConnector, "_get_connector_classes_and_configs", lambda _config: found
    )
    with pytest.raises(ValueError, match=r"\['BLHNC', 'LBHNC'\]"):
        NVMeoFMultiConnector.get_required_kvcache_layout(None)
