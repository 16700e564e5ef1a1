# SPDX-License-Identifier: Apache-2.0
"""A trace as both benchmarks that read one see it, whatever file it came from.

A block id stands for its tokens *and all tokens before them*: two prompts share a prefix exactly
as far as their ids are equal. Readers make ids distinct over the whole trace, and refuse a file
in which an id has two different predecessors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["Ids", "Request", "Session", "Step", "Trace", "is_chained"]

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and its answer.

    blocks: int64[n], ids of the prompt's blocks. Of the last one only a part may belong to the
    prompt, and behind it there may be tokens that no id covers. think_s: from the end of the
    answer before to this request. service_s: how long it took where it was recorded; 0: unknown.
    """

    input_tokens: int
    output_tokens: int
    blocks: Ids
    think_s: float = 0.0
    service_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """What one user does, one step after the other. A step is a request, or sessions of
    sub-agents that run side by side while this one waits. start_s: None: when a user is free."""

    name: str
    steps: tuple[Step, ...]
    start_s: float | None = None

    def requests(self) -> Iterator[Request]:
        """All of them, those of sub-agents too."""
        for step in self.steps:
            if isinstance(step, Request):
                yield step
            else:
                for child in step:
                    yield from child.requests()


Step = Request | tuple[Session, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """block_tokens: tokens that one block id stands for."""

    name: str
    block_tokens: int
    sessions: tuple[Session, ...]

    def requests(self) -> Iterator[Request]:
        for session in self.sessions:
            yield from session.requests()

    def capped(self, context_tokens_max: int) -> Trace:
        """Each session ends before its first request that, answer included, is longer than
        that; sessions of which nothing is left are left out."""

        def fits(one: Request) -> bool:
            return one.input_tokens + one.output_tokens <= context_tokens_max

        cut = (_until(session, fits) for session in self.sessions)
        return replace(self, sessions=tuple(one for one in cut if one.steps))

    def scaled(self, block_tokens: int) -> Trace:
        """The same structure with shorter blocks: prompts and answers shrink in proportion."""

        def shrink(tokens: int) -> int:
            return max(1, round(tokens * block_tokens / self.block_tokens))

        def one(step: Step) -> Step:
            if not isinstance(step, Request):
                return tuple(replace(s, steps=tuple(map(one, s.steps))) for s in step)
            return replace(
                step,
                input_tokens=shrink(step.input_tokens),
                output_tokens=shrink(step.output_tokens),
            )

        if block_tokens == self.block_tokens:
            return self
        sessions = tuple(replace(s, steps=tuple(map(one, s.steps))) for s in self.sessions)
        return Trace(self.name, block_tokens, sessions)

    def unique_tokens(self) -> int:
        """The working set: tokens of all distinct blocks."""
        every = [one.blocks for one in self.requests()]
        return len(np.unique(np.concatenate(every))) * self.block_tokens if every else 0


def _until(session: Session, fits: Callable[[Request], bool]) -> Session:
    steps: list[Step] = []
    for step in session.steps:
        if isinstance(step, Request):
            if not fits(step):
                break
            steps.append(step)
        else:
            children = tuple(child for child in (_until(s, fits) for s in step) if child.steps)
            if children:
                steps.append(children)
    return replace(session, steps=tuple(steps))


def is_chained(prompts: Sequence[Ids]) -> bool:
    """Whether every id has the same predecessor wherever it stands."""
    if not prompts:
        return True
    ids = np.concatenate(prompts)
    if not len(ids):
        return True
    before = np.concatenate([np.concatenate(([-1], one[:-1])) for one in prompts if len(one)])
    names, numbers = np.unique(ids, return_inverse=True)
    one_of = np.empty(len(names), np.int64)
    one_of[numbers] = before
    return bool((one_of[numbers] == before).all())
