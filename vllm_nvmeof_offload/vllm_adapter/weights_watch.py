# SPDX-License-Identifier: Apache-2.0
"""Notices that vLLM changes its model's weights, and tells our connector.

vLLM tells a connector of a reset alone. New weights go to the workers past the scheduler
(`reload_weights`, the weight transfer API, a function of the user's own), and the
`reset_prefix_cache` that is to follow leaves connectors out unless `reset_connector` says
otherwise. What we hold would then be loaded for prompts that the new weights answer.

All of that passes `EngineCore.collective_rpc`, in the process where the scheduler's side of the
connector lives. An adapter is loaded by `EngineCore.add_lora`, or by the workers for the first
request that names it (`EngineCore.add_request`). All three are wrapped there. Whoever changes
weights past the engine (an executor of one's own, a worker that listens by itself) must reset
with the connector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.vllm_adapter.adapters import Adapters, stamp_of

__all__ = ["HARMLESS", "KNOWN_TO_CHANGE", "install"]

#: Calls of vLLM's own API that change weights.
KNOWN_TO_CHANGE = frozenset(
    {
        "finish_weight_update",
        "load_model",
        "reload_weights",
        "reset_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)
#: Calls of vLLM's own API that do not. Any other one, a user's own above all, may.
HARMLESS = frozenset(
    {
        "add_lora",
        "annotate_profile",
        "check_health",
        "checkpoint_prepare",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "get_cache_block_size_bytes",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
    }
)


def install(engine_core: type) -> None:
    """Wrap vLLM's `EngineCore`, once; engines without our connector are left as they are.

    Raises:
        IntegrationError: it is not as expected.
    """
    for name, wrap in (
        ("collective_rpc", _watch_calls),
        ("add_lora", _watch_adapters),
        ("add_request", _watch_requests),
    ):
        stock = getattr(engine_core, name, None)
        if not callable(stock):
            raise IntegrationError(f"EngineCore has no {name}")
        if not getattr(stock, "_nvmeof", False):
            wrapped = wrap(stock)
            wrapped._nvmeof = True  # type: ignore[attr-defined]
            setattr(engine_core, name, wrapped)


def _watch_calls(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        if isinstance(method, str) and name in HARMLESS:
            return stock(self, method, *args, **kwargs)
        try:
            return stock(self, method, *args, **kwargs)
        finally:  # one that failed may have done half of it
            _tell(self, name, known=isinstance(method, str) and name in KNOWN_TO_CHANGE)

    return collective_rpc


def _watch_adapters(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        before = stamp_of(lora_request)
        try:
            return stock(self, lora_request, *args, **kwargs)
        finally:
            # Files that changed meanwhile may have been read in either state.
            stamp = before if stamp_of(lora_request) == before else ""
            others = _adapters(self).note(lora_request, stamp)
            # Blocks are named after an adapter's name and path, which stay.
            if getattr(lora_request, "load_inplace", False):
                _tell(self, "add_lora with load_inplace", known=True)
            elif others:
                _tell(self, "add_lora with other files than before", known=True)

    return add_lora


def _watch_requests(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        lora = getattr(request, "lora_request", None)
        adapters = _adapters(self)
        new = lora is not None and not adapters.knows(lora)
        if new and adapters.note(lora, stamp_of(lora)):
            _tell(self, "a request for an adapter with other files than before", known=True)
        return stock(self, request, *args, **kwargs)

    return add_request


def _adapters(engine_core: Any) -> Adapters:
    adapters: Adapters = vars(engine_core).setdefault("_nvmeof_adapters", Adapters())
    return adapters


def _tell(engine_core: Any, call: str, *, known: bool) -> None:
    scheduler = getattr(engine_core, "scheduler", None)
    for connector in _connectors(getattr(scheduler, "connector", None)):
        told = getattr(connector, "weights_may_have_changed", None)
        if told is not None:
            told(call, known=known)


def _connectors(connector: Any) -> Iterator[Any]:
    """The connector, and those that it combines (`MultiConnector`)."""
    yield connector
    for child in getattr(connector, "sub_connectors", None) or ():
        yield from _connectors(child)
