# SPDX-License-Identifier: Apache-2.0
"""A pipeline over engines that act only when the test makes them.

Orders and faults at random are the simulator's (tests/sim); these are the named cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm_nvmeof_bench.servers.faults import lanes_of

from tests.chunks import Reported, batch_of, begin, number_in, place_in, rows_of
from vllm_nvmeof_offload.copy.base import Descriptors, Direction, Payloads
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.errors import OK, Outcome
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import (
    Completion,
    ForeignSlab,
    IoOp,
    Lanes,
    Room,
)
from vllm_nvmeof_offload.native import Machine, MachineOptions, PythonLanes
from vllm_nvmeof_offload.peers.base import PeerEnd, PeerRead, PeerState
from vllm_nvmeof_offload.pool.format import SlotPlace, Stamp
from vllm_nvmeof_offload.protocol import (
    CancelCommand,
    ChunkBatch,
    FetchCommand,
    LevelReport,
    LoadCommand,
    OpKind,
    OpReport,
    Report,
    SlotIdentity,
    StoreCommand,
    Urgency,
    WriteCommand,
    owned_by,
    target_of,
    unpacked,
)
from vllm_nvmeof_offload.staging import SetMap, StagingMap
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.worker.peer_reads import OwnRegion, Peers, Serve, ServeQueue
from vllm_nvmeof_offload.worker.pipeline import TransferLimits, TransferPipeline
from vllm_nvmeof_offload.worker.regions import RegionFiles

STRIDE = HEADER_BYTES + 4096
_BLOCK_BYTES = STRIDE - HEADER_BYTES
_NO_BYTES: tuple[Group, Sequence[CacheTensor]] = (Group(1, GroupKind.FULL, 16), [])
READ_S, WRITE_S = 5.0, 30.0
TAG = bytes(range(16))
NO_EPOCH = 1 << 32
REGION_SLOTS = 1000  # of each of our regions

#: Number of a chunk, cache slot, pool slot as format 1 numbers it; None: the row has none.
Chunk = tuple[int, int | None, int | None]


def identity(number: int) -> SlotIdentity:
    return SlotIdentity(b"%08d" % number, 1000 + number)


def region_of(target: int) -> bytes:
    """The uuid of ours on this target."""
    return bytes([target]) * 16


def machine_of(lanes: PythonLanes, **fields: Any) -> Machine:
    """A machine with these options; the others have their defaults."""
    options = MachineOptions()
    for field, value in fields.items():
        setattr(options.io if hasattr(options.io, field) else options, field, value)
    return Machine(options, lanes.address)


def whole_blocks() -> CacheGeometry:
    """A group whose chunks are one block each, and one without bytes."""
    tensor = CacheTensor(1 << 30, _BLOCK_BYTES, _BLOCK_BYTES, 1 << 20)
    return CacheGeometry([(Group(0, GroupKind.FULL, 16), [tensor]), _NO_BYTES])


def half_blocks() -> CacheGeometry:
    """The same bytes, in two blocks per chunk."""
    tensor = CacheTensor(1 << 30, _BLOCK_BYTES // 2, _BLOCK_BYTES // 2, 2)
    return CacheGeometry([(Group(0, GroupKind.FULL, 16, 2), [tensor]), _NO_BYTES])


def begin_chunks(
    pipeline: TransferPipeline, command: StoreCommand | LoadCommand, fence: object = "fence"
) -> None:
    """Begin a store or load of whole chunks. Nothing moves yet."""
    begin(pipeline, whole_blocks(), command, range(len(command.batch)), fence)


class FakeCopy:
    makes_checksums = True

    def __init__(self) -> None:
        self.submitted: list[tuple[int, Direction, list[int], object]] = []
        self.passed: set[object] = set()  # fences
        self.asked: list[object] = []  # of these
        self.open: set[int] = set()  # tickets that are not finished
        self._done: list[tuple[int, Outcome]] = []
        self._payloads: dict[int, Payloads | None] = {}

    def record_fence(self) -> object:
        return "fence"

    def has_passed(self, fence: object) -> bool:
        self.asked.append(fence)
        return fence in self.passed

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        ticket = len(self.submitted)
        self.open.add(ticket)
        self._payloads[ticket] = payloads
        self.submitted.append((ticket, direction, pieces[:, 1].tolist(), fence))
        return ticket

    def payloads_of(self, ticket: int) -> Payloads | None:
        return self._payloads[ticket]

    def finish(self, ticket: int, outcome: Outcome = OK, crc: int | None = None) -> None:
        """crc: of each payload that was copied; None: the copy made none."""
        payloads = self._payloads.pop(ticket)
        if crc is not None:
            assert payloads is not None
            payloads.crcs[:] = crc
        self.open.discard(ticket)
        self._done.append((ticket, outcome))

    def poll(self) -> list[tuple[int, Outcome]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None: ...


class FakeIo:
    name = "fake"

    def __init__(self) -> None:
        self.ops: dict[int, IoOp] = {}
        self.started: list[IoOp] = []
        self.cancelled: list[int] = []
        #: Tokens that count as not started, so that a cancel takes them back.
        self.queued: set[int] = set()
        self.room_max = 10_000
        self.regions: dict[tuple[int, int], ForeignSlab] = {}  # by owner and target
        self._completions: list[Completion] = []
        self._resets = 0

    @property
    def stamp(self) -> Stamp:
        return Stamp(0, TAG)

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        """The n-th reset: its superblocks have the epoch n; what none names has NO_EPOCH - n."""
        self._resets += 1
        named_epoch, unnamed = self._resets, NO_EPOCH - self._resets
        return Stamp(named_epoch if named else unnamed, tag), Stamp(unnamed, tag)

    def save_sessions(self, content: bytes) -> None:
        self.saved_sessions = content

    def attach(self) -> Lanes:
        return lanes_of(self)

    @property
    def busy(self) -> bool:
        return not self.room_max

    @busy.setter
    def busy(self, busy: bool) -> None:
        self.room_max = 0 if busy else 10_000

    def room(self) -> Room:
        return Room(self.room_max, self.room_max)

    def submit(self, ops: Sequence[IoOp]) -> None:
        assert all(op.kind is OpKind.RESET for op in ops) or len(ops) <= self.room_max
        self.ops.update({op.token: op for op in ops})
        self.started += ops

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        self.cancelled += tokens
        withdrawn = [token for token in tokens if token in self.queued]
        for token in withdrawn:
            del self.ops[token]
        return withdrawn

    def complete(
        self,
        token: int,
        outcome: Outcome = OK,
        *,
        ended_s: float | None = None,
        crc: int | None = None,
    ) -> None:
        """crc: of a good read whose payload was not checked."""
        del self.ops[token]
        self._completions.append(Completion(token, outcome, ended_s, crc))

    def attach_region(self, owner: int, target: int, region: ForeignSlab) -> None:
        self.regions[owner, target] = region

    def detach_region(self, owner: int, target: int) -> None:
        del self.regions[owner, target]

    def poll(self) -> list[Completion]:
        completions, self._completions = self._completions, []
        return completions

    def fileno(self) -> int:
        return -1

    def close(self, timeout_s: float = 5.0) -> bool:
        return True


class FakePeers:
    """Sessions with peers, of which `lanes` says what is known."""

    def __init__(self, lanes: Sequence[PeerState]) -> None:
        self.lanes = list(lanes)
        self.reads: dict[int, PeerRead] = {}  # not released
        self.asked: list[tuple[int, PeerRead]] = []  # by lane
        self.cancelled: list[int] = []
        self._ends: list[PeerEnd] = []

    def submit(self, lane: int, reads: Sequence[PeerRead]) -> None:
        self.asked += [(lane, read) for read in reads]
        self.reads.update({read.token: read for read in reads})

    def cancel(self, tokens: Sequence[int]) -> None:
        self.cancelled += tokens

    def end(self, token: int, outcome: Outcome = OK, *, released: bool = True) -> None:
        if released:
            del self.reads[token]
        self._ends.append(PeerEnd(token, outcome, released))

    def poll(self) -> list[PeerEnd]:
        ends, self._ends = self._ends, []
        return ends

    def state(self, lane: int) -> PeerState:
        return self.lanes[lane]


class Bench:
    """A pipeline with a clock. A command may have one chunk, or any number of `Chunk`s."""

    def __init__(
        self,
        stream_slots: int = 1,
        cache_slots: int = 4,
        target_count: int = 1,
        members: SetMap | None = None,
        opener: RegionFiles | None = None,
        peers: Sequence[PeerState] = (),
        serve_slots: int = 0,
        **config: float,
    ) -> None:
        """peers: the lanes of these. serve_slots: of what peers may ask for; 0: for nothing."""
        self.now_s = 0.0
        self.peers = FakePeers(peers)
        #: Queue lengths are sent along with the other reports.
        self.levels: list[LevelReport] = []
        self.copy, self.io = FakeCopy(), FakeIo()
        self.landing = FakeCopy()  # of what peers bring, into cache slots
        self._targets = target_count
        self._sizes: dict[int, int] = {}  # op → its rows
        self.queue = ServeQueue(lambda: None)
        own = {region_of(target): OwnRegion(target, REGION_SLOTS) for target in range(target_count)}
        self.staging = StagingMap(
            members.addresses[members.member] if members else 0,
            STRIDE,
            cache_slots,
            stream_slots,
            members,
            serve_slots,
        )
        self.pipeline = TransferPipeline(
            self.staging,
            self.copy,
            self.io,
            TransferLimits(  # type: ignore[arg-type]
                group_bytes=(STRIDE - HEADER_BYTES, 0),
                target_count=target_count,
                read_deadline_s=READ_S,
                write_deadline_s=WRITE_S,
                **config,
            ),
            lambda: self.now_s,
            opener=opener,
            peers=Peers(self.peers, len(peers), self._place, self.landing) if peers else None,
            serve=Serve(self.queue, own) if serve_slots else None,
        )

    def number(self, op: IoOp) -> int:
        """The number of the slot that it reads or writes, as in `place_in`."""
        return number_in(op.place, self._targets)

    def _place(self, place: int) -> SlotPlace:
        return SlotPlace(bytes(16), 0, number_in(place, self._targets))

    def _batch(self, op: int, chunks: Sequence[Chunk]) -> ChunkBatch:
        self._sizes[op] = len(chunks)
        rows = [
            (identity(number), cache, None if pool is None else place_in(pool, self._targets))
            for number, cache, pool in chunks
        ]
        return batch_of(*rows)

    def store_chunks(self, op: int, chunks: Sequence[tuple[int, int]]) -> None:
        """Store chunks: (number, cache slot). Nothing moves yet."""
        batch = self._batch(op, [(number, slot, None) for number, slot in chunks])
        self.begin(StoreCommand(op, batch))

    def store(self, op: int, slot: int, number: int) -> None:
        self.store_chunks(op, [(number, slot)])
        self.pipeline.step()

    def stored(self, op: int, slot: int, number: int) -> None:
        self.store(op, slot, number)
        self.copy.finish(self.copy.submitted[-1][0])
        self.pipeline.step()
        assert self.reports() == [Reported(op)]

    def load(self, op: int, number: int, cache: int | None, pool: int | None) -> None:
        self.load_chunks(op, [(number, cache, pool)])
        self.pipeline.step()

    def load_chunks(self, op: int, chunks: Sequence[Chunk], helpers: int | None = None) -> None:
        """Nothing moves yet."""
        batch = self._batch(op, chunks)
        self.begin(LoadCommand(op, batch, helpers))

    def begin(self, command: StoreCommand | LoadCommand, fence: object = "fence") -> None:
        begin_chunks(self.pipeline, command, fence)

    def load_halves(self, op: int, number: int, pool: int, first: int, count: int) -> None:
        """Load `count` halves of a chunk, from half `first` on, through a stream slot."""
        batch = self._batch(op, [(number, None, pool)])
        begin(
            self.pipeline, half_blocks(), LoadCommand(op, batch), range(count), "fence", first=first
        )
        self.pipeline.step()

    def borrow(self, op: int, owner: int, number: int, pool: int, cache: int | None = None) -> None:
        """Load a chunk from another engine's region. Nothing moves yet."""
        self._sizes[op] = 1
        place = owned_by(owner, place_in(pool, self._targets))
        batch = batch_of((identity(number), cache, place))
        self.begin(LoadCommand(op, batch))

    def stream(self, op: int, pool_slots: Sequence[int], helpers: int | None = None) -> None:
        """Load chunks through stream slots. Nothing moves yet."""
        self.load_chunks(op, [(slot, None, slot) for slot in pool_slots], helpers)

    def asked(self, token: int, pool: int, slot: int | None = None) -> PeerRead:
        """What a peer asks for: a chunk of ours, which has the number of its pool slot.

        slot: the serve slot; None: as the token.
        """
        number, target = divmod(pool, self._targets)
        return PeerRead(
            token,
            self.staging.serve_address + STRIDE * (token if slot is None else slot),
            STRIDE - HEADER_BYTES,
            identity(pool),
            SlotPlace(region_of(target), 0, number),
            TAG,
            self.now_s + READ_S,
        )

    def serve(self, *pools: int) -> None:
        """Let peers ask for these pool slots; each token is the slot's place in the list. Nothing
        moves yet."""
        self.queue.serve([self.asked(token, pool) for token, pool in enumerate(pools)])

    def fetch(self, op: int, number: int, pool: int, cache: int, *, urgent: bool = False) -> None:
        self.fetch_chunks(op, [(number, cache, pool)], urgent=urgent)

    def fetch_chunks(self, op: int, chunks: Sequence[Chunk], *, urgent: bool = False) -> None:
        """Nothing moves yet."""
        urgency = Urgency.URGENT if urgent else Urgency.PREFETCH
        self.pipeline.command(FetchCommand(op, self._batch(op, chunks), urgency))

    def write(self, op: int, number: int, cache: int, pool: int) -> None:
        self.write_chunks(op, [(number, cache, pool)])

    def write_chunks(self, op: int, chunks: Sequence[Chunk]) -> None:
        """Nothing moves yet."""
        self.pipeline.command(WriteCommand(op, self._batch(op, chunks)))

    def cancel(self, op: int, *rows: int) -> None:
        """No rows: all of them."""
        indexes = np.array(rows, np.uint32) if rows else None
        self.pipeline.command(CancelCommand(op, indexes))

    def turn(self, targets: Sequence[int] = (0,), target_count: int = 1) -> bool:
        """End the oldest operation on each of these targets, and all copies; False if none
        ended.
        """
        oldest = {self.number(op) % target_count: op.token for op in reversed(self.io.ops.values())}
        tokens = [oldest[target] for target in targets if target in oldest]
        for token in tokens:
            self.io.complete(token)
        self.pipeline.step()
        tickets = [(engine, one) for engine in (self.landing, self.copy) for one in engine.open]
        for engine, ticket in tickets:
            engine.finish(ticket)
        self.pipeline.step()
        return bool(tokens or tickets)

    def io_done(self, outcome: Outcome = OK) -> None:
        """Complete the oldest operation in flight."""
        self.io.complete(next(iter(self.io.ops)), outcome)
        self.pipeline.step()

    def hang(self, seconds: float = READ_S) -> None:
        """Let so much time pass. By default, what is being read now passes its deadline."""
        self.now_s += seconds
        self.pipeline.step()

    def io_of(self, number: int) -> int:
        """The token of the read or write of a pool slot."""
        ops = [op for op in self.io.ops.values() if op.kind is not OpKind.RESET]
        (token,) = [op.token for op in ops if self.number(op) == number]
        return token

    def superblocks(self) -> dict[int, int]:
        """The token of each superblock that is being written, by target; the newest of each."""
        ops = [op for op in self.io.ops.values() if op.kind is OpKind.RESET]
        return {target_of(op.place): op.token for op in ops}

    def writes(self) -> list[tuple[int, int]]:
        """Pool slot and epoch of each write that has started, in their order."""
        started = [op for op in self.io.started if op.kind is OpKind.WRITE]
        return [(self.number(op), op.stamp.epoch) for op in started if op.stamp is not None]

    def take(self) -> list[Report]:
        """The reports, one per op, except those that ride along."""
        taken = list(unpacked(self.pipeline.take_reports()))
        self.levels += [one for one in taken if isinstance(one, LevelReport)]
        return [one for one in taken if not isinstance(one, LevelReport)]

    def reports(self) -> list[Reported | Report]:
        """The reports, those on ops by row."""
        found: list[Reported | Report] = []
        for one in self.take():
            if isinstance(one, OpReport):
                found += rows_of(one, self._sizes.get(one.op, 1))
            else:
                found.append(one)
        return found

    def idle(self) -> bool:
        """Return whether nothing is left when all reports are taken."""
        self.take()
        return self.pipeline.idle()

    def finished(self) -> list[tuple[int, tuple[tuple[int, Outcome], ...]]]:
        return [(job.op, job.failures) for job in self.pipeline.take_finished()]
