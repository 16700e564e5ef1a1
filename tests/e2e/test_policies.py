# SPDX-License-Identifier: Apache-2.0
"""Load or compute, with a disk that is throttled or hangs: the faster choice is made; and chunks
that are stored on the second lookup and written on eviction. The tests of admission assert
decisions and tokens against the rates that the server exports, not durations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm_nvmeof_bench.servers.client import Answer
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import OffloadSpec, Server, ServerSpec
from vllm_nvmeof_bench.throttle import Throttle, ThrottleError

from tests.e2e import servers as rig
from vllm_nvmeof_offload.units import GIB, slot_stride_bytes

#: Much KV for little computing, so that the crossover is at tens of MB/s.
SHAPE = ModelShape(layers=6, hidden=512, intermediate=1024, heads=4, kv_heads=4)
BLOCK_TOKENS, CHUNK_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 64, 707, 4
PROMPTS = 6
SLOT_BYTES = slot_stride_bytes(SHAPE.kv_bytes_per_token * CHUNK_TOKENS)
#: Returns after which a new rate must have been learned. Each read halves the error, and a throttle
#: passes its first bytes at the disk's speed: from that speed to 10 MB/s takes six reads.
LESSONS = 7
#: So many decisions in a row must be right, within so many returns: many, because on a busy machine
#: loads disappoint again and again, and each that does has the pool tried half as often.
STEADY, RETURNS_MAX = 3, 60
#: Within this factor of the crossover either choice is right, because of hysteresis and noise.
CLOSE = 2.0
#: The metrics that the server decides by; printed if a test fails.
GOES_BY = (
    "prefill_tokens_per_second",
    "pool_read_bytes_per_second",
    "load_slowness",
    "loads_cut_total",
)


def _spec(directory: Path) -> ServerSpec:
    extra = {
        "targets": [str(directory / "pool")],
        "pool_bytes": 256 * SLOT_BYTES,
        "blocks_per_chunk": CHUNK_TOKENS // BLOCK_TOKENS,
        "stream_slots": 4,
        # Long deadlines: the disk is slow, and a target that misses one is not looked up.
        "read_deadline_ms": 60_000,
        "fault_injection": str(directory / "faults.json"),
    }
    offload = OffloadSpec(12 * SLOT_BYTES / GIB, extra)
    return ServerSpec(
        model=make_model(rig.BUILD / "models", SHAPE),
        max_model_len=1024,
        gpu_blocks=50,
        block_size=BLOCK_TOKENS,
        offload=offload,
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [random_tokens(rng, PROMPT_TOKENS + i, SHAPE) for i in range(PROMPTS)]


class Returns:
    """Prompts that return one after the other, each after GPU and CPU tier have evicted it."""

    def __init__(
        self, server: Server, prompts: list[list[int]], throttle: Throttle, faults: rig.Faults
    ) -> None:
        self.throttle = throttle
        self.faults = faults
        self.server = server
        self._prompts = prompts
        self._cold: list[Answer] = []
        self._next = 0
        for prompt in prompts:  # one at a time, because a slow disk would have stores refused
            self._cold += rig.ask(server, [prompt], ANSWER_TOKENS)
            rig.settle(server)

    def next(self) -> str:
        """Let the next prompt return; return the decision. Its tokens must be the same."""
        before = rig.metrics(self.server)
        index = self._next % len(self._prompts)
        self._next += 1
        answers = rig.ask(self.server, [self._prompts[index]], ANSWER_TOKENS)
        assert rig.same(answers, [self._cold[index]])
        after = rig.metrics(self.server)
        made = {
            decision: after.value("vllm:nvmeof_admissions_total", decision=decision)
            - before.value("vllm:nvmeof_admissions_total", decision=decision)
            for decision in ("load", "partial", "recompute")
        }
        faults = {
            name: after.value(f"vllm:nvmeof_{name}") - before.value(f"vllm:nvmeof_{name}")
            for name in ("failed_chunks_total", "loads_cut_total", "verdict_changes_total")
        }
        goes_by = {name: round(after.value(f"vllm:nvmeof_{name}"), 3) for name in GOES_BY}
        print(f"{answers[0].ttft_s:.3f} s", made, goes_by)
        # One per attempt. If a load was cut off before any of it arrived, vLLM asks again.
        assert 1 <= sum(made.values()) <= 1 + faults["loads_cut_total"], f"{made}, {faults}"
        return next(decision for decision, count in made.items() if count)

    def compute_over_load(self, bytes_per_s: float) -> float:
        """The ratio of computing time to loading time at a rate, by the server's prefill rate."""
        tokens_per_s = rig.metrics(self.server).value("vllm:nvmeof_prefill_tokens_per_second")
        chunks = PROMPT_TOKENS // CHUNK_TOKENS
        return chunks * CHUNK_TOKENS / tokens_per_s / (chunks * SLOT_BYTES / bytes_per_s)

    def is_faster(self, decision: str, bytes_per_s: float) -> bool:
        """Whether the decision is not clearly the slower one at a rate."""
        advantage = self.compute_over_load(bytes_per_s)
        return (advantage < CLOSE or decision == "load") and (
            advantage > 1 / CLOSE or decision != "load"
        )

    def learn(self, right: Callable[[str], bool]) -> list[str]:
        """Let prompts return until `STEADY` decisions in a row are right; return all decisions.

        A read that a busy machine holds up has the next hits recomputed, so one may be wrong later.
        """
        decisions: list[str] = []
        in_a_row = 0
        while in_a_row < STEADY:
            assert len(decisions) < RETURNS_MAX, decisions
            decisions.append(self.next())
            in_a_row = in_a_row + 1 if right(decisions[-1]) else 0
        return decisions


@pytest.fixture(scope="module")
def returns(
    prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Returns]:
    directory = tmp_path_factory.mktemp("admission")
    faults = rig.Faults(directory / "faults.json")
    faults.set()
    try:
        throttle = Throttle(directory)
        with throttle, rig.start(_spec(directory), "admission") as server:
            throttle.add_group(server.pid)
            yield Returns(server, prompts, throttle, faults)
            assert server.running
    except ThrottleError as error:
        pytest.skip(f"no disk can be throttled here: {error}")


@pytest.mark.parametrize("megabytes_per_s", [200, 10, 50, None])
def test_the_faster_choice_is_made(returns: Returns, megabytes_per_s: int | None) -> None:
    """Run in this order: each speed must replace the rate that was learned at the previous one."""
    rate = megabytes_per_s * 1_000_000 if megabytes_per_s else None
    returns.throttle.limit(read_bytes_per_s=rate)
    for _ in range(LESSONS):
        returns.next()
    decisions = returns.learn(lambda made: returns.is_faster(made, rate or 1_000_000_000))
    print(megabytes_per_s, decisions)


def test_a_pool_that_hangs_costs_one_load_and_is_used_again(returns: Returns) -> None:
    """Before any deadline passes, the load's limit of twice its computing time cuts it off."""
    returns.throttle.limit(read_bytes_per_s=None)
    for _ in range(RETURNS_MAX):
        returns.learn(lambda made: made == "load")
        before = rig.metrics(returns.server)
        returns.faults.set(hang_reads=True)
        if returns.next() == "load":
            break
        returns.faults.set()  # the last load was held up
    decisions = [returns.next() for _ in range(4)]
    assert decisions == 4 * ["recompute"]
    assert rig.grown(returns.server, before, "vllm:nvmeof_loads_cut_total") == 1
    returns.faults.set()
    assert any(returns.next() == "load" for _ in range(30))


def test_chunks_are_stored_on_the_second_lookup_and_written_on_eviction(tmp_path: Path) -> None:
    reference = rig.reference()
    spec = rig.spec(
        tmp_path / "pool", store_threshold=2, write_policy="on_eviction", io_engine="threads"
    )
    few = slice(2)  # less than the CPU tier holds
    with rig.start(spec, "policies") as server:
        assert "engine threads" in server.log()
        assert rig.same(rig.ask(server, reference.prompts[few]), reference.answers[few])
        first = rig.wait_for(server, "figures", rig.has_figures)
        assert first.value("vllm:nvmeof_unstored_chunks_total", reason="below_threshold") > 0
        rig.forget_gpu(server)
        assert rig.same(rig.ask(server, reference.prompts[few]), reference.answers[few])
        now = rig.wait_for(
            server, "stores", lambda m: m.value("vllm:nvmeof_stored_chunks_total") > 0
        )
        assert now.value("vllm:nvmeof_fallbacks") == 0
        assert now.value("vllm:nvmeof_written_chunks_total") == 0, "they stay in the CPU tier"
        for _ in range(3):
            assert rig.same(rig.ask(server, reference.prompts), reference.answers)
        now = rig.wait_for(
            server, "demotions", lambda m: m.value("vllm:nvmeof_written_chunks_total") > 0
        )
        assert now.value("vllm:nvmeof_target_written_bytes_total", target="0") > 0
        assert rig.same(rig.ask(server, reference.prompts), reference.answers)
        assert rig.grown(server, now, "vllm:nvmeof_loaded_tokens_total", source="pool") > 0
        assert rig.metrics(server).value("vllm:nvmeof_failed_chunks_total") == 0
