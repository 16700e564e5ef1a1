# SPDX-License-Identifier: Apache-2.0
"""Plans of engine runs, and the process that executes them (`zygote.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from vllm_nvmeof_bench.servers.engine import engine_memory, has_cpu_engine
from vllm_nvmeof_bench.servers.server import split_extra

from tests.e2e import servers
from tests.e2e.servers import LOGPROB_TOLERANCE, same
from tests.e2e.shapes.models import SHAPE
from vllm_nvmeof_offload.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[3]
LOGS = servers.BUILD / "logs"
#: An engine of a tiny model starts in three seconds on an idle machine.
RUN_S_MAX = 240.0
#: Options that must not change an answer.
_INDIFFERENT = {
    *("speculative_config", "prefix_caching_hash_algo", "mm_processor_cache_gb"),
    *("async_scheduling", "enforce_eager", "compilation_config"),
    *("pipeline_parallel_size", "distributed_executor_backend"),
}
STAGING_BYTES, POOL_BYTES = 32 * MIB, 32 * MIB
only_cpu_engine = pytest.mark.skipif(
    not has_cpu_engine(), reason="needs vLLM's CPU engine; this vLLM is a build for GPUs"
)


@dataclass(frozen=True)
class Request:
    """A prompt of token ids. image: its seed. lora: name, number and path of an adapter.

    follows: round and number of an earlier request; its prompt and its answer precede this prompt.
    """

    prompt: list[int]
    tokens: int = 6
    image: int | None = None
    lora: tuple[str, int, str] | None = None
    follows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plan:
    """One engine: its arguments, its pool's directory (None: no offloading), and its requests.

    Before each round the GPU's prefix cache is emptied. model: a kind that `models.py` makes.
    Rounds are named by their position.
    """

    model: str
    rounds: Sequence[Sequence[Request]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    target: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    #: Time limit on a busy machine.
    run_s_max: float = RUN_S_MAX
    #: Rounds whose requests are asked all at once, not one after the other.
    at_once: Sequence[int] = ()
    #: Round → the knobs of fault injection (`vllm_nvmeof_bench.servers.faults`) from its start on.
    faults: Mapping[int, Mapping[str, bool | float]] = field(default_factory=dict)
    #: Rounds before which both tiers are emptied as well.
    resets: Sequence[int] = ()
    #: Do not empty the GPU's prefix cache between rounds.
    keeps_cache: bool = False
    #: Run a refused model, to see its answers.
    lift_mla: bool = False
    #: After the first round: load the weights of this model by vLLM's API.
    reload: str = ""
    #: After the first round: replace one adapter's files by those of another.
    adapter_swap: tuple[str, str] | None = None
    #: Do not notify the connector of new weights.
    unwatched: bool = False
    #: Change the weights while the first round's request runs (`steady.py`).
    steady: bool = False
    #: Store KV that earlier weights have computed.
    unsuspended: bool = False
    #: Report the blocks of failed loads, not the requests.
    blocks_reported: bool = False
    #: Admission takes the model for so fast that no pool is worth reading.
    fast: bool = False
    #: See `stand_ins.py`.
    packed: bool = False
    stub_gpu: bool = False

    @property
    def fault_file(self) -> Path | None:
        """The control file of `faults`, beside the pool's directory."""
        return self.target and self.target.with_name(f"{self.target.name}-faults.json")

    def plain(self) -> Plan:
        """The same plan without offloading and without any cache."""
        options = {k: v for k, v in self.options.items() if k not in _INDIFFERENT}
        options["enable_prefix_caching"] = False
        without = replace(self, target=None, extra={}, options=options, env={}, faults={})
        return replace(without, packed=False, stub_gpu=False, blocks_reported=False)

    def variables(self) -> dict[str, str]:
        """What the engine's environment has besides."""
        faults = {"fault_injection": str(self.fault_file)} if self.faults else {}
        return {**split_extra({**faults, **self.extra})[1], **self.env}

    def arguments(self) -> dict[str, Any]:
        """`LLM`'s arguments."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": "float32",
            "max_model_len": 768,
            "enforce_eager": True,
            "block_size": 32,
            "num_gpu_blocks_override": 80,
            "disable_log_stats": False,
            **engine_memory(),
        }
        if self.target is not None:
            extra = {
                "targets": [str(self.target)],
                "pool_bytes": POOL_BYTES,
                "blocks_per_chunk": 2,
                # What is found is loaded, however slow a busy machine's disk is.
                "admission": "always",
                "read_deadline_ms": 20_000,
                **split_extra(self.extra)[0],
            }
            arguments |= {
                "kv_offloading_backend": "nvmeof",
                "kv_offloading_size": STAGING_BYTES / GIB,
                "kv_transfer_config": {"kv_connector_extra_config": extra},
            }
        return arguments | dict(self.options)


@dataclass(frozen=True)
class Answer:
    """gaps: by token, the distance of its log-probability to the runner-up's."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]

    @property
    def gap(self) -> float:
        return min(self.gaps)


@dataclass(frozen=True)
class Outcome:
    """One engine's life.

    counters: per round, the growth of each counter. error: the exception that `LLM(...)` raised,
    or empty. log: the process's output.
    """

    answers: list[list[Answer]]
    counters: list[dict[str, float]]
    error: str
    log: str

    def grown(self, turn: int, name: str) -> float:
        """The growth of a counter in a round (0 is the first)."""
        return self.counters[turn].get(name, 0)


def play_back(zygote: Zygote, plan: Plan, name: str) -> tuple[Outcome, Outcome]:
    """Ask the one round of `plan` without offloading, twice with it, and after a restart.

    Every answer must be the same. Returns the two lives of the engine that offloads.
    """
    (asked,) = plan.rounds
    reference = zygote.reference(plan, name)
    first = zygote.run(replace(plan, rounds=[asked, asked]), f"{name}-first")
    second = zygote.run(plan, f"{name}-second")
    for outcome in (first, second):
        assert not outcome.error, outcome.error
        for answers, counters in zip(outcome.answers, outcome.counters, strict=True):
            assert same(answers, reference)
            assert counters.get("nvmeof_failed_chunks", 0) == 0
    return first, second


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    """Random prompts without common prefixes."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(2, SHAPE.vocab, n)] for n in lengths]


class Zygote:
    """The process of `zygote.py`."""

    def __init__(self) -> None:
        self._references: dict[str, list[Answer]] = {}
        LOGS.mkdir(parents=True, exist_ok=True)
        env = {
            **servers.spec().environment(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
            # Threads that wait for one another spin, and these models gain nothing from threads.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        for variable in ("PYTHONHASHSEED", "VLLM_PLUGINS"):
            env.pop(variable, None)
        self._log = (LOGS / "shapes-zygote.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.shapes.zygote"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
        )
        assert self._answer(RUN_S_MAX) == "READY"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def model(self, kind: str) -> Path:
        """Make a model; return its directory."""
        _, seen = self._play(Plan(kind), f"{kind}-made", only_make=True)
        return Path(seen["model"])

    def run(self, plan: Plan, name: str) -> Outcome:
        """Run `plan` in a fresh process; its output goes to `build/logs/shapes-NAME.log`."""
        text, seen = self._play(plan, name)
        return Outcome(
            [[Answer(**a) for a in answers] for answers in seen.get("answers", [])],
            seen.get("counters", []),
            seen.get("error", ""),
            text,
        )

    def _play(self, plan: Plan, name: str, *, only_make: bool = False) -> tuple[str, Any]:
        log, result = LOGS / f"shapes-{name}.log", LOGS / f"shapes-{name}.json"
        result.unlink(missing_ok=True)
        order = {
            "llm": plan.arguments(),
            "rounds": [[asdict(request) for request in asked] for asked in plan.rounds],
            "env": plan.variables(),
            "only_make": only_make,
            "at_once": list(plan.at_once),
            "faults": dict(plan.faults),
            "resets": list(plan.resets),
            "keeps_cache": plan.keeps_cache,
            "fault_file": str(plan.fault_file),
            "lift_mla": plan.lift_mla,
            "reload": plan.reload,
            "adapter_swap": plan.adapter_swap,
            "unwatched": plan.unwatched,
            "steady": plan.steady,
            "unsuspended": plan.unsuspended,
            "blocks_reported": plan.blocks_reported,
            "fast": plan.fast,
            "packed": plan.packed,
            "stub_gpu": plan.stub_gpu,
            "offloads": plan.target is not None,
            "log": str(log),
            "result": str(result),
        }
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        code = self._answer(plan.run_s_max)
        text = log.read_text(errors="replace")
        assert code == "0" and result.exists(), f"exit {code}\n{text[-4000:]}"
        return text, json.loads(result.read_text())

    def reference(self, plan: Plan, name: str) -> list[Answer]:
        """The answers to the one round of `plan` without offloading, cached for equal plans."""
        plain = plan.plain()
        known = repr(plain)
        if known not in self._references:
            outcome = self.run(plain, f"{name}-plain")
            assert not outcome.error, outcome.error
            (answers,) = outcome.answers
            gap = min(answer.gap for answer in answers)
            assert gap > 2 * LOGPROB_TOLERANCE, "choose another seed"
            self._references[known] = answers
        return self._references[known]

    def _answer(self, timeout_s: float) -> str:
        """The next line. A process that prints nothing for `timeout_s` is killed."""
        assert self._process.stdout is not None
        guard = threading.Timer(timeout_s, os.killpg, (self._process.pid, 9))
        guard.start()
        try:
            return self._process.stdout.readline().strip()
        finally:
            guard.cancel()
