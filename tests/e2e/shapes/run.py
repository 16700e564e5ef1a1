# SPDX-License-Identifier: Apache-2.0
"""One engine's life: start, rounds of requests, what they gave and what was counted."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from typing import Any

from tests.e2e.shapes import stand_ins
from tests.e2e.shapes.models import make

_SETTLE_S = 120.0
#: Log-probabilities of the token and of the runner-up.
_RANKS = 2


def play(plan: dict[str, Any]) -> dict[str, Any]:
    """Start an engine as `plan` says and ask it; `Plan` has the fields.

    Returns `answers` and `counters` of each round, or `error` (the exception's text).
    """
    from vllm import LLM

    os.environ.update(plan["env"])
    if plan["lift_mla"]:
        _lift_the_refusal_of_mla()
    if plan["unwatched"]:
        _watch_nothing()
    if plan["packed"]:
        stand_ins.ask_as_on_a_gpu()
    if plan["stub_gpu"]:
        stand_ins.copy_by_stub()
    arguments = _with_models(plan["llm"])
    if plan["only_make"]:
        return {"model": arguments["model"]}
    try:
        llm = LLM(**arguments)
    except Exception as error:  # noqa: BLE001 - whatever it says is the result
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    answers, counters = [], []
    for number, asked in enumerate(plan["rounds"]):
        if plan["reload"] and number == 1:
            new = {"weights_path": str(make(plan["reload"]))}
            llm.collective_rpc("reload_weights", kwargs=new)
        if plan["adapter_swap"] and number == 1:
            new, old = plan["adapter_swap"]
            shutil.copytree(new, old, dirs_exist_ok=True)
        # What comes back comes from us: GPU memory forgets.
        assert llm.reset_prefix_cache()
        before = _counters(llm)
        answers.append(_ask(llm, asked) if plan["at_once"] else [_ask(llm, [r])[0] for r in asked])
        if plan["offloads"]:
            _settle(llm)
        after = _counters(llm)
        counters.append({k: v - before.get(k, 0) for k, v in after.items()})
    return {"answers": answers, "counters": counters}


def _with_models(arguments: dict[str, Any]) -> dict[str, Any]:
    """`LLM`'s arguments with models' directories in the place of their kinds."""
    made = {**arguments, "model": str(make(arguments["model"]))}
    drafter = made.get("speculative_config")
    if drafter and "model" in drafter:
        made["speculative_config"] = {**drafter, "model": str(make(drafter["model"]))}
    return made


def _lift_the_refusal_of_mla() -> None:
    from vllm_nvmeof_offload.integration import model_shape

    model_shape._ignores_loaded_kv = lambda vllm_config: False


def _watch_nothing() -> None:
    from vllm_nvmeof_offload.integration import weights_watch

    weights_watch.install = lambda engine_core: None


def _ask(llm: Any, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask all of it at once."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts: list[dict[str, Any]] = [{"prompt_token_ids": r["prompt"]} for r in asked]
    for prompt, request in zip(prompts, asked, strict=True):
        if request["image"] is not None:
            prompt["multi_modal_data"] = {"image": _image(request["image"])}
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=r["tokens"], ignore_eos=True, logprobs=_RANKS)
        for r in asked
    ]
    loras = [LoRARequest(*r["lora"]) if r["lora"] else None for r in asked]
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=loras)
    return [_answer(*output.outputs) for output in outputs]


def _answer(answer: Any) -> dict[str, Any]:
    tokens = list(answer.token_ids)
    ranked = [
        sorted((lp.logprob for lp in step.values()), reverse=True) for step in answer.logprobs
    ]
    return {
        "tokens": tokens,
        "logprobs": [
            step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)
        ],
        "gap": min(first - second for first, second, *_ in ranked),
    }


def _image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _counters(llm: Any) -> dict[str, float]:
    """Counters and gauges by name and, where there is one, source or tier."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not hasattr(metric, "value"):
            continue
        label = metric.labels.get("source") or metric.labels.get("tier")
        name = metric.name.removeprefix("vllm:")
        key = f"{name}:{label}" if label else name
        found[key] = found.get(key, 0) + metric.value
    return found


def _settle(llm: Any) -> None:
    """Step until every write has been reported, at most 120 s: reports travel on steps."""
    deadline = time.monotonic() + _SETTLE_S
    tiny = {"prompt": [5, 6, 7], "tokens": 1, "image": None, "lora": None}
    while True:
        _ask(llm, [tiny])
        now = _counters(llm)
        written = now.get("nvmeof_written_chunks", 0)
        if written >= now.get("nvmeof_stored_chunks", 0) and not now.get("nvmeof_writes_pending"):
            return
        assert time.monotonic() < deadline, "writes do not end"
