# SPDX-License-Identifier: Apache-2.0
"""The facts about a vLLM deployment that determine which KV bytes are interchangeable.

The facts identify the keyspace: a pool written under different facts is in another directory. If
KV depends on data that neither the facts nor the block hashes contain, a later start must not adopt
the stored chunks; `Deployment.volatile` gives the reasons.

vLLM reads the weights long before a worker computes its keyspace. Therefore `note_weights` stamps
the files before the model is loaded, and `Deployment.replaced` compares the stamps in each worker.

The keyspace is closed: every field of vLLM's configuration, even in future releases, is a fact,
unless `HARMLESS` lists the field with a reason. A value that servers cannot compare becomes a
reason in `volatile` instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from vllm_nvmeof_offload.config import WEIGHTS_SEEN
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.vllm_adapter.weights import (
    ModelSource,
    changed_since,
    drafter_of,
    weights_stamp,
    why_unknown,
)

#: Hash algorithms with a random root in each process unless PYTHONHASHSEED is set.
_SEEDED_HASHES = frozenset({"xxhash", "xxhash_cbor"})
#: Keys in a model's configuration that describe its origin, not its content.
_INCIDENTAL_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
#: RoPE types whose factors at *all* positions depend on the maximum length.
_LENGTH_DEPENDENT_ROPE = ('"longrope"', '"su"')
#: Environment variables that affect weights, media or a block's bytes, but are not in any field.
_VARIABLES = (
    *("PYTHONHASHSEED", "VLLM_PP_LAYER_PARTITION", "VLLM_SSM_CONV_STATE_LAYOUT"),
    *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG"),
    *("VLLM_MARLIN_INPUT_DTYPE", "VLLM_CPU_INT4_W4A8", "VLLM_VIDEO_LOADER_BACKEND"),
)
#: The fields that are not facts, by vLLM configuration class and by reason.
HARMLESS: Mapping[str, Mapping[str, str]] = {
    "VllmConfig": {
        "numerics only": "compilation_config kernel_config optimization_level performance_mode",
        "scheduling of tokens": "scheduler_config",
        "use of the last layer's output": "structured_outputs_config reasoning_config "
        "watermark_config aux_output_config",
        "where weights and KV are kept": "offload_config engram_config kv_transfer_config",
        "replaced weights have another share tag": "weight_transfer_config",
        "follows from model_config and load_config": "quant_config",
        "running and observing a server": "observability_config logging_config profiler_config "
        "kv_events_config instance_id shutdown_timeout watchdog_config",
    },
    "ModelConfig": {
        "the content of the files is a fact": "model model_weights revision trust_remote_code "
        "word_embeddings_untied_by_checkpoint",
        "hf_config is a fact": "hf_text_config hf_config_path hf_overrides config_format "
        "is_submodel_config",
        "architecture is a fact": "model_impl",
        "part of the keyspace only if RoPE depends on it": "max_model_len",
        "token ids identify prompts": "tokenizer tokenizer_mode tokenizer_revision "
        "skip_tokenizer_init renderer_num_workers io_processor_plugin",
        "in vLLM's block hashes": "enable_prompt_embeds",
        "use of the last layer's output": "seed return_sampling_mask max_logprobs "
        "logprobs_mode use_fp64_gumbel enable_trace_replay generation_config "
        "override_generation_config logits_processors pooler_config",
        "numerics only": "enforce_eager disable_cascade_attn",
        "access and names": "allowed_local_media_path allowed_media_domains hf_token "
        "served_model_name allow_deprecated_quantization spec_target_max_model_len",
        "memory of a sleeping server": "enable_sleep_mode sleep_preserve_parameter_names "
        "sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend "
        "enable_cumem_allocator",
    },
    "CacheConfig": {
        "the geometry is a fact": "block_size user_specified_block_size _block_size_resolved "
        "kv_cache_layout prefix_match_unit is_attention_free sliding_window hash_block_size "
        "mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_mode "
        "effective_attention_block_size cache_hit_alignment_tokens",
        "sizes": "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
        "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size "
        "simple_cpu_offload_num_blocks",
        "which KV is kept": "enable_prefix_caching prefix_cache_retention_interval "
        "enable_mamba_shared_prefix_checkpoint kv_offloading_backend",
    },
    "ParallelConfig": {
        "every replica has the whole model": "data_parallel_size data_parallel_size_local "
        "data_parallel_rank data_parallel_rank_local data_parallel_index data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval _api_process_count "
        "_api_process_rank disable_nccl_for_dp_synchronization",
        "places and times": "data_parallel_master_ip data_parallel_rpc_port "
        "data_parallel_master_port _data_parallel_master_port_list _coord_store_port master_addr "
        "master_port node_rank nnodes rank numa_bind numa_bind_nodes numa_bind_cpus "
        "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "distributed_executor_backend placement_group ray_runtime_env ray_workers_use_nsight "
        "max_parallel_loading_workers enable_ep_weight_filter enable_shm_tensor_arena "
        "enable_fault_tolerance fault_tolerance_config",
        "in other facts": "world_size is_moe_model _allow_auto_resolve_cp_interleave_size",
        "numerics only": "enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling "
        "enable_eplb eplb_config expert_placement_strategy all2all_backend enable_elastic_ep "
        "elastic_ep_max_dp_size disable_custom_all_reduce enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate",
    },
    "LoadConfig": {
        "how files are read": "download_dir safetensors_load_strategy device use_tqdm_on_load "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location",
    },
    "DeviceConfig": {"device_type is a fact": "device"},
    "AttentionConfig": {
        "numerics only": "minimax_m3_msa_decode_backend flash_attn_version use_trtllm_attention "
        "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv mla_prefill_backend "
        "tq_max_kv_splits_for_cuda_graph sparse_mla_force_mqa sparse_mla_prefill_workspace_factor "
        "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size "
        "trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp",
    },
    "LoRAConfig": {
        "sizes and numerics": "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels "
        "fully_sharded_loras specialize_active_lora",
    },
    "MultiModalConfig": {
        "what is accepted": "language_model_only limit_per_prompt enable_mm_embeds mm_encoder_only "
        "allow_missing_mm_embeddings",
        "token ids identify prompts": "interleave_mm_strings",
        "memory and transport": "mm_processor_cache_gb mm_processor_cache_type mm_tensor_ipc "
        "mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb skip_mm_profiling "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        "numerics only": "mm_device_do_normalize mm_encoder_tp_mode mm_encoder_attn_backend",
    },
    "SpeculativeConfig": {
        "draft_model_config and its files are facts": "model quantization max_model_len revision "
        "target_model_config target_parallel_config tensor_parallel_size",
        "which drafts are made and accepted": "num_speculative_tokens draft_sample_method "
        "num_speculative_tokens_per_batch_size disable_padded_drafter_batch dspark_draft_topk "
        "use_local_argmax_reduction rejection_sample_method enable_adaptive_verification "
        "draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold "
        "fly_entropy_top_k",
        "numerics only": "enforce_eager moe_backend",
    },
    "ECTransferConfig": {"places": "engine_id ec_buffer_device ec_buffer_size ec_ip ec_port"},
}


@dataclass(frozen=True)
class Deployment:
    #: The facts, except weights and KV geometry.
    facts: Mapping[str, Any]
    source: ModelSource
    drafter: ModelSource | None = None
    #: Reasons why nothing is adopted.
    volatile: tuple[str, ...] = ()
    #: The stamps of local models' files, by model, taken before vLLM read the files.
    stamps: Mapping[str, str] = field(default_factory=dict)
    #: The earliest system time, in seconds, at which vLLM may have read a model without a stamp.
    began_s: float = float("inf")

    def keyspace(self, **geometry: Any) -> Keyspace:
        identities = {source: source.identity() for source in self._sources()}
        drafter = identities[self.drafter] if self.drafter is not None else None
        return Keyspace.of(
            {**self.facts, **identities[self.source], "drafter_weights": drafter, **geometry}
        )

    def replaced(self) -> tuple[str, ...]:
        """Return the reasons why the weight files may differ from the files that vLLM read. Call
        this after `keyspace`, which reads the current files."""
        return tuple(why for source in self._sources() if (why := self._why_replaced(source)))

    def _sources(self) -> list[ModelSource]:
        """Return each source once, because a drafter may be part of the model's files."""
        return list(dict.fromkeys(s for s in (self.source, self.drafter) if s is not None))

    def _why_replaced(self, source: ModelSource) -> str:
        path = Path(source.model)
        stamp = self.stamps.get(source.model)
        if stamp is not None:
            same = path.exists() and stamp == weights_stamp(path, code=source.code)
            return "" if same else f"files of {source.model} were replaced while the server started"
        changed = changed_since(path, self.began_s, code=source.code)
        return f"{changed} was written while this process started" if changed else ""


def note_weights(vllm_config: Any, extra: MutableMapping[str, Any]) -> None:
    """Stamp the files of the local models in `vllm_config`, and write the stamps into `extra`. Keep
    existing stamps, because vLLM copies configurations while it loads the model."""
    stamps = dict(extra.get(WEIGHTS_SEEN, {}))
    for model in (vllm_config.model_config, drafter_of(vllm_config)):
        if model is None or model.model in stamps:
            continue
        source = ModelSource.of(model)
        if source.local:
            try:
                stamps[source.model] = weights_stamp(Path(source.model), code=source.code)
            except OSError:
                continue  # vLLM reports the error when it reads the files
    extra[WEIGHTS_SEEN] = stamps


def process_began_s() -> float:
    # The second field, the command's name, may contain spaces. The start time is the 22nd field.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def describe(
    vllm_config: Any,
    vllm_version: str,
    *,
    stamps: Mapping[str, str] | None = None,
    began_s: float = float("inf"),
    foreign_code: Collection[str] = (),
) -> Deployment:
    """Collect the facts of a `VllmConfig`. `stamps` and `began_s` are as in `Deployment`,
    `foreign_code` as in `why_unknown`."""
    model, load = vllm_config.model_config, vllm_config.load_config
    drafter = drafter_of(vllm_config)
    why = why_unknown(model, load, foreign_code)
    why += _volatile(vllm_config)
    configuration = _fields_facts(vllm_config, "", why)
    if drafter is None:
        configuration["speculative_config"] = None  # without a model, drafts have no KV
    else:
        load = vllm_config.speculative_config.draft_load_config or load
        why += [f"drafter: {one}" for one in why_unknown(drafter, load, foreign_code)]
    facts = {
        "vllm": vllm_version,
        "configuration": configuration,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        # vLLM's CPU attention packs keys differently if the processor has AMX.
        "amx": _has_amx(),
    }
    return Deployment(
        facts,
        ModelSource.of(model),
        ModelSource.of(drafter) if drafter is not None else None,
        tuple(dict.fromkeys(why)),
        stamps or {},
        began_s,
    )


def _fields_facts(config: Any, where: str, unknown: list[str]) -> dict[str, Any]:
    """Return the facts of a configuration object. `where` prefixes its fields; see `_fact`."""
    name = type(config).__name__
    harmless = " ".join(HARMLESS.get(name, {}).values()).split()
    facts = {
        one.name: _fact(getattr(config, one.name, None), f"{where}{one.name}", unknown)
        for one in fields(config)
        if one.name not in harmless
    }
    if name == "ModelConfig":
        # vLLM's and Transformers' classes may order a head's values differently.
        facts["architecture"] = str(getattr(config, "architecture", ""))
        resolved = json.dumps(config.hf_config.to_dict(), default=str)
        if any(kind in resolved for kind in _LENGTH_DEPENDENT_ROPE):
            facts["max_model_len"] = config.max_model_len
    return facts


def _fact(value: Any, where: str, unknown: list[str]) -> Any:
    """Encode a value as JSON that is the same in all processes.

    Mappings become digests, because facts are stored on disk in plain text. A value that cannot be
    encoded adds a reason to `unknown`. `where` is the field's name.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float | torch.dtype | torch.device | Path):
        return str(value)
    if isinstance(value, type | FunctionType):
        qualified = f"{value.__module__}.{value.__qualname__}"
        if "<" not in qualified:  # neither a lambda nor local to a function
            return qualified
    elif isinstance(value, Mapping) or hasattr(value, "to_dict"):
        # A model's configuration has items that no class declares.
        items = value if isinstance(value, Mapping) else value.to_dict()
        plain = {
            str(key): _fact(item, where, unknown)
            for key, item in items.items()
            if key not in _INCIDENTAL_KEYS
        }
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    elif is_dataclass(value):
        return _fields_facts(value, f"{where}.", unknown)
    elif isinstance(value, list | tuple):
        return [_fact(item, where, unknown) for item in value]
    unknown.append(f"{where} is a {type(value).__name__} that other servers cannot compare")
    return None


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
        # vLLM then numbers the items from 1 in each process.
        why.append("multimodal items have no content hash with both of vLLM's caches off")
    if getattr(multimodal, "mm_encoder_fp8_scale_path", None):
        why.append("the encoder's scales (mm_encoder_fp8_scale_path) are known by path only")
    return why


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def deployed(vllm_config: Any, stamps: Mapping[str, str]) -> Deployment:
    from vllm.version import __version__

    return describe(
        vllm_config,
        __version__,
        stamps=stamps,
        began_s=process_began_s(),
        foreign_code=foreign_code(),
    )


def foreign_code() -> frozenset[str]:
    """Return load formats and architectures with a loader or class from outside vLLM."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.model_executor.models import ModelRegistry

    modules = {name: loader.__module__ for name, loader in _LOAD_FORMAT_TO_MODEL_LOADER.items()}
    for name, model in ModelRegistry.models.items():
        known = getattr(model, "module_name", None)  # for a class that is not imported yet
        modules[name] = known or model.model_cls.__module__
    return frozenset(name for name, module in modules.items() if not module.startswith("vllm."))
