# SPDX-License-Identifier: Apache-2.0
"""Refuses releases of vLLM that this version does not know.

vLLM's offloading interface changes with its releases. An unknown release may call us with other
parameters, or leave out a call that we rely on, which would give wrong tokens without an error. A
release is known when vLLM's own tests have passed with our connector. The visible interface of a
known release is compared too, because the version of a build from source means little.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm_nvmeof_offload import CONNECTOR_MODULE
from vllm_nvmeof_offload.errors import IntegrationError

#: Releases of vLLM, by their first two numbers.
KNOWN = ("0.32", "0.33")

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
#: Members of vLLM's objects that we use beyond their interfaces: class → names.
_READ = {
    f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler": (
        "manager config _req_status _current_batch_load_jobs _chunks_being_loaded"
    ),
    f"{_OFFLOADING}.scheduler:SchedulerOffloadConfig": "kv_group_configs tokens_per_hash",
    f"{_OFFLOADING}.scheduler:GroupOffloadConfig": (
        "tokens_per_block tokens_per_chunk hashes_per_chunk"
    ),
    f"{_OFFLOADING}.scheduler:RequestOffloadState": (
        "group_states req_context transfer_jobs update_offload_keys num_locally_computed_tokens"
    ),
    f"{_OFFLOADING}.scheduler:RequestGroupState": "offload_keys",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "block_pool evict_blocks get_blocks reset_prefix_cache"
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        "kv_cache_groups kv_cache_tensors num_blocks hisparse_host_num_blocks kv_cache_layout"
    ),
    "vllm.v1.kv_cache_interface:KVCacheTensor": "layers block_stride size",
    f"{_OFFLOADING}.worker:OffloadingConnectorWorker": "spec worker",
    f"{_OFFLOADING}.common:OffloadingConnectorMetadata": "load_jobs store_jobs jobs_to_flush",
    f"{_OFFLOADING}.common:OffloadingWorkerMetadata": "completed_jobs transfer_stats",
    f"{_OFFLOADING}.common:TransferJob": "req_id",
}


def version() -> str:
    """Version of the vLLM that is imported, or `unknown`."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def unknown_version() -> str | None:
    """Why this vLLM's version is unknown, with the remedy; None: it is known."""
    found = version()
    numbers = re.match(r"\d+\.\d+(?=\.)", found)
    if numbers and numbers[0] in KNOWN:
        return None
    return (
        f"vLLM {found} is not known to this vllm-nvmeof-offload; use vLLM "
        f"{' or '.join(KNOWN)}, or a vllm-nvmeof-offload that knows this one"
    )


def require() -> None:
    """Refuse an unknown vLLM with an `IntegrationError`: one line with the remedy."""
    problem = unknown_version()
    if problem is None:
        found = _difference()
        if found is None:
            return
        problem = (
            f"this vLLM {version()} is not as released ({found}); use a release of vLLM "
            f"{' or '.join(KNOWN)}, or a vllm-nvmeof-offload that knows this one"
        )
    raise IntegrationError(problem)


@functools.cache
def _difference() -> str | None:
    """The first difference between this vLLM's interface and the one we were written for."""
    try:
        connector = importlib.import_module(CONNECTOR_MODULE)
    except (ImportError, AttributeError) as error:
        return str(error).partition(" (/")[0]  # without the file's path
    return next(_differences(connector), None)


def _differences(connector: Any) -> Iterator[str]:
    for cls in (
        connector.NVMeoFOffloadingConnector,
        connector.NVMeoFOffloadingManager,
        connector.NVMeoFOffloadingWorker,
        connector.NVMeoFOffloadingSpec,
    ):
        base = cls.__base__
        for name in sorted(cls.__abstractmethods__):
            yield f"{base.__name__}.{name} is new"
        for name, method in vars(cls).items():
            theirs = getattr(base, name, None)
            if not inspect.isfunction(method) or not inspect.isfunction(theirs):
                continue
            if not accepts(method, theirs):
                yield f"{base.__name__}.{name}{inspect.signature(theirs)} has other parameters"
    for place, names in _READ.items():
        module, _, class_name = place.partition(":")
        cls = getattr(importlib.import_module(module), class_name, None)
        if cls is None:
            yield f"{class_name} is gone"
            continue
        for name in names.split():
            if not _has(cls, name):
                yield f"{class_name}.{name} is gone"


def accepts(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether `ours` accepts every call that `theirs` accepts."""
    signature = inspect.signature(ours)
    calls = [
        p
        for p in inspect.signature(theirs).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    places = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # A parameter with a default may be passed by name only, to our `**kwargs` too.
    called = [p.name for p in calls if p.default is p.empty or p.name in signature.parameters]
    try:
        signature.bind(**{p.name: None for p in calls})
    except TypeError:
        return False
    return places[: len(called)] == called


def _has(cls: type, name: str) -> bool:
    """Whether instances of `cls` have `name`: a member, a field, or set in `__init__`."""
    if hasattr(cls, name) or name in getattr(cls, "__dataclass_fields__", ()):
        return True
    code = getattr(getattr(cls, "__init__", None), "__code__", None)
    return code is not None and name in code.co_names
