# SPDX-License-Identifier: Apache-2.0
"""vLLM's own work for a load in the step that plans it, to compare our part of that step with."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_nvmeof_bench.hotpath.managers import Recorder

_BLOCK_TOKENS = 16


class Blocks:
    """vLLM's manager of GPU blocks, each of which is one chunk, with room for a prompt of `chunks`.

    No GPU memory is allocated. The prefix cache is on, as it is by default.
    """

    def __init__(self, chunks: int) -> None:
        spec = FullAttentionSpec(
            block_size=_BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(chunks + 2, [], [KVCacheGroupSpec(["layer"], spec)])
        tokens = (chunks + 1) * _BLOCK_TOKENS
        sizes = dict.fromkeys(("scheduler_block_size", "hash_block_size"), _BLOCK_TOKENS)
        self._manager = KVCacheManager(config, max_model_len=tokens, enable_caching=True, **sizes)
        init_none_hash(_hash)
        self._hasher = get_request_block_hasher(_BLOCK_TOKENS, _hash)
        self._made = 0

    def measure(self, recorder: Recorder, chunks: int) -> None:
        """Measure the allocation of a load of `chunks` chunks, and what follows the load."""
        self._made += 1
        tokens = [self._made] * (chunks * _BLOCK_TOKENS + 1)  # one token is left to compute
        request = Request(
            str(self._made), tokens, SamplingParams(), None, block_hasher=self._hasher
        )
        loaded = chunks * _BLOCK_TOKENS

        def allocate() -> Any:
            return self._manager.allocate_slots(
                request, 0, num_external_computed_tokens=loaded, delay_cache_blocks=True
            )

        got = recorder.time("blocks", "allocate", chunks, allocate)
        assert got is not None, "there are enough blocks"
        recorder.time("blocks", "name", chunks, lambda: self._manager.cache_blocks(request, loaded))
        self._manager.free(request)


def _hash(value: Any) -> bytes:
    """Return a block's hash. vLLM hashes when a request arrives; this is no part of the figures."""
    return hash(value).to_bytes(8, "little", signed=True) * 4
