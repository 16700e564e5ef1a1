# SPDX-License-Identifier: Apache-2.0
"""Features that this version cannot offload correctly are refused by name, with vLLM's types."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

#: A separate process, because importing vLLM changes logging and warnings for everything after it.
_CHILD = """
import json
from types import SimpleNamespace as Object

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
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
state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
wide = FullAttentionSpec(**{**common, "num_kv_heads": 4})

def layers(**specs):
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)

class Derived(FullAttentionSpec):
    pass

def parallel(**sizes):
    names = ("pipeline", "decode_context", "prefill_context", "data")
    return Object(world_size=1, **{f"{n}_parallel_size": sizes.get(n, 1) for n in names})

def refusal_of(call, *args):
    try:
        call(*args)
    except ConfigError as error:
        return str(error)
    return ""

def refused(*specs, mla=False, caching=True, **sizes):
    config = Object(
        model_config=Object(model="org/name", use_mla=mla),
        parallel_config=parallel(**sizes),
        scheduler_config=Object(enable_chunked_prefill=caching),
        cache_config=Object(enable_prefix_caching=caching),
    )
    groups = [Object(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs]
    return refusal_of(refuse_unsupported, config, Object(kv_cache_groups=groups))

def prechecked(**sizes):
    model = Object(model="org/name", is_moe=True)
    config = Object(model_config=model, cache_config=None, parallel_config=parallel(**sizes))
    return refusal_of(precheck, config, {}, "staging_bytes")

print("RESULT " + json.dumps({
    "full": refused(full),
    "full without caching": refused(full, caching=False),
    "several widths": refused(layers(a=full, b=wide)),
    "mla": refused(mla, mla=True),
    "mla without context": refused(mla, mla=True, caching=False),
    "window": refused(window),
    "window among full": refused(full, window),
    "window in one group": refused(layers(a=full, b=window)),
    "chunked local": refused(full, local),
    "state": refused(full, state),
    "window and state": refused(full, window, state),
    "nothing": refused(),
    "derived": refused(Derived(**common)),
    "two groups": refused(full, full),
    "pipeline": refused(full, pipeline=2),
    "decode context": refused(full, decode_context=2),
    "prefill context": refused(full, prefill_context=2),
    "pipeline, before the model loads": prechecked(pipeline=2),
    "replicas with experts": prechecked(data=2),
}))
"""


def test_unsupported_features_are_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        env={**os.environ, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    refusals = json.loads(line.removeprefix("RESULT "))
    for case in ("full", "full without caching", "several widths", "mla"):
        assert refusals.pop(case) == "", case
    keep_all, without = "--disable-hybrid-kv-cache-manager", "serve this model without offloading"
    wanted = {
        "window": ["org/name", "(2 x SlidingWindowSpec)", "--disable-sliding-window", "128 tok"],
        "window among full": ["2 x FullAttentionSpec, 2 x SlidingWindowSpec", keep_all],
        "window in one group": ["1 x FullAttentionSpec, 1 x SlidingWindowSpec", keep_all],
        "chunked local": ["2 x ChunkedLocalAttentionSpec", keep_all],
        "state": ["2 KV cache groups (2 x FullAttentionSpec, 2 x MambaSpec)", without],
        "window and state": ["3 KV cache groups", without],
        "nothing": ["0 KV cache groups (no KV)", without],
        "mla without context": ["org/name", "MLAAttentionSpec", "no AMX", "without offloading"],
        "derived": ["org/name", "1 KV cache group (2 x Derived)", "full attention", without],
        "two groups": ["org/name", "2 KV cache groups (4 x FullAttentionSpec)", without],
        "pipeline": ["pipeline_parallel_size=2", "supports 1"],
        "decode context": ["decode_context_parallel_size=2", "supports 1"],
        "prefill context": ["prefill_context_parallel_size=2", "supports 1"],
        "pipeline, before the model loads": ["pipeline_parallel_size=2", "supports 1"],
        "replicas with experts": ["data_parallel_size=2", "experts", "independent servers"],
    }
    assert refusals.keys() == wanted.keys()
    for case, words in wanted.items():
        assert all(word in refusals[case] for word in words), (case, refusals[case])
