# SPDX-License-Identifier: Apache-2.0
"""`LLM(kv_offloading_backend="nvmeof")` in a separate process; prints its results as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(target: str) -> None:
    from vllm_nvmeof_bench.servers import forking

    from tests.e2e import faults_rig as rig

    forking.fork_engines()
    from vllm import LLM, SamplingParams

    spec = rig.spec(Path(target))
    llm = LLM(**rig.llm_options(spec))
    sampling = SamplingParams(temperature=0.0, max_tokens=rig.ANSWER_TOKENS, ignore_eos=True)
    asked = rig.prompts()

    def ask() -> list[list[int]]:
        # One prompt at a time: together they would compete for the GPU cache's few blocks.
        outputs = [
            llm.generate({"prompt_token_ids": p}, sampling, use_tqdm=False)[0] for p in asked
        ]
        return [list(output.outputs[0].token_ids) for output in outputs]

    cold, back = ask(), ask()
    hits = sum(m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
    print("RESULT " + json.dumps({"cold": cold, "back": back, "hits": hits}))


if __name__ == "__main__":
    main(sys.argv[1])
