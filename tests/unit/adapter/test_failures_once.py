# SPDX-License-Identifier: Apache-2.0
"""A load whose failure vLLM's own connector reports too is reported to vLLM once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vllm_nvmeof_offload.connector import NVMeoFOffloadingConnector


class _Worker:
    """Loads of "a" and "b" failed, at blocks 1 and 2, and that of "c", as a whole."""

    def __init__(self) -> None:
        self.blocks, self.requests = {"a": {1}, "b": {2}}, {"c"}

    def forget_failures(self, requests: set[str]) -> None:
        for request in requests:
            self.blocks.pop(request, None)
            self.requests.discard(request)

    def take_invalid_blocks(self) -> set[int]:
        return set().union(*self.blocks.values())

    def take_failed_requests(self) -> set[str]:
        return self.requests


class _Connector(NVMeoFOffloadingConnector):
    connector_worker: Any = SimpleNamespace()

    def __init__(self) -> None:
        self.ours = _Worker()

    @property
    def _worker(self) -> Any:
        return self.ours


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
    connector = _Connector()
    found = connector.get_transfer_results(set())
    assert found.finished_recving == {"a", "b", "c"}
    assert found.failed_recving == requests
    assert connector.get_block_ids_with_load_errors() == blocks
