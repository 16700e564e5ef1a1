# SPDX-License-Identifier: Apache-2.0
"""Measures how long the model takes for its steps: the prefill rate, and how much longer a token
takes when more tokens precede it. Pure."""

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
#: The same for the slope over the depth, which changes less than the rate: it is the model's own.
_SLOPE_KEPT = 0.98
#: The slope is fitted only if the depths' standard deviation is at least this share of the largest
#: step's tokens.
_DEPTHS_APART = 0.25
#: Of the measured time of a token, at most so much is attributed to the tokens before it.
_SLOPE_SHARE_MAX = 0.9
#: Steps between scheduling and output; more means that outputs were missed.
_AHEAD_MAX = 8


@dataclass(frozen=True, slots=True)
class _Step:
    """One scheduled step."""

    began_s: float
    tokens: int  # of prompts and decodes
    share: float  # of the tokens that belong to prompts
    counts: bool  # for the prefill rate
    depth: float  # tokens that precede one of a prompt, on average


class StepMeter:
    """Measures steps; call `scheduled` and `ended` once for every step.

    A step lasts from its scheduling, or from the end of the step before if that is later (the
    engine may schedule ahead), to the arrival of its output. The prefill rate is that of the
    largest steps, because each step has a fixed cost beside its tokens: the rest of a prompt that
    was loaded is computed in a small step, at a fraction of the rate of the whole prompt.

    Attention reads all tokens before a token, so the end of a long prompt can take several times as
    long as its beginning. `depth_s` is the slope of a line through the largest steps' times per
    token over their depths, fitted by least squares.
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
        self._prefill_tokens = self._prefill_s = self._prefill_depths = 0.0
        self._line = _Line()
        self._slope = 0.0  # the last one that depths far enough apart have shown
        self._largest = 0

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of prefill, over the last of the largest steps; 0: unknown."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    @property
    def depth(self) -> float:
        """Tokens that precede one, on average, in the steps that give the `prefill_rate`."""
        return self._prefill_depths / self._prefill_tokens if self._prefill_tokens else 0.0

    @property
    def depth_s(self) -> float:
        """Seconds by which each preceding token lengthens the computation of one; 0: unknown."""
        if not self.depth:
            return 0.0
        token_s = self._prefill_s / self._prefill_tokens
        return max(0.0, min(self._slope, _SLOPE_SHARE_MAX * token_s / self.depth))

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

    def scheduled(
        self, tokens: Mapping[str, int], computed: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """A step was scheduled. tokens: by request. computed: returns the tokens that precede
        these, by request; called only if the step counts for the prefill rate."""
        prefill = {one: count for one, count in tokens.items() if count > _DECODE_TOKENS_MAX}
        total, prompts = sum(tokens.values()), sum(prefill.values())
        decodes, depth = len(tokens) - len(prefill), 0.0
        counts = prompts >= _DECODE_TOKENS_MAX * max(4, decodes)
        if counts:
            before = computed()
            pairs = sum(count * (before.get(one, 0) + count / 2) for one, count in prefill.items())
            depth = pairs / prompts
        self._ahead.append(_Step(self._clock(), total, prompts / max(1, total), counts, depth))

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
            self._prefill_depths = _KEPT * self._prefill_depths + step.tokens * step.depth
            self._line.add(step.tokens, step.depth, seconds)
            if self._line.is_spread(_DEPTHS_APART * self._largest):
                self._slope = self._line.slope


class _Line:
    """A line through points, by least squares; earlier points count less and less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, weight: float, x: float, y: float) -> None:
        """Add a point. y: times the weight."""
        sample = weight, weight * x, y, weight * x * x, x * y
        known = self._weight, self._x, self._y, self._xx, self._xy
        kept = [_SLOPE_KEPT * old + new for old, new in zip(known, sample, strict=True)]
        self._weight, self._x, self._y, self._xx, self._xy = kept

    @property
    def slope(self) -> float:
        """Call only if `is_spread`."""
        mean_x = self._x / self._weight
        return (self._xy - mean_x * self._y) / (self._xx - mean_x * self._x)

    def is_spread(self, least: float) -> bool:
        """Whether x has a standard deviation of at least this, which is not 0."""
        if not self._weight or not least:
            return False
        mean_x = self._x / self._weight
        return self._xx / self._weight - mean_x * mean_x >= least * least
