# SPDX-License-Identifier: Apache-2.0
"""Servers for the end-to-end tests: a small model, small tiers and many prompts, so that returning
requests load from a faulty pool; what is expected of them; and what happens in their lives."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from vllm_nvmeof_bench import servers
from vllm_nvmeof_bench.servers.client import Answer, Client, Metrics
from vllm_nvmeof_bench.servers.engine import engine_memory, has_cpu_engine
from vllm_nvmeof_bench.servers.forked import ForkedServer, can_be_forked
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import (
    MODEL_NAME,
    OffloadSpec,
    Server,
    ServerSpec,
    split_extra,
)

from tests.process import wait_until
from vllm_nvmeof_offload.units import GIB, KIB, slot_stride_bytes

BUILD = Path(__file__).resolve().parents[2] / "build"
SHAPE = ModelShape(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=1)
BLOCK_TOKENS, BLOCKS_PER_CHUNK = 32, 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
SLOT_BYTES = slot_stride_bytes(SHAPE.kv_bytes_per_token * CHUNK_TOKENS)
#: Not a multiple of a block: the last chunk is never whole. 15 whole chunks.
PROMPT_TOKENS, ANSWER_TOKENS = 1003, 12
PROMPTS = 12
STAGING_SLOTS = 40  # less than three prompts
POOL_SLOTS = 512
LOGPROB_TOLERANCE = 1e-3
#: Deadlines of `spec` for tests that miss them: longer than a shared disk stalls by itself.
SHORT_DEADLINES = {"read_deadline_ms": 4000, "write_deadline_ms": 8000}
_UNDER_WAY = ("vllm:nvmeof_writes_pending", "vllm:kv_cache_usage_perc")
UNSTORED = "vllm:nvmeof_unstored_chunks_total"
UNWRITTEN = "vllm:nvmeof_unwritten_chunks_total"
_ROUNDS_MAX = 8
#: A script: importing it imports vLLM.
_FORKING = Path(servers.__file__).with_name("forking.py")
#: The program of a server that may not use io_uring.
DENIED = str(Path(__file__).with_name("denied_server.py"))


@dataclass(frozen=True)
class Reference:
    """Prompts, and the answers of a server without offloading."""

    prompts: list[list[int]]
    answers: list[Answer]


def prompts(seed: int = 11, count: int = PROMPTS) -> list[list[int]]:
    """Prompts of different lengths; pairs of them share their first half."""
    rng = np.random.default_rng(seed)
    heads = [random_tokens(rng, PROMPT_TOKENS // 2, SHAPE) for _ in range(count // 2)]
    return [
        [*heads[i // 2], *random_tokens(rng, PROMPT_TOKENS // 2 + 7 * i, SHAPE)]
        for i in range(count)
    ]


def spec(target: Path | None = None, **extra: object) -> ServerSpec:
    """A server without offloading, or with a pool in `target`."""
    offload = None
    if target is not None:
        settings = {
            "targets": [str(target)],
            "pool_bytes": POOL_SLOTS * SLOT_BYTES,
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
            # A shared disk stalls for seconds, and no operation may fail because of that.
            "read_deadline_ms": 20_000,
            # A read that a busy machine holds up makes `auto` recompute the next hits, and a slow
            # model makes it load them: `test_admission` is about that.
            "admission": "always",
        }
        size_gib = STAGING_SLOTS * SLOT_BYTES / GIB
        offload = OffloadSpec(size_gib, {**settings, **extra})
    return ServerSpec(
        model=make_model(BUILD / "models", SHAPE),
        max_model_len=2048,
        gpu_blocks=101,
        block_size=BLOCK_TOKENS,
        max_num_seqs=16,
        offload=offload,
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )


def without_plugin(server_spec: ServerSpec) -> ServerSpec:
    """The same server configured only by JSON with module paths; our plugin may not load."""
    offload = server_spec.offload
    assert offload is not None and offload.size_gib is not None
    extra = {
        **offload.extra,
        "spec_name": "NVMeoFOffloadingSpec",
        "spec_module_path": "vllm_nvmeof_offload.spec",
        "staging_bytes": int(offload.size_gib * GIB),
    }
    transfer = {
        "kv_connector": "NVMeoFOffloadingConnector",
        "kv_connector_module_path": "vllm_nvmeof_offload.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return replace(
        server_spec,
        offload=OffloadSpec(None, extra, transfer),
        env={**server_spec.env, "VLLM_PLUGINS": "none"},
    )


def llm_options(server_spec: ServerSpec) -> dict[str, Any]:
    """Arguments of `LLM` that make the same engine as this server's."""
    offload = server_spec.offload
    assert offload is not None
    return {
        "model": str(server_spec.model),
        "dtype": "float32",
        "max_model_len": server_spec.max_model_len,
        "enforce_eager": True,
        "block_size": server_spec.block_size,
        "num_gpu_blocks_override": server_spec.gpu_blocks,
        **engine_memory(),
        "disable_log_stats": False,
        "kv_offloading_backend": "nvmeof",
        "kv_offloading_size": offload.size_gib,
        "kv_transfer_config": {"kv_connector_extra_config": split_extra(offload.extra)[0]},
    }


def start(server_spec: ServerSpec, name: str, *, unforked: bool = False) -> Server:
    """Start a server and wait until it is ready. It is forked unless `server_spec` names a program.

    unforked: the first process is not forked, so that it shares nothing with earlier servers.
    """
    log = BUILD / "logs" / f"{name}.log"
    if can_be_forked(server_spec) and not unforked:
        return ForkedServer(server_spec, log).wait_ready()
    forking = (sys.executable, "-P", str(_FORKING)) if has_cpu_engine() else ()
    program = server_spec.program or forking
    return Server(replace(server_spec, program=program), log).wait_ready()


@functools.cache
def reference() -> Reference:
    """The answers of a server without offloading, which is asked once per session."""
    asked = prompts()
    with start(spec(), "faults-reference") as server:
        answers = ask(server, asked)
    assert min(min(a.gaps) for a in answers) > 2 * LOGPROB_TOLERANCE, "choose another seed"
    return Reference(asked, answers)


def ask(
    server: Server, asked: Sequence[Sequence[int]], tokens: int = ANSWER_TOKENS, **options: Any
) -> list[Answer]:
    """Ask the prompts one after the other. options: those of `Client.complete`."""

    async def run() -> list[Answer]:
        async with Client(server.url) as client:
            return [await client.complete(prompt, tokens, **options) for prompt in asked]

    return asyncio.run(run())


def ask_at_once(
    server: Server, asked: Sequence[Sequence[int]], tokens: int = ANSWER_TOKENS
) -> list[Answer]:
    async def run() -> list[Answer]:
        async with Client(server.url) as client:
            return list(await asyncio.gather(*(client.complete(p, tokens) for p in asked)))

    return asyncio.run(run())


def metrics(server: Server) -> Metrics:
    async def run() -> Metrics:
        async with Client(server.url) as client:
            return await client.metrics()

    return asyncio.run(run())


#: `/metrics` of one server in this session, for the tests that check the texts.
scrapes: list[str] = []


def keep_scrape(server: Server) -> None:
    scrapes.append(httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text)


def grown(server: Server, before: Metrics, name: str, **labels: str) -> float:
    """The growth of a counter since `before`."""
    return metrics(server).value(name, **labels) - before.value(name, **labels)


def has_figures(now: Metrics) -> bool:
    """Whether the engine exports figures, which it does from its first step on."""
    return now.value("vllm:nvmeof_slots", kind="cache") > 0


def is_usable(now: Metrics) -> bool:
    """Whether the server's only target is ok or degraded, not suspect (2) or gone (3)."""
    return now.value("vllm:nvmeof_target_verdict") < 2


def wait_for(server: Server, what: str, condition: Callable[[Metrics], bool]) -> Metrics:
    """Poll `/metrics` until `condition` holds, at most 120 s.

    Reports are sent with the engine's steps, and an idle engine does not step. Each poll therefore
    sends a tiny request, too short for a chunk.
    """
    deadline = time.monotonic() + 120
    while True:
        assert server.running, f"the server died while we waited for {what}"
        ask(server, [[5, 6, 7]], 1)
        now = metrics(server)
        if condition(now):
            return now
        assert time.monotonic() < deadline, f"no {what} in 120 s; {server.log_path}"


def settle(server: Server) -> Metrics:
    """Wait until every store and write of an idle server has ended; return the metrics then."""
    return wait_for(server, "the last write", all_written)


def all_written(now: Metrics) -> bool:
    """Whether no chunk of an idle server is being stored or written.

    One that is being stored is in none of our gauges yet, but it holds its blocks of GPU memory.
    """
    return not any(map(now.value, _UNDER_WAY))


def written(server: Server) -> float:
    """Wait until the server has written all that it stored; return its chunks in the pool."""
    return settle(server).value("vllm:nvmeof_slots_used", kind="pool")


def knows(server: Server, chunks: float) -> Metrics:
    """Wait until the server knows of so many chunks of others."""
    return wait_for(server, f"{chunks} chunks of others", lambda m: m.value(PLACES) >= chunks)


def ask_and_settle(
    server: Server, asked: Sequence[Sequence[int]], tokens: int = ANSWER_TOKENS
) -> list[Answer]:
    """As `ask`, and the chunks of each prompt are written before the next one.

    So each chunk finds room in the CPU tier, however slow the disk is.
    """
    answers = []
    for prompt in asked:
        answers += ask(server, [prompt], tokens)
        settle(server)
    return answers


def store_all(
    server: Server,
    reference: Reference,
    ask: Callable[[Server, Sequence[Sequence[int]]], list[Answer]] = ask,
) -> None:
    """Ask until every chunk is stored and written.

    One round may not be enough: while a shared disk stalls, other chunks find no room.
    """
    for _ in range(_ROUNDS_MAX):
        before = metrics(server)
        assert same(ask(server, reference.prompts), reference.answers)
        settle(server)
        refused = grown(server, before, UNSTORED, reason="no_room")
        if not refused + grown(server, before, UNWRITTEN, reason="evicted"):
            return
    raise AssertionError(f"chunks are refused in each of {_ROUNDS_MAX} rounds")


def forget_gpu(server: Server) -> None:
    """Drop only the GPU's prefix cache, so that every later hit comes from the offload tiers."""
    _reset(server, {})


def forget_all(server: Server) -> None:
    """Void GPU cache, CPU tier and pool, as after an update of the weights."""
    _reset(server, {"reset_external": "true"})


def _reset(server: Server, params: dict[str, str]) -> None:
    def succeeds() -> bool:
        url = f"{server.url}/reset_prefix_cache"
        response = httpx.post(url, params=params, timeout=60, trust_env=False)
        response.raise_for_status()
        return bool(response.json()["success"])

    # vLLM refuses while blocks are held, and stores hold blocks until the last one was copied.
    wait_until("a reset of the prefix cache", succeeds)


def same(answers: Sequence[Answer], reference: Sequence[Answer]) -> bool:
    """Whether tokens are equal and log-probabilities agree within the tolerance."""
    return all(
        a.tokens == b.tokens and np.allclose(a.logprobs, b.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)
        for a, b in zip(answers, reference, strict=True)
    )


class Faults:
    """The control file of `io/faulty.py`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set()

    def set(self, **knobs: object) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"seed": 1, **knobs}))
        os.replace(fresh, self.path)

    def fired(self, knob: str, rank: int = 0) -> int:
        record = self.path.with_name(self.path.name + ".fired" + (f".{rank}" if rank else ""))
        return int(json.loads(record.read_text()).get(knob, 0)) if record.exists() else 0


def damage_slab(target: Path) -> int:
    """Flip one payload byte of every slot that was written; return the number of slots."""
    (slab,) = target.rglob("slab")
    damaged = 0
    with slab.open("r+b", buffering=0) as file:
        for start_byte in range(0, slab.stat().st_size - SLOT_BYTES + 1, SLOT_BYTES):
            file.seek(start_byte)
            if not any(file.read(64)):
                continue
            place = start_byte + 4 * KIB + 12345
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 0x04]))
            damaged += 1
        os.fsync(file.fileno())
    return damaged


def plain_answers(model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
    """Greedy answers with log-probabilities and the gaps to the runner-up, float32."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.servers", str(model)],
        input=json.dumps({"prompts": list(prompts), "tokens": tokens}),
        cwd=BUILD.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [Answer(sent=0.0, **answer) for answer in answers]


def _answer(model: Any, prompt: list[int], tokens: int) -> dict[str, list[Any]]:
    import torch

    out: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "gaps": []}
    past, given = None, torch.tensor([prompt])
    for _ in range(tokens):
        seen = model(given, past_key_values=past, use_cache=True)
        past = seen.past_key_values
        top = torch.log_softmax(seen.logits[0, -1].double(), -1).topk(2)
        out["tokens"].append(int(top.indices[0]))
        out["logprobs"].append(float(top.values[0]))
        out["gaps"].append(float(top.values[0] - top.values[1]))
        given = top.indices[:1][None]
    return out


def _answer_as_a_program(directory: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        answers = [_answer(model, prompt, asked["tokens"]) for prompt in asked["prompts"]]
    print(json.dumps(answers))


RANKS = 2
#: Two KV heads: each rank holds a different one, so that one rank's bytes cannot replace the
#: other's. A rank's slot is as large as that of the one-headed model.
SPLIT_SHAPE = replace(SHAPE, kv_heads=2)
SPLIT_PROMPTS, SPLIT_TOKENS = 4, 8
#: Room for two of the prompts.
GPU_BLOCKS = 69
HITS = "vllm:external_prefix_cache_hits_total"
LOADED = "vllm:nvmeof_loaded_tokens_total"
FAILED = "vllm:nvmeof_failed_chunks_total"
PLACES = "vllm:nvmeof_shared_entries"
BORROWED = "vllm:nvmeof_borrowed_chunks_total"
REFUSED = "vllm:nvmeof_borrow_failures_total"


@functools.cache
def split_reference() -> Reference:
    """Prompts, and the answers of the model without vLLM and without this package."""
    asked = prompts(seed=23, count=SPLIT_PROMPTS)
    model = make_model(BUILD / "models", SPLIT_SHAPE)
    answers = plain_answers(model, asked, SPLIT_TOKENS)
    assert min(min(a.gaps) for a in answers) > 2 * LOGPROB_TOLERANCE, "choose another seed"
    return Reference(asked, answers)


def split_spec(target: Path, option: str, **extra: object) -> ServerSpec:
    """A server with two ranks or replicas, by `option`. Each has the usual number of slots."""
    pool_bytes = RANKS * POOL_SLOTS * (SLOT_BYTES + 64)
    base = spec(target, pool_bytes=pool_bytes, **extra)
    assert base.offload is not None
    size_gib = RANKS * STAGING_SLOTS * SLOT_BYTES / GIB
    return replace(
        base,
        model=make_model(BUILD / "models", SPLIT_SHAPE),
        gpu_blocks=GPU_BLOCKS,
        offload=replace(base.offload, size_gib=size_gib),
        extra_args=(option, str(RANKS)),
        # Bound to cores, two ranks would need four cores: vLLM leaves one free per rank.
        env={**base.env, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    )


def split_ask(server: Server, asked: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
    return ask(server, asked, SPLIT_TOKENS, **options)


def whole(prompt: Sequence[int]) -> int:
    """The number of a prompt's tokens that are in whole chunks."""
    return len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS


def whole_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """The tokens of the prompts in whole chunks. Pairs of prompts share their first halves."""
    return sum(map(whole, prompts))


#: Half of the rig's pool: enough to exceed GPU memory and CPU tier together.
FEW_PROMPTS = 6
NEW_SHAPE = replace(SHAPE, seed=77)
_WEIGHTS = "model.safetensors"
#: A file in a model's directory, for `sleeping_worker`: the model whose weights a trainer brings.
TRAINED = "trained"


@dataclass(frozen=True)
class Weights:
    """Two sets of weights of one shape, and a model directory that has one of them."""

    directory: Path
    old: Path
    new: Path

    @classmethod
    def make(cls, directory: Path) -> Weights:
        """Make a model directory with the old weights."""
        old = make_model(BUILD / "models", SHAPE)
        shutil.copytree(old, directory)
        return cls(directory, old, make_model(BUILD / "models", NEW_SHAPE))

    def put(self, model: Path) -> None:
        """Replace the weights by those of `model`, in the way new weights are published."""
        self.bring(model)
        self.publish()

    def bring(self, model: Path) -> None:
        """The slow part of `put`: copy the weights of `model` beside those in use."""
        shutil.copy(model / _WEIGHTS, self.directory / "fresh")

    def publish(self) -> None:
        """Replace the weights by those that were brought."""
        (self.directory / "fresh").rename(self.directory / _WEIGHTS)
        # The start time of a process is known in ticks: a process that starts in this tick would
        # treat these weights as changed during its start.
        time.sleep(2 / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True)
class Scene:
    """The directory with model and pool, and the answers of each set of weights."""

    pool: Path
    weights: Weights
    faults: Faults
    prompts: list[list[int]]
    old: list[list[int]]
    new: list[list[int]]

    def start(self, name: str, *arguments: str, step_tokens: int) -> Server:
        made = spec_of(self.pool, self.weights.directory, fault_injection=str(self.faults.path))
        made = replace(made, extra_args=arguments, max_num_batched_tokens=step_tokens)
        return start(made, name)


def asked() -> list[list[int]]:
    return prompts()[:FEW_PROMPTS]


def expected_of(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens per prompt, computed by the model's own code without vLLM."""
    answers = plain_answers(model, prompts, count)
    assert min(min(a.gaps) for a in answers) > 2 * LOGPROB_TOLERANCE, "another seed"
    return [answer.tokens for answer in answers]


def tokens_of(server: Server, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [answer.tokens for answer in ask(server, prompts)]


def spec_of(pool: Path, model: Path, **extra: object) -> ServerSpec:
    """A server with this pool and model."""
    return replace(spec(pool, **extra), model=model)


def post(server: Server, path: str, **params: Any) -> httpx.Response:
    """Call one of vLLM's administrative endpoints, which must succeed."""
    response = httpx.post(f"{server.url}{path}", params=params, timeout=60, trust_env=False)
    assert response.status_code == httpx.codes.OK, (path, params, response.text)
    return response


def call_workers(server: Server, method: str, **kwargs: Any) -> None:
    """vLLM's `collective_rpc`."""
    body = {"method": method, "kwargs": kwargs}
    response = httpx.post(f"{server.url}/collective_rpc", json=body, timeout=60, trust_env=False)
    assert response.status_code == httpx.codes.OK, (method, response.text)


def group(leader: int) -> dict[int, str]:
    """Process id → title of the live processes of a group."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == leader and state not in "ZX":
                title = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(stat.parent.name)] = title.decode(errors="replace").strip()
    return found


def with_priorities(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Ask all prompts at once; the last one has the highest priority."""

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            return list(await asyncio.gather(*(one(http, i) for i in range(len(prompts)))))

    async def one(http: httpx.AsyncClient, number: int) -> list[int]:
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompts[number], "temperature": 0}
        body |= {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "return_token_ids": True}
        response = await http.post(
            f"{server.url}/v1/completions", json={**body, "priority": -number}
        )
        response.raise_for_status()
        return list(response.json()["choices"][0]["token_ids"])

    return asyncio.run(run())


def stored(server: Server, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answers' tokens; all chunks of the prompts are then in the pool."""
    return [answer.tokens for answer in ask_and_settle(server, prompts)]


def returning(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    forget_gpu(server)
    return tokens_of(server, prompts)


def wait_for_requests(server: Server) -> None:
    async def running() -> float:
        async with Client(server.url) as client:
            return (await client.metrics()).value("vllm:num_requests_running")

    wait_until("running requests", lambda: asyncio.run(running()) > 0)


def while_loads_run(
    server: Server, scene: Scene, act: Callable[[], None]
) -> list[Answer | BaseException]:
    """Ask for chunks that are read from the pool, and call `act` during the reads.

    The reads hang until `act` has begun, and then still for as long as a slow disk takes.
    """
    prompts = scene.prompts[::2]
    assert stored(server, prompts) == scene.old[::2]
    forget_gpu(server)
    slow = {"read_delay_ms": 300, "write_delay_ms": 300}
    scene.faults.set(hang_reads=True, **slow)
    fired = scene.faults.fired("hang_reads")
    release = threading.Timer(0.3, scene.faults.set, kwargs=slow)

    def act_during_reads() -> None:
        wait_until("a read", lambda: scene.faults.fired("hang_reads") > fired)
        release.start()
        act()
        release.join()

    async def run() -> list[Answer | BaseException]:
        async with Client(server.url) as client:
            asked = [client.complete(p, ANSWER_TOKENS) for p in prompts]
            answers = asyncio.gather(*asked, return_exceptions=True)
            await asyncio.to_thread(act_during_reads)
            return list(await answers)

    answers = asyncio.run(run())
    scene.faults.set()
    return answers


if __name__ == "__main__":
    _answer_as_a_program(sys.argv[1])
