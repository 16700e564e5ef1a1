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
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.upstream.planner_child import planner
from vllm_nvmeof_offload.pool.format import Keyspace

LAYOUT = KVCacheLayout.BLHNC
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
LIMIT_S = 60.0


def groups() -> list[Any]:
    common: dict[str, Any] = {"num_kv_heads": 1, "head_size": WIDTH, "dtype": torch.float32}
    full = interface.MLAAttentionSpec(block_size=BLOCK_TOKENS, **common)
    window = interface.SlidingWindowMLASpec(
        block_size=BLOCK_TOKENS, sliding_window=WINDOW, bounded_replay=True, **common
    )
    ring = interface.CircularBufferSpec(block_size=8, head_size_v=0, **common)
    made = interface.KVCacheGroupSpec
    return [made(["full.0", "full.1"], full), made(["window"], window), made(["ring"], ring)]


def kv_cache_config() -> Any:
    """The groups as vLLM places them in memory, all over the same blocks."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: LAYOUT,
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=0,
    )
    config = SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None)
    )
    return planner().get_kv_cache_config_from_groups(config, groups(), 1 << 20)


def kv_of(prompt: int, tokens: int) -> torch.Tensor:
    """float32[groups, tokens, width]: the KV of a prompt's first tokens."""
    made = np.random.default_rng(prompt).standard_normal((2, 400, WIDTH), np.float32)
    return torch.from_numpy(made[:, :tokens])


class Deployment:
    """The deployment of a model that has no files."""

    volatile = ("a made-up model",)

    def keyspace(self, **geometry: Any) -> Keyspace:
        return Keyspace.of({"replay": True, **geometry})

    def replaced(self) -> tuple[str, ...]:
        return ()


class Engine:
    """vLLM's scheduler and one worker of ours, over a KV cache in CPU memory."""

    def __init__(self, config: Any) -> None:
        made = kv_cache_config()
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=made,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        self.scheduler.use_v2_model_runner = True
        assert self.scheduler.prefix_replay_tokens == WINDOW
        connector: Any = self.scheduler.connector
        self.manager = connector.scheduler.manager
        self.worker = type(connector)(config, KVConnectorRole.WORKER, made)
        self.worker.connector_worker.spec.deployment = Deployment()
        self.bytes = torch.zeros(made.kv_cache_tensors[0].size, dtype=torch.int8)
        specs = {name: one.kv_cache_spec for one in groups() for name in one.layer_names}
        self.views: dict[str, Any] = {}
        for placed in made.kv_cache_tensors:
            spec = specs[placed.layers[0]]
            views = interface.create_kv_cache_views(self.bytes, spec, BLOCKS, LAYOUT, placed)
            self.views |= dict(zip(placed.layers, views, strict=True))
        with set_current_vllm_config(config):
            self.worker.register_kv_caches(self.views)
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_of)
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, hash_of)
        self.prompts: dict[str, int] = {}
        self.starts: dict[str, int] = {}  # request → its replay's start
        self.replayed = self.preemptions = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def serve(self, *prompts: int, tokens: int = LONG, answer: int = 2) -> dict[str, float]:
        """Serve the prompts together until everything is written; tokens by source."""
        before, ends_s = self.counts(), time.monotonic() + LIMIT_S
        for prompt in prompts:
            name = f"request-{len(self.prompts)}"
            self.prompts[name] = prompt
            self.scheduler.add_request(
                Request(
                    request_id=name,
                    prompt_token_ids=[prompt * 1000 + at for at in range(tokens)],
                    sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
                    pooling_params=None,
                    block_hasher=self.hasher,
                )
            )
        while self.scheduler.requests or self.manager.has_pending_work():
            self.step()
            assert time.monotonic() < ends_s, "requests did not end"
        after = self.counts()
        return {name: after[name] - before[name] for name in after}

    def counts(self) -> dict[str, float]:
        counters = self.manager.core.counters
        found = {source: counters["loaded_tokens", source] for source in ("cpu", "pool")}
        failed = counters["recomputed_tokens", "load_failed"]
        own = {"replayed": self.replayed, "preemptions": self.preemptions}
        return {**found, "failed": failed, **own}

    def forget(self) -> None:
        """Empty and overwrite vLLM's KV cache."""
        assert self.scheduler.reset_prefix_cache(reset_connector=False)
        self.bytes.fill_(-1)  # not a number, in 32 bits

    def step(self) -> None:
        output = self.scheduler.schedule()
        worker, metadata = self.worker, output.kv_connector_metadata
        self.preemptions += len(output.preempted_req_ids or ())
        worker.bind_connector_metadata(metadata)  # vLLM's second model runner, as V4.1 needs it
        if output.preempted_req_ids:
            worker.handle_preemptions(metadata)
        self.starts |= {one.req_id: one.replay_start for one in output.scheduled_new_reqs}
        self.compute(output.num_scheduled_tokens)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        transfers = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        done = [self.scheduler.requests[name] for name in names]
        sampled = [[7] if one.num_computed_tokens >= one.num_tokens else [] for one in done]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=transfers,
            ),
        )
        if not names:
            time.sleep(0.001)  # a transfer is in progress

    def compute(self, scheduled: dict[str, int]) -> None:
        """Write the scheduled tokens' KV and verify all KV that they read."""
        for name, count in scheduled.items():
            end = self.scheduler.requests[name].num_computed_tokens
            first, start = end - count, self.starts[name]
            kept = start + WINDOW if start else 0  # the end of the hit: before it, only windows
            self.replayed += max(0, min(end, kept) - first) if start else 0
            by_group = self.scheduler.kv_cache_manager.get_block_ids(name)
            kv = kv_of(self.prompts[name], end)
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


def damage(folder: Path) -> None:
    """Overwrite the payloads of all slots of the pool."""
    (slab,) = folder.rglob("slab")
    noise = np.random.default_rng(0).bytes(64 << 10)
    with slab.open("r+b") as file:
        for at in range(0, slab.stat().st_size, len(noise)):
            file.seek(at)
            file.write(noise)


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
        damage(Path(pool))
        found["failed"] = engine.serve(1)
        engine.forget()
        found["after a failure"] = engine.serve(1)
    finally:
        engine.close()
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
