# SPDX-License-Identifier: Apache-2.0
"""A self-test of an unknown vLLM, run in the engine's process before the first request.

vLLM's own scheduler, with our connector on both sides, serves artificial requests: a store, loads
from both tiers, a failed load and a reset. In the artificial model, the KV of a token is a function
of prompt and position. In each step, the model verifies the KV of all earlier tokens of a request,
whatever their source, byte by byte. The test uses no GPU, weights, or users' pools, only a few
hundred KiB of CPU memory and a pool in a temporary directory.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_nvmeof_offload import CONNECTOR_MODULE, CONNECTOR_NAME, SPEC_MODULE, SPEC_NAME, logger
from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.units import KIB, MIB
from vllm_nvmeof_offload.vllm_adapter import vllm_release

_LAYERS = ("self_test.0", "self_test.1")
_BLOCK_TOKENS, _PER_CHUNK, _BLOCKS = 16, 2, 24
_HEAD_SIZE = 8
#: Two whole chunks, one block of a third chunk, and part of another block.
_PROMPT_TOKENS = 2 * _PER_CHUNK * _BLOCK_TOKENS + _BLOCK_TOKENS + 5
_STORED_TOKENS = 2 * _PER_CHUNK * _BLOCK_TOKENS
_ANSWER_TOKENS = 2
#: The total size of the CPU tier and the stream slots, too small for the chunks of three prompts.
_STAGING_BYTES = 64 * KIB
#: A limit that only a test that hangs can reach: a test takes less than 2 s on an idle machine.
_LIMIT_S = 20.0

_running = False


def run(vllm_config: Any) -> None:
    """Test the imported vLLM with `vllm_config` and with the test's own values for some fields.

    The test's engine creates a connector, which calls this function again without effect. Raises
    IntegrationError, with the remedy, if the test fails or cannot run on this vLLM.
    """
    global _running
    if _running:
        return
    began_s = time.monotonic()
    version, _running = vllm_release.version(), True
    try:
        with _quiet(), tempfile.TemporaryDirectory(prefix="vllm-nvmeof-self-test-") as folder:
            _test(_config_like(vllm_config, folder), Path(folder))
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        if not isinstance(error, IntegrationError):
            said = f"{type(error).__name__}: {said}"
        raise IntegrationError(
            f"vLLM {version} failed the self-test of this vllm-nvmeof-offload ({said}); use a "
            f"release of vLLM {' or '.join(vllm_release.KNOWN)}, or a vllm-nvmeof-offload that "
            "knows this vLLM"
        ) from error
    finally:
        _running = False
    logger.warning(
        "THIS VLLM (%s) IS UNKNOWN to this vllm-nvmeof-offload. Every interface used exists, and a "
        "self-test passed in %.1f s: store, load, failed load, reset. "
        "allow_unknown_vllm=false refuses this vLLM.",
        version,
        time.monotonic() - began_s,
    )


class _MadeUpDeployment:
    volatile = ("a self-test",)

    def keyspace(self, **geometry: Any) -> Keyspace:
        return Keyspace.of({"self_test": True, **geometry})

    def replaced(self) -> tuple[str, ...]:
        return ()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log of the test's engine, in which loads fail on purpose."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _config_like(vllm_config: Any, folder: str) -> Any:
    config = copy.copy(vllm_config)
    model = config.model_config = copy.copy(vllm_config.model_config)
    model.__class__ = type(
        "TextModelConfig",
        (type(model),),
        dict.fromkeys(("supports_multimodal_inputs", "is_encoder_decoder", "use_mla"), False),
    )
    model.skip_tokenizer_init, model.runner_type = True, "generate"
    parts: dict[str, dict[str, Any]] = {
        "cache_config": {
            "block_size": _BLOCK_TOKENS,
            "prefix_match_unit": None,
            "prefix_cache_retention_interval": None,
            "num_gpu_blocks": _BLOCKS,
            "enable_prefix_caching": True,
            "kv_cache_layout": "LBHNC",
        },
        "scheduler_config": {
            "async_scheduling": False,
            "policy": "fcfs",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 4 * _PROMPT_TOKENS,
            "max_num_scheduled_tokens": None,
        },
        "parallel_config": {
            **dict.fromkeys(("world_size", "tensor_parallel_size", "data_parallel_size"), 1),
            **dict.fromkeys(("pipeline_parallel_size", "decode_context_parallel_size"), 1),
            "prefill_context_parallel_size": 1,
            **dict.fromkeys(("rank", "data_parallel_index"), 0),
        },
    }
    for part, values in parts.items():
        changed = copy.copy(getattr(vllm_config, part))
        for name, value in values.items():
            setattr(changed, name, value)
        setattr(config, part, changed)
    for part in ("speculative_config", "kv_events_config", "lora_config", "ec_transfer_config"):
        setattr(config, part, None)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR_NAME,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=_settings(folder),
    )
    return config


def _settings(folder: str) -> dict[str, Any]:
    """Return our configuration with every key, so that no environment variable has an effect."""
    fields = OffloadConfig.model_fields.items()
    settings = {
        name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in fields
    }
    settings |= {
        "targets": [folder],
        "allow_root_file_system": True,
        "pool_bytes": 4 * MIB,
        "staging_bytes": _STAGING_BYTES,
        "blocks_per_chunk": _PER_CHUNK,
        "io_engine": "threads",
        "admission": "always",
        "eviction_policy": "lru",
        "allow_unknown_vllm": True,
        "spec_name": SPEC_NAME,
        "spec_module_path": SPEC_MODULE,
    }
    return {name: value for name, value in settings.items() if value is not None}


class Engine:
    """vLLM's scheduler, and one worker of ours over a KV cache in CPU memory."""

    def __init__(self, config: Any) -> None:
        cache_config, views = self._make_cache()
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=_BLOCK_TOKENS,
        )
        connector: Any = self._scheduler.connector
        self._manager = connector.scheduler.manager
        self._worker = type(connector)(config, KVConnectorRole.WORKER, cache_config)
        self._worker.connector_worker.spec.deployment = _MadeUpDeployment()
        with set_current_vllm_config(config):
            self._worker.register_kv_caches(views)
        handshake = self._worker.get_handshake_metadata()
        assert handshake is not None
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_of)
        self._hasher = kv_cache_utils.get_request_block_hasher(_BLOCK_TOKENS, hash_of)
        self._ends_s = time.monotonic() + _LIMIT_S
        self._prompts: dict[str, int] = {}

    def _make_cache(self) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
        spec = FullAttentionSpec(
            block_size=_BLOCK_TOKENS, num_kv_heads=1, head_size=_HEAD_SIZE, dtype=torch.float32
        )
        page = spec.page_size_bytes
        placed = KVCacheTensor(
            size=len(_LAYERS) * _BLOCKS * page,
            layers=list(_LAYERS),
            layer_stride=_BLOCKS * page,
            block_stride=page,
        )
        cache_config = KVCacheConfig(
            num_blocks=_BLOCKS,
            kv_cache_tensors=[placed],
            kv_cache_groups=[KVCacheGroupSpec(list(_LAYERS), spec)],
        )
        self._cache = torch.zeros(len(_LAYERS), _BLOCKS, 2, _BLOCK_TOKENS, 1, _HEAD_SIZE)
        return cache_config, dict(zip(_LAYERS, self._cache, strict=True))

    def close(self) -> None:
        self._worker.shutdown()
        self._scheduler.shutdown()

    def serve(
        self, *prompts: int, tokens: int = _PROMPT_TOKENS, answer: int = _ANSWER_TOKENS
    ) -> dict[str, float]:
        """Serve `prompts`, each of `tokens` tokens, together. Return their tokens by source."""
        before = self._tokens()
        for prompt in prompts:
            name = f"self-test-{len(self._prompts)}"
            self._prompts[name] = prompt
            self._scheduler.add_request(
                Request(
                    request_id=name,
                    prompt_token_ids=[prompt * 1000 + position for position in range(tokens)],
                    sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
                    pooling_params=None,
                    block_hasher=self._hasher,
                )
            )
        while self._scheduler.requests or self._manager.has_pending_work():
            self._step()
            if time.monotonic() > self._ends_s:
                raise IntegrationError(f"requests did not end within {_LIMIT_S:.0f} s")
        after = self._tokens()
        return {name: after[name] - before[name] for name in after}

    def forget(self, *, everything: bool = False) -> None:
        """Empty and overwrite vLLM's KV cache; with `everything`, empty our tiers too."""
        if not self._scheduler.reset_prefix_cache(reset_connector=everything):
            raise IntegrationError("a reset of the prefix cache did not succeed")
        self._cache.view(torch.uint8).fill_(255)  # not a number

    def _tokens(self) -> dict[str, float]:
        counters = self._manager.core.counters
        found = {source: counters["loaded_tokens", source] for source in ("cpu", "pool")}
        return {**found, "failed": counters["recomputed_tokens", "load_failed"]}

    def _step(self) -> None:
        output, worker = self._scheduler.schedule(), self._worker
        self._begin(output)
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
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
                kv_connector_output=transfers,
            ),
        )
        if not names:
            time.sleep(0.001)  # a transfer is in progress

    def _begin(self, output: Any) -> None:
        self._worker.handle_preemptions(output.kv_connector_metadata)
        self._worker.bind_connector_metadata(output.kv_connector_metadata)
        self._compute(output.num_scheduled_tokens)

    def _compute(self, scheduled: dict[str, int]) -> None:
        """Verify the KV of earlier tokens, and write the KV of the scheduled tokens."""
        for name, count in scheduled.items():
            end = self._scheduler.requests[name].num_computed_tokens
            (ids,) = self._scheduler.kv_cache_manager.get_block_ids(name)
            places = np.arange(end)
            blocks, offsets = np.array(ids)[places // _BLOCK_TOKENS], places % _BLOCK_TOKENS
            kv = _kv_of(self._prompts[name], end)
            held = self._cache[:, blocks, :, offsets, 0]  # [tokens, layers, K and V, head]
            wrong = (held != kv).flatten(1).any(1)[: end - count]
            if wrong.any():
                first = int(wrong.nonzero()[0])
                raise IntegrationError(
                    f"{int(wrong.sum())} of {end - count} tokens of a request have wrong KV, the "
                    f"first at position {first}"
                )
            new = slice(end - count, end)
            self._cache[:, blocks[new], :, offsets[new], 0] = kv[new]


def _kv_of(prompt: int, tokens: int) -> torch.Tensor:
    """Return float32[tokens, layers, 2, head]: the KV of a prompt's first tokens."""
    made = np.random.default_rng(prompt).standard_normal(
        (_PROMPT_TOKENS + _ANSWER_TOKENS, len(_LAYERS), 2, _HEAD_SIZE), np.float32
    )
    return torch.from_numpy(made[:tokens])


def _expect(what: str, found: dict[str, float], **wanted: int) -> None:
    expected = {"cpu": 0, "pool": 0, "failed": 0, **wanted}
    if found != expected:
        raise IntegrationError(f"{what}: tokens by source were {found} instead of {expected}")


def _test(config: Any, folder: Path) -> None:
    engine = Engine(config)
    try:
        _expect("the first store", engine.serve(1))
        engine.forget()
        _expect("a load from the CPU tier", engine.serve(1), cpu=_STORED_TOKENS)
        for prompt in (2, 3, 4, 5):  # afterwards the first prompt is only in the pool
            _expect("a store", engine.serve(prompt))
        engine.forget()
        _expect("a load from the pool", engine.serve(1), pool=_STORED_TOKENS)
        for prompt in (6, 7, 8, 9):
            _expect("a store", engine.serve(prompt))
        engine.forget()
        damage(folder)
        failed = engine.serve(1)
        _expect("a failed load", failed, pool=_STORED_TOKENS, failed=_STORED_TOKENS)
        engine.forget(everything=True)
        _expect("a request after a reset", engine.serve(1))
    finally:
        engine.close()


def damage(folder: Path) -> None:
    """Overwrite the payloads of all slots of the pool."""
    (slab,) = folder.rglob("slab")
    noise = np.random.default_rng(0).bytes(64 * KIB)
    with slab.open("r+b") as file:
        for at in range(0, slab.stat().st_size, len(noise)):
            file.seek(at)
            file.write(noise)
