# SPDX-License-Identifier: Apache-2.0
"""Features, platforms and parallel shapes that cannot be offloaded are refused by name."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import ModelRegistry
from vllm.v1 import kv_cache_interface as interface

from tests.unit.adapter.test_cache_groups import (
    BLOCK_TOKENS,
    _full,
    _latent,
    _local,
    _replayed,
    _state,
    _window,
)
from vllm_nvmeof_offload.config import OffloadConfig, set_replicas
from vllm_nvmeof_offload.errors import ConfigError, install_extra
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.vllm_adapter.deployment import foreign_code
from vllm_nvmeof_offload.vllm_adapter.supported import (
    Replica,
    count_nodes,
    precheck,
    refuse_platform,
    refuse_unsupported,
    replica_of,
    slot_bytes_estimate,
)
from vllm_nvmeof_offload.vllm_adapter.weights import FILE_FORMATS


def layers(**specs: Any) -> Any:
    return interface.UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=specs)


class Derived(interface.FullAttentionSpec):
    """A kind of layer that this package has never seen."""


def _special(kind: type, **more: Any) -> Any:
    """Layers of another kind with full attention."""
    full = _full()
    common = {name: getattr(full, name) for name in ("num_kv_heads", "head_size", "dtype")}
    return kind(block_size=BLOCK_TOKENS, **common, **more)


WHOLE_STATE = replace(_state(), mamba_cache_mode="none")
WITHOUT = "serve this model without offloading"
UNKNOWN = "does not know (2 x Derived)"
#: The groups of a model, the options of `refusal_of`, and words of the refusal; none if served.
MODELS: dict[str, tuple[list[Any], dict[str, Any], list[str]]] = {
    "full": ([_full()], {}, []),
    "full without caching": ([_full()], {"caching": False}, []),
    "several widths": ([layers(a=_full(), b=_full(4))], {}, []),
    "mla": ([_latent()], {"mla": True}, []),
    "window": ([_window()], {}, []),
    "window among full": ([_full(), _window()], {}, []),
    "windows of latent attention": ([_latent(), _replayed(bounded_replay=False)], {}, []),
    "replayed": ([_full(), _replayed()], {}, []),
    "chunked local": ([_full(), _local()], {}, []),
    "state": ([_full(), _state()], {}, []),
    "window and state": ([_full(), _window(), _state()], {}, []),
    "states only": ([_state()], {}, []),
    "states of whole requests": ([WHOLE_STATE], {"caching": False}, []),
    "blocks together": ([_full()], {"layout": "BLNHC"}, []),
    "two groups": ([_full(), _full()], {}, []),
    "states of whole requests beside attention": (
        *([_full(), WHOLE_STATE], {"caching": False}),
        ["--enable-prefix-caching"],
    ),
    "mla without context": (
        *([_latent()], {"mla": True, "caching": False}),
        ["org/name", "MLAAttentionSpec", "no AMX", "without offloading"],
    ),
    "window in one group": (
        *([layers(a=_full(), b=_window())], {}),
        ["org/name", "1 x FullAttentionSpec, 1 x SlidingWindowSpec"],
    ),
    "nothing": ([], {}, ["org/name", "no KV that vLLM can offload", WITHOUT]),
    "derived": ([_special(Derived)], {}, ["org/name", UNKNOWN, WITHOUT]),
    "derived, among others": ([_full(), _special(Derived)], {}, ["org/name", UNKNOWN, WITHOUT]),
    "sink": (
        *([_special(interface.SinkFullAttentionSpec, sink_len=4)], {}),
        ["org/name", "does not know (2 x SinkFullAttentionSpec)", WITHOUT],
    ),
    "ahead": (
        *([_full(), _full(non_causal=True)], {}),
        ["org/name", "attends to later tokens", "unequal KV", WITHOUT],
    ),
    "hosts": ([_full()], {"hosts": 8}, ["hisparse_config", "HiSparse"]),
    "heads first": ([_full()], {"layout": "LHBNC"}, ["VLLM_KV_CACHE_LAYOUT='LHBNC'", "LBHNC"]),
    "elastic": (
        *([_full()], {"elastic": True}),
        ["enable_elastic_ep=True", "fixed number of replicas"],
    ),
}


def parallel(elastic: bool) -> Any:
    return SimpleNamespace(world_size=1, data_parallel_size=1, enable_elastic_ep=elastic)


def refusal_of(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("specs", "options", "words"), MODELS.values(), ids=MODELS)
def test_unsupported_features_are_refused_by_name(
    specs: list[Any], options: dict[str, Any], words: list[str]
) -> None:
    caching = options.get("caching", True)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="org/name", use_mla=options.get("mla", False)),
        parallel_config=parallel(options.get("elastic", False)),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=caching),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    made = interface.KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(["a", "b"], spec) for spec in specs],
        kv_cache_layout=options.get("layout"),
        hisparse_host_num_blocks=options.get("hosts"),
    )
    refusal = refusal_of(refuse_unsupported, config, made)
    assert all(word in refusal for word in words)
    assert bool(refusal) is bool(words)


def test_elastic_replicas_are_refused_before_the_model_loads() -> None:
    model = SimpleNamespace(model="org/name", is_moe=True)
    config = SimpleNamespace(model_config=model, cache_config=None, parallel_config=parallel(True))
    refusal = refusal_of(precheck, config, {}, "staging_bytes")
    assert refusal.startswith("enable_elastic_ep=True: ") and "fixed number" in refusal


def test_a_plugins_loader_and_model_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)
    monkeypatch.setattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", loaders)
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    assert loaders.keys() >= FILE_FORMATS
    assert foreign_code() == set()

    @model_loader.register_model_loader("hf")
    @model_loader.register_model_loader("mine")
    class Mine(DefaultModelLoader): ...

    ModelRegistry.register_model("LlamaForCausalLM", "mine:Llama")
    assert foreign_code() == {"LlamaForCausalLM", "hf", "mine"}


def config(
    size: int = 1, index: int = 0, engine_id: str = "abc", *, moe: bool = False, **parallel: int
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_moe=moe),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
        parallel_config=SimpleNamespace(
            **{
                "enable_elastic_ep": False,
                "data_parallel_size": size,
                "data_parallel_size_local": size,
                "data_parallel_index": index,
                **parallel,
            }
        ),
    )


def test_the_number_of_replicas_is_taken_from_vllm_where_it_knows_it() -> None:
    extra: dict[str, Any] = {}
    set_replicas(extra, 1)
    assert extra == {}
    set_replicas(extra, 3)
    # Once more, as the configuration of one replica, which vLLM has made independent.
    set_replicas(extra, 1)
    assert extra == {"replicas": 3}


def test_a_number_of_replicas_that_contradicts_vllms_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^replicas=2: data_parallel_size is 3; leave"):
        set_replicas({"replicas": 2}, 3)


def test_replicas_of_a_model_with_experts_share_the_sizes_as_others_do() -> None:
    """Each stays one of two, and knows its own index, because they compute in step."""
    one = config(size=2, index=1, engine_id="abc_dp1", moe=True)
    assert replica_of(one, 2) == Replica(1, 2, "abc")


def test_a_replica_knows_its_index_and_whose_ranks_are_its_siblings() -> None:
    first, second = (replica_of(config(index=i, engine_id=f"abc_dp{i}"), 2) for i in (0, 1))
    assert (first, second) == (Replica(0, 2, "abc"), Replica(1, 2, "abc"))
    assert (first.engine, second.engine) == ("abc/0", "abc/1")
    assert replica_of(config(), 1) == Replica(0, 1, "abc")
    assert Replica().engine == ""


@pytest.mark.parametrize(
    "one", [config(index=1), config(engine_id="abc_dp0"), config(size=2)],
    ids=["the second", "the first", "not made independent"],
)  # fmt: skip
def test_a_replica_that_was_not_counted_is_refused(one: Any) -> None:
    """Without our plugin the pool is not divided."""
    with pytest.raises(ConfigError, match=r"^data_parallel_size=2: .*VLLM_PLUGINS.*replicas"):
        replica_of(one, 1)


def test_more_replicas_than_were_declared_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^replicas=2: this is replica 2, counted from 0"):
        replica_of(config(index=2, engine_id="abc_dp2"), 2)


def test_memory_is_judged_by_machine() -> None:
    assert count_nodes(config().parallel_config) == 1
    assert count_nodes(config(size=4).parallel_config) == 1
    assert count_nodes(config(size=4, data_parallel_size_local=2).parallel_config) == 2
    assert count_nodes(config(data_parallel_size_local=0).parallel_config) == 1
    assert count_nodes(config(nnodes=3).parallel_config) == 3


ROOT = Path(__file__).parents[3]


def platform(kind: str) -> SimpleNamespace:
    return SimpleNamespace(
        device_type=kind, is_cpu=lambda: kind == "cpu", is_cuda=lambda: kind == "cuda"
    )


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    def find_spec(name: str) -> object:
        if name.partition(".")[0] in missing and "." in name:
            raise ModuleNotFoundError(name)
        return None if name in missing else object()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize("kind", ["rocm", "xpu", "tpu"])
def test_platforms_without_a_copy_engine_are_refused(kind: str) -> None:
    error = refusal_of(refuse_platform, platform(kind))
    assert error.startswith("--kv-offloading-backend='nvmeof': ")
    assert f"'{kind}'" in error and "NVIDIA GPUs" in error


@pytest.mark.parametrize(
    ("kind", "missing"), [("cpu", "cuda"), ("cuda", ""), ("cuda", "cuda.core")]
)
def test_a_platform_is_served_with_the_packages_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, kind: str, missing: str
) -> None:
    without(monkeypatch, missing)
    assert refusal_of(refuse_platform, platform(kind)) == ""


@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_a_gpu_without_them_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    without(monkeypatch, missing)
    error = refusal_of(refuse_platform, platform("cuda"))
    assert re.search(r"need cuda-bindings: pip install '?cuda-bindings.* 'nvidia-ml-py", error)


def test_every_extra_can_be_installed_without_this_packages_name() -> None:
    """No package index has this package, so `NAME[extra]` would fetch somebody else's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, wanted in project["optional-dependencies"].items():
        command, verb, *packages = shlex.split(install_extra(extra))
        assert (command, verb) == ("pip", "install")
        assert [Requirement(one) for one in packages] == [Requirement(one) for one in wanted]
    listed = (ROOT / "docs" / "install.md").read_text()
    assert all(f"`[{extra}]`" in listed for extra in project["optional-dependencies"])
    shown = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    shown += [*ROOT.glob("vllm_nvmeof_offload/**/*.py"), *ROOT.glob("bench/**/*.py")]
    assert [path.name for path in shown if f"{project['name']}[" in path.read_text()] == []


def _estimate(is_hybrid: bool = False, stages: int = 1, **text_config: Any) -> int | None:
    """Of four layers with two heads of 64 values, in blocks of 16 tokens and 2 bytes per value."""
    model = SimpleNamespace(
        is_hybrid=is_hybrid,
        dtype=SimpleNamespace(itemsize=2),
        use_mla=False,
        hf_text_config=SimpleNamespace(**text_config),
        get_head_size=lambda: 64,
        get_num_kv_heads=lambda parallel: 2,
        get_num_layers=lambda parallel: 4,
    )
    config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(block_size=16, cache_dtype="auto"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    return slot_bytes_estimate(config, OffloadConfig(blocks_per_chunk=2 if stages == 1 else None))


def test_one_group_of_full_attention_has_an_estimate() -> None:
    block_bytes = 2 * 2 * 64 * 2 * 4 * 16
    assert _estimate() == HEADER_BYTES + 2 * block_bytes
    assert _estimate(sliding_window=None, layer_types=["full_attention"] * 4) is not None
    # Chunks of a pipeline stage have as many blocks as fit into 256 tokens.
    assert _estimate(stages=2) == HEADER_BYTES + 256 // 16 * block_bytes


@pytest.mark.parametrize(
    "text_config",
    [
        {"sliding_window": 512},
        {"attention_chunk_size": 8192},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"is_hybrid": True},
    ],
)
def test_a_model_that_may_have_several_groups_has_none(text_config: dict[str, Any]) -> None:
    assert _estimate(**text_config) is None
