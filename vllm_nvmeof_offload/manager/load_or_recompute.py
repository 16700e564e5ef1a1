# SPDX-License-Identifier: Apache-2.0
"""Admission: load the pool's chunks or recompute them, whichever is faster. Pure.

    loading time = slowness * (one step + bytes of the busiest lane / read rate of that lane)
    computing time = tokens / prefill rate at their depth

A token's depth is the number of tokens before it. Attention reads all of these, so the rate falls
as the depth grows; `StepMeter` measures both. A lane is a queue of reads, here for a target. Its
bytes include those that other loads will read there. While a rate is unknown, everything is loaded.

The slowness is the smoothed ratio of the actual to the predicted loading time. It is below 1 if
peers read for us, or if loads overlap with other requests' prompts. A load that takes longer than
computing can only raise it. If the load was cut off, it raises the slowness to the full ratio at
once, because the rest would have taken even longer. Any other load can only lower it: a load slower
than predicted does no harm while it is faster than computing. When loading becomes slower than
computing, the pool is declined until loading is faster by the factor `_HYSTERESIS`.

A probe reads a few declined chunks in the background (`ReloadScheduler.probe`), so that no request
has to wait to find out that the pool has recovered. A successful probe lowers the slowness towards
its minimum: by half the distance, or by a share equal to the trust in the pool if that is less.
Loads that are fast only with peers are therefore tried too. Trust starts at 1; a load that takes
longer than computing halves it, and any other load doubles it. A pool that sometimes hangs, or that
is fast only for probes, is therefore tried less and less often.

Chunks in the CPU tier are always loaded: pinned memory is many times faster than any model, and
loading leaves the model free for other requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_offload.manager.handshake import Capacity, CoreConfig
from vllm_nvmeof_offload.manager.ledger import Ledger, Op

_HYSTERESIS = 1.25  # prevents noise from changing the decision with each request
_NEWEST = 1 / 2  # the weight of a load in the slowness, and of a probe if trust allows it
_SLOWNESS_MIN = 0.5  # loads that overlap with prompts for a while will not always do so
_SLOWNESS_LOST = 16.0  # the slowness of a load that did not complete and had no prediction
#: At this trust, hundreds of probes pass between two loads that are cut off after twice their
#: computing time, so such loads cost a few percent of total computing time.
_TRUST_MIN = 1 / 512
#: A load is cut off after this many times the time to compute its chunks and one step, but not
#: before `_LIMIT_S_MIN`. A load begins when the step that carries it ends, and is reported with a
#: later step's output, so slow decode steps must not make the load look slow.
_LIMIT_FACTOR = 2.0
_LIMIT_S_MIN = 0.25


@dataclass(frozen=True, slots=True)
class Find:
    """A look-up's hit. `leading_cpu` is the number of leading chunks that the CPU tier has. For the
    chunks after these, `read_bytes` are the bytes to read, by lane, and `tokens` are those that a
    load covers. `queued_bytes` are the bytes that other loads still have to read, by lane."""

    leading_cpu: int
    read_bytes: Sequence[int]
    queued_bytes: Sequence[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision to load or, if `load` is False, to recompute. `predicted_s` is the loading time at
    a slowness of 1, or 0 if unknown or declined. `limit_s` is the time after which the load is cut
    off. `expected_s` is the loading time at the slowness so far, and `compute_s` the computing
    time."""

    load: bool
    predicted_s: float = 0.0
    limit_s: float | None = None
    expected_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """The decision on a hit that follows `local` tokens in GPU memory: `tokens` are loaded, and
    `declined` are found but not loaded. `helpers` is as in `LoadCommand`."""

    local: int
    tokens: int
    declined: int
    decision: Decision
    helpers: int | None = None

    @property
    def result(self) -> str:
        if not self.declined:
            return "load"
        return "partial" if self.tokens else "recompute"


class Admission:
    """The decisions for one core, and the estimates behind them. Bytes are per rank, by lane.
    `read_rates`, which the caller updates, is the slowest rank's bytes per second; 0 if unknown."""

    def __init__(self, config: CoreConfig, read_rates: Sequence[float]) -> None:
        self.automatic = config.admission
        self.read_rates = read_rates
        self.prefill_rate, self.prefill_depth = 0.0, 0.0  # tokens/s (0 if unknown), their depth
        self.depth_s = 0.0  # the measured seconds that each preceding token adds per token
        self.step_s = 0.0  # the measured seconds that a step takes without prompts
        self.slowness = 1.0
        #: Whether the last decision was to read the pool, and no load has been too slow since.
        self.reading = True
        self._trust = 1.0

    @property
    def bytes_per_s(self) -> float:
        """The read rate of all lanes together, or 0 if unknown."""
        return sum(self.read_rates)

    def token_s(self, tokens: int, before: int) -> float:
        """Return the seconds per token for computing `tokens` after `before` others, at a known
        rate."""
        return 1 / self.prefill_rate + self.depth_s * (before + tokens / 2 - self.prefill_depth)

    def compute_s(self, tokens: int, before: int) -> float:
        """Return the time in seconds to compute `tokens` after `before` others, or 0 if unknown."""
        return tokens * self.token_s(tokens, before) if self.prefill_rate else 0.0

    def decide(
        self,
        read_bytes: Sequence[int],
        queued_bytes: Sequence[int],
        tokens: int,
        before: int = 0,
    ) -> Decision:
        """Decide whether to read these bytes, after the queued ones, or to compute the tokens,
        which follow `before` others."""
        if not self.prefill_rate or not any(read_bytes):
            return Decision(load=True)
        compute_s = self.compute_s(tokens, before)
        predicted_s = self._bytes_s(read_bytes, queued_bytes)
        if predicted_s:
            predicted_s += self.step_s
            enough_s = compute_s if self.reading else compute_s / _HYSTERESIS
            self.reading = self.slowness * predicted_s < enough_s
        else:
            self.reading = self.slowness <= 1
        expected_s = self.slowness * predicted_s
        if not self.reading:
            return Decision(load=False, expected_s=expected_s, compute_s=compute_s)
        limit_s = max(_LIMIT_S_MIN, _LIMIT_FACTOR * (compute_s + self.step_s))
        return Decision(True, predicted_s, limit_s, expected_s, compute_s)

    def loaded(self, seconds: float, predicted_s: float, *, missed: bool, late: bool) -> None:
        """Learn from a load that took `seconds`, with the decision's `predicted_s`. `missed`: some
        chunks had not arrived in time. `late`: the load took longer than computing."""
        if not predicted_s and not missed:
            return
        sample = seconds / predicted_s if predicted_s else _SLOWNESS_LOST
        if not (missed or late):
            self._trust = min(1.0, self._trust * 2)
            self._approach(min(sample, self.slowness), _NEWEST)
            return
        self._approach(max(sample, self.slowness), 1.0 if missed else _NEWEST)
        if self.reading:  # else it was planned before an earlier slow load ended
            self.reading = False
            self._trust = max(_TRUST_MIN, self._trust / 2)

    def probed(self, *, missed: bool) -> None:
        """Learn from a probe. `missed`: some chunks had not arrived in time."""
        if missed:
            self._approach(max(_SLOWNESS_LOST, self.slowness), _NEWEST)
        else:
            self._approach(_SLOWNESS_MIN, min(_NEWEST, self._trust))

    def _approach(self, sample: float, share: float) -> None:
        self.slowness += share * (max(sample, _SLOWNESS_MIN) - self.slowness)

    def _bytes_s(self, read_bytes: Sequence[int], queued_bytes: Sequence[int]) -> float:
        """Return the time in seconds to read these bytes after the queued ones, or 0 if unknown."""
        lanes = zip(read_bytes, queued_bytes, self.read_rates, strict=True)
        return max(((own + more) / rate for own, more, rate in lanes if own and rate), default=0.0)


class LoadTimes:
    """The times of one core's loads, the bytes they still have to read, and the overdue loads.

    A load lasts from its plan until its report is applied, after which the request runs. Without
    the load, the request would have run in the step for which the load was planned. The ranks' own
    times would leave out the steps before and after the copy. Time in which the model computes
    other requests' prompts does not count: this request could not be computed then either, and a
    step that fills the processors slows the load itself.
    """

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        clock: Callable[[], float],
        capacity: Capacity,
        config: CoreConfig,
    ) -> None:
        self.reading = [0] * len(capacity.pool_slots)  # bytes still to be read, by lane
        self._limits_s: dict[Op, float] = {}  # by load in progress; infinite once cut off
        self._ledger, self._admission, self._clock = ledger, admission, clock
        self._lane_bytes = list(capacity.lane_bytes)
        self._config = config

    def planned(self, op: Op, limit_s: float | None) -> None:
        """Record a load that is being sent. It is cut off after `limit_s`; None for never."""
        assert op.batch is not None
        op.lanes, op.reads = op.batch.lanes(self._lane_bytes, len(self.reading))
        for lane, count in enumerate(op.lanes):
            self.reading[lane] += count
        if limit_s is not None:
            self._limits_s[op] = limit_s

    def take_overdue(self) -> list[int]:
        """Return the loads to cut off now, each only once."""
        overdue = [
            op
            for op, limit_s in self._limits_s.items()
            if self._waited_s(op) > limit_s and self._is_worth_cutting(op)
        ]
        self._limits_s.update(dict.fromkeys(overdue, math.inf))
        return [op.number for op in overdue]

    def loaded(self, op: Op) -> tuple[float, bool]:
        """Record a load that has ended. Return its seconds and whether it was cut off."""
        limit_s = self._limits_s.pop(op, None)
        seconds, was_cut_off = self._waited_s(op), limit_s == math.inf
        if not op.reads:
            return seconds, was_cut_off
        assert op.batch is not None
        for lane, count in enumerate(op.lanes):
            self.reading[lane] -= count
        came, missed = op.batch.came(was_cut_off)
        if came or missed:  # a load that failed at once has no meaningful time
            late = limit_s is not None and seconds > limit_s / _LIMIT_FACTOR
            self._admission.loaded(seconds, op.predicted_s, missed=missed, late=late)
        return seconds, was_cut_off

    def probed(self, op: Op) -> None:
        """Record a probe that has ended."""
        assert op.batch is not None
        came, missed = op.batch.came(False)
        if came or missed:
            self._admission.probed(missed=missed)

    def _waited_s(self, op: Op) -> float:
        """Return the seconds that have passed since the op was planned, except those that the model
        spent on prompts."""
        seconds = self._clock() - op.issued_s
        return max(0.0, seconds - (self._ledger.prompts_s() - op.prompts_s))

    def _is_worth_cutting(self, op: Op) -> bool:
        """Return whether the load may be cut off. With several groups, a load yields all of its
        tokens or none, so once a read is complete, waiting is better than losing it."""
        if self._config.full_attention_only:
            return True
        assert op.batch is not None
        return op.batch.undecided >= int(np.count_nonzero(op.batch.places >= 0))
