# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and our connector with a made-up model that replays its windows.

Usage: replay_child.py MODEL_DIRECTORY POOL_DIRECTORY

The KV cache groups are those of DeepSeek V4.1: one that keeps all tokens and is offloaded, one of
windows with bounded replay and one of rings, which are not. The KV of a token is a fixed function
of prompt, group and position. In each step, the model verifies the KV that attention would read,
byte by byte. As in vLLM's model, replayed tokens write only windows, and no window before the
replay's start is read. Prints the tokens of each request by source as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1 import kv_cache_interface as interface

from tests.upstream.planner_child import planned, views_of
from vllm_nvmeof_offload.vllm_adapter import self_test

LAYOUT = "BLHNC"
BLOCK_TOKENS, PER_CHUNK, WINDOW = 16, 2, 32
FULL, WINDOWS = 0, 1
#: Enough for one long request, too few for two: the second one is preempted.
BLOCKS = 40
#: For the CPU tier and stream slots; less than the chunks of four long prompts.
STAGING_BYTES = 64 << 10
#: Three chunks, a block of a fourth one and a part of a block; one chunk, which is no longer than
#: the window.
LONG, SHORT = 3 * PER_CHUNK * BLOCK_TOKENS + BLOCK_TOKENS + 5, PER_CHUNK * BLOCK_TOKENS + 5
WIDTH = 4  # 32-bit values per token and layer


def groups() -> list[Any]:
    common: dict[str, Any] = {"num_kv_heads": 1, "head_size": WIDTH, "dtype": torch.float32}
    full = interface.MLAAttentionSpec(block_size=BLOCK_TOKENS, **common)
    window = interface.SlidingWindowMLASpec(
        block_size=BLOCK_TOKENS, sliding_window=WINDOW, bounded_replay=True, **common
    )
    ring = interface.CircularBufferSpec(block_size=8, head_size_v=0, **common)
    made = interface.KVCacheGroupSpec
    return [made(["full.0", "full.1"], full), made(["window"], window), made(["ring"], ring)]


def kv_of(prompt: int, tokens: int) -> torch.Tensor:
    """float32[groups, tokens, width]: the KV of a prompt's first tokens."""
    made = np.random.default_rng(prompt).standard_normal((2, 400, WIDTH), np.float32)
    return torch.from_numpy(made[:, :tokens])


class Engine(self_test.Engine):
    """The self-test's engine with these groups and vLLM's second model runner, as V4.1 needs it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._scheduler.use_v2_model_runner = True
        assert self._scheduler.prefix_replay_tokens == WINDOW
        self._ends_s = float("inf")  # pytest's limit is enough
        self.starts: dict[str, int] = {}  # request → its replay's start
        self.replayed = self.preemptions = 0

    def serve(self, *prompts: int, tokens: int = LONG, answer: int = 2) -> dict[str, float]:
        return super().serve(*prompts, tokens=tokens, answer=answer)

    def _make_cache(self) -> tuple[Any, dict[str, Any]]:
        made = planned(groups(), LAYOUT, BLOCKS)
        self._cache = torch.zeros(made.kv_cache_tensors[0].size, dtype=torch.int8)
        self.views = views_of(made, LAYOUT, self._cache)
        return made, self.views

    def _tokens(self) -> dict[str, float]:
        own = {"replayed": self.replayed, "preemptions": self.preemptions}
        return {**super()._tokens(), **own}

    def _begin(self, output: Any) -> None:
        worker, metadata = self._worker, output.kv_connector_metadata
        self.preemptions += len(output.preempted_req_ids or ())
        worker.bind_connector_metadata(metadata)
        if output.preempted_req_ids:
            worker.handle_preemptions(metadata)
        self.starts |= {one.req_id: one.replay_start for one in output.scheduled_new_reqs}
        self._compute(output.num_scheduled_tokens)

    def _compute(self, scheduled: dict[str, int]) -> None:
        """Write the scheduled tokens' KV and verify all KV that they read."""
        for name, count in scheduled.items():
            end = self._scheduler.requests[name].num_computed_tokens
            first, start = end - count, self.starts[name]
            kept = start + WINDOW if start else 0  # the end of the hit: before it, only windows
            self.replayed += max(0, min(end, kept) - first) if start else 0
            by_group = self._scheduler.kv_cache_manager.get_block_ids(name)
            kv = kv_of(self._prompts[name], end)
            reads = {FULL: 0, WINDOWS: max(start, first - WINDOW + 1, 0)}
            writes = {FULL: max(first, kept), WINDOWS: first}
            for group, read in reads.items():
                ids = np.array(by_group[group])
                for layer in groups()[group].layer_names:
                    view = self.views[layer].squeeze()  # [blocks, tokens, width]
                    at = np.arange(writes[group], end)
                    view[ids[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = kv[group, at]
                    at = np.arange(read, end)
                    blocks = ids[at // BLOCK_TOKENS]
                    assert blocks.all(), f"{layer}: vLLM has dropped a block that is read"
                    wrong = (view[blocks, at % BLOCK_TOKENS] != kv[group, at]).any(1)
                    assert not wrong.any(), (
                        f"{layer}: {int(wrong.sum())} of {len(at)} tokens have wrong KV, the first "
                        f"at position {at[int(wrong.nonzero()[0])]} of {first} to {end}"
                    )


def main(model: str, pool: str) -> None:
    settings = {
        "targets": [pool],
        "allow_root_file_system": True,
        "pool_bytes": 4 << 20,
        "staging_bytes": STAGING_BYTES,
        "blocks_per_chunk": PER_CHUNK,
        "io_engine": "threads",
        "spec_name": "NVMeoFOffloadingSpec",
        "spec_module_path": "vllm_nvmeof_offload.spec",
    }
    config = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_num_seqs=4,
        kv_transfer_config=KVTransferConfig(
            kv_connector="NVMeoFOffloadingConnector",
            kv_connector_module_path="vllm_nvmeof_offload.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        ),
    ).create_engine_config()
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks = BLOCKS
    found: dict[str, Any] = {}
    with set_current_vllm_config(config):
        engine = Engine(config)
    try:
        found["stored"] = engine.serve(1)
        found["from the GPU"] = engine.serve(1)
        engine.forget()
        found["from the CPU tier"] = engine.serve(1)
        found["short, stored"] = engine.serve(2, tokens=SHORT)
        engine.forget()
        found["no longer than the window"] = engine.serve(2, tokens=SHORT)
        for prompt in range(3, 13):  # afterwards the first prompt is only in the pool
            engine.serve(prompt)
        engine.forget()
        found["from the pool"] = engine.serve(1)
        engine.forget()
        found["two at once"] = engine.serve(20, 21, tokens=100, answer=200)
        for prompt in range(23, 33):
            engine.serve(prompt)
        engine.forget()
        self_test.damage(Path(pool))
        found["failed"] = engine.serve(1)
        engine.forget()
        found["after a failure"] = engine.serve(1)
    finally:
        engine.close()
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
