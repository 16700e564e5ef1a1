# SPDX-License-Identifier: Apache-2.0
"""Messages between the manager and the workers.

Commands go manager → workers with a step's metadata and are applied in order. Reports go
workers → manager with a step's output. An *op* is one command; its number is unique in a
process's life and the same on every rank. A command has a batch of chunks, and each rank reports
each row of it: its outcome once, and its release once, when neither the kernel nor the GPU touches
the row's buffers on that rank any more.

A row's fact holds when all ranks have reported it; a failure on any rank is the fact's failure.
All types are plain data in columns: they are pickled inside vLLM's metadata.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import RankGroup


class _Message:
    """Pickled as a call of its class with its fields. A frozen dataclass with slots goes through
    Python code for each object instead, and a step may carry hundreds of ops of one chunk."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


class OpKind(enum.Enum):
    """The command that an op is."""

    STORE = "store"
    LOAD = "load"
    WRITE = "write"
    FETCH = "fetch"
    RESET = "reset"
    ATTACH = "attach"


class Urgency(enum.IntEnum):
    """How urgent an I/O operation is, the most urgent first. The native core has the same one."""

    DEMAND = 0  # a read that a load waits for
    URGENT = 1  # a fetch that goes before other fetches
    SERVE = 2  # a read that a peer has asked for
    PREFETCH = 3
    WRITE = 4


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """The required content of a slot; every copy, read and write names it."""

    key: bytes
    generation: int


#: The member of a place or cache slot in which every rank has its part of the chunk. Ranks with
#: equal bytes of a group form a set (`RankGroup.set_size`). What is in a place or cache slot with
#: member m is the only copy in each set, and the set's rank m has it.
EVERY_MEMBER = 255
NOWHERE = -1
#: Target, member and owner of a place.
_TARGET_SHIFT, _MEMBER_SHIFT, _OWNER_SHIFT = 32, 40, 48
#: The owner of this engine's own places. Others are numbered by the follower, which reads what
#: other engines have on the same targets.
OURS = 0
#: A load of fewer chunks stays whole: no peer reads for it, because so few seldom win back the time
#: that a peer takes to answer.
PEER_CHUNKS_MIN = 4
#: The default of the key `ahead_cache_share`.
AHEAD_CACHE_SHARE = 0.5
#: Member + 1 of a cache slot; 0: every member.
_CACHE_SHIFT = 24
#: Rows of cache slots that the column `cache` can name.
CACHE_ROWS_MAX = 1 << _CACHE_SHIFT


def place_of(target: int, slot: int, member: int = EVERY_MEMBER) -> int:
    """Where a chunk is in our pool: owner 15 bits (`OURS`), member 8, target 8, slot 32."""
    return member << _MEMBER_SHIFT | target << _TARGET_SHIFT | slot


def places_of(
    target: int, slots: npt.NDArray[np.int64], members: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The places of many chunks on one target."""
    return place_of(target, 0, 0) | members << _MEMBER_SHIFT | slots


def member_of(place: int) -> int:
    return place >> _MEMBER_SHIFT & 0xFF


def members_of(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The members of places, none of which is `NOWHERE`."""
    return places >> _MEMBER_SHIFT & 0xFF


def cache_slot(row: int, member: int = EVERY_MEMBER) -> int:
    """What the column `cache` says of a member's slot in a row of the CPU tier."""
    return row if member == EVERY_MEMBER else member + 1 << _CACHE_SHIFT | row


def row_of(cache: int) -> int:
    return cache & CACHE_ROWS_MAX - 1


def cache_member(cache: int) -> int:
    return (cache >> _CACHE_SHIFT) - 1 & 0xFF


def owner_of(place: int) -> int:
    return place >> _OWNER_SHIFT


def owners_of(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The owners of places, none of which is `NOWHERE`."""
    return places >> _OWNER_SHIFT


def owned_by(owner: int, place: int) -> int:
    """The same place in the regions of another owner."""
    return owner << _OWNER_SHIFT | place


def target_of(place: int) -> int:
    return place >> _TARGET_SHIFT & 0xFF


def targets_of(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The targets of places, none of which is `NOWHERE`."""
    return places >> _TARGET_SHIFT & 0xFF


def slot_of(place: int) -> int:
    return place & 0xFFFFFFFF


def slots_by_target(slots: int, targets: int) -> tuple[int, ...]:
    """Pool slots on each of the targets: as many on each, and the rest on the first ones."""
    return tuple((slots + targets - 1 - target) // targets for target in range(targets))


def split_keys(keys: bytes, key_bytes: int) -> list[bytes]:
    """The keys, each of `key_bytes`, that are joined in `keys`."""
    return [keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes)]


class ChunkBatch(tuple[bytes, bytes, bytes, bytes, bytes]):
    """Chunks in columns of n rows: the only form in which they cross a process or a thread.

    keys: n keys of equal length, joined. generations: uint64[n]; with the key, the identity that
    every copy, read and write names. cache: int32[n], cache slots (`cache_slot`); -1: none, a
    stream slot. places: int64[n] (`place_of`); -1: no I/O. groups: uint8[n], positions of KV cache
    groups.

    A tuple of the columns' bytes, in this order, because no Python code runs then when it is made,
    pickled and handed to the machine. Arrays are views, made when they are asked for.
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        keys: bytes,
        generations: npt.NDArray[np.uint64],
        cache: npt.NDArray[np.int32],
        places: npt.NDArray[np.int64],
        groups: npt.NDArray[np.uint8],
    ) -> ChunkBatch:
        return cls(
            (keys, generations.tobytes(), cache.tobytes(), places.tobytes(), groups.tobytes())
        )

    @property
    def keys(self) -> bytes:
        return self[0]

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self[1], np.uint64)

    @property
    def cache(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self[2], np.int32)

    @property
    def places(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self[3], np.int64)

    @property
    def groups(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self[4], np.uint8)

    def __len__(self) -> int:
        return len(self[4])

    def key(self, row: int) -> bytes:
        length = len(self.keys) // len(self)
        return self.keys[row * length : (row + 1) * length]

    def key_list(self) -> list[bytes]:
        return split_keys(self.keys, len(self.keys) // max(1, len(self)))

    def identity(self, row: int) -> SlotIdentity:
        return SlotIdentity(self.key(row), int(self.generations[row]))


class StoreCommand(NamedTuple):
    """GPU blocks → cache slots. vLLM's own job has the GPU blocks."""

    op: int
    batch: ChunkBatch


class LoadCommand(NamedTuple):
    """Cache slots or places → GPU blocks, which vLLM's own job has.

    A row without a place is copied from its cache slot. Otherwise the place is read: into the
    cache slot if there is one (the chunk then stays there), else through one of the worker's
    stream slots. A row with neither fails with STALE and touches nothing: its chunk is gone.

    helpers: the peers that may read for it, a bit for each; None: all.
    """

    op: int
    batch: ChunkBatch
    helpers: int | None = None


class WriteCommand(NamedTuple):
    """Cache slot → place, then the table entry."""

    op: int
    batch: ChunkBatch


class FetchCommand(NamedTuple):
    """Place → cache slot, ahead of need."""

    op: int
    batch: ChunkBatch
    urgency: Urgency = Urgency.PREFETCH


@dataclass(frozen=True, slots=True)
class CancelCommand(_Message):
    """Cancel what has not started of op `target_op`; the reports still come.

    indexes: the rows to cancel; None: all of them.
    """

    target_op: int
    indexes: npt.NDArray[np.uint32] | None = None


#: Bytes of a share tag.
TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class ResetCommand(_Message):
    """Everything stored so far is void, on disk too: every superblock gets a new epoch and `tag`.

    tag: the share tag of the chunks that follow. named: they carry that epoch, and a later start
    may adopt them; False: they carry another, which no superblock names.
    """

    op: int
    tag: bytes
    named: bool


@dataclass(frozen=True, slots=True)
class AttachCommand(_Message):
    """Open, read-only, this rank's regions of another engine; reads of its places wait for that.

    engine_index: K of its directories engine-K in our keyspace, on our targets. pool_uuid: of its
    rank 0's superblocks; files there with another one are not its own any more. The report has one
    row.
    """

    op: int
    owner: int
    engine_index: int
    pool_uuid: bytes


@dataclass(frozen=True, slots=True)
class DetachCommand(_Message):
    """Close an owner's files once the last read of them is released. Nothing is reported."""

    owner: int


@dataclass(frozen=True, slots=True, eq=False)
class HintCommand(_Message):
    """Let other engines know which of their chunks this one borrows again and again: advice for
    their eviction, which may be lost. Nothing is reported, and only rank 0 acts on it.

    owners: uint16[n], those of `places`. places: int64[n], where the chunks were borrowed from.
    generations: uint64[n]. counts: uint32[n], how often each was borrowed since the last hint.
    """

    owners: npt.NDArray[np.uint16]
    places: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.places)


Command = (
    WriteCommand
    | FetchCommand
    | CancelCommand
    | ResetCommand
    | AttachCommand
    | DetachCommand
    | HintCommand
)

#: In `OpReport.codes`: no outcome, but the release that follows an earlier one.
RELEASED = 6


@dataclass(frozen=True, slots=True, eq=False)
class OpReport(_Message):
    """One rank's report on some rows of one op: each row's outcome once, and its release once.

    indexes: uint32[m]; None: all rows of the op, none of which this rank has reported before.
    codes: uint8[m], `OutcomeKind` by its order, or `RELEASED`; None: all are OK. errnos: int16[m],
    of the I/O errors. released: uint8[m]; None: neither kernel nor GPU touches these rows'
    buffers any more. seconds: from the command to the last of these outcomes, on this rank.
    A reset has one row.

    crcs: uint32, the CRC-32C of the payload of each row with the outcome OK that stored a chunk in
    a cache slot of every member, of a group of which the set has several members, in the order of
    the report's rows; None: there is no such row. rank: the reporting rank, wherever there are
    CRCs.
    """

    op: int
    indexes: npt.NDArray[np.uint32] | None = None
    codes: npt.NDArray[np.uint8] | None = None
    errnos: npt.NDArray[np.int16] | None = None
    released: npt.NDArray[np.uint8] | None = None
    seconds: float = 0.0
    crcs: npt.NDArray[np.uint32] | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class OpReports(_Message):
    """One rank's reports on several ops: on all rows of each, none of which this rank has reported
    before. All are OK and released, and none has a CRC.

    A step may end hundreds of ops of one chunk, and their reports are columns for the same reason
    as the rows of an op. ops: uint64[n], as bytes. seconds: float32[n], as in `OpReport`.
    """

    ops: bytes
    seconds: bytes

    def each(self) -> Iterator[OpReport]:
        """The same as a report per op."""
        columns = zip(*self.columns(), strict=True)
        return (OpReport(op, seconds=seconds) for op, seconds in columns)

    def columns(self) -> tuple[list[int], list[float]]:
        """Ops, and seconds of each."""
        ops, seconds = np.frombuffer(self.ops, np.uint64), np.frombuffer(self.seconds, np.float32)
        return ops.tolist(), seconds.tolist()


#: Verdicts on a target, from best to worst, as in `targets.health`. The first two are usable.
VERDICTS = ("ok", "degraded", "suspect", "gone")


@dataclass(frozen=True, slots=True)
class VerdictReport(_Message):
    """This rank's verdict on one target. No look-up hits on a target that is not usable."""

    rank: int
    target: int
    verdict: str

    @property
    def usable(self) -> bool:
        return self.verdict in VERDICTS[:2]


@dataclass(frozen=True, slots=True)
class RateReport(_Message):
    """This rank's rates on one busy target, in bytes per second; 0: unknown."""

    rank: int
    target: int
    write_bytes_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LevelReport(_Message):
    """Chunks in this rank's queues and with its I/O engine, for metrics only."""

    rank: int
    stream_slots_used: int = 0
    stream_slot_waiting: int = 0
    read_waiting: int = 0
    prefetch_waiting: int = 0
    write_waiting: int = 0
    reads_in_flight: int = 0
    writes_in_flight: int = 0
    #: By lane (the targets, then the peers): seconds that a read waits; 0: unknown.
    read_waits_s: tuple[float, ...] = ()


Report = OpReport | OpReports | VerdictReport | RateReport | LevelReport


def unpacked(reports: Iterable[Report]) -> Iterator[Report]:
    """The same reports, those on several ops as a report per op."""
    for report in reports:
        if isinstance(report, OpReports):
            yield from report.each()
        else:
            yield report


@dataclass(frozen=True)
class AdoptedEntries:
    """Entries that one rank found in its table at start, in no particular order.

    places: int64[n], generations: uint64[n], keys: n keys of equal length, joined.
    """

    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    generations: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    keys: bytes = b""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def key_bytes(self) -> int:
        return len(self.keys) // len(self) if len(self) else 0

    def key_rows(self) -> npt.NDArray[np.void]:
        """One opaque value per key, which can be compared for equality."""
        return np.frombuffer(self.keys, f"V{max(1, self.key_bytes)}")


@dataclass(frozen=True)
class RankHello:
    """Sent once at start by each rank (vLLM's handshake metadata).

    The manager's capacity is the minimum over the ranks, its index the intersection of their
    adopted entries. pool_slots: on all targets together (`slots_by_target`). groups: by position,
    in the same order on all ranks. Fields after `tag` are for logs and metrics only.
    """

    rank: int
    engine_index: int
    keyspace: str
    cache_slots: int
    pool_slots: int
    target_count: int
    slot_bytes: int
    groups: tuple[RankGroup, ...] = ()
    adopted: AdoptedEntries = field(default_factory=AdoptedEntries)
    tag: bytes = b""  # the share tag of this start; empty: what it writes is adopted by none
    fallbacks: tuple[str, ...] = ()  # parts that run slower than they could, and why
    stream_slots: int = 0
    targets: tuple[str, ...] = ()  # directories
    remote: tuple[bool | None, ...] = ()  # by target: on another machine; None: unknown
    io_engine: str = "none"
    copy_engine: str = "none"
    checksums: str = ""  # how they read memory
    adoption_s: float = 0.0
    volatile: tuple[str, ...] = ()  # why nothing is adopted
    replica: int | None = None
    lease_name: str = ""  # the server's in its group; empty: it is in none
