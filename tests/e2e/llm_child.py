# SPDX-License-Identifier: Apache-2.0
"""Programs with `LLM`, which print their results as JSON: with a pool, one `LLM`; with a pool and
a model, one after the other in one process, as in a notebook. As in a notebook, the worker of the
first `LLM` is killed; the second is closed with writes in flight. The engines of the others run in
this process: the third schedules asynchronously, which vLLM disables on a CPU, and the fourth
combines another connector with ours. Each `LLM` is closed twice."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any


def notebook(pool: str, model: str) -> None:
    from vllm_nvmeof_bench.servers import forking

    from tests.e2e import servers as rig

    forking.fork_engines()
    faults = rig.Faults(Path(pool).parent / "notebook-faults.json")
    runs = []
    for number in range(4):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if number >= 2 else "1"
        with _asynchronous_scheduling() if number == 2 else nullcontext():
            llm = _llm(Path(pool), model, str(faults.path), combined=number == 3)
        run: dict[str, Any] = {"adopted": _value(llm, "vllm:nvmeof_entries")}
        run["tokens"] = [_ask(llm), _ask(llm)]
        run["hits"] = _value(llm, "vllm:external_prefix_cache_hits")
        run["from_pool"] = _value(llm, "vllm:nvmeof_loaded_tokens", source="pool")
        if number == 0:
            (pid,) = [p for p, name in rig.group(os.getpgrp()).items() if "VLLM::Worker" in name]
            os.kill(pid, signal.SIGKILL)
            run["died"] = _died(llm)
        if number == 1:
            run["pending"] = _with_writes_in_flight(llm, faults)
        if number == 2:
            core = llm.llm_engine.engine_core.engine_core
            run["batches"] = core.batch_queue_size if core.batch_queue is not None else 1
        if number == 3:
            run["beside"] = _beside(llm)
        began_s = time.monotonic()
        for _ in range(2):
            llm.llm_engine.engine_core.shutdown()
        run["closing_s"] = time.monotonic() - began_s
        faults.set()
        del llm
        gc.collect()
        runs.append(run)
        print(f"run {number}: {run}", file=sys.stderr, flush=True)
    print("RESULT " + json.dumps(runs))


def _llm(pool: Path, model: str, faults: str, *, combined: bool) -> Any:
    from vllm import LLM
    from vllm_nvmeof_bench.servers.server import split_extra

    from tests.e2e import servers as rig

    spec = rig.spec_of(pool, Path(model), fault_injection=faults)
    assert spec.offload is not None
    keys, variables = split_extra(spec.offload.extra)
    os.environ.update(variables)
    transfer: dict[str, Any] = {"kv_connector_extra_config": keys}
    if combined:
        other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        other["kv_connector_extra_config"] = {"shared_storage_path": str(pool.parent / "example")}
        connectors = [{"kv_connector": "NVMeoFOffloadingConnector", **transfer}, other]
        transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = {"connectors": connectors}
    llm = LLM(**{**rig.llm_options(spec), "model": model, "kv_transfer_config": transfer})
    assert spec.block_size == rig.BLOCK_TOKENS
    _generate(llm, [5, 6, 7], 1)  # the engine exports figures from its first step on
    return llm


class _Nothing:
    """Replaces a CUDA stream or event: on a CPU all work is done when a call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, *_: object) -> None: ...


@contextmanager
def _asynchronous_scheduling() -> Iterator[None]:
    """Engines made within this context schedule a step before the previous step has ended."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.__dict__["check_and_update_config"]

    def check(cls: Any, vllm_config: Any) -> None:
        stock.__get__(None, cls)(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    for name in ("Stream", "Event"):  # permanently: the engine uses them during its whole life
        setattr(torch.cuda, name, _Nothing)
    torch.cuda.current_stream = lambda *_: _Nothing()
    torch.cuda.stream = lambda *_: nullcontext()
    CpuPlatform.check_and_update_config = classmethod(check)  # type: ignore[assignment]
    yield
    CpuPlatform.check_and_update_config = stock  # type: ignore[method-assign]


def _generate(llm: Any, prompt: list[int], count: int) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def _ask(llm: Any) -> list[list[int]]:

    from tests.e2e import servers as rig

    return [_generate(llm, prompt, rig.ANSWER_TOKENS) for prompt in rig.asked()]


def _value(llm: Any, name: str, **labels: str) -> float:
    found = [m for m in llm.get_metrics() if m.name == name]
    return float(sum(m.value for m in found if labels.items() <= m.labels.items()))


def _with_writes_in_flight(llm: Any, faults: Any) -> float:
    """Start writes that outlast every wait; return the number of pending writes."""

    from tests.e2e import servers as rig

    faults.set(write_delay_ms=120_000)
    for prompt in rig.asked()[:2]:
        _generate(llm, prompt[::-1], rig.ANSWER_TOKENS)
    return _value(llm, "vllm:nvmeof_writes_pending", state="sent")


def _beside(llm: Any) -> list[dict[str, Any]]:
    """Load from only the other connector, and then from ours."""
    found = []
    for with_connector in (True, False):
        assert llm.reset_prefix_cache(reset_connector=with_connector)
        ours = _value(llm, "vllm:nvmeof_loaded_tokens")
        hits = _value(llm, "vllm:external_prefix_cache_hits")
        run: dict[str, Any] = {"tokens": _ask(llm)}
        run["ours"] = _value(llm, "vllm:nvmeof_loaded_tokens") - ours
        run["hits"] = _value(llm, "vllm:external_prefix_cache_hits") - hits
        found.append(run)
    return found


def _died(llm: Any) -> str:
    """The name of the exception that the next request raises after the engine's processes ended."""
    from tests.e2e import servers as rig
    from tests.process import wait_until

    def gone() -> bool:
        titles = rig.group(os.getpgrp()).values()
        # vLLM waits forever for a request that was sent before it detects the death.
        known = llm.llm_engine.engine_core.resources.engine_dead
        return bool(known) and not any("VLLM::" in title for title in titles)

    wait_until("the end of the engine's processes", gone)
    try:
        _generate(llm, [5, 6, 7], 1)
    except Exception as error:  # noqa: BLE001 - its name is what is asked for
        return type(error).__name__
    return "nothing"


def one(target: str) -> None:
    from vllm_nvmeof_bench.servers import forking

    from tests.e2e import servers as rig

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
    (notebook if len(sys.argv) > 2 else one)(*sys.argv[1:])
