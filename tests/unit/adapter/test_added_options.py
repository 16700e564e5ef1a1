# SPDX-License-Identifier: Apache-2.0
"""Options that a later vLLM adds to its calls reach vLLM's own methods, or are ignored."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vllm_nvmeof_offload.connector import NVMeoFConnectorMetadata, NVMeoFOffloadingConnector


class _Connector(NVMeoFOffloadingConnector):
    """Our connector over stand-ins of everything that it drives."""

    connector_scheduler: Any = MagicMock()
    connector_worker: Any = MagicMock()
    _manager: Any = MagicMock()
    _waiting: Any = MagicMock()
    _worker: Any = MagicMock()

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._view = self._old_kv = MagicMock()  # type: ignore[assignment]


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
