# SPDX-License-Identifier: Apache-2.0
"""Agents, recorded in or drawn from a trace: the tokens that each turn finds, adds and answers.

An agent's context only grows, by each turn's new tokens and answer. `blocks` identify the parts
that prompts share, for simulations that look up tokens; without `blocks`, agents share nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.traces import Ids, Request, Session, Trace

#: The range of the first prompt of a drawn agent, in tokens.
_FIRST_TOKENS = (2000, 8000)
#: A prompt that adds more tokens than this is a new context, not a turn.
_ADDED_MAX = 4000


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent. By turn, `hit` are the tokens found if everything is kept, `new` the tokens to
    compute, `answer` the tokens of the answer, `think_s` the seconds before the turn, and `blocks`
    the blocks of the prompt. An agent without `start_s` starts at once."""

    hit: tuple[int, ...]
    new: tuple[int, ...]
    answer: tuple[int, ...]
    think_s: tuple[float, ...]
    blocks: tuple[Ids, ...] = ()
    start_s: float | None = None


@dataclass(frozen=True)
class Means:
    """The mean numbers of tokens that a drawn turn adds and answers."""

    added: float
    answer: float


def recorded_agents(trace: Trace, think_scale: float) -> list[Agent]:
    """Return the sessions as recorded, with sub-agents as separate agents. A session without a
    clock finds its own earlier tokens; a session with a clock is one request, which finds the
    tokens of all earlier requests."""
    shared: set[int] = set()
    agents = []
    for session in trace.sessions:
        for one in _alone(session):
            seen = set() if one.start_s is None else shared
            if any(isinstance(step, Request) for step in one.steps):
                agents.append(_recorded(one, seen, trace.block_tokens, think_scale))
    if not agents:
        raise BenchError(f"{trace.name}: no requests are left")
    return agents


def _alone(session: Session) -> Iterator[Session]:
    yield session
    for step in session.steps:
        if not isinstance(step, Request):
            for child in step:
                yield from _alone(child)


def _recorded(session: Session, seen: set[int], block_tokens: int, think_scale: float) -> Agent:
    hits, new, think_s, blocks = [], [], [], []
    requests = [step for step in session.steps if isinstance(step, Request)]
    had = answer = 0  # tokens of the previous prompt and answer; tokens of that answer
    for request in requests:
        ids = request.blocks.tolist()
        known = next((n for n, one in enumerate(ids) if one not in seen), len(ids))
        hit = known * block_tokens
        if had and hit + 2 * block_tokens > had - answer:  # it continues the previous request
            hit = max(hit, had // block_tokens * block_tokens)
        hit = max(0, min(hit, request.input_tokens - 1))
        seen.update(ids)
        hits.append(hit)
        new.append(request.input_tokens - hit)
        answer = request.output_tokens
        had = request.input_tokens + answer
        think_s.append(request.think_s * think_scale)
        blocks.append(request.blocks)
    answers = tuple(one.output_tokens for one in requests)
    start_s = None if session.start_s is None else session.start_s * think_scale
    return Agent(tuple(hits), tuple(new), answers, tuple(think_s), tuple(blocks), start_s)


def drawn_agents(trace: Trace, means: Means, tokens_max: int, count: int, seed: int) -> list[Agent]:
    """Return agents without think times whose contexts grow to `tokens_max`, with turns drawn from
    the trace and scaled to the means."""
    pairs = _turns(trace)
    if not pairs:
        raise BenchError(f"{trace.name}: no session has a second turn to draw from")
    scale = means.added / fmean(added for added, _ in pairs)
    scale_answer = means.answer / fmean(answer for _, answer in pairs)
    rng = random.Random(seed)
    return [
        _drawn(rng, pairs, (scale, scale_answer), tokens_max, trace.block_tokens)
        for _ in range(count)
    ]


def _drawn(
    rng: random.Random,
    pairs: Sequence[tuple[int, int]],
    scales: tuple[float, float],
    tokens_max: int,
    block_tokens: int,
) -> Agent:
    hits, new, answers = [], [], []
    context, added = 0, rng.randint(*_FIRST_TOKENS)
    answer = max(1, round(scales[1] * rng.choice(pairs)[1]))
    while context + added + answer <= tokens_max or not new:
        hit = context // block_tokens * block_tokens
        hits.append(hit)
        new.append(context + added - hit)
        answers.append(answer)
        context += added + answer
        pair = rng.choice(pairs)
        added = max(1, round(scales[0] * pair[0]))
        answer = max(1, round(scales[1] * pair[1]))
    return Agent(tuple(hits), tuple(new), tuple(answers), (0.0,) * len(new))


def _turns(trace: Trace) -> list[tuple[int, int]]:
    """Return the tokens added and answered by each turn that continues the previous one."""
    found = []
    for session in trace.sessions:
        requests = [step for step in session.steps if isinstance(step, Request)]
        for before, after in itertools.pairwise(requests):
            known = len(before.blocks)
            if np.array_equal(after.blocks[:known], before.blocks):
                added = after.input_tokens - before.input_tokens - before.output_tokens
                found.append((min(max(1, added), _ADDED_MAX), after.output_tokens))
    return found


def described(agents: Sequence[Agent]) -> dict[str, float]:
    turns = sum(len(one.new) for one in agents)
    hit = sum(sum(one.hit) for one in agents)
    prompt = hit + sum(sum(one.new) for one in agents)
    answers = sum(sum(one.answer) for one in agents)
    return {
        "agents": len(agents),
        "turns": turns / len(agents),
        "context_tokens": prompt / turns,
        "new_tokens": (prompt - hit) / turns,
        "answer_tokens": answers / turns,
        "hit": hit / prompt,
    }
