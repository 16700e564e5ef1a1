# SPDX-License-Identifier: Apache-2.0
"""Features, platforms and parallel shapes that cannot be offloaded are refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.unit.imported_vllm import ImportedVllm
from vllm_nvmeof_offload.config import OffloadConfig, set_replicas
from vllm_nvmeof_offload.errors import ConfigError, install_extra
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.vllm_adapter.supported import (
    Replica,
    count_nodes,
    refuse_parallel,
    refuse_platform,
    replica_of,
    slot_bytes_estimate,
)

#: A separate process, because importing vLLM changes logging and warnings for everything after it.
_REFUSED = """
import json
from types import SimpleNamespace as Object

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.vllm_adapter.supported import precheck, refuse_unsupported

common = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
full = FullAttentionSpec(**common)
mla = MLAAttentionSpec(**common)
window = SlidingWindowSpec(**common, sliding_window=128)
local = ChunkedLocalAttentionSpec(**common, attention_chunk_size=128)
state = MambaSpec(
    block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
whole_state = MambaSpec(block_size=2048, shapes=((4, 4),), dtypes=(torch.float32,))
window_mla = SlidingWindowMLASpec(**common, sliding_window=128)
replayed = SlidingWindowMLASpec(**common, sliding_window=128, bounded_replay=True)
sink = SinkFullAttentionSpec(**common, sink_len=4)
ahead = FullAttentionSpec(**common, non_causal=True)
wide = FullAttentionSpec(**{**common, "num_kv_heads": 4})

def layers(**specs):
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)

class Derived(FullAttentionSpec):
    pass

def parallel(elastic=False):
    return Object(world_size=1, data_parallel_size=1, enable_elastic_ep=elastic)

def refusal_of(call, *args):
    try:
        call(*args)
    except ConfigError as error:
        return str(error)
    return ""

def refused(*specs, mla=False, caching=True, hosts=None, layout=None, elastic=False):
    config = Object(
        model_config=Object(model="org/name", use_mla=mla),
        parallel_config=parallel(elastic),
        scheduler_config=Object(enable_chunked_prefill=caching),
        cache_config=Object(enable_prefix_caching=caching),
    )
    groups = [KVCacheGroupSpec(["a", "b"], spec) for spec in specs]
    made = KVCacheConfig(8, [], groups, kv_cache_layout=layout, hisparse_host_num_blocks=hosts)
    return refusal_of(refuse_unsupported, config, made)

def prechecked(elastic):
    model = Object(model="org/name", is_moe=True)
    config = Object(model_config=model, cache_config=None, parallel_config=parallel(elastic))
    return refusal_of(precheck, config, {}, "staging_bytes")

print("RESULT " + json.dumps({
    "full": refused(full),
    "full without caching": refused(full, caching=False),
    "several widths": refused(layers(a=full, b=wide)),
    "mla": refused(mla, mla=True),
    "mla without context": refused(mla, mla=True, caching=False),
    "window": refused(window),
    "window among full": refused(full, window),
    "windows of latent attention": refused(mla, window_mla),
    "window in one group": refused(layers(a=full, b=window)),
    "chunked local": refused(full, local),
    "state": refused(full, state),
    "window and state": refused(full, window, state),
    "states only": refused(state),
    "states of whole requests": refused(whole_state, caching=False),
    "states of whole requests beside attention": refused(full, whole_state, caching=False),
    "nothing": refused(),
    "derived": refused(Derived(**common)),
    "derived, among others": refused(full, Derived(**common)),
    "sink": refused(sink),
    "ahead": refused(full, ahead),
    "replayed": refused(full, replayed),
    "hosts": refused(full, hosts=8),
    "blocks together": refused(full, layout="BLNHC"),
    "heads first": refused(full, layout="LHBNC"),
    "two groups": refused(full, full),
    "elastic": refused(full, elastic=True),
    "elastic, before the model loads": prechecked(elastic=True),
}))
"""


def test_unsupported_features_are_refused_by_name(imported_vllm: ImportedVllm) -> None:
    done = imported_vllm.run(["-c", _REFUSED])
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    refusals = json.loads(line.removeprefix("RESULT "))
    served = (
        *("full", "full without caching", "several widths", "mla", "two groups"),
        *("window", "window among full", "windows of latent attention", "chunked local"),
        *("replayed", "blocks together"),
        *("state", "window and state", "states only", "states of whole requests"),
    )
    for case in served:
        assert refusals.pop(case) == "", case
    without = "serve this model without offloading"
    wanted = {
        "window in one group": ["org/name", "1 x FullAttentionSpec, 1 x SlidingWindowSpec"],
        "states of whole requests beside attention": ["--enable-prefix-caching"],
        "nothing": ["org/name", "no KV that vLLM can offload", without],
        "mla without context": ["org/name", "MLAAttentionSpec", "no AMX", "without offloading"],
        "derived": ["org/name", "does not know (2 x Derived)", without],
        "derived, among others": ["org/name", "does not know (2 x Derived)", without],
        "sink": ["org/name", "does not know (2 x SinkFullAttentionSpec)", without],
        "ahead": ["org/name", "attends to later tokens", "unequal KV", without],
        "heads first": ["VLLM_KV_CACHE_LAYOUT='LHBNC'", "LBHNC"],
        "hosts": ["hisparse_config", "HiSparse"],
        "elastic": ["enable_elastic_ep=True", "fixed number of replicas"],
        "elastic, before the model loads": ["enable_elastic_ep=True", "fixed number of replicas"],
    }
    assert refusals.keys() == wanted.keys()
    for case, words in wanted.items():
        assert all(word in refusals[case] for word in words), (case, refusals[case])


_REGISTERED = """
import json
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor import model_loader
from vllm.model_executor.models import ModelRegistry
from vllm_nvmeof_offload.vllm_adapter import weights
from vllm_nvmeof_offload.vllm_adapter.deployment import foreign_code

known = sorted(weights.FILE_FORMATS - set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER))
before = sorted(foreign_code())

@register_model_loader("hf")
@register_model_loader("mine")
class Mine(DefaultModelLoader):
    pass

ModelRegistry.register_model("LlamaForCausalLM", "mine:Llama")

print("RESULT " + json.dumps([known, before, sorted(foreign_code())]))
"""


def test_a_plugins_loader_and_model_are_noticed(imported_vllm: ImportedVllm) -> None:
    done = imported_vllm.run(["-c", _REGISTERED])
    assert done.returncode == 0, done.stderr
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    unknown_to_vllm, before, after = json.loads(result.removeprefix("RESULT "))
    assert unknown_to_vllm == []
    assert before == []
    assert after == ["LlamaForCausalLM", "hf", "mine"]


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


def test_a_number_of_replicas_that_may_change_is_refused() -> None:
    refuse_parallel(config(size=2).parallel_config)
    with pytest.raises(ConfigError, match=r"^enable_elastic_ep=True: .* fixed number of replicas"):
        refuse_parallel(config(size=2, enable_elastic_ep=True).parallel_config)


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


def refused(kind: str) -> str:
    try:
        refuse_platform(platform(kind))
    except ConfigError as error:
        return str(error)
    return ""


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    def find_spec(name: str) -> object:
        if name.partition(".")[0] in missing and "." in name:
            raise ModuleNotFoundError(name)
        return None if name in missing else object()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_the_cpu_needs_no_gpu_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "cuda")
    assert refused("cpu") == ""


@pytest.mark.parametrize("kind", ["rocm", "xpu", "tpu"])
def test_platforms_without_a_copy_engine_are_refused(kind: str) -> None:
    error = refused(kind)
    assert error.startswith("--kv-offloading-backend='nvmeof': ")
    assert f"'{kind}'" in error and "NVIDIA GPUs" in error


def test_a_gpu_is_served_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    assert refused("cuda") == ""


@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_a_gpu_without_them_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    without(monkeypatch, missing)
    error = refused("cuda")
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


def test_a_gpu_is_served_without_the_kernels_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "cuda.core")
    assert refused("cuda") == ""


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
