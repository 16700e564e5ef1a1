# SPDX-License-Identifier: Apache-2.0
"""Events in vLLM's processes that our connector must detect.

**New weights.** vLLM notifies a connector only of resets. New weights reach the workers without the
scheduler (`reload_weights`, the weight transfer API, a user's function), and the subsequent
`reset_prefix_cache` skips connectors unless `reset_connector` is given. The new weights would then
use KV from the old weights. All such calls go through `EngineCore.collective_rpc`, in the process
of the connector's scheduler side. An adapter is loaded by `EngineCore.add_lora`, or by the workers
for the first request that names it (`EngineCore.add_request`). These three methods are wrapped when
the connector is created or, in a vLLM with this package in its tree, when the class is defined. A
program that changes weights without the engine (a custom executor, a worker with its own listener)
must reset vLLM's prefix cache with `reset_connector`.

The operator can name the new weights, so that servers using the same name share chunks; the name is
not verified. The name is given in one of our own calls, which `collective_rpc` answers without the
workers; in an extra argument of an update's last call, removed before the workers get the call; or,
if configured, in vLLM's own `EngineCore.set_weight_version`.

**Pause and sleep.** vLLM resets its connectors at each pause that clears caches, because weights
can change. Usually the weights do not change; `_reset_caches` is wrapped so that `PausedTiers` can
compare them.

**Exit of the API server.** vLLM's engine process outlives a killed API server. The orphaned engine
serves no requests, but keeps its memory, GPU, and pool lock, and the next server would start with
an empty pool. The engine therefore exits too, unless it runs in the user's own process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import ConfigError, IntegrationError, OffloadError
from vllm_nvmeof_offload.manager.requests import Suspension
from vllm_nvmeof_offload.vllm_adapter.scheduler_view import SchedulerView
from vllm_nvmeof_offload.vllm_adapter.weights import Adapters, stamp_of, weights_fingerprint

_Class = TypeVar("_Class", bound=type)

#: Calls in vLLM's own API that change weights.
KNOWN_TO_CHANGE = frozenset(
    {
        *("load_model", "reload_weights", "reset_weights", "update_weights"),
        *("start_weight_update", "start_draft_weight_update", "finish_weight_update"),
    }
)
#: Calls in vLLM's own API that do not change weights. Any other call may change weights.
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
#: The `collective_rpc` method that names the weights.
NAME_WEIGHTS = "nvmeof_weights_version"
#: The argument in vLLM's calls that names the weights.
ARGUMENT = "weights_version"
#: Calls that complete an update.
WHOLE = frozenset({"load_model", "reload_weights", "finish_weight_update"})
_CHARACTERS_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+=-]*")
#: Methods of vLLM's `EngineCore` that not every release has.
_OPTIONAL = frozenset({"set_weight_version", "_reset_caches"})


def install(engine_core: _Class) -> _Class:
    """Wrap methods of vLLM's `EngineCore`. Idempotent; engines with other connectors are
    unaffected. Return the class: a vLLM with this package in its tree uses this as a decorator."""
    for name, wrap in (
        ("collective_rpc", _watch_calls),
        ("add_lora", _watch_adapters),
        ("add_request", _watch_requests),
        ("set_weight_version", _watch_versions),
        ("_reset_caches", _watch_pauses),
    ):
        stock = getattr(engine_core, name, None)
        if stock is None and name in _OPTIONAL:
            continue
        if not callable(stock):
            raise IntegrationError(f"EngineCore has no {name}")
        if not getattr(stock, "_nvmeof", False):
            wrapped = wrap(stock)
            wrapped._nvmeof = True  # type: ignore[attr-defined]
            setattr(engine_core, name, wrapped)
    return engine_core


def _watch_calls(stock: Callable[..., Any]) -> Callable[..., Any]:
    shape = inspect.signature(stock)

    @functools.wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else ""  # "" for a user's function
        call = shape.bind(self, method, *args, **kwargs)
        is_ours = any(_connectors_with(self, "name_weights"))
        if is_ours and name == NAME_WEIGHTS:
            return _name(self, version_of(call))
        version = take_version(name, call) if is_ours and name in KNOWN_TO_CHANGE else None
        try:
            answer = stock(*call.args, **call.kwargs)
        finally:  # a failed call may have changed some weights
            if name not in HARMLESS:
                text = name or getattr(method, "__name__", repr(method))
                _notify(self, text, known=name in KNOWN_TO_CHANGE)
        if version is not None:
            _name(self, version)
        return answer

    return collective_rpc


def check_version(what: str, version: object) -> str:
    """Return a valid name, or raise ConfigError. `what` is the argument or method that gives it."""
    if not isinstance(version, str):
        problem = "must be a string"
    elif len(version) > _CHARACTERS_MAX:
        problem = f"has {len(version)} characters; use at most {_CHARACTERS_MAX}"
    elif not _NAME.fullmatch(version):
        problem = "must begin with a letter or digit, and contain only letters, digits and "
        problem += ". _ : / @ + = -"
    else:
        return version
    raise ConfigError(what, version, f"the name of the weights {problem}")


def version_of(call: inspect.BoundArguments) -> str:
    args = tuple(call.arguments.get("args") or ())
    kwargs = dict(call.arguments.get("kwargs") or {})
    given = (*args, *kwargs.values())
    if len(given) != 1 or kwargs.keys() - {"version"}:
        raise ConfigError(
            NAME_WEIGHTS, given, 'give one argument, the name of the weights: args=("step-1200",)'
        )
    return check_version(NAME_WEIGHTS, given[0])


def take_version(method: str, call: inspect.BoundArguments) -> str | None:
    """Remove the name from the arguments of a call that changes weights; return the name, or None
    if there is none. Raises ConfigError for an invalid name or call."""
    kwargs = dict(call.arguments.get("kwargs") or {})
    if ARGUMENT not in kwargs:
        return None
    version = kwargs.pop(ARGUMENT)
    if method not in WHOLE:
        raise ConfigError(
            ARGUMENT,
            version,
            f"{method} is not the last call of an update; name the weights in the last call "
            f"({', '.join(sorted(WHOLE))}), or in {NAME_WEIGHTS} afterwards",
        )
    call.arguments["kwargs"] = kwargs
    return check_version(ARGUMENT, version)


def _watch_versions(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def set_weight_version(self: Any, weight_version: Any, *args: Any, **kwargs: Any) -> Any:
        trusts = any(one.trusts_weight_version for one in _connectors_with(self, "name_weights"))
        if trusts:
            check_version("weight_version", weight_version)
        answer = stock(self, weight_version, *args, **kwargs)
        if trusts:
            _name(self, weight_version)
        return answer

    return set_weight_version


def _watch_pauses(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _reset_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _paused_tiers(self)
        for one in ours:
            one.is_pausing = True
        try:
            return stock(self, *args, **kwargs)
        finally:
            for one in ours:
                one.is_pausing = False

    return _reset_caches


def _paused_tiers(engine_core: Any) -> list[PausedTiers]:
    ours = [one.paused for one in _connectors_with(engine_core, "paused")]
    for one in ours:
        one.read = functools.partial(_fingerprints, engine_core)
    return ours


def _fingerprints(engine_core: Any) -> list[str] | None:
    try:
        executor = engine_core.model_executor
        if executor.is_sleeping:
            return None  # the weights' memory may be unmapped
        ranks: list[str] = executor.collective_rpc(weights_fingerprint)
    except Exception as error:  # noqa: BLE001 - whatever vLLM or a worker raised
        logger.warning("the weights in memory cannot be compared: %s", error)
        return None
    return ranks if ranks and all(ranks) else None


def _watch_adapters(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        before = stamp_of(lora_request)
        try:
            return stock(self, lora_request, *args, **kwargs)
        finally:
            # If the files changed during the call, vLLM may have read either version.
            stamp = before if stamp_of(lora_request) == before else ""
            others = _adapters(self).note(lora_request, stamp)
            # The adapter's name and path, which block hashes contain, have not changed.
            in_place = getattr(lora_request, "load_inplace", False)
            if in_place or others:
                how = "load_inplace" if in_place else "different files"
                _notify(self, f"add_lora with {how}", known=True)

    return add_lora


def _watch_requests(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if "_nvmeof_reads" not in vars(self):
            self._nvmeof_reads = bool(_paused_tiers(self))
        lora = getattr(request, "lora_request", None)
        new = lora is not None and not _adapters(self).knows(lora)
        if new and _adapters(self).note(lora, stamp_of(lora)):
            _notify(self, "a request for an adapter with different files", known=True)
        return stock(self, request, *args, **kwargs)

    return add_request


def _adapters(engine_core: Any) -> Adapters:
    adapters: Adapters = vars(engine_core).setdefault("_nvmeof_adapters", Adapters())
    return adapters


def _notify(engine_core: Any, call: str, *, known: bool) -> None:
    for connector in _connectors_with(engine_core, "weights_may_have_changed"):
        connector.weights_may_have_changed(call, known=known)


def _name(engine_core: Any, version: str) -> list[str]:
    return [one.name_weights(version) for one in _connectors_with(engine_core, "name_weights")]


def _connectors_with(engine_core: Any, method: str) -> Iterator[Any]:
    scheduler = getattr(engine_core, "scheduler", None)
    connectors = [getattr(scheduler, "connector", None)]
    for connector in connectors:
        connectors += getattr(connector, "sub_connectors", None) or ()
        if getattr(connector, method, None) is not None:
            yield connector


class PausedTiers:
    """Keep both tiers across a pause or sleep during which the weights do not change.

    A fingerprint of each rank's weights, taken before the first look-up after the last start or
    reset, is compared with one taken before the first look-up after the pause. This also detects a
    change that bypasses vLLM. During the pause there are no look-ups or stores, so neither an
    update nor a crash needs to invalidate chunks: the tag of chunks on disk names their weights. If
    a copy from GPU memory is in progress, both tiers are invalidated: sleep unmaps the memory.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        #: Returns the ranks' fingerprints, or None if unknown. Set by `_paused_tiers`.
        self.read: Callable[[], list[str] | None] = lambda: None
        self.undecided = False  # whether the tiers are kept until the weights are compared
        self.is_pausing = False  # whether a pause causes the current reset
        self._is_read = False  # whether `_weights` has been read since the last reset
        self._weights: list[str] | None = None  # the weights of all chunks; None if unknown
        self._name = (b"", False)

    @property
    def is_due(self) -> bool:
        return self.undecided or not self._is_read

    def keep(self, *, has_jobs: bool) -> bool:
        """Return whether vLLM's current reset must not invalidate the tiers yet. With `has_jobs`,
        vLLM is waiting for transfers."""
        manager = self._manager
        if not self.is_pausing:
            self.give_up()  # the user requested the reset
        elif not self.undecided and manager.is_attached:
            if not self._is_read:
                self._weights, self._is_read = self.read(), True
            self.undecided = not (self._weights is None or has_jobs or manager.core.is_storing)
            self._is_read = self.undecided
            self._name = manager.core.name
        return self.undecided

    def give_up(self) -> None:
        """Stop preserving the tiers; a reset must follow."""
        self.undecided = self._is_read = False

    def compare(self) -> bool:
        """After a pause, compare the weights; otherwise fingerprint those that will compute the
        next chunks. Return whether the tiers remain valid. This blocks the caller once per start,
        reset or pause."""
        core, before, was_undecided = self._manager.core, self._weights, self.undecided
        self._weights, self._is_read, self.undecided = self.read(), True, False
        if not was_undecided:
            return True
        renamed = core.name[0] not in (b"", self._name[0])
        if self._weights == before and not renamed:
            core.name = self._name
            logger.info("the weights did not change in the pause: all offloaded KV remains valid")
            return True
        if not renamed:
            self._manager.weights_may_have_changed(known=True)
        return False


#: The prefix of the name of vLLM's engine process; a number may follow the prefix.
_ENGINE = "EngineCore"
_LOOK_S = 1.0
#: The time for an orderly exit, after which this process is killed.
_GRACE_S = 10.0

_watching = False


def end_with_parent() -> None:
    """Make this process, if it is vLLM's engine, exit when its parent process exits."""
    global _watching
    parent = multiprocessing.parent_process()
    if _watching or not multiprocessing.current_process().name.startswith(_ENGINE):
        return
    if parent is None or parent.pid != os.getppid():
        return  # the parent is a fork server, which may exit at any time
    _watching = True
    threading.Thread(target=_watch, args=(parent.pid,), name="orphan-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    logger.error("parent process %d has exited: stopping this engine", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def logged_in_one_line() -> Iterator[None]:
    """Log an `OffloadError` in one line and reraise it, because vLLM adds long tracebacks."""
    try:
        yield
    except OffloadError as error:
        logger.error("cannot serve: %s", error)
        raise


@dataclass(frozen=True, slots=True)
class _Admission:
    """A request that was given GPU blocks. `found` are the ids of blocks found in GPU memory.
    `loadable` is the number of tokens found there plus the number that we will load."""

    request: Any
    found: frozenset[int]
    loadable: int


class OldKV:
    """Find requests with KV from earlier weights, and suspend their stores in `suspension`.

    A reset invalidates chunks *stored* before the change. KV depends on all KV before it, so a
    request is *old* if it had GPU blocks when the weights changed, or reuses a block that an old
    request computed. It remains old until it ends, or until it loses its blocks and is admitted
    again without any of them. Old requests are not stored.

    `began` empties vLLM's prefix cache, including blocks in use, and each `step` removes the blocks
    that old requests have added. Between two steps, another request can find such a block: while
    vLLM schedules the step that completes the block or, with asynchronous scheduling, right after
    an output. Each admission is therefore compared with the blocks added since the last step.
    """

    def __init__(self, suspension: Suspension, view: SchedulerView) -> None:
        self._old = suspension
        self._view = view
        self._looked_up: dict[str, int] = {}  # in this step: request → tokens in GPU memory
        self._admitted: dict[str, _Admission] = {}  # in this step
        self._forgotten: dict[str, int] = {}  # old request → number of leading blocks forgotten

    def began(self, call: str, requests: Iterable[str], *, known: bool) -> None:
        """Record that `call` has changed weights or, unless `known`, may have. `requests` are the
        ids of all requests in vLLM."""
        self._looked_up.clear()
        self._admitted.clear()
        self._forgotten.clear()
        old = [name for name in requests if self._blocks(name) or self._manager is None]
        self._old.begin(call, old, known=known)
        for name in old:
            self._forget(name)
        self._forget_all()

    def looked_up(self, request_id: str, local: int) -> None:
        if self._old.requests:
            self._looked_up[request_id] = local

    def admitted(self, request: Any, blocks: Any, external: int) -> None:
        """Record that a request got blocks. `external` is the number of tokens to load."""
        local = self._looked_up.pop(request.request_id, None)
        if local is None:  # the request already had blocks
            return
        of_group = blocks.blocks[self._view.leading_id]
        found = of_group[: local // self._view.tokens_per_block]
        ids = frozenset(block.block_id for block in found)
        self._admitted[request.request_id] = _Admission(request, ids, local + external)

    def step(self, preempted: Iterable[str]) -> None:
        """Record that vLLM has scheduled a step. Call this before the step's stores are created."""
        self._looked_up.clear()
        admitted, self._admitted = self._admitted, {}
        if not self._old.requests:
            return
        lost = [name for name in preempted if name in self._old.requests]
        for name in [*lost, *admitted]:
            self._forgotten.pop(name, None)
        taint: set[int] = set()
        for name in self._old.requests - admitted.keys():
            taint |= self._forget(name)
        for name, admission in admitted.items():
            # Another connector may have loaded KV from earlier weights.
            foreign = admission.request.num_computed_tokens > admission.loadable
            if foreign or (admission.found and (lost or not taint.isdisjoint(admission.found))):
                self._old.requests.add(name)
                taint |= self._forget(name)
            elif name in self._old.requests:
                self._old.ended(name)
                self._view.store_from_the_first(name)
        if lost:  # the earlier blocks of these requests are unknown
            self._forget_all()

    def finished(self, request_id: str) -> None:
        self._looked_up.pop(request_id, None)
        self._admitted.pop(request_id, None)
        if request_id in self._old.requests:
            self._forget(request_id)
            self._forgotten.pop(request_id, None)

    @property
    def _manager(self) -> Any:
        return self._view.kv_cache_manager()

    def _blocks(self, request_id: str) -> Any:
        if not self._manager:
            return ()
        return self._manager.get_blocks(request_id).blocks[self._view.leading_id]

    def _forget(self, request_id: str) -> set[int]:
        """Remove from the prefix cache the blocks that the request added since the last call."""
        first = self._forgotten.get(request_id, 0)
        added = {
            index: block.block_id
            for index, block in enumerate(self._blocks(request_id)[first:], first)
            if block.block_hash is not None
        }
        if added:
            self._forgotten[request_id] = max(added) + 1
            self._manager.evict_blocks(set(added.values()))
        return set(added.values())

    def _forget_all(self) -> None:
        manager = self._manager
        if manager is None:
            return
        pool = manager.block_pool
        # vLLM reserves one block. If other blocks are in use, vLLM's reset does nothing.
        if pool.get_num_free_blocks() < pool.num_gpu_blocks - 1:
            manager.evict_blocks(set(range(pool.num_gpu_blocks)))
        else:
            manager.reset_prefix_cache()
