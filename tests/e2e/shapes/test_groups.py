# SPDX-License-Identifier: Apache-2.0
"""Models with several KV cache groups, or with one that keeps only windows: the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from vllm_nvmeof_bench.servers.engine import has_cpu_engine

from tests.e2e.shapes.lives import (
    AGAIN,
    BASE,
    COLD,
    CPU,
    CROWDED,
    FOUND,
    GOOD,
    HOLED,
    HOLES,
    LIES,
    LOSSES,
    LOST,
    NEXT,
    NEXT_RESTARTED,
    POOL,
    RESET,
    RESTARTED,
    TALK,
    TOUR_1,
    TOUR_2,
    TOURED,
    WRONG,
    Kind,
    Lives,
    live,
)
from tests.e2e.shapes.rig import Request, Zygote, only_cpu_engine
from vllm_nvmeof_offload.units import KIB

#: Share of what the next turn could find, and of what a resumed request may compute again.
FOUND_MIN, RECOMPUTED_MAX = 0.95, 0.05


@pytest.fixture(scope="class")
def lives(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Lives:
    kind: Kind = request.cls.kind
    pool: Path = tmp_path_factory.mktemp(kind.name) / "pool"
    pool.mkdir()
    return live(zygote, kind, pool)


class Same:
    """The checks of one kind; a subclass names it."""

    kind: ClassVar[Kind]

    def test_cold(self, lives: Lives) -> None:
        assert self.kind.same(lives.first.answers[COLD], lives.plain.answers[COLD])
        assert lives.first.grown(COLD, FOUND) == 0

    def test_from_the_cpu_tier(self, lives: Lives) -> None:
        assert self.kind.same(lives.first.answers[AGAIN], lives.plain.answers[AGAIN])
        assert lives.first.grown(AGAIN, FOUND) == self.findable(BASE)
        assert lives.first.grown(AGAIN, CPU) > 0
        assert lives.first.grown(AGAIN, POOL) == 0

    def test_from_the_pool_after_a_restart(self, lives: Lives) -> None:
        reference = lives.reference(GOOD)
        assert self.kind.same(lives.second.answers[RESTARTED], reference)
        assert lives.second.grown(RESTARTED, FOUND) == self.findable(GOOD)
        assert lives.second.grown(RESTARTED, POOL) > 0
        assert lives.second.grown(RESTARTED, CPU) == 0

    def test_the_next_turn_of_a_conversation(self, lives: Lives) -> None:
        """The prompt and the answer are found, but for what is not a whole chunk."""
        for life, turn in ((lives.first, NEXT), (lives.second, NEXT_RESTARTED)):
            assert self.kind.same(life.answers[turn], lives.plain.answers[NEXT])
            tokens = len(TALK.prompt) + TALK.tokens
            assert life.grown(turn, FOUND) >= FOUND_MIN * self.kind.whole(tokens)

    def test_preempted_while_decoding(self, lives: Lives) -> None:
        """A resumed request computes little again, but for what is behind its last boundary."""
        life = lives.first
        reference = lives.plain.answers[CROWDED]
        assert self.kind.same(life.answers[CROWDED], reference, in_pieces=True)
        assert lives.plain.grown(CROWDED, "num_preemptions") == 0
        preemptions = life.grown(CROWDED, "num_preemptions")
        assert preemptions > 0
        loaded = life.grown(CROWDED, "nvmeof_resumed_tokens:loaded")
        computed = life.grown(CROWDED, "nvmeof_resumed_tokens:recomputed")
        allowed = RECOMPUTED_MAX * (loaded + computed) + preemptions * self.kind.boundary_tokens
        assert loaded > 0
        assert computed <= allowed

    def test_some_reads_fail(self, lives: Lives) -> None:
        assert self.kind.same(
            lives.second.answers[HOLES], lives.reference(HOLED, COLD), in_pieces=True
        )
        assert lives.second.grown(HOLES, "nvmeof_failed_chunks") > 0
        assert lives.second.grown(HOLES, "nvmeof_recomputed_tokens:load_failed") > 0

    def test_all_reads_fail(self, lives: Lives) -> None:
        assert self.kind.same(lives.second.answers[LOSSES], lives.reference(LOST, COLD))
        assert lives.second.grown(LOSSES, "nvmeof_recomputed_tokens:load_failed") > 0

    def test_wrong_bytes_change_the_answer(self, lives: Lives) -> None:
        """The negative control: otherwise equal answers would show nothing."""
        assert not self.kind.same(lives.second.answers[LIES], lives.reference(WRONG))
        assert lives.second.grown(LIES, "nvmeof_failed_chunks") == 0

    def test_after_a_reset_nothing_is_found(self, lives: Lives) -> None:
        assert self.kind.same(lives.second.answers[RESET], lives.reference(GOOD, COLD))
        assert lives.second.grown(RESET, FOUND) == 0

    def test_under_eviction(self, lives: Lives) -> None:
        reference = lives.plain.answers[TOURED]
        for turn, expected in ((TOUR_1, reference), (TOUR_2, reference[::-1])):
            assert self.kind.same(lives.second.answers[turn], expected, in_pieces=True)
        for tier in ("cpu", "pool"):
            evictions = f"nvmeof_evictions:{tier}"
            assert sum(lives.second.grown(turn, evictions) for turn in (TOUR_1, TOUR_2)) > 0
        assert lives.second.grown(TOUR_2, FOUND) > 0

    def findable(self, requests: Sequence[Request]) -> int:
        return sum(self.kind.whole(len(request.prompt)) for request in requests)


class TestGemma(Same):
    # With asynchronous scheduling, vLLM's windows take blocks for the tokens of two steps.
    kind = Kind("gemma", 64, 16 * KIB, 54 if has_cpu_engine() else 66, 90)


@only_cpu_engine
class TestUnevenGemma(Same):
    kind = Kind("gemma_uneven", 64, 32 * KIB, 54, 90)


@only_cpu_engine
class TestGemma4(Same):
    kind = Kind("gemma4", 64, 16 * KIB, 40, 110, blocks_per_chunk=1)


@only_cpu_engine
class TestGptOss(Same):
    kind = Kind("gptoss", 64, 16 * KIB, 30, 48)


@only_cpu_engine
class TestLlama4(Same):
    kind = Kind("llama4", 64, 16 * KIB, 56, 170)


@only_cpu_engine
class TestMistral(Same):
    kind = Kind("mistral", 64, 32 * KIB, 24, 26)


class TestLfm2(Same):
    kind = Kind(
        *("lfm2", 32, 8 * KIB, 30, 90),
        blocks_per_chunk=1,
        noise=0.5,
    )


@only_cpu_engine
class TestQwen3Next(Same):
    kind = Kind(
        *("qwen3next", 64, 128 * KIB, 32, 110),
        options={"dtype": "bfloat16"},
        blocks_per_chunk=1,
        noise=0.1,
        by_cache=True,
    )
