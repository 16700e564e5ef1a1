# SPDX-License-Identifier: Apache-2.0
"""The facts of a vLLM deployment under which KV bytes are interchangeable.

They become the keyspace: a pool written under other facts is another directory, never mixed. If the
KV depends on something that neither the facts nor the block hashes contain, what is stored must not
be adopted by a later start; `Deployment.volatile` has the reasons.

vLLM reads the weights long before a worker makes its keyspace. Therefore the check before model
load stamps their files (`note_weights`), and each worker compares (`Deployment.replaced`).

Configuration objects are read by attribute, so that tests need no vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.vllm_adapter.weights import (
    ModelSource,
    changed_since,
    drafter_of,
    weights_stamp,
    why_unknown,
)

#: Hash algorithms whose root is drawn at random by each process unless PYTHONHASHSEED is set.
_SEEDED_HASHES = frozenset({"xxhash", "xxhash_cbor"})
#: Keys of a model's configuration with its path or author, not its content.
_INCIDENTAL_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
#: RoPE types whose factors for *all* positions depend on the maximum length served.
_LENGTH_DEPENDENT_ROPE = ('"longrope"', '"su"')


@dataclass(frozen=True)
class Deployment:
    """What one process of vLLM runs."""

    #: Everything except weights and KV geometry.
    facts: Mapping[str, Any]
    source: ModelSource
    drafter: ModelSource | None = None
    #: Reasons why nothing is adopted.
    volatile: tuple[str, ...] = ()
    #: Local model → stamp of its files from before vLLM read them.
    stamps: Mapping[str, str] = field(default_factory=dict)
    #: Earliest time at which vLLM may have read a model without a stamp, in seconds of the
    #: system's clock.
    began_s: float = float("inf")

    def keyspace(self, **geometry: Any) -> Keyspace:
        """The keyspace of these facts and this KV geometry. Reads the models' files."""
        identities = {source: source.identity() for source in self._sources()}
        drafter = identities[self.drafter] if self.drafter is not None else None
        return Keyspace.of(
            {**self.facts, **identities[self.source], "drafter_weights": drafter, **geometry}
        )

    def replaced(self) -> tuple[str, ...]:
        """Why files may not be the ones that vLLM has read; empty: they are.

        Call it after `keyspace`, which reads the files that are there now.
        """
        return tuple(why for source in self._sources() if (why := self._why_replaced(source)))

    def _sources(self) -> list[ModelSource]:
        """Each source once, because some drafters are a part of the model's own files."""
        return list(dict.fromkeys(s for s in (self.source, self.drafter) if s is not None))

    def _why_replaced(self, source: ModelSource) -> str:
        path = Path(source.model)
        stamp = self.stamps.get(source.model)
        if stamp is not None:
            same = path.exists() and stamp == weights_stamp(path, code=source.code)
            return "" if same else f"files of {source.model} were replaced while the server started"
        changed = changed_since(path, self.began_s, code=source.code)
        return f"{changed} was written while this process started" if changed else ""


def note_weights(
    vllm_config: Any, noted: Mapping[str, str], extra: MutableMapping[str, Any]
) -> None:
    """Stamp the files of the local models in `vllm_config`, and write the stamps into `extra`.

    A model in `noted` keeps its stamp, because vLLM copies configurations while it loads the model.
    """
    stamps = dict(noted)
    for model in (vllm_config.model_config, drafter_of(vllm_config)):
        if model is None or model.model in stamps:
            continue
        source = ModelSource.of(model)
        if source.local:
            try:
                stamps[source.model] = weights_stamp(Path(source.model), code=source.code)
            except OSError:
                continue  # vLLM reports it when it reads them
    extra["weights_seen"] = stamps


def process_began_s() -> float:
    """The start of this process, in seconds of the system's clock."""
    # The second field, the command's name, may hold spaces; the start is the 22nd.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def describe(
    vllm_config: Any,
    vllm_version: str,
    *,
    stamps: Mapping[str, str] | None = None,
    began_s: float = float("inf"),
    foreign_formats: Collection[str] = (),
) -> Deployment:
    """Collect the facts from a `VllmConfig`. stamps, began_s: see `Deployment`."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    resolved = _resolved(model)
    facts = {
        "vllm": vllm_version,
        **_model_facts(model, vllm_config.load_config),
        "cache_dtype": str(cache.cache_dtype),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "attention": str(getattr(vllm_config.attention_config, "backend", None)),
        # vLLM's CPU attention packs keys differently if the processor has AMX.
        "amx": _has_amx(),
        "tensor_parallel": parallel.tensor_parallel_size,
        "multimodal": _multimodal_facts(model),
        "drafter": None,
    }
    facts |= _parallel_facts(parallel)
    if any(kind in resolved for kind in _LENGTH_DEPENDENT_ROPE):
        facts["max_model_len"] = model.max_model_len
    why = why_unknown(model, vllm_config.load_config, foreign_formats)
    why += _volatile(vllm_config)
    drafter = drafter_of(vllm_config)
    if drafter is not None:
        speculative = vllm_config.speculative_config
        load = speculative.draft_load_config or vllm_config.load_config
        facts["drafter"] = {"method": str(speculative.method), **_model_facts(drafter, load)}
        why += [f"drafter: {one}" for one in why_unknown(drafter, load, foreign_formats)]
    return Deployment(
        facts,
        ModelSource.of(model),
        ModelSource.of(drafter) if drafter is not None else None,
        tuple(why),
        stamps or {},
        began_s,
    )


def _parallel_facts(parallel: Any) -> dict[str, Any]:
    """Facts of shapes in which a rank has only some layers, or only some tokens of a block."""
    facts: dict[str, Any] = {}
    if parallel.pipeline_parallel_size > 1:
        partition = os.environ.get("VLLM_PP_LAYER_PARTITION", "")
        facts["pipeline_parallel"] = [parallel.pipeline_parallel_size, partition]
    sizes = [parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size]
    if max(sizes) > 1:
        facts["context_parallel"] = [*sizes, parallel.cp_kv_cache_interleave_size]
    return facts


def _model_facts(model: Any, load: Any) -> dict[str, Any]:
    return {
        "hf_config": hashlib.sha256(_resolved(model).encode()).hexdigest(),
        # A class of vLLM or of Transformers: they may order a head's values differently.
        "architecture": str(getattr(model, "architecture", "")),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": str(load.load_format),
        "load_options": _canonical(load.model_loader_extra_config),
        "code_revision": str(model.code_revision or ""),
    }


def _resolved(model: Any) -> str:
    """The model's configuration including the command line's overrides (RoPE scaling, …)."""
    return _canonical(_without_incidentals(model.hf_config.to_dict()))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _volatile(vllm_config: Any) -> list[str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    why: list[str] = []
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm in _SEEDED_HASHES and os.environ.get("PYTHONHASHSEED") is None:
        why.append(f"{algorithm} block hashes are seeded at random unless PYTHONHASHSEED is set")
    if vllm_config.lora_config is not None:
        why.append("adapters are known by name and path, not by content")
    multimodal = getattr(model, "multimodal_config", None)
    hashed = cache.enable_prefix_caching or getattr(multimodal, "mm_processor_cache_gb", 0)
    if multimodal is not None and not hashed:
        # vLLM then numbers the items of each process, from 1 again after a restart.
        why.append("multimodal items have no content hash with both of vLLM's caches off")
    return why


def _multimodal_facts(model: Any) -> str:
    """The server's own processing of images and sounds, which is not in the block hashes."""
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return ""
    names = ("mm_processor_kwargs", "media_io_kwargs")
    return _canonical({name: getattr(multimodal, name, None) for name in names})


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


def deployed(vllm_config: Any, stamps: Mapping[str, str]) -> Deployment:
    """The deployment of this process."""
    from vllm.version import __version__

    return describe(
        vllm_config,
        __version__,
        stamps=stamps,
        began_s=process_began_s(),
        foreign_formats=foreign_formats(),
    )


def foreign_formats() -> frozenset[str]:
    """Load formats whose loader a plugin has added or replaced."""
    from vllm.model_executor import model_loader

    return frozenset(
        name
        for name, loader in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items()
        if not loader.__module__.startswith(f"{model_loader.__name__}.")
    )
