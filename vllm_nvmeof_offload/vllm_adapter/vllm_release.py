# SPDX-License-Identifier: Apache-2.0
"""A check that vLLM is supported, based on its interface rather than its version.

vLLM's offloading interface changes between releases. A release that calls us with different
parameters, or omits a call that we rely on, could silently produce wrong tokens. Therefore vLLM
must have all capabilities that we use, and our classes must match its own; otherwise it is refused
with an error that names the difference. No other code in the adapter checks a version: versions of
builds from source mean little, and a new release may have all capabilities.

A release is *known* when vLLM's own tests have passed with our connector. An unknown release with
all capabilities is served after a self-test (`self_test`), unless `allow_unknown_vllm` is false.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm_nvmeof_offload import CONNECTOR_MODULE
from vllm_nvmeof_offload.errors import ConfigError, IntegrationError

#: The known releases of vLLM, by their first two numbers.
KNOWN = ("0.32", "0.33")

UNKNOWN = "unknown"
_RELEASES = " or ".join(KNOWN)


def version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", UNKNOWN))


def release() -> str:
    numbers = re.match(r"\d+\.\d+(?=\.)", version())
    return numbers[0] if numbers and numbers[0] in KNOWN else UNKNOWN


def unknown_version() -> str | None:
    if release() != UNKNOWN:
        return None
    return (
        f"vLLM {version()} is not known to this vllm-nvmeof-offload; use vLLM {_RELEASES}, or a "
        "vllm-nvmeof-offload that knows this vLLM"
    )


def drops_connector_stats() -> bool:
    """Return whether vLLM's front end is in Rust, which drops a connector's statistics.

    If VLLM_USE_RUST_FRONTEND is set, `vllm serve` starts this front end, and the engine inherits
    the variable. Otherwise, `vllm-rs serve` is an ancestor of the engine. A front end on a
    different host from the engine cannot be detected.
    """
    import psutil
    from vllm import envs

    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        return True
    try:
        return "vllm-rs" in (process.name() for process in psutil.Process().parents())
    except psutil.Error:  # an ancestor has exited, or is hidden
        return False


def refuse_different() -> None:
    """Raise IntegrationError, with the remedy, if vLLM, known or not, lacks a capability."""
    found = _difference()
    if found is None:
        return
    raise IntegrationError(
        f"this vLLM {version()} differs from what this vllm-nvmeof-offload uses ({found}); use a "
        f"release of vLLM {_RELEASES}, or a vllm-nvmeof-offload that knows this vLLM"
    )


def refuse_unknown(allowed: bool) -> None:
    """Raise ConfigError for an unknown release unless `allowed`, the key `allow_unknown_vllm`."""
    problem = unknown_version()
    if problem is not None and not allowed:
        raise ConfigError(
            "allow_unknown_vllm", allowed, f"{problem}; true serves it after a self-test"
        )


@functools.cache
def _difference() -> str | None:
    try:
        found = next(missing(), None)
        if found is not None:
            return found
        connector = importlib.import_module(CONNECTOR_MODULE)
    except (ImportError, AttributeError) as error:
        return str(error).partition(" (/")[0]  # without the file's path
    return next(_differences(connector), None)


def _differences(connector: Any) -> Iterator[str]:
    """Yield methods of vLLM's classes that ours lack or override with different parameters."""
    for cls in (
        connector.NVMeoFOffloadingConnector,
        connector.NVMeoFOffloadingManager,
        connector.NVMeoFOffloadingWorker,
        connector.NVMeoFOffloadingSpec,
    ):
        base = next(one for one in cls.__mro__ if _is_vllms(one.__module__))
        for name in sorted(cls.__abstractmethods__):
            yield f"{base.__name__}.{name} is new"
        for name, theirs in inspect.getmembers(base, inspect.isfunction):
            method = getattr(cls, name)
            if inspect.isfunction(method) and not accepts(method, theirs):
                yield f"{base.__name__}.{name}{inspect.signature(theirs)} has other parameters"


def _is_vllms(module: str) -> bool:
    """Return whether a module is vLLM's own, even if this package is inside vLLM's tree."""
    ours = CONNECTOR_MODULE.removesuffix("connector")
    return module.startswith("vllm.") and not module.startswith(ours)


def accepts(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    signature = inspect.signature(ours)
    calls = [
        p
        for p in inspect.signature(theirs).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    places = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # vLLM may pass parameters with a default only by name, and our `**kwargs` may accept them.
    called = [p.name for p in calls if p.default is p.empty or p.name in signature.parameters]
    try:
        signature.bind(**{p.name: None for p in calls})
    except TypeError:
        return False
    return places[: len(called)] == called


# A capability is a part of vLLM that we use. It is a list of needs:
#
#     module:Class.method(a, b, c=)    the method accepts `a` and `b` in this order and `c` by name,
#                                      and requires nothing else
#     module:Class has x y             instances of the class have these members
#     module:name                      the module has this name
_BASE = "vllm.v1.kv_offload.base"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_CACHE = "vllm.v1.kv_cache_interface"


class Capability:
    """A capability, with a name for error messages."""

    def __init__(self, name: str, *needs: str) -> None:
        self.name, self.needs = name, needs

    def differences(self) -> Iterator[str]:
        return filter(None, map(difference, self.needs))


#: The method that the plugin wraps, and the fields that it reads and writes. If they are absent,
#: users can still name our connector in --kv-transfer-config.
CONFIGURATION = Capability(
    "configuration of a server",
    "vllm.config:VllmConfig._post_init_kv_transfer_config()",
    "vllm.config:CacheConfig has kv_offloading_size kv_offloading_backend",
    "vllm.config:KVTransferConfig has kv_connector kv_connector_module_path kv_role",
    "vllm.config:KVTransferConfig has kv_connector_extra_config kv_load_failure_policy",
)
#: The capabilities without which vLLM is refused.
REQUIRED = (
    Capability(
        "GPU blocks of a transfer",
        f"{_BASE}:OffloadingWorker.submit_store(job_id, src_spec, dst_spec)",
        f"{_BASE}:OffloadingWorker.submit_load(job_id, src_spec, dst_spec)",
        f"{_BASE}:GPULoadStoreSpec has block_ids group_sizes block_indices",
    ),
    Capability(
        "failed loads",
        f"{_CONNECTOR}:KVConnectorBase_V1.get_transfer_results(finished_req_ids)",
        f"{_CONNECTOR}:KVConnectorTransferResults has finished_recving failed_recving",
        f"{_CONNECTOR}:KVConnectorBase_V1.get_block_ids_with_load_errors()",
        "vllm.v1.outputs:KVConnectorOutput has failed_recving invalid_block_ids "
        "kv_connector_worker_meta",
    ),
    Capability(
        "jobs of a step",
        f"{_OFFLOADING}.common:OffloadingConnectorMetadata(load_jobs, store_jobs, jobs_to_flush)",
        f"{_OFFLOADING}.common:OffloadingWorkerMetadata(completed_jobs, transfer_stats)",
        f"{_OFFLOADING}.common:TransferJob has req_id src_spec dst_spec",
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker has spec worker",
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker.handle_preemptions(kv_connector_metadata)",
        f"{_BASE}:TransferResult(job_id, success, transfer_size, transfer_time)",
    ),
    Capability(
        "requests of the offloading scheduler",
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler has manager config _req_status "
        "_current_batch_load_jobs _current_batch_jobs_to_flush _chunks_being_loaded",
        f"{_OFFLOADING}.scheduler:SchedulerOffloadConfig has kv_group_configs tokens_per_hash "
        "alignment_tokens retention_interval",
        f"{_OFFLOADING}.scheduler:GroupOffloadConfig has group_idx tokens_per_block "
        "tokens_per_chunk hashes_per_chunk",
        f"{_OFFLOADING}.scheduler:RequestOffloadState has req group_states req_context "
        "transfer_jobs update_offload_keys num_locally_computed_tokens",
        f"{_OFFLOADING}.scheduler:RequestGroupState has offload_keys block_ids "
        "next_stored_chunk_idx",
        f"{_BASE}:ReqContext has req_id kv_transfer_params load_tier_filter get_state set_state "
        "get_offload_key_position",
        f"{_BASE}:make_offload_key(block_hash, group_idx)",
    ),
    Capability(
        "results of the manager",
        f"{_BASE}:PrepareStoreOutput(keys_to_store, store_spec, evicted_keys)",
        f"{_BASE}:LookupResult has HIT MISS",
        f"{_BASE}:LoadStoreSpec()",
        f"{_BASE}:RequestOffloadingContext()",
        f"{_BASE}:TierFilter has ALL allows",
    ),
    Capability(
        "KV events of the manager",
        f"{_BASE}:OffloadingEvent(keys=, medium=, removed=, removal_expected=)",
        f"{_BASE}:Medium has CPU STORAGE",
        f"{_BASE}:Locality has LOCAL REMOTE",
    ),
    Capability(
        "metrics",
        f"{_BASE}:OffloadingCounterMetadata(documentation, labelnames)",
        f"{_BASE}:OffloadingGaugeMetadata(documentation, labelnames)",
        f"{_OFFLOADING}.metrics:OffloadingConnectorStats.increase_counter"
        "(counter_name, counter_increase_value, labelvalues)",
        f"{_OFFLOADING}.metrics:OffloadingConnectorStats.set_gauge"
        "(gauge_name, gauge_value, labelvalues)",
    ),
    Capability(
        "configuration of the KV cache",
        f"{_OFFLOADING}.config:build_offloading_config(vllm_config, kv_cache_config)",
        f"{_OFFLOADING}.config:get_offloading_group_ids(kv_cache_config)",
        f"{_CACHE}:KVCacheConfig has kv_cache_groups kv_cache_tensors num_blocks "
        "hisparse_host_num_blocks kv_cache_layout",
        f"{_CACHE}:KVCacheTensor has layers layer_stride block_stride size",
    ),
    Capability(
        "GPU's cache of prefixes",
        "vllm.v1.core.kv_cache_manager:KVCacheManager has block_pool",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks(block_ids)",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_blocks(request_id)",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache()",
        "vllm.v1.core.block_pool:BlockPool.get_cached_block(block_hash, kv_cache_group_ids)",
    ),
    Capability(
        "life of the engine",
        "vllm.v1.engine.core:EngineCore.collective_rpc(method)",
        "vllm.v1.engine.core:EngineCore.add_lora(lora_request)",
        "vllm.v1.engine.core:EngineCore.add_request(request)",
    ),
    Capability(
        "chunks of a window",
        # vLLM's own function. Its module depends on the release, so `groups` imports it.
        f"{__package__}.groups:get_sliding_window_size_in_chunks(kv_cache_spec, tokens_per_chunk)",
    ),
)


def missing() -> Iterator[str]:
    for capability in REQUIRED:
        yield from capability.differences()


_NEED = re.compile(r"([\w.]+:[\w.]+)(?:\((.*)\)| has (.*))?")


def difference(need: str) -> str | None:
    """Return how this vLLM differs from `need`, for an error message, or None."""
    matched = _NEED.fullmatch(need)
    assert matched, need
    place, arguments, members = matched.groups()
    name = place.partition(":")[2]
    try:
        found = _find(place)
    except ModuleNotFoundError as error:
        return f"{error.name} is gone"
    except ImportError as error:  # the module itself could not import a name
        return str(error).partition(" (/")[0]  # without the file's path
    if found is None:
        return f"{name} is gone"
    if members is not None:
        gone = [member for member in members.split() if not _has(found, member)]
        return f"{name}.{gone[0]} is gone" if gone else None
    if arguments is not None and not _takes(found, arguments, bound="." in name):
        return f"{name}{inspect.signature(found)} has other parameters"
    return None


def _find(place: str) -> Any:
    """Return the object at `place`, or None if its module lacks the name. Raises ImportError."""
    module, _, names = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


def _takes(function: Any, arguments: str, *, bound: bool) -> bool:
    """Return whether a call with these arguments passes them to parameters of the same names. If
    `bound`, `function` is a method whose first parameter is the object."""
    named = [one.strip() for one in arguments.split(",") if one.strip()]
    places = [name for name in named if not name.endswith("=")]
    keywords = [name[:-1] for name in named if name.endswith("=")]
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if by_place[: len(places)] != places:
        return False
    try:
        signature.bind(*[None] * (len(places) + bound), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _has(cls: Any, name: str) -> bool:
    """Return whether instances of `cls` have `name`, as a member or field, or set in `__init__`."""
    if hasattr(cls, name) or name in getattr(cls, "__dataclass_fields__", ()):
        return True
    makers = (vars(base).get("__init__") for base in inspect.getmro(cls))
    return any(name in make.__code__.co_names for make in makers if inspect.isfunction(make))
