# SPDX-License-Identifier: Apache-2.0
"""The demo's steps: make the model, then serve it without offloading, with it, and restarted.

The real model answers text prompts. A random model replaces it if there is no package index or disk
space, and on a GPU, which would compute a small model's prompts instantly.

1. Without offloading: every conversation, turn by turn, and the crowd. The tokens are the
   reference; offloading must beat these cold first turns and recomputed resumes.
2. With offloading: the main conversations, first cold, then from the CPU tier. After other
   conversations have evicted them from GPU and CPU memory, all return from the pool. The crowd is
   preempted and resumes.
3. SIGTERM stops the server. All conversations return to a new server on the same pool.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape

from vllm_nvmeof_bench.conditions import at_start
from vllm_nvmeof_bench.demo import workload
from vllm_nvmeof_bench.demo.report import Report
from vllm_nvmeof_bench.demo.workload import CrowdPlan, Plan, Runs
from vllm_nvmeof_bench.reports.demo import tables
from vllm_nvmeof_bench.servers import smollm2
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.forked import import_vllm, start
from vllm_nvmeof_bench.servers.model import ModelShape, make_model
from vllm_nvmeof_bench.servers.server import Server, ServerSpec
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import format_bytes

#: The plan for `--quick`: fewer and shorter conversations with the same cases.
_QUICK = Plan(
    main=2,
    others=2,
    prompt_tokens=2400,
    gpu_tokens=3104,
    cpu_tier_conversations=2.4,
    crowd=CrowdPlan(count=8, prompt_tokens=360, answer_tokens=160, answer_step=8),
)
#: The plan for the real model, whose texts have fewer tokens than planned.
_CHAT = Plan(
    prompt_tokens=1900,
    answer_tokens=16,
    gpu_tokens=2144,
    cpu_tier_conversations=2.7,
    crowd=CrowdPlan(count=8, prompt_tokens=240, answer_tokens=72, answer_step=6),
)
_QUICK_CHAT = replace(
    _CHAT, main=2, prompt_tokens=1400, gpu_tokens=1664, cpu_tier_conversations=1.9
)


def run(
    json_path: Path = Path("build/demo.json"),
    quick: bool = False,
    keep: bool = False,
    pool_dir: Path | None = None,
    random: bool = False,
) -> int:
    """Run the demo; return 0 if every check passed, else 1.

    json_path: the results file; an SVG of the conversations is written next to it. random: use the
    random model. pool_dir: where to create the pool's directory, by default `build`. keep: do not
    delete the pool's directory.
    """
    console = Console(highlight=False, soft_wrap=True)
    build = Path("build").resolve()
    above = (pool_dir or build).resolve()
    try:
        above.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix="demo-pool-", dir=above))
    except OSError as error:
        console.print("[red]demo failed:[/]", escape(str(error)))
        return 1
    try:
        report = _measure(console, quick, random, build, target)
    except (OffloadError, httpx.HTTPError) as error:
        console.print("[red]demo failed:[/]", type(error).__name__, escape(str(error)))
        console.print(f"the servers' logs are in {build / 'demo-logs'}")
        return 1
    finally:
        if not keep:
            shutil.rmtree(target, ignore_errors=True)
    report.write(json_path)
    if picture := report.picture():
        json_path.with_suffix(".svg").write_text(picture)
    return _finish(console, report, json_path)


def _make_model(console: Console, random: bool, build: Path) -> tuple[Path, ModelShape]:
    with console.status("making the model"):
        if not random and has_cpu_engine():
            import_vllm(workload.server_spec(_CHAT, Path()))
            try:
                return smollm2.make(), smollm2.SHAPE
            except smollm2.NoRealModelError as error:
                console.print("using a random model instead of the real one:", escape(str(error)))
        shape = workload.model_shape()
        return make_model(build / "models", shape), shape


def _measure(console: Console, quick: bool, random: bool, build: Path, target: Path) -> Report:
    """Run the steps listed in the module's docstring. target: the pool's directory."""
    began = time.monotonic()
    model, shape = _make_model(console, random, build)
    if shape == smollm2.SHAPE:
        plan, name = _QUICK_CHAT if quick else _CHAT, smollm2.NAME
    else:
        plan, name = _QUICK if quick else Plan(), "random"
    console.print(
        f"model: {name}, {shape.parameters / 1e6:.0f} M float32 parameters, "
        f"{format_bytes(shape.kv_bytes_per_token)} of KV cache per token"
    )
    plain = workload.server_spec(plan, model)
    # At startup vLLM computes this many tokens, which is slow for a real model on two cores.
    plain = replace(plain, max_num_batched_tokens=plain.max_model_len)
    spec = replace(plain, offload=workload.offload_spec(plan, shape, target))
    runs = Runs(plan, shape, console)
    logs = build / "demo-logs"
    with _served(console, "without offloading", plain, logs) as server:
        baseline = asyncio.run(runs.baseline(server))
    with _served(console, "with --kv-offloading-backend nvmeof", spec, logs) as server:
        offloaded = asyncio.run(runs.offloaded(server))
    with _served(console, "started again on the same pool", spec, logs) as server:
        restarted = asyncio.run(runs.restarted(server))
    conditions = _conditions(name, spec, plan, shape)
    conditions["seconds"] = round(time.monotonic() - began, 1)
    return Report(baseline, offloaded, restarted, conditions)


@contextmanager
def _served(console: Console, what: str, spec: ServerSpec, logs: Path) -> Iterator[Server]:
    log_path = logs / f"{what.split(maxsplit=1)[0]}.log"
    with console.status(f"vllm serve, {what}") as status, start(spec, log_path) as server:
        server.wait_ready(
            progress=lambda s, stage: status.update(f"vllm serve, {what}: {stage}, {s:.0f} s")
        )
        status.stop()
        console.print(f"\n[bold]vllm serve, {what}[/] (ready after {server.startup_s:.0f} s)")
        yield server


def _conditions(model: str, spec: ServerSpec, plan: Plan, shape: ModelShape) -> dict[str, object]:
    assert spec.offload is not None
    return {
        **at_start(spec.model),
        "model": {
            "name": model,
            "parameters": shape.parameters,
            "kv_bytes_per_token": shape.kv_bytes_per_token,
        },
        "gpu_tokens": spec.gpu_tokens,
        "staging_gib": spec.offload.size_gib,
        "extra_config": {k: v for k, v in spec.offload.extra.items() if k != "targets"},
        "conversations": plan.main + plan.others,
        "prompt_tokens": plan.prompt_tokens,
        "answer_tokens": plan.answer_tokens,
        "crowd": f"{plan.crowd.count} requests of {plan.crowd.prompt_tokens} tokens",
    }


def _finish(console: Console, report: Report, json_path: Path) -> int:
    seen, facts, failures = report.comparison(), report.facts(), report.failures()
    console.print()
    for table in tables(report.samples(), report.conditions):
        console.print(table, soft_wrap=False)
    console.print(
        f"{seen.tokens} greedy tokens of {seen.answers} answers compared with the server "
        f"without offloading: {'identical' if seen.identical else 'DIFFERENT'}; "
        f"log-probabilities differ by at most {seen.logprob_difference_max:.1g}, "
        f"the smallest lead over a runner-up is {seen.gap_min:.1g}",
        f"{facts['external_hit_tokens']} prompt tokens loaded; {facts['preemptions']} "
        f"preemptions: {facts['reloaded_tokens']} tokens reloaded, {facts['recomputed_tokens']} "
        "recomputed",
        f"figures: {json_path}; the demo took {report.conditions['seconds']:.0f} s",
        sep="\n",
    )
    for line in failures:
        console.print(f"[red]failed:[/] {escape(line)}")
    return 1 if failures else 0
