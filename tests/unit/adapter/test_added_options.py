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
    monkeypatch.setattr(_Connector, "_manager", MagicMock(answers=lambda _: answers))
    ours = {"nvmeof": {"kv_hint": answers}}
    assert finish(MagicMock(request_id="r"), [1]) == (True, {"remote_host": "h", **ours})
    assert finish(MagicMock(request_id="other"), [1]) == result, "vLLM does not know it"
    answers = []
    assert finish(MagicMock(request_id="r"), [1]) == result
