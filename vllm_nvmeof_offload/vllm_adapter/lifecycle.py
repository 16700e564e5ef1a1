# SPDX-License-Identifier: Apache-2.0
"""Events in the life of vLLM's processes that our connector must know of.

**New weights.** vLLM notifies a connector of a reset only. New weights go to the workers past the
scheduler (`reload_weights`, the weight transfer API, a function of the user's own), and the
`reset_prefix_cache` that should follow leaves connectors out unless `reset_connector` is given.
Our chunks would then be loaded for prompts that the new weights answer. All such calls pass
`EngineCore.collective_rpc`, in the process of the connector's scheduler side. An adapter is loaded
by `EngineCore.add_lora`, or by the workers for the first request that names it
(`EngineCore.add_request`). These three methods are wrapped: where the connector is made, or, in a
vLLM that has this package in its tree, where the class is defined. A program that changes weights
past the engine (an executor of its own, a worker that listens by itself) must reset with the
connector.

**Death of the API server.** vLLM's engine process outlives a killed API server: it serves nobody,
and keeps its memory, its GPU and the lock on its pool, so that the next server would start with an
empty pool. The engine therefore ends. An engine within its user's own process is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import IntegrationError, OffloadError
from vllm_nvmeof_offload.vllm_adapter.weights import Adapters, stamp_of

_Class = TypeVar("_Class", bound=type)

#: Calls of vLLM's own API that change weights.
KNOWN_TO_CHANGE = frozenset(
    {
        *("load_model", "reload_weights", "reset_weights", "update_weights"),
        *("start_weight_update", "start_draft_weight_update", "finish_weight_update"),
    }
)
#: Calls of vLLM's own API that do not. Any other call, above all a user's own, may.
HARMLESS = frozenset(
    {
        *("add_lora", "list_loras", "pin_lora", "remove_lora"),
        *("annotate_profile", "check_health", "profile", "synchronize_device"),
        *("checkpoint_prepare", "save_sharded_state", "save_tensorized_model"),
        *("compute_weight_checksums", "get_model_inspection", "get_supported_tasks"),
        *("determine_available_memory", "get_cache_block_size_bytes", "get_kv_cache_spec"),
        *("execute_dummy_batch", "get_encoder_timing_stats", "reset_encoder_cache"),
        *("get_kv_connector_handshake_metadata", "reset_mm_cache"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    }
)


def install(engine_core: _Class) -> _Class:
    """Wrap vLLM's `EngineCore`, once. Engines without our connector behave as before.

    Returns the class, which a vLLM with this package in its tree decorates with this function.
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
    return engine_core


def _watch_calls(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else ""  # "": a function of the user's own
        try:
            return stock(self, method, *args, **kwargs)
        finally:  # a call that failed may have done half of its work
            if name not in HARMLESS:
                call = name or getattr(method, "__name__", repr(method))
                _notify(self, call, known=name in KNOWN_TO_CHANGE)

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
            in_place = getattr(lora_request, "load_inplace", False)
            if in_place or others:
                how = "load_inplace" if in_place else "other files than before"
                _notify(self, f"add_lora with {how}", known=True)

    return add_lora


def _watch_requests(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        lora = getattr(request, "lora_request", None)
        new = lora is not None and not _adapters(self).knows(lora)
        if new and _adapters(self).note(lora, stamp_of(lora)):
            _notify(self, "a request for an adapter with other files than before", known=True)
        return stock(self, request, *args, **kwargs)

    return add_request


def _adapters(engine_core: Any) -> Adapters:
    adapters: Adapters = vars(engine_core).setdefault("_nvmeof_adapters", Adapters())
    return adapters


def _notify(engine_core: Any, call: str, *, known: bool) -> None:
    scheduler = getattr(engine_core, "scheduler", None)
    for connector in _connectors(getattr(scheduler, "connector", None)):
        notified = getattr(connector, "weights_may_have_changed", None)
        if notified is not None:
            notified(call, known=known)


def _connectors(connector: Any) -> Iterator[Any]:
    """The connector, and the connectors that it combines (`MultiConnector`)."""
    yield connector
    for child in getattr(connector, "sub_connectors", None) or ():
        yield from _connectors(child)


#: vLLM's name of its engine's process; a number may follow.
_ENGINE = "EngineCore"
_LOOK_S = 1.0
#: Time for vLLM to end by itself, before this process is killed.
_GRACE_S = 10.0

_watching = False


def end_with_parent() -> None:
    """If this process is vLLM's engine, let it end when its parent process does."""
    global _watching
    parent = multiprocessing.parent_process()
    if _watching or not multiprocessing.current_process().name.startswith(_ENGINE):
        return
    if parent is None or parent.pid != os.getppid():
        return  # its parent is a fork server, whose end means nothing
    _watching = True
    threading.Thread(target=_watch, args=(parent.pid,), name="orphan-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    logger.error("the process %d that started this engine is gone: ending", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def logged_in_one_line() -> Iterator[None]:
    """Log an `OffloadError` in one line and raise it: vLLM hides it among its tracebacks."""
    try:
        yield
    except OffloadError as error:
        logger.error("cannot serve: %s", error)
        raise
