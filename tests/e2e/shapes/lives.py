# SPDX-License-Identifier: Apache-2.0
"""Three engines of one kind of model: without offloading, with it, and after a restart.

Few engines answer many questions, because each takes seconds to start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.e2e.shapes.rig import (
    LOGPROB_TOLERANCE,
    Answer,
    Outcome,
    Plan,
    Request,
    Zygote,
    prompts,
)
from vllm_nvmeof_offload.units import GIB, slot_stride_bytes

FOUND = "external_prefix_cache_hits"
CPU, POOL = "nvmeof_loaded_tokens:cpu", "nvmeof_loaded_tokens:pool"


def _asked(seed: int, lengths: Sequence[int], tokens: int) -> list[Request]:
    return [Request(prompt, tokens) for prompt in prompts(seed, *lengths)]


#: Requests that run at once and do not fit into GPU memory together.
CROWD = _asked(7, [60, 90, 70, 100, 80, 110], 220)
#: Prompts by what becomes of their reads after the restart.
GOOD, LOST, HOLED, WRONG = (
    *(_asked(3, [150, 200, 330], 6), _asked(4, [180], 6)),
    *(_asked(5, [260, 310], 6), _asked(6, [290, 333], 6)),
)
#: The first turn of a conversation; its answer fills chunks.
TALK = _asked(8, [210], 135)[0]
BASE = [TALK, *GOOD, *LOST, *HOLED, *WRONG]
#: Prompts that do not fit into the tiers together.
TOUR = _asked(9, range(240, 444, 17), 2)
#: Slots of staging after the restart.
STAGED_CHUNKS = 40
#: The next turn's own tokens.
_NEXT = [7, 8, 9]

#: Rounds of the engine without offloading and of the first one with it, by name.
CROWDED, COLD, AGAIN, NEXT, TOURED = range(5)
#: Rounds after the restart.
RESTARTED, NEXT_RESTARTED, HOLES, LIES, LOSSES, RESET, TOUR_1, TOUR_2 = range(8)
_FAULTS = {
    HOLES: {"read_eio": 0.5, "seed": 1},
    LIES: {"flip_with_valid_crc": True},
    LOSSES: {"read_eio": True},
    RESET: {},
}


@dataclass(frozen=True)
class Kind:
    """A kind of model, and how it is run.

    boundary_tokens: the distance of boundaries. chunk_bytes: of the largest group. crowd_blocks:
    GPU blocks that are too few for `CROWD`, and enough for the longest request. pool_chunks: slots
    of the pool, enough for `BASE` and too few for `TOUR`. noise: the most by which vLLM's own
    log-probabilities differ when a prompt is computed in other pieces. by_cache: answers are
    compared with those of vLLM's own prefix cache at the same boundary, because of this noise.
    """

    name: str
    boundary_tokens: int
    chunk_bytes: int
    crowd_blocks: int
    pool_chunks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    blocks_per_chunk: int = 2
    noise: float = 0.0
    by_cache: bool = False

    def whole(self, tokens: int) -> int:
        """The last boundary of so many tokens at which something is left to compute."""
        return (tokens - 1) // self.boundary_tokens * self.boundary_tokens

    def same(
        self, answers: Sequence[Answer], reference: Sequence[Answer], *, in_pieces: bool = False
    ) -> bool:
        """Whether the answers are the same.

        in_pieces: prompts may have been computed in other pieces. Answers are then compared up to
        the first two tokens that are nearer than the noise; this must be a third of them or more.
        """
        pairs = list(zip(answers, reference, strict=True))
        noise = LOGPROB_TOLERANCE + self.noise * in_pieces
        lengths = [_same_tokens(answer, expected, noise) for answer, expected in pairs]
        if None in lengths:
            return False
        return 3 * sum(filter(None, lengths)) >= sum(len(a.tokens) for a in answers)

    def plan(self, pool: Path, **extra: Any) -> Plan:
        """An engine that offloads, with memory for all requests."""
        settings = {
            "pool_bytes": self.pool_chunks * slot_stride_bytes(self.chunk_bytes),
            "blocks_per_chunk": self.blocks_per_chunk,
            **self.extra,
            **extra,
        }
        return Plan(self.name, (), self._options(400), pool, settings)

    def _options(self, blocks: int) -> dict[str, Any]:
        room = {"max_model_len": 480, "max_num_batched_tokens": 256, "max_num_seqs": 8}
        return {**room, "num_gpu_blocks_override": blocks, **self.options}

    def staging(self, chunks: int) -> dict[str, Any]:
        """The option that makes staging as large as so many slots."""
        return {"kv_offloading_size": chunks * slot_stride_bytes(self.chunk_bytes) / GIB}


@dataclass(frozen=True)
class Lives:
    """The three engines; rounds are named above."""

    kind: Kind
    plain: Outcome
    first: Outcome
    second: Outcome

    def reference(self, requests: Sequence[Request], turn: int = AGAIN) -> list[Answer]:
        """The answers to some of `BASE` without offloading."""
        return [self.plain.answers[turn][BASE.index(request)] for request in requests]


def live(zygote: Zygote, kind: Kind, pool: Path) -> Lives:
    """Run the three engines."""
    follow = [Request(_NEXT, 6, follows=(COLD, 0))]
    shared = [CROWD, BASE, BASE, follow]
    plan = kind.plan(pool)
    alone = replace(
        plan.plain(), rounds=[*shared, TOUR], at_once=[CROWDED], keeps_cache=kind.by_cache
    )
    if kind.by_cache:
        cache = {
            "enable_prefix_caching": True,
            "prefix_cache_retention_interval": kind.boundary_tokens,
        }
        alone = replace(alone, options={**alone.options, **cache})
    plain = _run(zygote, alone, f"{kind.name}-plain")
    crowded = {"num_gpu_blocks_override": kind.crowd_blocks, **kind.staging(400)}
    first = _run(
        zygote,
        replace(plan, rounds=shared, at_once=[CROWDED], options={**plan.options, **crowded}),
        f"{kind.name}-first",
    )
    answer = plain.answers[COLD][0].tokens
    follow = [Request([*TALK.prompt, *answer, *_NEXT], 6)]
    restarted = replace(
        kind.plan(pool),
        # Backwards, because a tour that begins at its oldest chunks finds all evicted.
        rounds=[GOOD, follow, HOLED, WRONG, LOST, GOOD, TOUR, TOUR[::-1]],
        options={**plan.options, **kind.staging(STAGED_CHUNKS)},
        faults=_FAULTS,
        resets=[RESET],
    )
    return Lives(kind, plain, first, _run(zygote, restarted, f"{kind.name}-second"))


def _run(zygote: Zygote, plan: Plan, name: str) -> Outcome:
    outcome = zygote.run(plan, name)
    assert not outcome.error, outcome.error
    return outcome


def _same_tokens(answer: Answer, reference: Answer, noise: float) -> int | None:
    """How many tokens agree before the first tie; None: an answer differs for another reason."""
    for at, gap in enumerate(reference.gaps):
        if answer.tokens[at] != reference.tokens[at]:
            return at if gap <= 2 * noise else None
        if abs(answer.logprobs[at] - reference.logprobs[at]) > noise:
            return None
    return len(reference.gaps)
