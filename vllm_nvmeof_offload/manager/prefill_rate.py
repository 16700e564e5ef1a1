# SPDX-License-Identifier: Apache-2.0
"""Measures how long the model takes for its steps: the prefill rate. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Steps between scheduling and output; more means that outputs were missed.
_AHEAD_MAX = 8
#: A step counts for the prefill rate if it computes at least so many tokens of prompts …
_PREFILL_TOKENS_MIN = 64
#: … and so many per request that decodes in the same step.
_PREFILL_PER_DECODE_MIN = 16
#: A request with at most so many tokens in a step decodes; speculative decoding has more than 1.
_DECODE_TOKENS_MAX = 16
#: Weight of the earlier samples of a size against a new one.
_KEPT = 0.8


@dataclass(frozen=True, slots=True)
class _Step:
    """One scheduled step."""

    began_s: float
    tokens: int  # of prompts and decodes
    counts: bool  # for the prefill rate
    share: float  # of the tokens that belong to prompts


class StepMeter:
    """Measures steps; call `scheduled` and `ended` once for every step.

    A step lasts from its scheduling, or from the end of the step before if that is later (the
    engine may schedule ahead), to the arrival of its output. The prefill rate is that of the
    largest steps, because each step has a fixed cost beside its tokens: the rest of a prompt that
    was loaded is computed in a small step, at a fraction of the rate of the whole prompt.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.steps = 0  # with tokens
        self.seconds = 0.0  # they took
        self.tokens = 0  # they computed
        self._clock = clock
        self._ahead: deque[_Step] = deque()
        self._ended_s = 0.0
        self._prompts_s = 0.0
        #: By size class, the number of bits of a step's tokens: tokens, and seconds they took.
        self._prefill: dict[int, tuple[float, float]] = {}

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of prefill, over the last of the largest steps; 0: unknown."""
        if not self._prefill:
            return 0.0
        tokens, seconds = self._prefill[max(self._prefill)]
        return tokens / seconds

    def prompts_s(self) -> float:
        """Seconds since the start in which the model computed prompts, including the current step.

        A step that decodes too counts with its prompts' share of the tokens.
        """
        under_way_s = 0.0
        if self._ahead:
            step = self._ahead[0]
            under_way_s = step.share * (self._clock() - max(step.began_s, self._ended_s))
        return self._prompts_s + max(0.0, under_way_s)

    def clear(self) -> None:
        """Count from zero again; the learned rate stays."""
        self.steps, self.seconds, self.tokens = 0, 0.0, 0

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """A step was scheduled. tokens: by request."""
        prefill = [count for count in tokens.values() if count > _DECODE_TOKENS_MAX]
        total, prompts = sum(tokens.values()), sum(prefill)
        decodes = len(tokens) - len(prefill)
        enough = max(_PREFILL_TOKENS_MIN, _PREFILL_PER_DECODE_MIN * decodes)
        share = prompts / total if total else 0.0
        self._ahead.append(_Step(self._clock(), total, prompts >= enough, share))
        if len(self._ahead) > _AHEAD_MAX:
            self._ahead.popleft()

    def ended(self) -> None:
        """The oldest step's output has come."""
        if not self._ahead:
            return
        step = self._ahead.popleft()
        now_s = self._clock()
        seconds = now_s - max(step.began_s, self._ended_s)
        self._ended_s = now_s
        if not step.tokens:
            return
        self.steps += 1
        self.seconds += seconds
        self.tokens += step.tokens
        self._prompts_s += step.share * seconds
        if step.counts and seconds > 0:
            size = step.tokens.bit_length()
            old_tokens, old_s = self._prefill.get(size, (0.0, 0.0))
            self._prefill[size] = (_KEPT * old_tokens + step.tokens, _KEPT * old_s + seconds)
