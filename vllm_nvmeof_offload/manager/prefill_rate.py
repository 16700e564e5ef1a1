# SPDX-License-Identifier: Apache-2.0
"""A meter of the model's steps: the prefill rate, and how the time per token grows with the number
of tokens that precede it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: A request with at most this many tokens in a step is decoding; speculative decoding uses more
#: than 1. A step counts towards the prefill rate if it has at least this many prompt tokens per
#: decode and four times as many in total; otherwise decodes or the step's fixed cost dominate its
#: time.
_DECODE_TOKENS_MAX = 16
_KEPT = 0.8  # the factor by which the weight of older samples decays with each new sample
#: The minimum standard deviation of depths at which a slope is fitted, as a share of the largest
#: step's tokens.
_DEPTHS_APART = 0.25
_SLOPE_SHARE_MAX = 0.9  # the largest share of a token's time attributed to earlier tokens
_AHEAD_MAX = 8  # the maximum number of steps awaiting output; beyond it, outputs were missed


@dataclass(frozen=True, slots=True)
class _Step:
    began_s: float
    tokens: int  # prompt and decode tokens
    share: float  # the share of tokens that belong to prompts
    counts: bool  # whether it counts towards the prefill rate
    depth: float  # the average number of tokens before a prompt token


class StepMeter:
    """A meter of steps. Call `scheduled` and `ended` once for every step.

    A step lasts from its scheduling, or from the end of the previous step if that is later, to the
    arrival of its output. The prefill rate is that of the largest steps, because each step also has
    a fixed cost: the rest of a loaded prompt is computed in a small step, at a fraction of a whole
    prompt's rate. Attention reads all tokens before a token, so the time per token grows with its
    depth: `depth_s` is the slope of a least-squares line through the largest steps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.steps = 0  # steps with tokens
        self.seconds = 0.0  # the total duration of these steps
        self.tokens = 0  # the tokens in these steps
        self.decode_s = 0.0  # the longest recent step time in excess of the time for prompts
        self._clock = clock
        self._ahead: deque[_Step] = deque(maxlen=_AHEAD_MAX)
        self._ended_s = 0.0
        self._prompts_s = 0.0
        #: Sums over the tokens of steps with at least half the tokens of the largest step: of 1,
        #: depth, seconds per token, depth², and depth times seconds. Older steps weigh less.
        self._sums = [0.0] * 5
        self._slope = 0.0  # the last slope from depths far enough apart
        self._largest = 0

    @property
    def prefill_rate(self) -> float:
        """The prefill rate in recent large steps, in tokens per second; 0 if unknown."""
        tokens, _, seconds, *_ = self._sums
        return tokens / seconds if seconds else 0.0

    @property
    def depth(self) -> float:
        """The average number of tokens before a token, in the steps that `prefill_rate` covers."""
        tokens, depths, *_ = self._sums
        return depths / tokens if tokens else 0.0

    @property
    def depth_s(self) -> float:
        """The time in seconds that each preceding token adds to the time for a token, or 0."""
        _, depths, seconds, *_ = self._sums
        return max(0.0, min(self._slope, _SLOPE_SHARE_MAX * seconds / depths)) if depths else 0.0

    def prompts_s(self) -> float:
        """Return the seconds that the model has spent on prompts, including in the current step."""
        if not self._ahead:
            return self._prompts_s
        step = self._ahead[0]
        under_way_s = max(0.0, self._clock() - max(step.began_s, self._ended_s))
        return self._prompts_s + step.share * under_way_s

    def clear(self) -> None:
        """Restart the counts from zero, but keep the measured rate."""
        self.steps, self.seconds, self.tokens = 0, 0.0, 0

    def scheduled(
        self, tokens: Mapping[str, int], computed: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """Record a scheduled step. `tokens` gives its number of tokens by request. `computed`
        returns the number of tokens before these, by request; it is called only if the step counts
        towards the rate."""
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
        """Record that the oldest step's output has arrived."""
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
            self._count(step.tokens, step.depth, seconds / step.tokens)

    def _count(self, tokens: int, depth: float, token_s: float) -> None:
        sample = 1, depth, token_s, depth * depth, depth * token_s
        pairs = zip(self._sums, sample, strict=True)
        self._sums = [_KEPT * known + tokens * new for known, new in pairs]
        mean_depth, mean_s, squares, products = (one / self._sums[0] for one in self._sums[1:])
        variance = squares - mean_depth * mean_depth
        if variance >= (_DEPTHS_APART * self._largest) ** 2:
            self._slope = (products - mean_depth * mean_s) / variance
