# SPDX-License-Identifier: Apache-2.0
"""One engine's life: start, rounds of requests, their answers and the counters."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.e2e.shapes.models import make
from vllm_nvmeof_offload.copy import calibration
from vllm_nvmeof_offload.vllm_adapter import new_weights

_SETTLE_S = 120.0
#: Number of log-probabilities: the token's and the runner-up's.
_RANKS = 2
#: The labels that distinguish counters and gauges of one name.
_LABELS = ("source", "tier", "decision", "reason", "state")


def play(plan: dict[str, Any]) -> dict[str, Any]:
    """Start the engine of `plan` and ask its requests; `Plan` describes the fields.

    Returns `answers` and `counters` of each round, or `error` (the exception's text).
    """
    from vllm import LLM

    os.environ.update(plan["env"])
    if plan["lift_mla"]:
        _lift_the_refusal_of_mla()
    if plan["unwatched"]:
        _watch_nothing()
    if plan["unsuspended"]:
        _suspend_nothing()
    if plan["blocks_reported"]:
        _report_blocks()
    if plan["fast"]:
        _compute_fast()
    if plan["packed"]:
        ask_as_on_a_gpu()
    if plan["stub_gpu"]:
        copy_by_stub()
    arguments = _with_models(plan["llm"])
    if plan["only_make"]:
        return {"model": arguments["model"]}
    try:
        llm = LLM(**arguments)
    except Exception as error:  # noqa: BLE001 - any message is the result
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return _play_steadily(llm, plan) if plan["steady"] else _play_rounds(llm, plan)


def _play_rounds(llm: Any, plan: dict[str, Any]) -> dict[str, Any]:
    answers: list[list[dict[str, Any]]] = []
    counters = []
    for number, asked in enumerate(plan["rounds"]):
        if number == 1:
            _change_weights(llm, plan)
        _prepare(llm, plan, number)
        before = _counters(llm)
        for request in asked:
            _follow_on(request, plan["rounds"], answers)
        answers.append([])
        for some in [asked] if number in plan["at_once"] else [[request] for request in asked]:
            answers[-1] += _ask(llm, some)
            if plan["offloads"]:
                _settle(llm)  # while a disk is busy, a small CPU tier refuses the next stores
        counters.append(_grown(before, _counters(llm)))
    return {"answers": answers, "counters": counters}


def _prepare(llm: Any, plan: dict[str, Any], number: int) -> None:
    """Empty caches and set faults before a round."""
    if number in plan["resets"]:
        assert llm.reset_prefix_cache(reset_connector=True)
    elif not plan["keeps_cache"]:
        # Drop GPU memory's prefix cache, so that every hit comes from the offload tiers.
        assert llm.reset_prefix_cache()
    knobs = plan["faults"].get(str(number))
    if knobs is not None:
        file = Path(plan["fault_file"])
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(knobs))
        partial.rename(file)


def _follow_on(
    request: dict[str, Any], rounds: list[list[dict[str, Any]]], answers: list[list[dict[str, Any]]]
) -> None:
    """Put the prompt and the answer that the request follows before its prompt."""
    if request["follows"]:
        turn, number = request["follows"]
        earlier, answer = rounds[turn][number], answers[turn][number]
        request["prompt"] = [*earlier["prompt"], *answer["tokens"], *request["prompt"]]


def _change_weights(llm: Any, plan: dict[str, Any]) -> None:
    """Replace the model's or an adapter's weights between the first two rounds, by the plan."""
    if plan["reload"]:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(make(plan["reload"]))})
    if plan["adapter_swap"]:
        new, old = plan["adapter_swap"]
        shutil.copytree(new, old, dirs_exist_ok=True)


def _with_models(arguments: dict[str, Any]) -> dict[str, Any]:
    """`LLM`'s arguments with each model's kind replaced by its directory."""
    made = {**arguments, "model": str(make(arguments["model"]))}
    drafter = made.get("speculative_config")
    if drafter and "model" in drafter:
        made["speculative_config"] = {**drafter, "model": str(make(drafter["model"]))}
    return made


def _play_steadily(llm: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """Change the weights while the first round's request runs. The second round is asked during
    that request, the third after its end and after a reset of GPU memory's prefix cache. The first
    round's `counters` are those during the second round."""
    (long,), during, afterwards = plan["rounds"]
    engine = SteadyEngine(llm, long)
    engine.reload(plan["reload"])
    before = _counters(llm)
    answers = [[engine.ask(request) for request in during]]
    beside = _counters(llm)
    counters = [beside, _grown(before, beside)]
    answers.insert(0, [engine.finish()])
    _settle(llm, voided_max=engine.chunks_before_max)
    assert llm.reset_prefix_cache()
    before = _counters(llm)
    answers.append([answer for request in afterwards for answer in _ask(llm, [request])])
    counters += [_grown(before, _counters(llm))]
    return {"answers": answers, "counters": counters}


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _lift_the_refusal_of_mla() -> None:
    from vllm_nvmeof_offload.vllm_adapter import supported

    supported._ignores_loaded_kv = lambda vllm_config: False


def _suspend_nothing() -> None:
    from vllm_nvmeof_offload.manager.requests import Suspension

    Suspension.begin = lambda self, call, requests, known: None  # type: ignore[method-assign]


def _compute_fast() -> None:
    from vllm_nvmeof_offload.manager.load_or_recompute import Admission

    decide = Admission.decide

    def decide_fast(self: Any, read_bytes: Any, *arguments: Any, **options: Any) -> Any:
        self.prefill_rate, self.depth_s, self.read_rates = 1e9, 0.0, [1e6] * len(read_bytes)
        return decide(self, read_bytes, *arguments, **options)

    Admission.decide = decide_fast  # type: ignore[method-assign]


def _report_blocks() -> None:
    from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker as Worker

    init = Worker.__init__

    def init_and_report(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._reports_blocks = True

    Worker.__init__ = init_and_report  # type: ignore[method-assign]


def _watch_nothing() -> None:

    new_weights.install = lambda engine_core: None


def _ask(llm: Any, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask all requests at once."""
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
        "gaps": [first - second for first, second, *_ in ranked],
    }


def _image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _counters(llm: Any) -> dict[str, float]:
    """Counters and gauges by name and, if present, by the first of `_LABELS`."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not hasattr(metric, "value"):
            continue
        label = next(filter(None, map(metric.labels.get, _LABELS)), None)
        name = metric.name.removeprefix("vllm:")
        key = f"{name}:{label}" if label else name
        found[key] = found.get(key, 0) + metric.value
    return found


def _failed_writes(llm: Any) -> float:
    """Where all reads fail, a target is gone, and writes fail until it is attached again."""
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:nvmeof_failed_chunks" and metric.labels["operation"] == "write"
    )


def _settle(llm: Any, voided_max: int = 0) -> None:
    """Step until every write has been reported, at most 120 s: reports are sent with steps.

    voided_max: chunks that new weights may have voided before they were written.
    """
    deadline = time.monotonic() + _SETTLE_S
    tiny = {"prompt": [5, 6, 7], "tokens": 1, "image": None, "lora": None}
    while True:
        _ask(llm, [tiny])
        now = _counters(llm)
        written = now.get("nvmeof_written_chunks", 0)
        stored = now.get("nvmeof_stored_chunks", 0) - voided_max
        unwritten = "nvmeof_unwritten_chunks:superseded", "nvmeof_unwritten_chunks:evicted"
        stored -= sum(now.get(name, 0) for name in unwritten)
        stored -= _failed_writes(llm)
        if written >= stored and not now.get("nvmeof_writes_pending:sent"):
            return
        shown = {name: count for name, count in now.items() if "chunks" in name or "write" in name}
        assert time.monotonic() < deadline, f"writes do not end: {shown}"


#: Steps of the long request before the weights change: more than two chunks of answers.
_STEPS_BEFORE = 150


class SteadyEngine:
    """`LLM`'s engine, stepped by hand: a long request runs during all other requests."""

    def __init__(self, llm: Any, long: dict[str, Any]) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._answers: dict[str, list[int]] = {}
        self._numbers = self._names()
        self._long = self._add(long)
        #: Chunks of 64 tokens that the long request has stored before the weights change.
        self.chunks_before_max = (len(long["prompt"]) + _STEPS_BEFORE) // 64
        for _ in range(_STEPS_BEFORE):
            self._step()

    def reload(self, kind: str) -> None:
        """Load the weights of another model into this one by vLLM's API."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(make(kind))})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask while the long request runs."""
        name = self._add(request)
        while name not in self._answers:
            self._step()
        assert self._long not in self._answers, "the long request is not long enough"
        return {"tokens": self._answers[name], "logprobs": [], "gaps": []}

    def finish(self) -> dict[str, Any]:
        """Run the long request to its end."""
        while self._long not in self._answers:
            self._step()
        return {"tokens": self._answers[self._long], "logprobs": [], "gaps": []}

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True)
        name = next(self._numbers)
        self._engine.add_request(name, {"prompt_token_ids": request["prompt"]}, sampling)
        return name

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._answers[output.request_id] = list(output.outputs[0].token_ids)

    def _names(self) -> Iterator[str]:
        number = 0
        while True:
            yield f"steady-{number}"
            number += 1


def ask_as_on_a_gpu() -> None:
    """Make the connector request its layout as on a GPU, and the CPU's attention accept it.

    vLLM's CPU kernels use strides, so they also support the packed layout, in which all layers of
    a block are contiguous; the CPU backend only does not list that layout.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_nvmeof_offload import connector

    class Asked(CPUAttentionBackend):
        @classmethod
        def supported_kv_cache_layouts(cls) -> Any:
            return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    CPUAttentionBackend.supported_kv_cache_layouts = Asked.supported_kv_cache_layouts
    connector.current_platform = SimpleNamespace(is_cpu=lambda: False)


def copy_by_stub() -> None:
    """Build the worker as on a GPU, over a STUB of CUDA whose copies run late and reordered.

    The stub tests how the parts are assembled, and proves nothing about a GPU.
    """
    from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
    from vllm_nvmeof_offload.worker import build

    def open_device(name: str) -> calibration.KvDevice:
        assert name == "cpu"
        cuda = FakeCuda(seed=os.getpid())
        threading.Thread(target=_go_on, args=(cuda,), name="stub-gpu", daemon=True).start()
        return calibration.KvDevice(cuda, lambda: MODEL_STREAM, ("a STUB stands in for the GPU",))

    build.open_device = open_device


def _go_on(cuda: Any) -> None:
    """Advance the stub, as a GPU advances by itself."""
    while True:
        if not cuda.step():
            threading.Event().wait(0.0005)
