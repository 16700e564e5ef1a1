# SPDX-License-Identifier: Apache-2.0
"""Admission: load the chunks that the pool has, or recompute them, whichever is faster. Pure.

The rule:

    loading time = slowness * (one step + bytes of the busiest lane / read rate of that lane)
    computing time = tokens / prefill rate at their depth

The depth of a token is the number of tokens that precede it. Attention reads all of them, so the
rate falls with the depth. The `StepMeter` measures the rate, its depth, the slope, and a step.

A lane is what reads queue for: a target. Its bytes include those that other loads have yet to read
there. The workers measure the read rates. While a rate is unknown, everything is loaded.

The slowness is the time that loads take over the one predicted for them, smoothed. It is below 1
where peers read for us, and where loads hide behind the prompts of others. A load that takes longer
than computing, or is cut off, can only raise it, and the latter at once: what it lacked would have
taken longer still. Any other can only lower it: loads that are slower than predicted do no harm
while they are faster than computing. The pool is read while loading is faster than computing. Once
it is slower, the pool is declined until loading is faster by the factor `_HYSTERESIS`.

A probe reads a few declined chunks in the background (`ReloadScheduler.probe`), so that no request
waits to find out that the pool has recovered. A probe that goes well lowers the slowness towards
its minimum: by half of the distance, or by the trust in the pool if that is less. So a load that
only peers would make fast is tried, too. Trust begins at 1; a load that takes longer than computing
halves it, any other doubles it. So a pool that hangs now and then, or that is fast only for the few
chunks of a probe, is tried less and less.

Chunks of the CPU tier are always loaded, because pinned memory is many times faster than any model,
and loading keeps the model free for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_offload.manager.handshake import Capacity, CoreConfig
from vllm_nvmeof_offload.manager.ledger import Ledger, Op

#: Keeps noise from changing the decision with each request.
_HYSTERESIS = 1.25
#: The share of the distance by which a load moves the slowness, and a probe if trust allows it.
_NEWEST = 1 / 2
#: Loads that hide behind prompts for a while will not always do so.
_SLOWNESS_MIN = 0.5
#: The slowness of what did not come and had no prediction.
_SLOWNESS_LOST = 16.0
#: With the least trust hundreds of probes pass between two loads that are cut off after twice their
#: computing time: a few percent of all computing.
_TRUST_MIN = 1 / 512
#: A load is cut off after so many times the time of computing its chunks and of one step, but not
#: before `_LIMIT_S_MIN`. It begins when the step that brings it ends, and a later step's output
#: reports it, so steps that only decode, but slowly, must not make it look slow.
_LIMIT_FACTOR = 2.0
_LIMIT_S_MIN = 0.25


@dataclass(frozen=True, slots=True)
class Find:
    """A look-up's hit. leading_cpu: chunks at its front that the CPU tier has.

    Of the chunks behind these, read_bytes: by lane, to be read. tokens: that reading them saves the
    model. queued_bytes: by lane, that other loads have yet to read.
    """

    leading_cpu: int
    read_bytes: Sequence[int]
    queued_bytes: Sequence[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """load: False recomputes. predicted_s: how long loading takes if its slowness is 1; 0: unknown.
    limit_s: when to cut the load off."""

    load: bool
    predicted_s: float = 0.0
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """The decision on a hit behind `local` tokens in GPU memory.

    tokens: to load; declined: found, and not to be loaded. helpers: as in `LoadCommand`. The others
    are as in `Decision`.
    """

    local: int
    tokens: int
    declined: int
    limit_s: float | None
    helpers: int | None = None
    predicted_s: float = 0.0

    @property
    def decision(self) -> str:
        if not self.declined:
            return "load"
        return "partial" if self.tokens else "recompute"


class Admission:
    """The decision for one core, and its estimates. All bytes are by lane, and of one rank.

    read_rates: bytes per second by lane, of the slowest rank, as measured; 0: unknown. The caller
    updates it.
    """

    def __init__(self, config: CoreConfig, read_rates: Sequence[float]) -> None:
        self.automatic = config.admission
        self.read_rates = read_rates
        #: Tokens per second of prefill, as measured, 0: unknown; and the depth of these tokens.
        self.prefill_rate, self.prefill_depth = 0.0, 0.0
        #: Seconds by which each preceding token lengthens the computation of one, as measured.
        self.depth_s = 0.0
        #: Seconds that a step takes without prompts, as measured.
        self.step_s = 0.0
        #: The time of loads over the one predicted for them, smoothed.
        self.slowness = 1.0
        #: The last decision about the pool was to read it, and no load has disappointed since.
        self.reading = True
        self._trust = 1.0

    @property
    def bytes_per_s(self) -> float:
        """The read rate of all lanes together; 0: unknown."""
        return sum(self.read_rates)

    def token_s(self, tokens: int, before: int) -> float:
        """Seconds per token of computing `tokens` that follow `before` others.

        Call only if the prefill rate is known.
        """
        return 1 / self.prefill_rate + self.depth_s * (before + tokens / 2 - self.prefill_depth)

    def decide(
        self,
        read_bytes: Sequence[int],
        queued_bytes: Sequence[int],
        tokens: int,
        before: int = 0,
    ) -> Decision:
        """Decide whether to read these bytes, behind the queued ones, or to compute the tokens.

        before: tokens that precede these.
        """
        if not self.automatic or not self.prefill_rate or not any(read_bytes):
            return Decision(load=True)
        compute_s = tokens * self.token_s(tokens, before)
        predicted_s = self._bytes_s(read_bytes, queued_bytes)
        if predicted_s:
            predicted_s += self.step_s
            enough_s = compute_s if self.reading else compute_s / _HYSTERESIS
            self.reading = self.slowness * predicted_s < enough_s
        else:
            self.reading = self.slowness <= 1
        if not self.reading:
            return Decision(False, predicted_s)
        limit_s = max(_LIMIT_S_MIN, _LIMIT_FACTOR * (compute_s + self.step_s))
        return Decision(True, predicted_s, limit_s)

    def loaded(self, seconds: float, predicted_s: float, *, missed: bool, late: bool) -> None:
        """Learn from a load. predicted_s: as in the decision. missed: some chunks had not come by
        then. late: it took longer than computing."""
        if not predicted_s and not missed:
            return
        sample = seconds / predicted_s if predicted_s else _SLOWNESS_LOST
        if not (missed or late):
            self._trust = min(1.0, self._trust * 2)
            self._approach(min(sample, self.slowness), _NEWEST)
            return
        self._approach(max(sample, self.slowness), 1.0 if missed else _NEWEST)
        if self.reading:  # otherwise it was decided on before an earlier one disappointed
            self.reading = False
            self._trust = max(_TRUST_MIN, self._trust / 2)

    def probed(self, *, missed: bool) -> None:
        """Learn from a probe. missed: some chunks had not come by then."""
        if missed:
            self._approach(max(_SLOWNESS_LOST, self.slowness), _NEWEST)
        else:
            self._approach(_SLOWNESS_MIN, min(_NEWEST, self._trust))

    def _approach(self, sample: float, share: float) -> None:
        self.slowness += share * (max(sample, _SLOWNESS_MIN) - self.slowness)

    def _bytes_s(self, read_bytes: Sequence[int], queued_bytes: Sequence[int]) -> float:
        """Seconds to read these bytes, behind the queued ones, at the rates that are known; 0: none
        is."""
        lanes = zip(read_bytes, queued_bytes, self.read_rates, strict=True)
        return max(((own + more) / rate for own, more, rate in lanes if own and rate), default=0.0)


class LoadTimes:
    """Times the loads of one core: what they have yet to read, and which are overdue.

    A load takes from its plan until its report is applied, by this clock: the report comes with a
    step's output, and the request runs in the next step. Without the load it would have run in the
    step for which it was planned, and the steps in between are what it waits for. Ranks' own times
    would leave out the steps before and after the copy.

    The time in which the model computes prompts of other requests does not count. This request
    would not be computed then either, and a step that fills the processors slows the load itself.
    """

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        clock: Callable[[], float],
        capacity: Capacity,
        config: CoreConfig,
    ) -> None:
        #: By lane: bytes that loads have yet to read there.
        self.reading = [0] * len(capacity.pool_slots)
        self._limits_s: dict[Op, float] = {}  # of loads under way; infinite: it was cut off
        self._ledger, self._admission, self._clock = ledger, admission, clock
        self._lane_bytes = list(capacity.lane_bytes)
        self._config = config

    def planned(self, op: Op, limit_s: float | None) -> None:
        """The load goes to the workers. limit_s: when it is cut off; None: never."""
        assert op.batch is not None
        op.lanes, op.reads = op.batch.lanes(self._lane_bytes, len(self.reading))
        for lane, count in enumerate(op.lanes):
            self.reading[lane] += count
        if limit_s is not None:
            self._limits_s[op] = limit_s

    def take_overdue(self) -> list[int]:
        """Return the loads to cut off now, each of them once."""
        overdue = [
            op
            for op, limit_s in self._limits_s.items()
            if self._waited_s(op) > limit_s and self._is_worth_cutting(op)
        ]
        self._limits_s.update(dict.fromkeys(overdue, math.inf))
        return [op.number for op in overdue]

    def loaded(self, op: Op) -> None:
        """Take in a load whose outcome every rank has reported."""
        limit_s = self._limits_s.pop(op, None)
        if not op.reads:
            return
        assert op.batch is not None
        for lane, count in enumerate(op.lanes):
            self.reading[lane] -= count
        came, missed = op.batch.came(limit_s == math.inf)
        if came or missed:  # a load that failed at once has no meaningful time
            seconds = self._waited_s(op)
            late = limit_s is not None and seconds > limit_s / _LIMIT_FACTOR
            self._admission.loaded(seconds, op.predicted_s, missed=missed, late=late)

    def probed(self, op: Op) -> None:
        """Take in a probe whose outcome every rank has reported."""
        assert op.batch is not None
        came, missed = op.batch.came(False)
        if came or missed:
            self._admission.probed(missed=missed)

    def _waited_s(self, op: Op) -> float:
        """The part of the seconds since the op's plan in which the model computed no prompts."""
        seconds = self._clock() - op.issued_s
        return max(0.0, seconds - (self._ledger.prompts_s() - op.prompts_s))

    def _is_worth_cutting(self, op: Op) -> bool:
        """Over several groups a load brings all of its tokens or none: once one of its reads has
        ended, waiting for the others is better than losing it."""
        if self._config.full_attention_only:
            return True
        assert op.batch is not None
        return op.batch.undecided >= int(np.count_nonzero(op.batch.places >= 0))
