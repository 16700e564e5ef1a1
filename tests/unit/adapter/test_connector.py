# SPDX-License-Identifier: Apache-2.0
"""Our connector alone and with others: options, failures, answers, layouts and log lines."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vllm_nvmeof_offload import MULTI_CONNECTOR_NAME, multi_connector
from vllm_nvmeof_offload.connector import (
    NVMeoFConnectorMetadata,
    NVMeoFOffloadingConnector,
    OffloadingStats,
)
from vllm_nvmeof_offload.metrics import COUNTERS, GAUGES
from vllm_nvmeof_offload.multi_connector import NVMeoFMultiConnector
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker


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


class _Failing(NVMeoFOffloadingConnector):
    """Loads of "a" and "b" failed, at blocks 1 and 2, and that of "c", as a whole."""

    def __init__(self) -> None:
        worker = object.__new__(NVMeoFOffloadingWorker)
        worker._invalid_blocks, worker._failed_requests = {"a": {1}, "b": {2}}, {"c"}
        self.connector_worker: Any = SimpleNamespace(worker=worker)


@pytest.mark.parametrize(
    ("theirs", "their_blocks", "requests", "blocks"),
    [
        (set(), set(), {"c"}, {1, 2}),
        ({"c"}, set(), {"c"}, {1, 2}),
        ({"a"}, set(), {"a", "c"}, {2}),
        ({"a", "b", "c"}, set(), {"a", "b", "c"}, set()),
        (set(), {2, 3}, {"c"}, {1, 2, 3}),
    ],
)
def test_each_failed_load_reaches_vllm_once(
    monkeypatch: pytest.MonkeyPatch,
    theirs: set[str],
    their_blocks: set[int],
    requests: set[str],
    blocks: set[int],
) -> None:
    def results(self: Any, finished: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_recving={"a", "b", "c"}, failed_recving=theirs)

    monkeypatch.setattr(OffloadingConnector, "get_transfer_results", results)
    monkeypatch.setattr(
        OffloadingConnector, "get_block_ids_with_load_errors", lambda self: their_blocks
    )
    connector = _Failing()
    found = connector.get_transfer_results(set())
    assert found.finished_recving == {"a", "b", "c"}
    assert found.failed_recving == requests
    assert connector.get_block_ids_with_load_errors() == blocks


class _Connector(NVMeoFOffloadingConnector):
    """Our connector over stand-ins of everything that it drives."""

    connector_scheduler: Any = MagicMock()
    connector_worker: Any = MagicMock()
    _manager: Any = MagicMock()
    _waiting: Any = MagicMock()
    _worker: Any = MagicMock()

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._view = self._old_kv = self.paused = MagicMock()  # type: ignore[assignment]
        self.paused.undecided = False  # type: ignore[misc]


_METADATA = NVMeoFConnectorMetadata({}, {})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("on_new_request", ("request",)),
        ("update_state_after_alloc", ("request", "blocks", 16)),
        ("request_finished", ("request", [1])),
        ("request_finished_all_groups", ("request", ([1],))),
        ("update_connector_output", ("output",)),
        ("handle_preemptions", (_METADATA,)),
        ("get_transfer_results", (set[str](),)),
        ("build_connector_meta", ("scheduler output",)),
    ],
)
def test_an_added_option_reaches_vllms_own_method(
    monkeypatch: pytest.MonkeyPatch, name: str, given: tuple[Any, ...]
) -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def theirs(self: Any, *args: Any, **options: Any) -> Any:
        seen.append((args, options))
        if name.startswith("request_finished"):
            return False, None
        return (
            OffloadingConnectorMetadata({}, {}) if name == "build_connector_meta" else MagicMock()
        )

    monkeypatch.setattr(OffloadingConnector, name, theirs)
    monkeypatch.setattr(_Connector, "_without_resumed", lambda self, output: output)
    first = MagicMock(request_id="r") if given[0] == "request" else given[0]
    if isinstance(first, str):
        first = MagicMock(kv_connector_worker_meta=None, preempted_req_ids=None)
    getattr(_Connector(), name)(first, *given[1:], session="s")
    assert seen == [((first, *given[1:]), {"session": "s"})]


@pytest.mark.parametrize("name", ["request_finished", "request_finished_all_groups"])
def test_an_answer_to_hints_is_added_to_what_vllm_returns(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    result = True, {"remote_host": "h"}
    monkeypatch.setattr(OffloadingConnector, name, lambda *_: result)
    monkeypatch.setattr(_Connector, "scheduler", MagicMock(_req_status={"r": MagicMock()}))
    finish, answers = getattr(_Connector(), name), [{"action_id": "a", "done": "prefetch"}]
    monkeypatch.setattr(_Connector, "_manager", MagicMock(answers=lambda _: ours["nvmeof"]))
    ours: dict[str, dict[str, Any]] = {"nvmeof": {"kv_hint": answers, "retention": "drop"}}
    assert finish(MagicMock(request_id="r"), [1]) == (True, {"remote_host": "h", **ours})
    assert finish(MagicMock(request_id="other"), [1]) == result, "vLLM does not know it"
    ours["nvmeof"] = {}
    assert finish(MagicMock(request_id="r"), [1]) == result


def test_the_line_shows_only_nonzero_counters() -> None:
    stats = OffloadingStats()
    stats.increase_counter(COUNTERS["lookups"].name, 3, ("cpu",))
    stats.increase_counter(COUNTERS["lookups"].name, 0, ("miss",))
    stats.increase_counter(COUNTERS["transfer_seconds"].name, 0.12345, ("load", "pool"))
    stats.set_gauge(GAUGES["entries"].name, 12)
    stats.set_gauge(GAUGES["target_verdict"].name, 1, ("0",))
    stats.increase_counter("vllm:kv_offload_load_bytes", 7)
    assert stats.reduce() == {
        "lookups cpu": 3,
        "transfer_seconds load pool": 0.123,
        "vllm:kv_offload_load_bytes": 7,
    }
