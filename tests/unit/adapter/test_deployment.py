# SPDX-License-Identifier: Apache-2.0
"""Deployments whose KV bytes differ have different keyspaces; unidentified ones adopt nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_nvmeof_offload.vllm_adapter.deployment import describe, process_began_s


class _HfConfig:
    def __init__(self, values: dict[str, Any], commit: str | None) -> None:
        self._values = values
        self._commit_hash = commit

    def to_dict(self) -> dict[str, Any]:
        return self._values


def made(name: str, **values: Any) -> Any:
    """A stand-in of one of vLLM's configuration classes."""
    return make_dataclass(name, list(values))(**values)


def _config(model: str, commit: str | None = None, **rope: Any) -> Any:
    values = {"hidden_size": 64, "_name_or_path": model, "rope_parameters": rope}
    model_config = made(
        "ModelConfig",
        model=model,
        hf_config=_HfConfig(values, commit),
        dtype="torch.bfloat16",
        quantization=None,
        quantization_config=None,
        model_class_overrides={},
        max_model_len=4096,
        model_weights="",
        multimodal_config=None,
        revision=None,
        code_revision=None,
        hf_config_path=None,
        trust_remote_code=False,
        hf_token=None,
        served_model_name=None,
    )
    model_config.architecture = "LlamaForCausalLM"  # a property of vLLM's
    return made(
        "VllmConfig",
        model_config=model_config,
        cache_config=made(
            "CacheConfig",
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
            gpu_memory_utilization=0.9,
            num_gpu_blocks=None,
        ),
        parallel_config=made(
            "ParallelConfig",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            rank=0,
            data_parallel_rank=0,
        ),
        load_config=made("LoadConfig", load_format="auto", model_loader_extra_config={}),
        attention_config=made("AttentionConfig", backend=None),
        device_config=made("DeviceConfig", device=torch.device("cpu"), device_type="cpu"),
        lora_config=None,
        speculative_config=None,
        scheduler_config=None,
        compilation_config=None,
        instance_id="one",
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "weights" / "tiny"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return directory


def _digest(config: Any, **geometry: Any) -> str:
    return describe(config, "0.32.0").keyspace(pages=[4096], **geometry).digest


def test_the_same_weights_under_another_name_are_the_same_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    names = [str(model), f"{model}/", "tiny", "./tiny"]
    assert len({_digest(_config(name)) for name in names}) == 1
    assert describe(_config(str(model)), "0.32.0").volatile == ()


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("model_config.hf_config", _HfConfig({"hidden_size": 64, "rope_theta": 5e5}, None)),
        _set("cache_config.cache_dtype", "fp8"),
        _set("parallel_config.tensor_parallel_size", 2),
        _set("load_config.model_loader_extra_config", {"tensorizer_uri": "s3://b/v1.tensors"}),
        _set("model_config.architecture", "TransformersForCausalLM"),
        _set(
            "model_config.multimodal_config",
            made("MultiModalConfig", mm_processor_kwargs={"n": 2}, media_io_kwargs={}),
        ),
        _set("model_config.quantization_config", {"linear": "fp8", "ignore": ["layers.0"]}),
        _set("model_config.model_class_overrides", {"Llama": "vllm.models.llama:Other"}),
        _set("device_config.device_type", "cuda"),
    ],
)
def test_a_setting_that_changes_the_kv_changes_the_keyspace(
    model: Path, change: Callable[[Any], None]
) -> None:
    before, after = _config(str(model)), _config(str(model))
    change(after)
    assert _digest(before) != _digest(after)


def test_a_field_that_nobody_has_seen_counts(model: Path) -> None:
    def digest(**fields: Any) -> str:
        config = _config(str(model))
        config.cache_config = made("CacheConfig", **vars(config.cache_config), **fields)
        return _digest(config)

    assert len({digest(), digest(new=1), digest(new=2), digest(new=[{"a": Path("x")}])}) == 4
    assert digest(new={"a": 1, "b": torch.float16}) == digest(new={"b": torch.float16, "a": 1})
    assert digest(new=Path) != digest(new=subprocess.run)
    assert digest(new=made("NewConfig", a=1)) != digest(new=made("NewConfig", a=2))


def test_weights_geometry_version_and_seed_count(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(str(model))
    before = _digest(config)
    assert _digest(config, blocks_per_chunk=2) != before
    assert describe(config, "0.33.0").keyspace(pages=[4096]).digest != before
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert _digest(config) != before
    monkeypatch.delenv("PYTHONHASHSEED")
    (model / "model.safetensors").write_bytes(bytes(range(1, 256)) + bytes(1) + bytes(256 * 63))
    assert _digest(config) != before


def test_the_division_of_a_pipeline_and_of_blocks_counts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, shards = _config(str(model)), _config(str(model))
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    stages.parallel_config.pipeline_parallel_size = 2
    shards.parallel_config.decode_context_parallel_size = 2
    before = _digest(stages), _digest(shards)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "7,9")
    shards.parallel_config.cp_kv_cache_interleave_size = 16
    assert before[0] != _digest(stages) and before[1] != _digest(shards)
    assert _digest(_config(str(model))) == _digest(_config(str(model)))


def test_served_length_counts_only_where_rope_follows_it(model: Path) -> None:
    for rope, differs in (({"rope_type": "longrope"}, True), ({"rope_type": "llama3"}, False)):
        short, long = _config(str(model), **rope), _config(str(model), **rope)
        long.model_config.max_model_len = 131072
        assert (_digest(short) != _digest(long)) is differs


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("cache_config.prefix_caching_hash_algo", "xxhash"), "seeded at random"),
        (_set("load_config.load_format", "dummy"), "dummies"),
        (_set("lora_config", object()), "adapters"),
        (_set("model_config.model", "org/name"), "no known revision"),
        (_set("model_config.model_weights", "s3://bucket/name"), "remote place"),
        (_set("attention_config.backend", object()), "attention_config.backend is a object"),
        (_set("attention_config.backend", lambda: None), "backend is a function"),
    ],
)
def test_indistinguishable_deployments_adopt_nothing(
    model: Path, change: Callable[[Any], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = _config(str(model))
    change(config)
    assert reason in " ".join(describe(config, "0.32.0").volatile)


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        ({"OtherForCausalLM", "mine"}, ""),
        ({"LlamaForCausalLM", "mine"}, "the model's class is not vLLM's own"),
        ({"auto", "mine"}, "load format auto has a loader that is not vLLM's own"),
    ],
)
def test_code_of_a_plugin_adopts_nothing(model: Path, foreign: set[str], why: str) -> None:
    assert _volatile(_config(str(model)), foreign_code=foreign) == why


def test_a_hub_model_is_its_commit() -> None:
    one, two = _config("org/name", "aaaa"), _config("org/name", "bbbb")
    assert _digest(one) != _digest(two)
    assert describe(one, "0.32.0").volatile == ()


def test_multimodal_items_without_content_hashes(model: Path) -> None:
    config = _config(str(model))
    multimodal = made("MultiModalConfig", mm_processor_cache_gb=0, mm_encoder_fp8_scale_path=None)
    config.model_config.multimodal_config = multimodal
    assert describe(config, "0.32.0").volatile == ()
    config.cache_config.enable_prefix_caching = False
    assert "multimodal" in " ".join(describe(config, "0.32.0").volatile)
    multimodal.mm_encoder_fp8_scale_path = "/scales.json"
    assert "scales" in " ".join(describe(config, "0.32.0").volatile)


def test_the_start_time_of_a_process() -> None:
    code = (
        "from vllm_nvmeof_offload.vllm_adapter.deployment import process_began_s as p; print(p())"
    )
    before_s = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before_s - 0.1 <= float(done.stdout) <= time.time()
    assert process_began_s() < before_s


ONE, TWO = "1" * 40, "2" * 40


class Resolved(str):
    """A reply of huggingface_hub."""

    __slots__ = ("resolved",)
    resolved: str


def resolved(text: str, commit: str) -> Resolved:
    made = Resolved(text)
    made.resolved = commit
    return made


def _volatile(config: Any, **more: Any) -> str:
    return " ".join(describe(config, "0.32.0", **more).volatile)


def _loaded(model: Path, load_format: str, extra: Mapping[str, Any] = {}) -> Any:
    config = _config(str(model))
    config.load_config = made(
        "LoadConfig", load_format=load_format, model_loader_extra_config=extra
    )
    return config


# -- load formats -----------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "sharded_state", "runai_streamer"])
def test_weights_from_the_models_files_are_known(model: Path, load_format: str) -> None:
    assert _volatile(_loaded(model, load_format)) == ""


@pytest.mark.parametrize(
    ("load_format", "extra"),
    [
        ("tensorizer", {"tensorizer_uri": "/elsewhere/v1.tensors"}),
        ("modelexpress", {}),
        ("ipc_cache", {"socket_path": "/run/weights.sock"}),
        ("npcache", {}),  # numpy files of an earlier start, whatever the model's are now
        ("a_plugins_own", {"where": 1}),
        ("sharded_state", {"pattern": "../other/model-rank-{rank}-part-{part}.safetensors"}),
        ("sharded_state", {"pattern": "model-rank-{rank}-part-{part}.weights"}),
    ],
)
def test_weights_from_elsewhere_are_not_adopted(
    model: Path, load_format: str, extra: Mapping[str, Any]
) -> None:
    assert "elsewhere" in _volatile(_loaded(model, load_format, extra))


@pytest.mark.parametrize("place", ["other/weights", "s3://bucket/weights"])
def test_weights_of_another_model_are_not_adopted(model: Path, place: str) -> None:
    config = _loaded(model, "runai_streamer")
    config.model_config.model_weights = place
    assert "the weights are" in _volatile(config)


# -- hub models -------------------------------------------------------------------------


def test_a_hub_model_is_the_commit_of_its_weights() -> None:
    """The commit is not that of its configuration, which may come from another repository."""
    digests = set()
    for commit in (ONE, TWO):
        config = _config("org/weights", commit="of-the-configuration")
        config.model_config.hf_config_path = "org/config"
        config.model_config.revision = resolved("main", commit)
        assert _volatile(config) == ""
        digests.add(_digest(config))
    assert len(digests) == 2


@pytest.mark.parametrize("revision", [None, "main", "v1.0", ONE[:12]])
def test_a_revision_that_can_move_is_not_adopted(revision: str | None) -> None:
    config = _config("org/weights", commit="of-the-configuration")
    config.model_config.hf_config_path = "org/config"
    config.model_config.revision = revision
    assert "no known revision" in _volatile(config)
    config.model_config.revision = ONE
    assert _volatile(config) == ""


# -- remote code ------------------------------------------------------------------------


def test_code_of_a_local_directory_counts_where_it_is_run(model: Path) -> None:
    trusting = _config(str(model))
    trusting.model_config.trust_remote_code = True
    before = _digest(trusting), _digest(_config(str(model)))
    (model / "modeling_tiny.py").write_text("scale = 1")
    after = _digest(trusting), _digest(_config(str(model)))
    assert after[0] != before[0]
    assert after[1] == before[1]
    (model / "modeling_tiny.py").write_text("scale = 2")
    assert _digest(trusting) not in (before[0], after[0])


@pytest.mark.parametrize(
    ("name", "auto_map", "code_revision", "known"),
    [
        ("org/name", "modeling.Model", None, True),
        ("org/name", "modeling.Model", "branch", False),
        ("org/name", "org/code--modeling.Model", None, False),
        ("org/name", "org/code--modeling.Model", ONE, True),
        (None, "modeling.Model", "branch", True),
        (None, "org/code--modeling.Model", None, False),
    ],
)
def test_code_of_another_repository(
    model: Path, name: str | None, auto_map: str, code_revision: str | None, known: bool
) -> None:
    config = _config(name or str(model))
    config.model_config.revision = resolved("main", ONE)
    config.model_config.hf_config.to_dict()["auto_map"] = {"AutoModel": auto_map}
    config.model_config.code_revision = code_revision
    assert _volatile(config) == ""
    config.model_config.trust_remote_code = True
    assert ("code" in _volatile(config)) is not known


# -- drafters ---------------------------------------------------------------------------


def _with_drafter(model: Path, drafter: Path | str) -> Any:
    config = _config(str(model))
    config.speculative_config = made(
        "SpeculativeConfig",
        method="draft_model",
        target_model_config=config.model_config,
        draft_model_config=_config(str(drafter)).model_config,
        draft_load_config=None,
    )
    return config


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    directory = tmp_path / "drafter"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"draft" * 99)
    return directory


def test_the_drafter_counts(model: Path, drafter: Path) -> None:
    config = _with_drafter(model, drafter)
    digests = [_digest(_config(str(model))), _digest(config)]
    (drafter / "model.safetensors").write_bytes(b"DRAFT" * 99)
    digests.append(_digest(config))
    config.speculative_config.draft_model_config.dtype = "torch.float16"
    digests.append(_digest(config))
    config.speculative_config.method = "eagle"
    digests.append(_digest(config))
    assert len(set(digests)) == len(digests)


def test_a_drafter_that_is_not_known_is_not_adopted(model: Path, drafter: Path) -> None:
    assert _volatile(_with_drafter(model, drafter)) == ""
    assert "drafter: " in _volatile(_with_drafter(model, "org/drafter"))
    config = _with_drafter(model, drafter)
    config.speculative_config.draft_load_config = _loaded(drafter, "dummy").load_config
    assert "drafter: the weights are dummies" in _volatile(config)


def test_drafts_without_a_model_change_nothing(model: Path) -> None:
    """For n-grams vLLM names the model itself as the drafter."""
    config = _with_drafter(model, model)
    config.speculative_config.draft_model_config = config.model_config
    assert _digest(config) == _digest(_config(str(model)))
    config.speculative_config.draft_model_config = None
    assert _digest(config) == _digest(_config(str(model)))
