# SPDX-License-Identifier: Apache-2.0
"""`LLM(kv_offloading_backend="nvmeof")` in a process of its own; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(target: str) -> None:
    from vllm import LLM, SamplingParams

    from tests.e2e import faults_rig as rig

    spec = rig.spec(Path(target))
    assert spec.offload is not None
    llm = LLM(
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
    sampling = SamplingParams(temperature=0.0, max_tokens=rig.ANSWER_TOKENS, ignore_eos=True)
    asked = rig.prompts()

    def ask() -> list[list[int]]:
        # One at a time: together they would share the GPU cache's few blocks.
        outputs = [
            llm.generate({"prompt_token_ids": p}, sampling, use_tqdm=False)[0] for p in asked
        ]
        return [list(output.outputs[0].token_ids) for output in outputs]

    cold, back = ask(), ask()
    hits = sum(m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
    print("RESULT " + json.dumps({"cold": cold, "back": back, "hits": hits}))


if __name__ == "__main__":
    main(sys.argv[1])
