# SPDX-License-Identifier: Apache-2.0
"""Admission: load the chunks that the pool has, or compute them again, whichever is faster. Pure.

Admission decides per attempt, for the whole length that was found (protocol, rule 10): load
everything, or only the leading chunks that the CPU tier has. Those are always loaded, because
pinned memory is many times faster than any model, and loading keeps the model free for others.

Reading takes an overhead plus the bytes of the busiest target over its read rate, including the
bytes that other loads still read there; computing takes the tokens over the prefill rate. The
rates are measured elsewhere (`target_choice`, `prefill_rate`) or pinned. The overhead is learned
here, from the time by which loads exceeded their bytes. While the model computes others' prompts,
it would not have computed this one, and a step that fills the processors slows the load itself:
that time does not count against loading.

An estimate that no sample confirms loses its weight: after `_HALF_LIFE_S` a read counts as half as
long, so a wrong estimate cannot keep the pool switched off. While no load reads the pool, a few
chunks are read in the background, which brings samples.

A load that was cut off, or took clearly longer than computing would have, is believed at once:
every load is assumed to take that long until a probe succeeds. Each further bad load doubles the
number of probes required; each good one halves it. So a pool that hangs now and then, or that is
fast only for a few chunks, is given up for as long as it costs more than it saves.

A load that takes much longer than computing would is cut off (`limit_s`). A load is sent to the
workers with its step and begins when the work of that step is done; its clock starts then, because
computing could not have started earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.errors import OutcomeKind
from vllm_nvmeof_offload.manager.ledger import Ledger, Op
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.manager.types import AdmissionConfig

#: How many times faster loading must be for the pool to be used again. It is given up as soon as
#: computing is faster, because a server must not be slower than without offloading.
_HYSTERESIS = 1.25
#: A load was bad if it took this many times as long as computing, and lost at least this many
#: seconds; the learned overhead accounts for smaller losses.
_REGRET = 1.25
_REGRET_S_MIN = 0.05
_HALF_LIFE_S = 30.0
#: Weight of the newest overhead.
_NEWEST = 0.5
#: A load is cut off after so many times what computing would take, and not before `_LIMIT_S_MIN`.
_LIMIT_FACTOR = 2.0
_LIMIT_S_MIN = 0.25
#: The most probes that must come whole before a pool is read again that went badly. A request
#: brings up to four, so that at worst one load in 128 requests goes badly again. It is cut off
#: after twice the time of computing, and computed then: 1.6 per cent of all computing.
_CAUTION_MAX = 512


@dataclass(frozen=True, slots=True)
class Find:
    """What a look-up found. chunks: all of it; leading_cpu: those at its front that the CPU tier
    has. pool: by target, chunks to be read there; queued: what other loads have yet to read.
    """

    chunks: int
    leading_cpu: int
    pool: Sequence[int]
    queued: Sequence[int]


@dataclass(frozen=True, slots=True)
class Decision:
    """chunks: how many of those found to load, from the front. limit_s: when to cut it off."""

    chunks: int
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a load from the pool, or a probe, took. read: by target, chunks that came; queued:
    what was to be read before it; missed: chunks that had not come by then.
    """

    seconds: float
    read: Sequence[int]
    queued: Sequence[int]
    missed: int = 0
    probe: bool = False


class Admission:
    """The decision for one core, and the estimates behind it."""

    def __init__(
        self,
        config: AdmissionConfig,
        clock: Callable[[], float],
        slot_bytes: int,
        tokens_per_chunk: int,
    ) -> None:
        #: Tokens per second of prefill; 0: unknown.
        self.prefill_rate = 0.0
        #: Bytes per second by target, of its slowest rank; 0: unknown.
        self.read_rates: Sequence[float] = ()
        #: Whether the last decision about the pool was to read it.
        self.reading = True
        self._config = config
        self._clock = clock
        self._slot_bytes = slot_bytes
        self._tokens_per_chunk = tokens_per_chunk
        self._overhead_s = 0.0
        self._is_new = True  # no overhead was measured yet
        #: What any load is expected to take after one that went badly; 0: nothing is feared.
        self._feared_s = 0.0
        #: How many loads or probes must come whole before that is forgotten,
        self._doubts = 0
        #: how many these were after the first bad one, and how many it will be the next time.
        self._demanded = self._caution = 1
        self._sampled_s: float | None = None
        self._began_s = clock()

    @property
    def automatic(self) -> bool:
        return self._config.automatic

    @property
    def tokens_per_s(self) -> float:
        """The prefill rate that counts; 0: unknown."""
        return self._config.prefill_tokens_per_s or self.prefill_rate

    @property
    def bytes_per_s(self) -> float:
        """The read rate that counts, all targets together; 0: unknown."""
        return self._config.read_bytes_per_s or sum(self.read_rates)

    @property
    def overhead_s(self) -> float:
        """What a load from the pool takes beyond its bytes over the read rate."""
        return max(self._overhead_s, self._feared_s)

    def decide(self, find: Find) -> Decision:
        """How much of what was found to load."""
        tokens_per_s, from_pool = self.tokens_per_s, find.chunks - find.leading_cpu
        if not from_pool or not self._config.automatic or not tokens_per_s:
            return Decision(find.chunks)
        compute_s = from_pool * self._tokens_per_chunk / tokens_per_s
        pool_s = max(self._overhead_s + self._read_s(find.pool, find.queued), self._feared_s)
        pool_s *= self._weight()
        self.reading = pool_s < (compute_s if self.reading else compute_s / _HYSTERESIS)
        if not self.reading:
            return Decision(find.leading_cpu)
        return Decision(find.chunks, max(_LIMIT_S_MIN, _LIMIT_FACTOR * compute_s))

    def took(self, load: Taken) -> None:
        """Learn from a load from the pool, or a probe."""
        alone_s = self._read_s(load.read, [0] * len(load.read))
        waited_s = self._read_s(load.read, load.queued) - alone_s
        went_badly = load.missed > 0 or self._is_regretted(load, load.seconds - waited_s)
        rated = self._config.read_bytes_per_s or all(
            rate or not count for rate, count in zip(self.read_rates, load.read, strict=False)
        )
        if went_badly:
            self._feared_s = max(self._feared_s, load.seconds - waited_s)
            if not self._doubts:  # else it was decided on before the first one of a batch ended
                self._demanded = self._caution
                self._caution = min(2 * self._caution, _CAUTION_MAX)
            self._doubts = self._demanded
        elif not rated or (any(load.read) and not self.bytes_per_s):
            return  # the rate comes behind the load that brought it
        else:
            self._doubts = max(0, self._doubts - 1)
            self._feared_s = self._feared_s if self._doubts else 0.0
            if not load.probe:
                self._caution = max(1, self._caution // 2)
        if not load.missed:
            sample_s = max(0.0, load.seconds - waited_s - alone_s)
            first, self._is_new = self._is_new, False
            self._overhead_s += (1.0 if first else _NEWEST) * (sample_s - self._overhead_s)
        self._sampled_s = self._clock()

    def _is_regretted(self, load: Taken, seconds: float) -> bool:
        """Whether computing would have been clearly faster."""
        tokens_per_s = self.tokens_per_s
        if load.probe or not tokens_per_s:
            return False
        compute_s = sum(load.read) * self._tokens_per_chunk / tokens_per_s
        return seconds > max(_REGRET * compute_s, compute_s + _REGRET_S_MIN)

    def _read_s(self, chunks: Sequence[int], queued: Sequence[int]) -> float:
        """How long reading these chunks takes, behind those, by the rates."""
        pinned = self._config.read_bytes_per_s
        if pinned:
            return (sum(chunks) + sum(queued)) * self._slot_bytes / pinned
        return max(
            (
                (chunks[target] + queued[target]) * self._slot_bytes / rate
                for target, rate in enumerate(self.read_rates)
                if rate and chunks[target]
            ),
            default=0.0,
        )

    def _weight(self) -> float:
        since_s = self._began_s if self._sampled_s is None else self._sampled_s
        return float(0.5 ** ((self._clock() - since_s) / _HALF_LIFE_S))


#: Steps that the engine schedules ahead; more means that outputs were missed.
_AHEAD_MAX = 8


class LoadLimits:
    """`scheduled` and `ended` come in turn, once for every engine step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planned: list[int] = []  # ops since the last step was scheduled
        self._ahead: deque[list[int]] = deque()  # ops by step that is under way
        self._limit_s: dict[int, float] = {}
        self._due_s: dict[int, float] = {}
        self._cut: set[int] = set()

    def planned(self, op: int, limit_s: float) -> None:
        """The next step brings this load to the workers."""
        self._planned.append(op)
        self._limit_s[op] = limit_s

    def scheduled(self) -> None:
        self._ahead.append(self._planned)
        self._planned = []
        if len(self._ahead) > _AHEAD_MAX:
            self._ahead.popleft()

    def ended(self) -> None:
        """The oldest step's output has come."""
        now_s = self._clock()
        for op in self._ahead.popleft() if self._ahead else ():
            if op in self._limit_s:
                self._due_s[op] = now_s + self._limit_s[op]

    def over(self, op: int) -> bool:
        """The load has its outcome; returns whether it was cut off."""
        self._forget(op)
        was_cut = op in self._cut
        self._cut.discard(op)
        return was_cut

    def take_overdue(self) -> list[int]:
        """Loads to cut off now; each is named once."""
        if not self._due_s:
            return []
        now_s = self._clock()
        overdue = [op for op, due_s in self._due_s.items() if now_s > due_s]
        for op in overdue:
            self._forget(op)
        self._cut.update(overdue)
        return overdue

    def _forget(self, op: int) -> None:
        self._limit_s.pop(op, None)
        self._due_s.pop(op, None)


#: What a read that was read to its end may have come to.
_READ = frozenset({OutcomeKind.OK, OutcomeKind.CHECKSUM_MISMATCH, OutcomeKind.STALE})


class LoadTimes:
    """Times the loads of one core, from the plan of each to its end."""

    def __init__(
        self, tiers: Tiers, ledger: Ledger, admission: Admission, clock: Callable[[], float]
    ) -> None:
        self.limits = LoadLimits(clock)
        #: By target: chunks that loads have yet to read there.
        self.reading = [0] * tiers.pool.lanes
        self._tiers, self._ledger = tiers, ledger
        self._admission = admission

    def planned(self, op: Op, limit_s: float | None) -> None:
        """The load goes to the workers. limit_s: what takes longer is cut off; None: nothing is."""
        op.queued = tuple(self.reading)
        for slot in op.pool_slots:
            if slot is not None:
                self.reading[self._tiers.pool.lane(slot)] += 1
        if limit_s is not None:
            self.limits.planned(op.number, limit_s)

    def loaded(self, op: Op) -> None:
        """Take in a load whose outcome every rank has reported."""
        was_cut = self.limits.over(op.number)
        for slot in op.pool_slots:
            if slot is not None:
                self.reading[self._tiers.pool.lane(slot)] -= 1
        if any(slot is not None for slot in op.pool_slots):
            self.learn(op, was_cut)

    def learn(self, op: Op, was_cut: bool) -> None:
        """How long this took that read from the pool, and what came of it by then."""
        read, missed = [0] * len(self.reading), 0
        for index, slot in enumerate(op.pool_slots):
            if slot is None:
                continue
            kind = op.failures[index].kind if index in op.failures else OutcomeKind.OK
            if kind in _READ:
                read[self._tiers.pool.lane(slot)] += 1
            elif kind is OutcomeKind.DEADLINE or (was_cut and kind is OutcomeKind.CANCELLED):
                missed += 1
        if missed or any(read):  # a load that failed at once has no meaningful time
            queued = op.queued or [0] * len(read)
            seconds = max(0.0, op.seconds - (self._ledger.prompts_s() - op.prompts_s))
            self._admission.took(Taken(seconds, read, queued, missed, probe=op.probe))
