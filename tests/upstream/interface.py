# SPDX-License-Identifier: Apache-2.0
"""Prints, as JSON, what the imported vLLM has of the interfaces that we use: place → text."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload import base

from tests.upstream.config_fields import read_fields
from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter.vllm_release import Capability

#: The classes of which ours are subclasses.
_BASES = (base.OffloadingManager, base.OffloadingWorker, base.OffloadingSpec, OffloadingConnector)
_GONE = "is gone"
_BASE = "vllm.v1.kv_offload.base"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
#: What we use if it is there.
_OPTIONAL = (
    vllm_release.CONFIGURATION,
    Capability(
        "sources of loaded tokens",
        "vllm.v1.metrics.cache_hit_source:CacheHitSource has HOST DISK EXTERNAL_UNSPECIFIED",
    ),
    Capability(
        "expedited loads",
        f"{_BASE}:OffloadingWorker.submit_load(job_id, src_spec, dst_spec, expedited)",
    ),
    Capability("labels of the configuration", f"{_BASE}:OffloadingManager.config_info"),
    Capability("lock of a step", f"{_BASE}:OffloadingManager.lock"),
    Capability("end of a reset", f"{_BASE}:OffloadingManager.on_reset_flushed"),
    Capability("hints of a request", f"{_BASE}:ReqContext has kv_hints"),
    Capability(
        "sleep of the KV cache",
        f"{_CONNECTOR}.unregister_kv_caches()",
        f"{_CONNECTOR}.restore_kv_caches()",
    ),
)


def describe() -> dict[str, str]:
    """Everything that we use: forms of capabilities, signatures, fields of configurations."""
    found: dict[str, str] = {}
    for capability in (*vllm_release.REQUIRED, *_OPTIONAL):
        absent = "absent" if capability in _OPTIONAL else "NOT AS EXPECTED"
        found[f"capability: {capability.name}"] = absent if any(capability.differences()) else "yes"
        for need in capability.needs:
            found |= _lines(need)
    for cls in _BASES:
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                found[f"{cls.__name__}.{name}"] = str(inspect.signature(method))
    for config, names in read_fields(Path(vllm.__file__).parent).items():
        found |= {f"field {config}.{name}": "is there" for name in names.split()}
    return found


def _lines(need: str) -> dict[str, str]:
    matched = re.match(r"([\w.]+):([\w.]+)(?: has (.*))?", need)
    assert matched, need
    module, name, members = matched.groups()
    try:
        thing: Any = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return {name: _GONE}
    if members:
        fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
        types = {field.name: str(field.type) for field in fields}
        return {
            f"{name}.{one}": _GONE
            if vllm_release.difference(f"{module}:{name} has {one}")
            else types.get(one, "is there")
            for one in members.split()
        }
    return {name: str(inspect.signature(thing)) if inspect.isroutine(thing) else "is there"}


if __name__ == "__main__":
    refusal = None
    try:
        vllm_release.refuse_different()
    except IntegrationError as error:
        refusal = str(error)
    print("INTERFACE " + json.dumps({"lines": describe(), "refusal": refusal}))
