# SPDX-License-Identifier: Apache-2.0
"""Measures how long the model takes for its steps: the prefill rate. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: A request with at most so many tokens in a step decodes; speculative decoding has more than 1.
#: A step counts for the prefill rate if it computes as many tokens of prompts per decode, and four
#: times as many in any case: otherwise decodes, or the step's fixed cost, take most of its time.
_DECODE_TOKENS_MAX = 16
#: Weight of the earlier samples against a new one.
_KEPT = 0.8
#: Steps between scheduling and output; more means that outputs were missed.
_AHEAD_MAX = 8


@dataclass(frozen=True, slots=True)
class _Step:
    """One scheduled step."""

    began_s: float
    tokens: int  # of prompts and decodes
    share: float  # of the tokens that belong to prompts
    counts: bool  # for the prefill rate


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
        #: How long the longest of the last steps took beside its prompts.
        self.decode_s = 0.0
        self._clock = clock
        self._ahead: deque[_Step] = deque(maxlen=_AHEAD_MAX)
        self._ended_s = 0.0
        self._prompts_s = 0.0
        #: Of the steps with at least half the tokens of the largest one; earlier ones count less.
        self._prefill_tokens = self._prefill_s = 0.0
        self._largest = 0

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of prefill, over the last of the largest steps; 0: unknown."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    def prompts_s(self) -> float:
        """Seconds in which the model computed prompts: of each step until now, their share."""
        if not self._ahead:
            return self._prompts_s
        step = self._ahead[0]
        under_way_s = max(0.0, self._clock() - max(step.began_s, self._ended_s))
        return self._prompts_s + step.share * under_way_s

    def clear(self) -> None:
        """Count from zero again; the learned rate stays."""
        self.steps, self.seconds, self.tokens = 0, 0.0, 0

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """A step was scheduled. tokens: by request."""
        prefill = [count for count in tokens.values() if count > _DECODE_TOKENS_MAX]
        total, prompts, decodes = sum(tokens.values()), sum(prefill), len(tokens) - len(prefill)
        counts = prompts >= _DECODE_TOKENS_MAX * max(4, decodes)
        self._ahead.append(_Step(self._clock(), total, prompts / max(1, total), counts))

    def ended(self) -> None:
        """The oldest step's output has come."""
        if not self._ahead:
            return
        step, now_s = self._ahead.popleft(), self._clock()
        seconds = now_s - max(step.began_s, self._ended_s)
        self._ended_s = now_s
        if not step.tokens:
            return
        self.steps += 1
        self.seconds += seconds
        self.tokens += step.tokens
        self._prompts_s += step.share * seconds
        self.decode_s = max((1 - step.share) * seconds, _KEPT * self.decode_s)
        if step.counts and seconds > 0 and 2 * step.tokens >= self._largest:
            self._largest = max(self._largest, step.tokens)
            self._prefill_tokens = _KEPT * self._prefill_tokens + step.tokens
            self._prefill_s = _KEPT * self._prefill_s + seconds
