# SPDX-License-Identifier: Apache-2.0
"""Admission: load the chunks that the pool has, or recompute them, whichever is faster. Pure.

The rule:

    reading time = overhead + bytes of the busiest lane / read rate of that lane
    computing time = tokens / prefill rate at their depth

The depth of a token is the number of tokens that precede it. Attention reads all of them, so the
rate falls with the depth. The `StepMeter` measures the rate, its depth, and the slope.

A lane is what reads queue for: a target. Its bytes include those that other loads have yet to read
there. Peers that read for us take from all lanes until everything has come, each behind what it has
to read for others: the reading time is then when lanes and peers are through together. The pool is
read while reading is faster than computing. Once it is slower, the pool is declined until reading
is faster by the factor `_HYSTERESIS`. While a rate is unknown, everything is loaded. The workers
and the `StepMeter` measure the rates.

The overhead is learned: the time that recent loads and probes took beyond their bytes. A load
disappoints if it was cut off or took longer than computing would have. It raises the overhead to
its own at once, so that the next request of its size is recomputed. Each load and probe that goes
well lowers the overhead by a share of the distance: a half, or the trust in the pool if that is
less. Trust begins at 1; a load that took longer than computing halves it, any other doubles it. So
a pool that hangs now and then, or that is fast only for the few chunks of a probe, is tried less
and less.

A probe reads a few declined chunks in the background (`ReloadScheduler.probe`), so that a recovery
is noticed and no request waits for it. Chunks of the CPU tier are always loaded, because pinned
memory is many times faster than any model, and loading keeps the model free for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_offload.manager.handshake import Capacity, CoreConfig
from vllm_nvmeof_offload.manager.ledger import Ledger, Op
from vllm_nvmeof_offload.protocol import PEER_CHUNKS_MIN, PeerReport

#: Keeps noise from changing the decision with each request.
_HYSTERESIS = 1.25
#: A load disappoints if it took so much longer than computing; less is noise.
_LOSS_S_MAX = 0.05
#: The share of the distance by which a sample moves the overhead, if trust allows it.
_NEWEST = 1 / 2
#: With the least trust about 500 probes, which 125 requests bring, pass between two loads that are
#: cut off after twice their computing time: less than 2 % of all computing.
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
    """load: False recomputes. reading_s: the estimate. limit_s: when to cut the load off. token_s:
    the seconds that computing one of the tokens would take; 0: unknown."""

    load: bool
    reading_s: float = 0.0
    limit_s: float | None = None
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """The decision on a hit behind `local` tokens in GPU memory.

    tokens: to load; declined: found, and not to be loaded; limit_s: when to cut the load off.
    helpers: as in `LoadCommand`. token_s: as in `Decision`.
    """

    local: int
    tokens: int
    declined: int
    limit_s: float | None
    helpers: int | None = None
    token_s: float = 0.0

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

    def __init__(
        self, config: CoreConfig, read_rates: Sequence[float], chunk_bytes: int = 0
    ) -> None:
        """chunk_bytes: of the largest chunk, on one rank."""
        self.automatic = config.admission
        self.read_rates = read_rates
        #: Tokens per second of prefill, as measured, 0: unknown; and the depth of these tokens.
        self.prefill_rate, self.prefill_depth = 0.0, 0.0
        #: Seconds by which each preceding token lengthens the computation of one, as measured.
        self.depth_s = 0.0
        #: Seconds that a step takes without prompts, as measured.
        self.step_s = 0.0
        #: Seconds that a load takes beyond its bytes.
        self.overhead_s = 0.0
        #: The last decision about the pool was to read it, and no load has disappointed since.
        self.reading = True
        self._config = config
        self._trust = 1.0
        self._split_bytes_min = PEER_CHUNKS_MIN * chunk_bytes
        self._of_peers: dict[int, dict[int, PeerReport]] = {}  # by peer and rank
        #: Of each peer that reads for every rank: its number; bytes per second; 0: unknown; and
        #: bytes that it has to read before ours. Those of the slowest rank.
        self._peers: list[tuple[int, float, int]] = []

    @property
    def bytes_per_s(self) -> float:
        """The read rate of all lanes together; 0: unknown."""
        return sum(self.read_rates)

    def heard(self, report: PeerReport) -> None:
        """A rank says what it knows of a peer."""
        self._of_peers.setdefault(report.peer, {})[report.rank] = report
        helping = [
            (number, ranks.values())
            for number, ranks in self._of_peers.items()
            if len(ranks) == self._config.world_size and all(one.usable for one in ranks.values())
        ]
        self._peers = [
            (number, min(one.bytes_per_s for one in ranks), max(one.queued_bytes for one in ranks))
            for number, ranks in helping
        ]

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
        helpers: int | None = None,
        before: int = 0,
    ) -> Decision:
        """Decide whether to read these bytes, behind the queued ones, or to compute the tokens.

        helpers: as in `LoadCommand`. before: tokens that precede these.
        """
        if not self.automatic or not self.prefill_rate or not any(read_bytes):
            return Decision(load=True)
        token_s = self.token_s(tokens, before)
        compute_s = tokens * token_s
        reading_s = self.overhead_s + self._bytes_s(read_bytes, queued_bytes, helpers)
        self.reading = reading_s < (compute_s if self.reading else compute_s / _HYSTERESIS)
        if not self.reading:
            return Decision(False, reading_s)
        return Decision(
            True,
            reading_s,
            max(_LIMIT_S_MIN, _LIMIT_FACTOR * (compute_s + self.step_s)),
            token_s,
        )

    def took(
        self,
        seconds: float,
        read_bytes: Sequence[int],
        queued_bytes: Sequence[int],
        *,
        tokens: int | None,
        missed: bool = False,
        helpers: int | None = None,
        token_s: float = 0.0,
    ) -> None:
        """Learn from a load, or a probe, that read these bytes behind the queued ones.

        tokens: the ones loaded; None: a probe, for which no request waited. missed: some chunks
        had not come by then. helpers: as in `LoadCommand`. token_s: as in the decision; 0: there
        was none, so the mean rate counts.
        """
        rated = self._rated(read_bytes)
        if not token_s and self.prefill_rate:
            token_s = 1 / self.prefill_rate
        if not (missed or rated or (token_s and tokens is not None)):
            return
        bytes_s = self._bytes_s(read_bytes, queued_bytes, helpers)
        sample_s, lost_s = max(0.0, seconds - bytes_s), 0.0
        if tokens is not None and token_s:
            # The reads of others that were queued before are not held against the load.
            waited_s = bytes_s - self._bytes_s(read_bytes, [0] * len(read_bytes), helpers)
            lost_s = seconds - waited_s - tokens * token_s
            missed |= lost_s > _LOSS_S_MAX
        if missed:
            self.overhead_s = max(self.overhead_s, sample_s)
            if self.reading:  # otherwise it was decided on before an earlier one disappointed
                self.reading = False
                self._trust = max(_TRUST_MIN, self._trust / 2)
        elif rated:  # a rate is reported after the load that brought it
            share = min(_NEWEST, self._trust) if sample_s < self.overhead_s else _NEWEST
            self.overhead_s += share * (sample_s - self.overhead_s)
            if tokens is not None:
                changed = self._trust / 2 if lost_s > 0 else self._trust * 2
                self._trust = min(1.0, max(_TRUST_MIN, changed))

    def _rated(self, read_bytes: Sequence[int]) -> bool:
        """Whether the rate of each lane on which bytes are read is known."""
        for own, rate in zip(read_bytes, self.read_rates, strict=True):
            if own and not rate:
                return False
        return True

    def _bytes_s(
        self, read_bytes: Sequence[int], queued_bytes: Sequence[int], helpers: int | None
    ) -> float:
        """Seconds to read these bytes, behind the queued ones, at the rates that are known."""
        lanes = [
            (rate, own + more)
            for own, more, rate in zip(read_bytes, queued_bytes, self.read_rates, strict=True)
            if own and rate
        ]
        peers = [
            (rate, left)
            for number, rate, left in self._peers
            if helpers is None or helpers >> number & 1
        ]
        if not lanes or not peers or sum(read_bytes) < self._split_bytes_min:
            return max((left / rate for rate, left in lanes), default=0.0)
        # As the worker does: a peer whose rate is unknown is tried as if it were one of ours.
        slowest = min(rate for rate, _ in lanes)
        return _together_s(lanes, [(rate or slowest, left) for rate, left in peers])


def _together_s(lanes: Sequence[tuple[float, int]], peers: Sequence[tuple[float, int]]) -> float:
    """Seconds until the lanes' bytes are read, if each peer helps once it has read its own.

    Of each: its rate, and its bytes.
    """
    left, rate, now_s = float(sum(size for _, size in lanes)), sum(one for one, _ in lanes), 0.0
    changes = [(size / one, -one) for one, size in lanes]
    changes += [(size / one, one) for one, size in peers]
    for at_s, change in sorted(changes):
        if rate > 0 and left <= rate * (at_s - now_s):
            break
        left -= rate * (at_s - now_s)
        now_s, rate = at_s, rate + change
    return now_s + (left / rate if rate > 0 else 0.0)


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
        if op.reads:
            op.queued = tuple(self.reading)
            self._count(op, 1)
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
        was_cut = self._limits_s.pop(op, 0.0) == math.inf
        if op.reads and any(op.lanes):
            self._count(op, -1)
            self.learn(op, was_cut=was_cut)

    def learn(self, op: Op, was_cut: bool) -> None:
        """Let admission learn from a load or a probe that has its outcome."""
        assert op.batch is not None
        lanes, chunks, missed = op.batch.timed(self._lane_bytes, len(self.reading), was_cut)
        if not missed and not chunks:
            return  # a load that failed at once has no meaningful time
        tokens = len(op.tokens)
        if self._config.full_attention_only:
            tokens = chunks * self._config.groups[0].tokens_per_chunk
        self._admission.took(
            self._waited_s(op),
            lanes,
            op.queued or [0] * len(self.reading),
            tokens=None if op.probe else tokens,
            missed=missed,
            helpers=op.helpers,
            token_s=op.token_s,
        )

    def _waited_s(self, op: Op) -> float:
        """The part of the seconds since the op's plan in which the model computed no prompts."""
        seconds = self._clock() - op.issued_s
        return max(0.0, seconds - (self._ledger.prompts_s() - op.prompts_s))

    def _count(self, op: Op, sign: int) -> None:
        for lane, count in enumerate(op.lanes):
            self.reading[lane] += sign * count

    def _is_worth_cutting(self, op: Op) -> bool:
        """Over several groups a load brings all of its tokens or none: once one of its reads has
        ended, waiting for the others is better than losing it."""
        if self._config.full_attention_only:
            return True
        assert op.batch is not None
        return op.batch.undecided >= int(np.count_nonzero(op.batch.places >= 0))
