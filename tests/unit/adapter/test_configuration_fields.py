# SPDX-License-Identifier: Apache-2.0
"""The keyspace is closed: each field of vLLM's configuration is a fact or on the harmless list."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import vllm.config
from vllm.engine.arg_utils import EngineArgs
from vllm_nvmeof_bench.servers.model import ModelShape, make_model

from tests.upstream.config_fields import DATA
from tests.upstream.releases import installed_version
from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter.configure import TRANSFER_FIELDS
from vllm_nvmeof_offload.vllm_adapter.deployment import HARMLESS, describe

RELEASES: dict[str, dict[str, str]] = json.loads(DATA.read_text())
#: What a person has judged to be a fact, by class. Everything that is not known is one too.
FACTS = {
    "VllmConfig": "model_config cache_config parallel_config device_config load_config "
    "attention_config mamba_config lora_config speculative_config diffusion_config "
    "ec_transfer_config ec_manager_config additional_config",
    "ModelConfig": "runner convert dtype hf_config code_revision quantization quantization_config "
    "disable_sliding_window model_class_overrides multimodal_config",
    "QuantizationConfigArgs": "linear moe ignore targets",
    "QuantSpec": "weight activation",
    "CacheConfig": "cache_dtype prefix_caching_hash_algo kv_cache_dtype_skip_layers "
    "mamba_cache_dtype mamba_ssm_cache_dtype replayssm_buffer_len use_replayssm use_kda_recoverssm "
    "kv_sharing_fast_prefill swa_bounded_replay",
    "ParallelConfig": "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
    "decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
    "worker_cls worker_extension_cls",
    "DeviceConfig": "device_type",
    "LoadConfig": "load_format model_loader_extra_config ignore_patterns",
    "AttentionConfig": "backend backend_per_kind disable_flashinfer_q_quantization "
    "use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits hisparse_config "
    "use_non_causal",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "MambaConfig": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds "
    "ssu_algorithm",
    "LoRAConfig": "lora_dtype target_modules default_mm_loras enable_tower_connector_lora "
    "enable_mixed_moe_lora_format enable_moe_shared_loras",
    "MultiModalConfig": "media_io_kwargs mm_processor_kwargs mm_hasher_algorithm "
    "mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
    # Some belong to methods without a drafter, which have no facts.
    "SpeculativeConfig": "method draft_tensor_parallel_size attention_backend kv_cache_dtype "
    "code_revision index_share_for_mtp_iteration disable_eagle_block_drop "
    "disable_lookahead_block_hashes use_heterogeneous_vocab parallel_drafting draft_model_config "
    "draft_parallel_config draft_load_config prompt_lookup_max prompt_lookup_min "
    "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
    "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob synthetic_acceptance_rates "
    "synthetic_acceptance_length",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "ECTransferConfig": "ec_connector ec_role ec_connector_extra_config ec_connector_module_path "
    "mm_encoder_output_widths",
    "EncoderCacheManagerConfig": "encoder_cache_manager_cls manager_config",
}
#: Harmless field → classes that occur only in it.
INSIDE = {
    "VllmConfig.compilation_config": "CompilationConfig PassConfig DynamicShapesConfig Range",
    "VllmConfig.kernel_config": "KernelConfig IrOpPriorityConfig",
    "VllmConfig.scheduler_config": "SchedulerConfig",
    "VllmConfig.kv_transfer_config": "KVTransferConfig",
    "VllmConfig.offload_config": "OffloadConfig UVAOffloadConfig PrefetchOffloadConfig",
    "VllmConfig.engram_config": "EngramConfig",
    "VllmConfig.aux_output_config": "AuxOutputConfig",
    "VllmConfig.watermark_config": "WatermarkConfig",
    "VllmConfig.reasoning_config": "ReasoningConfig",
    "VllmConfig.structured_outputs_config": "StructuredOutputsConfig",
    "VllmConfig.observability_config": "ObservabilityConfig",
    "VllmConfig.logging_config": "LoggingConfig",
    "VllmConfig.profiler_config": "ProfilerConfig",
    "VllmConfig.kv_events_config": "KVEventsConfig",
    "VllmConfig.watchdog_config": "WatchdogConfig",
    "VllmConfig.weight_transfer_config": "WeightTransferConfig",
    "ModelConfig.pooler_config": "PoolerConfig",
    "ParallelConfig.eplb_config": "EPLBConfig",
    "ParallelConfig.fault_tolerance_config": "FaultToleranceConfig",
    "MultiModalConfig.limit_per_prompt": "BaseDummyOptions ImageDummyOptions VideoDummyOptions "
    "AudioDummyOptions",
}
#: Classes in no field: they are made of other facts, or for one request of the API server.
NO_FIELD = {"ModelArchitectureConfig", "SpeechToTextConfig", "SpeechToTextParams"}


def _harmless(name: str) -> list[str]:
    return " ".join(HARMLESS.get(name, {}).values()).split()


def test_the_fields_of_each_known_release_are_known() -> None:
    assert [one.rpartition(".")[0] for one in RELEASES] == list(vllm_release.KNOWN)


@pytest.mark.parametrize("release", RELEASES)
def test_each_field_is_a_fact_or_harmless(release: str) -> None:
    inside = {name for names in INSIDE.values() for name in names.split()}
    unknown = RELEASES[release].keys() - FACTS.keys() - inside - NO_FIELD
    assert not unknown, "classes that nobody has judged"
    for name, facts in FACTS.items():
        judged = [*_harmless(name), *facts.split()]
        assert not set(RELEASES[release].get(name, "").split()) - set(judged), (
            f"fields of {name} that nobody has judged: they are facts until `HARMLESS` has them"
        )
        assert len(set(judged)) == len(judged), f"{name} has a field that is judged twice"


def test_nothing_is_judged_that_no_release_has() -> None:
    for name in FACTS.keys() | HARMLESS.keys():
        known = {one for release in RELEASES.values() for one in release.get(name, "").split()}
        assert not {*_harmless(name), *FACTS[name].split()} - known
    for field in INSIDE:
        name, _, one = field.partition(".")
        assert one in _harmless(name)


def test_the_data_has_the_fields_of_the_installed_release() -> None:
    known = RELEASES.get(installed_version())
    if known is None:
        pytest.skip(f"no data of {installed_version()}")
    for one in pkgutil.iter_modules(vllm.config.__path__):
        for name, cls in vars(importlib.import_module(f"vllm.config.{one.name}")).items():
            if dataclasses.is_dataclass(cls) and cls.__module__ == f"vllm.config.{one.name}":
                own = {field.name for field in dataclasses.fields(cls)}
                inherited = {f.name for base in cls.__bases__ for f in _fields(base)}
                assert own - inherited <= set(known[name].split()) <= own, name


def _fields(cls: Any) -> tuple[Any, ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


# -- real configurations ----------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = ModelShape(layers=2, hidden=128, intermediate=128, heads=4, kv_heads=1)
    return make_model(tmp_path_factory.mktemp("model"), shape)


def facts(model: Path, **options: Any) -> dict[str, Any]:
    """The facts of a server, which are the same after its configuration went to a worker."""
    base = {"model": str(model), "dtype": "bfloat16", "max_model_len": 512, "block_size": 32}
    config = EngineArgs(**{**base, **options}).create_engine_config()
    found = describe(config, "0.32.0")
    assert found == describe(pickle.loads(pickle.dumps(config)), "0.32.0")
    assert found.volatile == ()
    json.dumps(found.facts, allow_nan=False)
    return dict(found.facts)


def online(**config: Any) -> dict[str, Any]:
    return {"quantization": "online", "quantization_config": config}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            online(linear="fp8_per_channel"),
            online(linear="fp8_per_channel", ignore=["*layers.0*"]),
        ),
        (
            {"quantization": "fp8_per_channel"},
            {
                "quantization": "fp8_per_channel",
                "quantization_config": {"ignore": ["*layers.0*"]},
            },
        ),
        ({}, {"quantization_config": {"linear": {"weight": "mxfp4"}}}),
        (
            {},
            {
                "model_class_overrides": {
                    "LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM"
                }
            },
        ),
        ({}, {"hf_overrides": {"rope_theta": 5e5}}),
        ({}, {"kv_cache_dtype": "fp8"}),
        ({}, {"attention_config": {"indexer_kv_dtype": "mxfp4"}}),
        ({}, {"mamba_cache_dtype": "float32"}),
        ({}, {"model_impl": "transformers"}),
        ({}, {"additional_config": {"plugin": "of a platform"}}),
    ],
)
def test_servers_with_other_kv_have_other_facts(
    model: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert facts(model, **one) != facts(model, **other)


def test_servers_with_the_same_kv_have_the_same_facts(model: Path) -> None:
    harmless = {
        "seed": 7,
        "served_model_name": "other",
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 1024,
        "max_model_len": 256,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 17,
        "hf_token": "a secret",
        "tokenizer_mode": "hf",
        "kv_cache_metrics": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
        },
    }
    assert facts(model) == facts(model, **harmless)


def test_config_check_knows_the_fields_of_a_transfer_configuration() -> None:
    known = {one.name for one in dataclasses.fields(vllm.config.KVTransferConfig)}
    assert set(TRANSFER_FIELDS) == known
