# SPDX-License-Identifier: Apache-2.0
"""An engine of the imported vLLM; prints its answers, the loaded tokens per tier and the adopted
chunks as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.servers import forking

from tests.e2e import servers as rig


def build(target: str) -> Any:
    from vllm import LLM

    spec = rig.spec(Path(target))
    return LLM(**rig.llm_options(spec))


def ask(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Ask one prompt at a time: together they would compete for the GPU cache's few blocks."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=rig.ANSWER_TOKENS, ignore_eos=True)
    outputs = [llm.generate({"prompt_token_ids": p}, sampling, use_tqdm=False)[0] for p in prompts]
    return [list(output.outputs[0].token_ids) for output in outputs]


def ask_with_hints(llm: Any, prompt: list[int]) -> list[int]:
    """As an orchestrator asks that advises on the request's KV, with one unknown action."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    kinds = ("prefetch", "demote", "teleport")
    actions = [KvHintAction(kind, f"kv.{kind}", "1.0", {}) for kind in kinds]
    sampling = SamplingParams(temperature=0.0, max_tokens=rig.ANSWER_TOKENS, ignore_eos=True)
    hints, tokens = KvHintsEnvelope("0.1", "m", actions), {"prompt_token_ids": prompt}
    llm.llm_engine.add_request("hinted", tokens, sampling, kv_hints=hints)
    outputs: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return list(outputs[-1].outputs[0].token_ids)


def counted(llm: Any, name: str, label: str = "") -> dict[str, float]:
    """A counter's values by a label."""
    found = [m for m in llm.get_metrics() if m.name == f"vllm:nvmeof_{name}"]
    return {m.labels.get(label, ""): m.value for m in found}


def known_as(llm: Any) -> str:
    """The release of vLLM that our server takes the imported one for."""
    (info,) = [m for m in llm.get_metrics() if m.name == "vllm:nvmeof_config_info"]
    return str(info.labels["vllm"])


def main(target: str) -> None:
    import vllm

    forking.fork_engines()
    prompts = rig.prompts()
    llm = build(target)
    result = {"version": vllm.__version__, "cold": ask(llm, prompts), "back": ask(llm, prompts)}
    assert llm.reset_prefix_cache()  # only the GPU's: the latest prompt is in the CPU tier
    result |= {
        "again": ask(llm, prompts[-1:]),
        "hinted": ask_with_hints(llm, prompts[0]),
        "hints": counted(llm, "kv_hints", "advice"),
        "loaded": counted(llm, "loaded_tokens", "source"),
        "adopted": counted(llm, "adoption_chunks", "outcome")["adopted"],
        "known_as": known_as(llm),
    }
    # Close the engine explicitly, as in a program that continues.
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
