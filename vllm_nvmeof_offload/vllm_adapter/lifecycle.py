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

Ends an engine whose API server has died.

vLLM's engine process outlives a killed API server: nobody can ask it any more, and it keeps its
memory, its GPU, and the lock on its pool, so that the next server would start with an empty one
beside it. An engine within a process of its user's is left alone.

What a worker's connector does when vLLM sleeps: on a GPU the KV cache's memory is unmapped.

vLLM waits for what was submitted to the GPU. A load that still waits for its bytes, or a store
that was put off to the next step, would come later, and lose the CUDA context of the worker.
vLLM 0.32 does not call these hooks: there it must not sleep while requests run.

One plain line for what stops a server: vLLM buries exceptions under tracebacks of processes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vllm_nvmeof_offload.errors import IntegrationError, OffloadError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.vllm_adapter.messages import NVMeoFConnectorMetadata
from vllm_nvmeof_offload.vllm_adapter.weights import Adapters, stamp_of

__all__ = [
    "HARMLESS",
    "KNOWN_TO_CHANGE",
    "SleepHooks",
    "end_with_parent",
    "install",
    "said_plainly",
]


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


logger = logging.getLogger(LOGGER_NAME)

#: What vLLM names its engine's process; a number may follow.
_ENGINE = "EngineCore"
_LOOK_S = 1.0
#: For vLLM's own way to end, before this process is killed.
_GRACE_S = 10.0

_watching = False


def end_with_parent() -> None:
    """From now on this process, if it is vLLM's engine, ends when the one does that made it."""
    global _watching
    parent = multiprocessing.parent_process()
    if _watching or not multiprocessing.current_process().name.startswith(_ENGINE):
        return
    if parent is None or parent.pid != os.getppid():
        return  # made by a server of forks, whose end says nothing
    _watching = True
    threading.Thread(
        target=_watch, args=(parent.pid, threading.Event()), name="orphan-watch", daemon=True
    ).start()


def _watch(parent: int, never: threading.Event) -> None:
    while os.getppid() == parent:
        never.wait(_LOOK_S)
    logger.error("the process %d that started this engine is gone: ending", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    never.wait(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


class SleepHooks:
    """Beside vLLM's OffloadingConnector."""

    connector_worker: Any
    _worker: Any

    def submit_deferred_stores(self) -> None:
        """Those of the last step that vLLM keeps for the next one."""
        nothing = NVMeoFConnectorMetadata(load_jobs={}, store_jobs={})
        self.connector_worker.handle_preemptions(nothing)

    def unregister_kv_caches(self) -> None:
        """Before sleep; vLLM may call it again while asleep."""
        self.submit_deferred_stores()
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """After waking up; likewise."""
        self._worker.wake()


@contextlib.contextmanager
def said_plainly() -> Iterator[None]:
    """Log an `OffloadError` as the reason why there is no server, and pass it on."""
    try:
        yield
    except OffloadError as error:
        logger.error("cannot serve: %s", error)
        raise
