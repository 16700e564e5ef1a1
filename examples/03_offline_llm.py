# SPDX-License-Identifier: Apache-2.0
"""Use the backend in your own program: run the same prompts twice, the second time from the cache.

    python examples/03_offline_llm.py MODEL [DIRECTORY]

MODEL is a name or a directory. DIRECTORY holds the pool (default: a temporary directory). On vLLM's
CPU build, set VLLM_CPU_KVCACHE_SPACE to the GiB that its KV cache may use.
"""

from __future__ import annotations

import sys
import tempfile
import time

from vllm import LLM, SamplingParams

DOCUMENT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 60
QUESTIONS = ("Who jumps?", "Who is lazy?", "What colour is the fox?")


def main(model: str, target: str) -> None:
    llm = LLM(
        model=model,
        dtype="float32",  # so that an answer does not depend on how its prompt was batched
        enforce_eager=True,
        disable_log_stats=False,  # for the counters below
        kv_offloading_backend="nvmeof",
        kv_offloading_size=0.25,  # GiB of pinned memory
        kv_transfer_config={
            "kv_connector_extra_config": {"targets": [target], "pool_bytes": "256MiB"}
        },
    )
    prompts = [f"Document {i}: {DOCUMENT}\n{q}" for i, q in enumerate(QUESTIONS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    answers = []
    for what in ("cold", "back"):
        # Empty the GPU's cache, as if other requests had evicted its blocks. The tiers keep theirs.
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answers.append([output.outputs[0].text for output in outputs])
        print(f"{what}: {time.perf_counter() - began:.2f} s for {len(prompts)} prompts")
    hits = sum(m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
    same = "the same" if answers[0] == answers[1] else "DIFFERENT"
    print(f"{hits:.0f} prompt tokens were loaded; answers: {same}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(sys.argv[1], sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(sys.argv[1], directory)
