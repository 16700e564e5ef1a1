# SPDX-License-Identifier: Apache-2.0
"""A simulated I/O engine over a `RankStore`, with every kind of fault."""

from __future__ import annotations

import errno
import math
import random
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from vllm_nvmeof_bench.servers.faults import lanes_of

from tests.chunks import number_in
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    OK,
    STALE,
    Outcome,
    OutcomeKind,
    io_error,
)
from vllm_nvmeof_offload.io.base import Completion, ForeignSlab, IoOp, Lanes, Room
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.protocol import (
    OURS,
    ChunkBatch,
    OpKind,
    SlotIdentity,
    Urgency,
    owner_of,
    slot_of,
    target_of,
)
from vllm_nvmeof_offload.units import slot_stride_bytes

from .base import BLOCK_BYTES, CLIENT, STAGING_BASE, Clock, Knobs, Memory, Tag, Violation, crc_of
from .copying import COPY_ERRNO
from .owners import REGION_ERRNOS, SimOpener
from .shapes import APART, own, split_cache, spread
from .store import Claim, RankStore, Record, Superblock

_ANSWERS = (OutcomeKind.IO_ERROR, OutcomeKind.CHECKSUM_MISMATCH, OutcomeKind.STALE)
_FETCHES = (Urgency.URGENT, Urgency.PREFETCH)
#: A target from which a load has read so lately reads half as much for peers at a time.
_LOADS_AGAIN_S = 2.0
_ROUNDING_S = 1e-6  # the machine counts nanoseconds


@dataclass(eq=False)
class _Flight:
    op: IoOp
    slot: int  # in staging
    start_s: float
    data_s: float
    table_s: float
    done_s: float
    fault: str = ""
    data_done: bool = False
    table_done: bool = False
    outcome: Outcome = OK
    deadline_s: float = math.inf  # from the first hand-over of its row
    retried: bool = False  # it is the second try, and there is no third
    unwanted: bool = False  # cancelled: the bytes it reads are discarded
    late: bool = False  # cancelled because of its deadline
    reset: int = 0  # of a superblock: the number of its reset,
    superblock: Superblock | None = None  # which is this,
    void_limit: int = 0  # and voids every generation up to this one
    region: ForeignSlab | None = None  # another engine's, at submission
    payload_crc: int | None = None  # of a read that has checked the header only: as that names it
    damaged: bool = False  # and the payload has another one
    #: It waits for a permit; the times of its events after its start. Empty: it does not.
    held: tuple[float, ...] = ()

    def __str__(self) -> str:
        place = self.op.place
        of = f" of owner {owner_of(place)}" if owner_of(place) else ""
        where = f"slot {slot_of(place)} of target {target_of(place)}{of}"
        return f"{self.op.kind.value} of {where} (io {self.op.token})"


def transfer_bytes(op: IoOp) -> int:
    """What the operation moves: header and payload, in whole pages."""
    return slot_stride_bytes(op.payload_bytes)


def _row(op: IoOp) -> tuple[object, ...]:
    """What a read and its retry have in common."""
    return op.kind, op.place, op.address, op.identity


def identities_of(batch: ChunkBatch) -> list[SlotIdentity]:
    rows = zip(batch.key_list(), batch.generations.tolist(), strict=True)
    return [SlotIdentity(key, generation) for key, generation in rows]


class SimIo:
    """IoEngine over `RankStore` and `Memory`. `expected`: generation → the right payload."""

    name = "simulated"

    def __init__(
        self,
        store: RankStore,
        memory: Memory,
        knobs: Knobs,
        clock: Clock,
        rng: random.Random,
        expected: dict[int, list[Tag]],
        rank: int,
        opener: SimOpener | None = None,
    ) -> None:
        """opener: of other engines' regions; None: there are none."""
        self.store = store
        self.opener = opener
        #: By owner and target, what `attach_region` was given.
        self.regions: dict[tuple[int, int], ForeignSlab] = {}
        self.pages = knobs.pages[rank]  # of a block, by group
        self._rank = rank
        #: Pool slot → the generation that this process has written or adopted.
        self.committed: dict[int, int] = {}
        self._memory = memory
        self._knobs = knobs
        self._clock = clock
        self._rng = rng
        self._expected = expected
        self._slot_bytes = knobs.slot_bytes
        self._flights: dict[int, _Flight] = {}
        self._room = Room(0, 0)
        #: Reads that failed and may be tried again: what they name → their deadline.
        self._retries: dict[tuple[object, ...], float] = {}
        #: By cache slot: what a load has read without a check of the payload, and its deadline. If
        #: others wait for it when the load is cancelled, it is read again.
        self._again: dict[int, tuple[tuple[object, ...], float]] = {}
        self._superblock_retries: dict[int, float] = {}  # the same of superblocks, by target
        self._retried: dict[int, int] = {}  # and the number of the last such reset
        #: The next reset voids every generation up to this one.
        self.void_limit = 0
        #: By target: when the region may be written again; infinite: its lease is lost.
        self._permitted_s = [0.0] * knobs.targets
        self._leases = random.Random(f"leases of {rng.random()}") if knobs.permit_gaps else None
        self._checks = random.Random(f"checks of {rng.random()}") if knobs.copies_check else None
        self._lanes = [ResetRule(target, store.stamp) for target in range(knobs.targets)]
        #: Identities of writes submitted before a reset: they may not start after it.
        self.overtaken: set[int] = set()
        #: Chunks that only one row ever named, of which a peer was asked: the row's deadline.
        self.asked: dict[SlotIdentity, float] = {}
        #: By staging slot of what is read for peers: until when.
        self.serve_until_s: dict[int, float] = {}
        #: By target: when a read that a load waits for was last submitted.
        self._loaded_s = [-math.inf] * knobs.targets
        #: How often a read of our pool has failed for a reason of its own.
        self._failures: Counter[tuple[SlotIdentity, OutcomeKind]] = Counter()
        self.counts: Counter[str] = Counter()
        self.calm = False  # no new faults: the simulation is ending

    # -- IoEngine ---------------------------------------------------------------------

    @property
    def stamp(self) -> Stamp:
        return self.store.stamp

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        stamps = self.store.begin_reset(tag, named)
        for lane in self._lanes:
            lane.began(*stamps)
        self.committed.clear()
        return stamps

    def save_sessions(self, content: bytes) -> None:
        self.store.sessions = content

    def attach(self) -> Lanes:
        return lanes_of(self)

    def room(self) -> Room:
        room = max(0, self._knobs.engine_depth - len(self._flights))
        if not self.calm and self._rng.random() < self._knobs.busy:
            room = 0
        self.counts["io_busy"] += not room
        self._room = Room(room, room)
        return self._room

    def submit(self, ops: Sequence[IoOp]) -> None:
        if ops[0].kind is not OpKind.RESET and len(ops) > self._room.reads:
            raise Violation("14", f"{len(ops)} operations for {self._room}")
        classes = [Urgency.SERVE if self._is_serve(op) else op.urgency for op in ops]
        if classes != sorted(classes):
            raise Violation("22", f"{classes} is no order")
        for op in ops:
            self._accept(op)

    def _slot_of(self, op: IoOp) -> int:
        """In staging."""
        return (op.address - STAGING_BASE) % APART // self._slot_bytes

    def _is_serve(self, op: IoOp) -> bool:
        return op.kind is not OpKind.RESET and self._slot_of(op) >= self._knobs.first_serve_slot

    def reads_into(self, slot: int) -> bool:
        """Whether something here may still write into this staging slot."""
        return any(flight.slot == slot for flight in self._flights.values())

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        now = self._clock()
        withdrawn = []
        for token in tokens:
            flight = self._flights[token]
            if flight.start_s > now and flight.op.kind is not OpKind.RESET:
                self._memory.watches.end(self._flights.pop(token))
                withdrawn.append(token)
            flight.unwanted = True
            flight.late = flight.deadline_s <= now
            self.counts["io_late"] += flight.late
            if flight.op.kind is OpKind.RESET:
                self._lane(flight.op).given_up()
                self.counts["io_reset_without_a_target"] += 1
        self.counts["io_cancelled"] += len(withdrawn)
        return withdrawn

    def poll(self) -> list[Completion]:
        self.advance()
        now = self._clock()
        completions: list[Completion] = []
        flights = list(self._flights.values())
        self._rng.shuffle(flights)
        for flight in flights:
            if flight.done_s > now or self._rng.random() > 0.9:
                continue
            token = flight.op.token
            del self._flights[token]
            self._memory.watches.end(flight)
            if flight.op.kind is OpKind.RESET:
                self._superblock_ends(flight)
            elif flight.late or (flight.unwanted and flight.op.kind is OpKind.WRITE):
                flight.outcome = CANCELLED
            else:
                self._finish(flight)
            crc = flight.payload_crc if flight.outcome.ok else None
            completions.append(Completion(token, flight.outcome, payload_crc=crc))
        return completions

    def attach_region(self, owner: int, target: int, region: ForeignSlab) -> None:
        self.regions[owner, target] = region

    def detach_region(self, owner: int, target: int) -> None:
        self.regions.pop((owner, target), None)

    def fileno(self) -> int:
        return -1

    def close(self, timeout_s: float = 5.0) -> bool:
        return not self._flights

    # -- progress ---------------------------------------------------------------------

    @property
    def stuck(self) -> int:
        """The operations that are never released."""
        return sum(math.isinf(f.done_s) for f in self._flights.values())

    def advance(self) -> None:
        now = self._clock()
        self._renew_permits()
        for flight in self._flights.values():
            kind = flight.op.kind
            if not flight.data_done and flight.data_s <= now:
                flight.data_done = True
                if flight.op.is_read:
                    self._read(flight)
                elif kind is OpKind.WRITE:
                    self._write(flight)
                else:
                    self._put_superblock(flight)
            if not flight.table_done and flight.table_s <= now and kind is OpKind.WRITE:
                flight.table_done = True
                self._enter(flight)

    def _renew_permits(self) -> None:
        """Let permits run out now and then, and some leases be lost; start what waited."""
        now, rng, knobs = self._clock(), self._leases, self._knobs
        if rng is None:
            return
        for target, until_s in enumerate(self._permitted_s):
            if self.calm:
                self._permitted_s[target] = until_s if math.isinf(until_s) else 0.0
            elif until_s <= now and rng.random() < knobs.permit_gaps:
                gap_s = rng.choice((0.01, 0.3, 3.0, 10.0))
                lost = rng.random() < knobs.permit_lost
                self._permitted_s[target] = math.inf if lost else now + gap_s
                self.counts["permits_lost" if lost else "permits_run_out"] += 1
        for flight in self._flights.values():
            if flight.held and math.isinf(self._permitted_s[self._target(flight.op)]):
                reset = flight.op.kind is OpKind.RESET
                flight.outcome = io_error(errno.ENODEV) if reset else CANCELLED
                flight.held, flight.done_s = (), now
            elif flight.held and self.may_start(flight.op):
                self._start_held(flight)

    def _start_held(self, flight: _Flight) -> None:
        start_s, data_s, table_s, done_s = (self._clock() + span_s for span_s in flight.held)
        flight.start_s, flight.data_s, flight.table_s, flight.done_s = (
            start_s,
            data_s,
            table_s,
            done_s,
        )
        flight.held = ()

    def _hold_back(self, flight: _Flight) -> None:
        """Rule 18: writes start only within the permit."""
        now = self._clock()
        if flight.op.is_read:
            return
        if self.may_start(flight.op):
            if self._permitted_s[self._target(flight.op)] > now:
                raise Violation("18", f"{flight} starts without a permit")
            return
        times = flight.start_s, flight.data_s, flight.table_s, flight.done_s
        flight.held = tuple(one - now for one in times)
        flight.start_s = flight.data_s = flight.table_s = flight.done_s = math.inf
        self.counts[f"held_{flight.op.kind.value}"] += 1

    def may_start(self, op: IoOp) -> bool:
        """The check that the engine's contract demands; mutants break it."""
        return self._permitted_s[self._target(op)] <= self._clock()

    def _target(self, op: IoOp) -> int:
        return target_of(op.place)

    def _number(self, op: IoOp) -> int:
        """Of its slot, in the stores."""
        return number_in(op.place, self._knobs.targets)

    def cancels(self) -> None:
        """The rank received a cancel: a read that was to be tried again may be gone."""
        self._retries.clear()

    def begins(self, batch: ChunkBatch) -> None:
        """A load begins: no read from before goes on into the slots that it fills."""
        for slot, place in zip(batch.cache.tolist(), batch.places.tolist(), strict=True):
            if slot >= 0 <= place:
                self._again.pop(split_cache(slot)[0], None)

    def check(self) -> None:
        """Check after a turn of the pipeline's thread."""
        for flight in self._flights.values():
            if flight.deadline_s <= self._clock() and not flight.unwanted:
                raise Violation("14", f"{flight} is past its deadline and waited for")
        awaited = [flight.op for flight in self._flights.values() if not flight.late]
        writing, resetting = (
            {self._target(op) for op in awaited if op.kind is kind}
            for kind in (OpKind.WRITE, OpKind.RESET)
        )
        for lane in self._lanes:
            lane.check(writing, resetting)

    def crash(self, *, power_cut: bool) -> None:
        """The process is gone; operations that had started may or may not have progressed."""
        self.advance()
        for flight in self._flights.values():
            if flight.held:
                continue  # it has not started
            if flight.op.kind is OpKind.RESET and not flight.data_done and self._rng.random() < 0.5:
                self._put_superblock(flight)
            if flight.op.kind is OpKind.WRITE and self._rng.random() < 0.5:
                if not flight.data_done:
                    flight.data_done = True
                    self._write(flight)
                if not flight.table_done and self._rng.random() < 0.5:
                    flight.table_done = True
                    self._enter(flight)
        if power_cut:
            self.store.power_cut(self._rng)

    # -- one operation ----------------------------------------------------------------

    def _accept(self, op: IoOp) -> None:
        rng, knobs, now = self._rng, self._knobs, self._clock()
        reset = op.kind is OpKind.RESET
        slot = -1 if reset else self._slot_of(op)
        start_s = now + knobs.io_s * rng.choice((0.0, 0.0, rng.random()))
        slow = 4.0 if self._target(op) == knobs.slow_target else 1.0
        done_s = start_s + slow * knobs.io_s * rng.uniform(0.2, 2.0)
        region = self._region_of(op)
        if op.header_only and (op.kind is not OpKind.LOAD or not knobs.copies_check):
            raise Violation("6", f"nobody checks the payload of {op}")
        flight = _Flight(op, slot, start_s, 0.0, 0.0, done_s, region=region)
        # A try that was past its deadline is not made: this is another load of the same chunk.
        self._retries = {row: end_s for row, end_s in self._retries.items() if end_s > now}
        if reset:
            self._begin_superblock(flight)
        elif self._is_serve(op):
            flight.deadline_s = self.serve_until_s[slot]
        else:
            flight.retried = _row(op) in self._retries
            flight.deadline_s = self._deadline_s(op)
        self._draw_fault(flight)
        span = min(flight.done_s, start_s + 10.0) - start_s
        first, second = sorted((rng.random(), rng.random()))
        flight.data_s, flight.table_s = start_s + span * first, start_s + span * second
        if flight.fault in ("error", "region"):
            flight.table_s = math.inf
            flight.data_s = flight.data_s if rng.random() < 0.5 else math.inf
        self._hold_back(flight)
        self._flights[op.token] = flight
        if flight.fault:
            self.counts[f"fault_{'read' if op.is_read else op.kind.value}_{flight.fault}"] += 1
        if reset:
            self._memory.watches.begin(flight, (), ())
            return
        self._check_bounds(flight)
        self._check_stream_slots(flight)
        reading = op.is_read
        cells = [("head", slot), ("slot", slot)]
        if reading:
            self._memory.watches.begin(flight, (), cells)
            return
        if not op.payload_bytes:  # the chunk has no bytes here: the slot still has another's
            self._memory.watches.unproven.pop(("slot", slot), None)
        self._memory.watches.begin(flight, cells[1:], cells[:1])
        self._check_write(flight)

    def _region_of(self, op: IoOp) -> ForeignSlab | None:
        """The files of a read of another engine's chunk: nobody reads before they are open."""
        if owner_of(op.place) == OURS:
            return None
        region = self.regions.get((owner_of(op.place), self._target(op)))
        if region is None:
            raise Violation("20", f"rank {self._rank} reads {op} without that owner's files")
        return region

    def _deadline_s(self, op: IoOp) -> float:
        knobs = self._knobs
        patience_s = knobs.read_deadline_s if op.is_read else knobs.write_deadline_s
        deadline_s = self._clock() + patience_s
        if op.kind is OpKind.LOAD and op.identity in self.asked:
            self.counts["second_tries"] += 1
            deadline_s = self.asked[op.identity]
        again = self._again.pop(self._slot_of(op), None) if op.is_read else None
        if again is not None and again[0] == _row(op) and not op.header_only:
            self.counts["reads_again"] += 1
            deadline_s = again[1]
        return self._retries.pop(_row(op), deadline_s)

    def _check_bounds(self, flight: _Flight) -> None:
        """The machine's bounds on what a target has, without operations that were given up. One
        operation of each kind, and one fetch, may always run."""
        knobs, op = self._knobs, flight.op
        others = [
            other.op
            for other in self._flights.values()
            if other is not flight
            and other.op.kind is not OpKind.RESET
            and not other.late
            and self._target(other.op) == self._target(op)
        ]
        same = [other for other in others if other.is_read == op.is_read]
        most, size_max = knobs.reads_max, knobs.read_bytes_max
        if not op.is_read:
            most, size_max = knobs.writes_max, knobs.write_bytes_max
            if len(same) < len(others):
                size_max = min(size_max, knobs.write_bytes_beside_reads_max)
        most = max(1, most // knobs.targets)
        self._check_bound(flight, same, most, size_max)
        if op.urgency in _FETCHES:
            fetches = [other for other in same if other.urgency in _FETCHES]
            self._check_bound(flight, fetches, most // 2, size_max // 2)
        if self._is_serve(op):
            serves, share = [other for other in same if self._is_serve(other)], knobs.serve_share
            has_loaded = self._has_loaded(self._target(op), same)
            serve_max = knobs.serve_bytes_max // (2 if has_loaded else 1)
            size_max = min(int(share * size_max), serve_max)
            self._check_bound(flight, serves, int(share * most), size_max)
        elif op.is_read and op.urgency is Urgency.DEMAND:
            self._loaded_s[self._target(op)] = self._clock()

    def _has_loaded(self, target: int, reads: Sequence[IoOp]) -> bool:
        """Whether a load reads there, or did so a moment ago. reads: under way there."""
        since_s = self._clock() - self._loaded_s[target]
        loads = (op.urgency is Urgency.DEMAND and not self._is_serve(op) for op in reads)
        return any(loads) or since_s < _LOADS_AGAIN_S - _ROUNDING_S

    def _check_bound(
        self, flight: _Flight, others: Sequence[IoOp], most: int, size_max: int
    ) -> None:
        size = sum(map(transfer_bytes, (flight.op, *others)))
        if others and (len(others) >= most or size > size_max):
            raise Violation(
                "bounds",
                f"{flight} beside {len(others)} of its kind: {size} bytes; at most {most} and "
                f"{size_max} bytes may run",
            )

    def _check_stream_slots(self, flight: _Flight) -> None:
        """A stream slot counts on the share of the target that reads into it, until its release."""
        knobs, target = self._knobs, self._target(flight.op)
        streams = range(knobs.cache_slots, knobs.first_serve_slot)
        held = sum(
            other.slot in streams and self._target(other.op) == target
            for other in self._flights.values()
        )
        most = max(1, knobs.stream_slots // knobs.targets)
        if flight.slot in streams and held > most:
            raise Violation("bounds", f"{flight}: {held} stream slots, at most {most} may be held")

    def _draw_fault(self, flight: _Flight) -> None:
        rng, knobs, op = self._rng, self._knobs, flight.op
        if self.calm:
            return
        flight.done_s = self._hang(flight, self._target(op)) or flight.done_s
        writes = not op.is_read
        if op.kind is OpKind.WRITE and (self._number(op) * 0.618) % 1 < knobs.full_slot:
            flight.fault, flight.outcome = "error", io_error(errno.ENOSPC)
        elif rng.random() < (knobs.write_fails if writes else knobs.read_fails):
            number = rng.choice((errno.EIO, errno.EIO, errno.ENODEV, errno.EINVAL))
            flight.fault, flight.outcome = "error", io_error(number)
        elif owner_of(op.place) and rng.random() < knobs.region_fails:
            flight.fault, flight.outcome = "region", io_error(rng.choice(REGION_ERRNOS))
        elif op.is_read and rng.random() < knobs.read_corrupts:
            flight.fault = "flip"
        elif op.kind is OpKind.WRITE and rng.random() < knobs.write_lies:
            flight.fault = rng.choice(("lost", "torn", "misdirected", "flip", "length"))

    def _hang(self, flight: _Flight, target: int) -> float | None:
        """The time when an operation on this target ends if it hangs; None: it does not hang."""
        rng, knobs = self._rng, self._knobs
        if knobs.hanging_target not in (None, target) or rng.random() >= knobs.hangs:
            return None
        return math.inf if rng.random() < knobs.never else flight.start_s + rng.uniform(0.1, 8.0)

    def _check_write(self, flight: _Flight) -> None:
        """Rules 1 and 5: a write signs the staged bytes with the identity it names."""
        identity = flight.op.identity
        assert identity is not None
        if owner_of(flight.op.place) != OURS:
            raise Violation("19", f"{flight}")
        payload = self._payload(flight)
        if payload != self.payload_of(identity.generation):
            raise Violation("1", f"{flight} signs {payload}, not the payload of {identity}")
        if flight.op.payload_crc not in (None, crc_of(payload)):
            raise Violation("1", f"{flight} is given the CRC of another payload")
        if identity.generation in self.overtaken:
            raise Violation("reset", f"{flight} was submitted before a reset but starts after it")
        self._lane(flight.op).check_write(flight, flight.op.stamp)
        for other in self._flights.values():
            if owner_of(other.op.place) != OURS:
                continue
            same = other is not flight and self._number(other.op) == self._number(flight.op)
            # A cancelled read may meet any bytes; it still owns its buffer.
            # What peers ask for, nobody here protects: what they get is refused.
            unminded = other.late or other.unwanted or self._is_serve(other.op)
            idle_read = other.op.is_read and unminded
            if same and other.op.kind is not OpKind.RESET and not idle_read:
                raise Violation("7", f"{flight} while {other} is under way")

    def _lane(self, op: IoOp) -> ResetRule:
        return self._lanes[self._target(op)]

    def _begin_superblock(self, flight: _Flight) -> None:
        target, now = self._target(flight.op), self._clock()
        same = [f for f in self._flights.values() if self._target(f.op) == target]
        if any(f.op.kind is OpKind.WRITE and not f.late for f in same):
            raise Violation("15", f"{flight} overtakes a write of its lane")
        resets = [f for f in same if f.op.kind is OpKind.RESET]
        if not all(f.late for f in resets):
            raise Violation("15", f"two superblocks of target {target} are waited for")
        flight.superblock, flight.void_limit = self.store.newest_drawn, self.void_limit
        flight.retried = target in self._superblock_retries
        patience_s = self._knobs.write_deadline_s
        flight.deadline_s = self._superblock_retries.pop(target, now + patience_s)
        flight.reset = self._retried[target] if flight.retried else self._lane(flight.op).offered()
        for other in resets:  # it waits for one that hangs, and takes the place of one that waits
            if other.start_s > now:
                other.outcome, other.data_s, other.done_s = CANCELLED, math.inf, now
                other.held = ()
            span_s = flight.done_s - flight.start_s
            flight.start_s = max(flight.start_s, other.done_s)
            flight.done_s = flight.start_s + span_s

    def _put_superblock(self, flight: _Flight) -> None:
        """Make it durable. One that reports an error may have become so, too."""
        assert flight.superblock is not None
        self.store.put_superblock(self._target(flight.op), flight.superblock)
        self.store.void_limit = max(self.store.void_limit, flight.void_limit)

    def _superblock_ends(self, flight: _Flight) -> None:
        target, outcome = self._target(flight.op), flight.outcome
        in_time = not flight.late and flight.deadline_s > self._clock()
        if outcome.retryable and in_time and not flight.retried:
            self._superblock_retries[target] = flight.deadline_s
            self._retried[target] = flight.reset
            return
        self._lane(flight.op).ended(flight.reset, ok=outcome.ok, late=flight.late)
        self.counts["io_late_superblocks"] += outcome.ok and flight.late

    def _write(self, flight: _Flight) -> None:
        op, rng = flight.op, self._rng
        assert op.identity is not None
        assert op.stamp is not None
        payload = tuple(self._payload(flight))
        # A writer that takes the chunk for one of another group.
        length = op.payload_bytes + (BLOCK_BYTES if flight.fault == "length" else 0)
        claim = Claim(op.identity, op.stamp.tag, length)
        record = Record(claim, payload, flight.fault not in ("torn", "flip", "error"))
        if flight.fault in ("torn", "flip") and self._spares_header():
            record = replace(record, signed=payload)
        if flight.fault == "lost":
            return
        if flight.fault == "torn":
            old = self.store.data.get(self._number(op))
            rest = (old.payload if old else ()) + (None,) * len(payload)
            cut = rng.randrange(max(1, len(payload)))
            record = replace(record, payload=payload[:cut] + rest[cut : len(payload)])
        elif record.signed is not None:
            record = record.damaged(header=False)
        number = self._number(op)
        if flight.fault == "misdirected":
            number = rng.randrange(self._knobs.pool_slots)
        self.store.put_data(number, record)

    def _enter(self, flight: _Flight) -> None:
        assert flight.op.identity is not None
        if not flight.data_done:
            raise Violation("5", f"{flight}: table entry before the data")
        assert flight.op.stamp is not None
        if flight.op.client != CLIENT and not self._knobs.owners:
            raise Violation("salt", f"{flight.op} is not written as the client's")
        entry = flight.op.identity, flight.op.stamp.epoch, flight.op.single_copy
        self.store.put_table(self._number(flight.op), entry)
        self.counts["io_single_copies"] += flight.op.single_copy

    def _read(self, flight: _Flight) -> None:
        op = flight.op
        assert op.identity is not None
        record = self._record_at(flight)
        if record is not None and flight.fault in ("flip", "error", "region"):
            header = flight.fault != "flip" or not self._spares_header()
            record = record.damaged(header=header)
        pages = op.payload_bytes // self._knobs.page_bytes
        found = (record.payload if record else ()) + (None,) * pages
        self._memory.slots[flight.slot][:pages] = found[:pages]
        if not flight.outcome.ok:
            return
        assert op.stamp is not None
        wanted = Claim(op.identity, op.stamp.tag, op.payload_bytes)
        checked = wanted._replace(tag=self.tag_of(flight, record))
        header_only = op.header_only and not self._checks_all()
        seen = record.as_signed if header_only and record is not None else record
        flight.outcome = self.verify(seen, checked)
        if not flight.outcome.ok:
            return
        if seen is None or seen != replace(seen, claim=wanted, intact=True):
            raise Violation("6", f"{flight} accepted {seen} as {wanted}")
        if header_only:
            flight.payload_crc = crc_of(seen.payload)
            flight.damaged = seen.payload != found[:pages]
            self._memory.watches.unproven["slot", flight.slot] = flight.payload_crc
            self.counts["unproven_reads"] += 1
            self.counts["damaged_unproven_reads"] += flight.damaged

    def _spares_header(self) -> bool:
        """Draw whether damage spares the header."""
        return self._checks is not None and self._checks.random() < 0.7

    def _checks_all(self) -> bool:
        """Draw whether the engine checks a payload of which the copy would do it."""
        return self._checks is None or self._checks.random() < self._knobs.full_checks

    def _record_at(self, flight: _Flight) -> Record | None:
        number = self._number(flight.op)
        if flight.region is None:
            return self.store.data.get(number)
        assert self.opener is not None
        owner = self.opener.files(flight.region)
        self.counts["reads_of_regions"] += 1
        if number >= owner.ends[self._rank] and flight.outcome.ok:
            flight.outcome = io_error(0)  # the slab was cut short
        return owner.data[self._rank].get(number)

    def payload_of(self, generation: int) -> list[Tag | None]:
        """The pages of a chunk's payload on this rank."""
        tags = self._expected[generation]
        if self._knobs.unequal:
            tags = [own(tag, self._rank, self._knobs) for tag in tags]
        return spread(tags, self.pages)

    def _payload(self, flight: _Flight) -> list[Tag | None]:
        """As many bytes of the slot as the operation has."""
        pages, rest = divmod(flight.op.payload_bytes, self._knobs.page_bytes)
        assert not rest
        return self._memory.slots[flight.slot][:pages]

    def tag_of(self, flight: _Flight, record: Record | None) -> bytes:
        """The share tag that the contract demands: our own at submission; mutants break it."""
        assert flight.op.stamp is not None
        return flight.op.stamp.tag

    def verify(self, record: Record | None, wanted: Claim) -> Outcome:
        """The check that the engine's contract demands; mutants break it."""
        if record is None or not record.intact:
            return CHECKSUM_MISMATCH
        return OK if record.claim == wanted else STALE

    def check_failures(self, batch: ChunkBatch, failures: Sequence[tuple[int, Outcome]]) -> None:
        """Rule 16: what a read from our pool fails of has happened here, to the read and its retry,
        whatever a peer has said."""
        identities = identities_of(batch)
        places, slots = batch.places.tolist(), batch.cache.tolist()
        for row, outcome in failures:
            ours = slots[row] < 0 <= places[row] and owner_of(places[row]) == OURS
            if not ours or outcome.kind not in _ANSWERS or outcome.errno == COPY_ERRNO:
                continue
            times = self._failures[identities[row], outcome.kind]
            if times < (2 if outcome.retryable else 1):
                raise Violation("16", f"{identities[row]} fails with {outcome}, seen {times} times")

    def _finish(self, flight: _Flight) -> None:
        op = flight.op
        if self._is_serve(op):
            return
        if op.is_read and op.identity is not None and not flight.outcome.ok:
            self._failures[op.identity, flight.outcome.kind] += 1
        if op.identity is not None and flight.damaged:  # its copy fails
            self._failures[op.identity, OutcomeKind.CHECKSUM_MISMATCH] += 1
        if flight.payload_crc is not None and flight.slot < self._knobs.cache_slots:
            self._again[flight.slot] = _row(op), flight.deadline_s
        if op.is_read and flight.outcome.retryable and not (flight.unwanted or flight.retried):
            self._retries[_row(op)] = flight.deadline_s
        if op.kind is not OpKind.WRITE or not flight.outcome.ok:
            return
        if not flight.data_done or not flight.table_done:
            raise Violation("5", f"{flight} reported before data and table")
        assert op.identity is not None
        self.committed[self._number(op)] = op.identity.generation


class ResetRule:
    """One lane of one rank: its superblocks that are owed, and the stamp of its writes."""

    def __init__(self, target: int, stamp: Stamp) -> None:
        self._target = target
        self._begun = 0  # resets
        self._not_offered = 0  # superblocks
        self._undecided = 0
        self._named = stamp
        #: Of a write that is submitted now.
        self.stamp = stamp

    def began(self, named: Stamp, unnamed: Stamp) -> None:
        """The rank begins a reset."""
        self._begun += 1
        self._not_offered += 1
        self._undecided += 1
        self._named, self.stamp = named, unnamed

    def offered(self) -> int:
        """The engine got a superblock. Returns the number of its reset."""
        self._not_offered -= 1
        if self._not_offered < 0:
            raise Violation("15", f"a superblock of target {self._target} that no reset asks for")
        return self._begun - self._not_offered

    def ended(self, reset: int, *, ok: bool, late: bool) -> None:
        """The engine has answered, for the last time."""
        if ok and reset == self._begun:
            self.stamp = self._named
        if not late:
            self._undecided -= 1

    def given_up(self) -> None:
        """Its deadline has passed."""
        self._undecided -= 1

    def check(self, running: Container[int], resetting: Container[int]) -> None:
        """Check after a turn of the pipeline. running: targets with a write that is waited for;
        resetting: those with a superblock that is."""
        target = self._target
        if self._not_offered and target not in running and target not in resetting:
            raise Violation("15", f"target {target} has to wait with its superblock for others")

    def check_write(self, what: object, stamp: Stamp | None) -> None:
        """Check a write that is submitted."""
        if self._undecided:
            raise Violation("15", f"{what} passes a superblock of its lane")
        if stamp != self.stamp:
            raise Violation("15", f"{what} carries {stamp}, not {self.stamp}")
