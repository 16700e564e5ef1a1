# SPDX-License-Identifier: Apache-2.0
"""Facts about a vLLM deployment under which KV bytes are interchangeable.

They become the keyspace: a pool written under other facts is another directory, never mixed.
Where something decides the KV that neither the facts nor the block hashes hold, what is
stored must not be adopted by a later start; `Deployment.volatile` says why.

Read off vLLM's configuration objects by attribute, so that no vLLM is needed to test it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.pool.keyspace import Keyspace
from vllm_nvmeof_offload.weights import changed_since, weights_digest

__all__ = ["Deployment", "describe", "process_began_s"]

#: Hash algorithms whose root is drawn at random by each process unless PYTHONHASHSEED is set.
_SEEDED_HASHES = frozenset({"xxhash", "xxhash_cbor"})
#: Keys of a model's configuration that say where it lies or who wrote it, not what it is.
_INCIDENTAL_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
#: RoPE types whose factors for *all* positions follow from the length that is served.
_LENGTH_DEPENDENT_ROPE = ('"longrope"', '"su"')


@dataclass(frozen=True)
class Deployment:
    """facts: everything but weights and KV geometry. volatile: why nothing is adopted."""

    facts: Mapping[str, Any]
    model: str
    commit: str = ""
    volatile: tuple[str, ...] = ()

    def keyspace(self, **geometry: Any) -> Keyspace:
        """The keyspace of these facts and this KV geometry. Reads the model's files."""
        path = Path(self.model)
        # Content, not place: the same weights elsewhere are the same model.
        local = path.exists()
        identity = {
            "model": path.resolve().name if local else self.model,
            "weights": weights_digest(path) if local else f"revision:{self.commit}",
        }
        return Keyspace.of({**self.facts, **identity, **geometry})


def process_began_s() -> float:
    """When this process began, in seconds of the system's clock."""
    # The second field, the command's name, may hold spaces; the start is the 22nd.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def describe(vllm_config: Any, vllm_version: str, began_s: float = float("inf")) -> Deployment:
    """Collect the facts from a `VllmConfig`.

    began_s: when the weights may have begun to be read, in seconds of the system's clock.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    # What the command line overrides (RoPE scaling, …) is in the resolved configuration only.
    resolved = json.dumps(
        _without_incidentals(model.hf_config.to_dict()), sort_keys=True, default=str
    )
    facts = {
        "vllm": vllm_version,
        "hf_config": hashlib.sha256(resolved.encode()).hexdigest(),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": str(vllm_config.load_config.load_format),
        "cache_dtype": str(cache.cache_dtype),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "attention": str(getattr(vllm_config.attention_config, "backend", None)),
        # vLLM's CPU attention packs keys otherwise where the processor has AMX.
        "amx": _has_amx(),
        "tensor_parallel": parallel.tensor_parallel_size,
        "multimodal": _multimodal_facts(model),
    }
    if any(kind in resolved for kind in _LENGTH_DEPENDENT_ROPE):
        facts["max_model_len"] = model.max_model_len
    commit = str(getattr(model.hf_config, "_commit_hash", None) or "")
    why = _volatile(vllm_config, commit)
    changed = changed_since(Path(str(model.model)), began_s)
    if changed is not None:
        # Those that were read may be the ones before, whose KV the keyspace would not name.
        why.append(f"{changed} was written while this process started")
    return Deployment(facts, str(model.model), commit, tuple(why))


def _volatile(vllm_config: Any, commit: str) -> list[str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    why: list[str] = []
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm in _SEEDED_HASHES and os.environ.get("PYTHONHASHSEED") is None:
        why.append(f"{algorithm} block hashes are seeded at random unless PYTHONHASHSEED is set")
    if "://" in str(getattr(model, "model_weights", "")):
        why.append("the weights are streamed from a remote place, whose content may change")
    elif not Path(str(model.model)).exists() and not commit:
        why.append("the model is no local directory and has no known revision")
    if str(vllm_config.load_config.load_format) == "dummy":
        why.append("the weights are dummies")
    if vllm_config.lora_config is not None:
        why.append("adapters are known by name and path, not by content")
    multimodal = getattr(model, "multimodal_config", None)
    hashed = cache.enable_prefix_caching or getattr(multimodal, "mm_processor_cache_gb", 0)
    if multimodal is not None and not hashed:
        # vLLM then numbers the items of each process, from 1 again after a restart.
        why.append("multimodal items have no content hash with both of vLLM's caches off")
    return why


def _multimodal_facts(model: Any) -> str:
    """What the server, not the request, does to images and sounds: not in the block hashes."""
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return ""
    options = {
        name: getattr(multimodal, name, None) for name in ("mm_processor_kwargs", "media_io_kwargs")
    }
    return json.dumps(options, sort_keys=True, default=str)


def _without_incidentals(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _without_incidentals(item)
            for key, item in value.items()
            if key not in _INCIDENTAL_KEYS
        }
    if isinstance(value, list | tuple):
        return [_without_incidentals(item) for item in value]
    return value


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
