# SPDX-License-Identifier: Apache-2.0
"""Features that this version cannot offload correctly are refused by name, with vLLM's types."""

from __future__ import annotations

import json

from tests.unit.imported_vllm import ImportedVllm

#: A separate process, because importing vLLM changes logging and warnings for everything after it.
_CHILD = """
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
    done = imported_vllm.run(["-c", _CHILD])
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    refusals = json.loads(line.removeprefix("RESULT "))
    served = (
        *("full", "full without caching", "several widths", "mla", "two groups"),
        *("window", "window among full", "windows of latent attention", "chunked local"),
        "blocks together",
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
        "replayed": ["org/name", "bounded replay", "--no-swa-bounded-replay", without],
        "heads first": ["VLLM_KV_CACHE_LAYOUT='LHBNC'", "LBHNC"],
        "hosts": ["hisparse_config", "HiSparse"],
        "elastic": ["enable_elastic_ep=True", "fixed number of replicas"],
        "elastic, before the model loads": ["enable_elastic_ep=True", "fixed number of replicas"],
    }
    assert refusals.keys() == wanted.keys()
    for case, words in wanted.items():
        assert all(word in refusals[case] for word in words), (case, refusals[case])
