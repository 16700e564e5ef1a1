# SPDX-License-Identifier: Apache-2.0
"""Two engines of whichever vLLM is imported, one after the other, on one pool; prints what they
answered and what was found where, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.e2e import faults_rig as rig


def build(target: str) -> Any:
    from vllm import LLM

    spec = rig.spec(Path(target))
    assert spec.offload is not None
    return LLM(
        model=str(spec.model),
        dtype="float32",
        max_model_len=spec.max_model_len,
        enforce_eager=True,
        block_size=spec.block_size,
        num_gpu_blocks_override=spec.gpu_blocks,
        disable_log_stats=False,
        kv_offloading_backend="nvmeof",
        kv_offloading_size=spec.offload.size_gib,
        kv_transfer_config={"kv_connector_extra_config": dict(spec.offload.extra)},
    )


def ask(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """One at a time: together they would share the GPU cache's few blocks."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=rig.ANSWER_TOKENS, ignore_eos=True)
    outputs = [llm.generate({"prompt_token_ids": p}, sampling, use_tqdm=False)[0] for p in prompts]
    return [list(output.outputs[0].token_ids) for output in outputs]


def loaded(llm: Any) -> dict[str, float]:
    """Tokens that were loaded, by where they came from."""
    found = [m for m in llm.get_metrics() if m.name == "vllm:nvmeof_loaded_tokens"]
    return {m.labels["source"]: m.value for m in found}


def main(target: str) -> None:
    import vllm

    prompts = rig.prompts()
    llm = build(target)
    first = {"cold": ask(llm, prompts), "back": ask(llm, prompts)}
    assert llm.reset_prefix_cache()  # the GPU's alone: the latest prompt is in the CPU tier
    first["again"] = ask(llm, prompts[-1:])
    first_loaded = loaded(llm)
    # Not the engine's own end of life alone: a program goes on and makes another.
    llm.llm_engine.engine_core.shutdown()
    del llm
    llm = build(target)
    second = ask(llm, prompts)
    second_loaded = loaded(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    result = {
        "version": vllm.__version__,
        **first,
        "first_loaded": first_loaded,
        "restarted": second,
        "second_loaded": second_loaded,
        "void": ask(llm, prompts[-1:]),
        "void_loaded": loaded(llm),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
