# SPDX-License-Identifier: Apache-2.0
"""Messages between the manager and the workers.

The manager sends commands to the workers with a step's metadata, and the workers apply them in
order. The workers send reports with a step's output. An *op* is one command; its number is unique
within the process and the same on every rank. A command has a batch of chunks. For each row, each
rank reports the outcome once, and the release once, when neither the kernel nor the GPU will touch
the row's buffers on that rank again.

A row's outcome is final when all ranks have reported it; a failure on any rank fails the row.
All types are plain data in columns, because they are pickled inside vLLM's metadata.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import RankGroup


class _Message:
    """A message that is pickled as a call to its class with its fields.

    By default, pickling a frozen dataclass with slots runs Python code for each of the hundreds of
    one-chunk ops in a step.
    """

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


class OpKind(enum.Enum):
    STORE = "store"
    LOAD = "load"
    WRITE = "write"
    FETCH = "fetch"
    RESET = "reset"
    ATTACH = "attach"


class Urgency(enum.IntEnum):
    """The urgency of an I/O operation, most urgent first, as in the native core."""

    DEMAND = 0  # a read for a load
    URGENT = 1  # a fetch that precedes other fetches
    SERVE = 2  # a read for a peer
    PREFETCH = 3
    WRITE = 4


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """The chunk that a slot must hold. Every copy, read and write specifies an identity."""

    key: bytes
    generation: int


#: The member number in a place or cache slot if every rank stores its own part of the chunk. Any
#: other m means that only rank m of each set of equal ranks (`RankGroup.set_size`) stores it.
EVERY_MEMBER = 255
NOWHERE = -1
#: The bit positions of target, member and owner in a place.
_TARGET_SHIFT, _MEMBER_SHIFT, _OWNER_SHIFT = 32, 40, 48
#: The owner number in this engine's places. The follower numbers other engines on these targets.
OURS = 0
#: Peers do not help with loads of fewer chunks, because waiting for a peer's answer would usually
#: take longer than the help saves.
PEER_CHUNKS_MIN = 4
#: The default for the key `ahead_cache_share`.
AHEAD_CACHE_SHARE = 0.5
#: The maximum number of CPU tier rows, because the column `cache` has 24 bits for a row.
CACHE_ROWS_MAX = 1 << 24

#: A place, or an array of places.
_Places = TypeVar("_Places", int, npt.NDArray[np.int64])


def place_of(target: int, slot: int, member: int = EVERY_MEMBER) -> int:
    """Return a place in our pool. Its bits: 15 owner (`OURS`), 8 member, 8 target, 32 slot."""
    return member << _MEMBER_SHIFT | target << _TARGET_SHIFT | slot


def places_of(
    target: int, slots: npt.NDArray[np.int64], members: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    return place_of(target, 0, 0) | members << _MEMBER_SHIFT | slots


def member_of(place: _Places) -> _Places:
    """Return the member of each place; undefined for `NOWHERE`."""
    return place >> _MEMBER_SHIFT & 0xFF


def owner_of(place: _Places) -> _Places:
    """Return the owner of each place; undefined for `NOWHERE`."""
    return place >> _OWNER_SHIFT


def owned_by(owner: int, place: int) -> int:
    """Return the same place in the regions of another owner."""
    return owner << _OWNER_SHIFT | place


def target_of(place: _Places) -> _Places:
    """Return the target of each place; undefined for `NOWHERE`."""
    return place >> _TARGET_SHIFT & 0xFF


def slot_of(place: _Places) -> _Places:
    return place & 0xFFFFFFFF


def slots_by_target(slots: int, targets: int) -> tuple[int, ...]:
    """Divide pool slots equally among targets, with the remainder on the first targets."""
    return tuple((slots + targets - 1 - target) // targets for target in range(targets))


def split_keys(keys: bytes, key_bytes: int) -> list[bytes]:
    return [keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes)]


class ChunkBatch(tuple[bytes, bytes, bytes, bytes, bytes]):
    """Chunks in columns of n rows, the only form in which threads and processes exchange them.

    `keys` joins n keys of equal length. `generations` is uint64[n]; a key and its generation are
    the identity that every copy, read and write specifies. `cache` is int32[n] of cache slots, or
    -1 for a stream slot. The lower 24 bits are the row in the CPU tier; the bits above are the
    member + 1, or 0 for `EVERY_MEMBER`. `places` is int64[n] (`place_of`), or -1 for no I/O.
    `groups` is uint8[n] of KV cache group positions.

    The batch is a tuple of the columns' bytes, so that no Python code runs when a batch is created,
    pickled, or passed to native code. The properties are views.
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

    @property
    def has_places(self) -> bool:
        return self[3].count(b"\xff") < len(self[3])  # all bits of NOWHERE are set

    def __len__(self) -> int:
        return len(self[4])

    def key_list(self) -> list[bytes]:
        return split_keys(self.keys, len(self.keys) // max(1, len(self)))


class StoreCommand(NamedTuple):
    """A copy to cache slots from the GPU blocks that vLLM's own job lists."""

    op: int
    batch: ChunkBatch


class LoadCommand(NamedTuple):
    """A copy from cache slots or places to the GPU blocks that vLLM's own job lists.

    A row without a place is copied from its cache slot. A row with a place is read into its cache
    slot, where the chunk remains, or through a stream slot if it has no cache slot. A row with
    neither was evicted and fails with STALE. `helpers` is a bit mask of the peers that may read for
    the load; None for all peers.
    """

    op: int
    batch: ChunkBatch
    helpers: int | None = None


class WriteCommand(NamedTuple):
    """A write from cache slots to places, followed by a write of the table entries. `clients` is
    uint32[n], by row: `pool.format.client_of(salt)` or, if the salt is unknown, 0."""

    op: int
    batch: ChunkBatch
    clients: bytes = b""


class FetchCommand(NamedTuple):
    op: int
    batch: ChunkBatch
    urgency: Urgency = Urgency.PREFETCH


@dataclass(frozen=True, slots=True)
class CancelCommand(_Message):
    """Cancel rows of op `target_op` that have not started: those in `indexes`, or all if it is
    None. Reports on the cancelled rows still follow."""

    target_op: int
    indexes: npt.NDArray[np.uint32] | None = None


#: The size of a share tag.
TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class ResetCommand(_Message):
    """Invalidate all stored chunks, also on disk: every superblock gets a new epoch and `tag`.

    `tag` is the share tag of later chunks. If `named`, later chunks have the new epoch, and a later
    start may adopt them; otherwise they have an epoch that is in no superblock.
    """

    op: int
    tag: bytes
    named: bool


@dataclass(frozen=True, slots=True)
class AttachCommand(_Message):
    """Open another engine's regions read-only; reads from the engine wait for this command.

    `engine_index` is the K in the engine's directories `engine-K`, in our keyspace on our targets.
    `pool_uuid` is in the superblocks of the engine's rank 0; files with a different UUID no longer
    belong to the engine. The report has one row.
    """

    op: int
    owner: int
    engine_index: int
    pool_uuid: bytes


@dataclass(frozen=True, slots=True)
class DetachCommand(_Message):
    """Close an engine's files after the last read from them is released. No report follows."""

    owner: int


_SESSIONS_MAGIC = b"vNVMeSE\0"
_SESSIONS_HEAD = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
#: A session, as in the native `SavedSession`.
SESSION = np.dtype(
    [("id", "<u8"), ("client", "<u4"), ("until", "<u4"), ("chunks", "<u4"), ("priority", "u1")]
)


class SavedSessions(NamedTuple):
    """The content of rank 0's file `sessions` (`pool.format`).

    `sessions` is `SESSION`[n]. `generations` is uint64[m]: the generations of the chunks of all
    sessions, in the order of the sessions.
    """

    sessions: npt.NDArray[np.void]
    generations: npt.NDArray[np.uint64]

    def encode(self) -> bytes:
        head = _SESSIONS_HEAD.pack(_SESSIONS_MAGIC, len(self.sessions), len(self.generations))
        body = head + self.sessions.tobytes() + self.generations.tobytes()
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def decode(raw: bytes) -> SavedSessions:
        """Parse the file. The result is empty if the file is not intact."""
        body, at = raw[: -_CRC.size], _SESSIONS_HEAD.size
        if len(body) >= at and _CRC.pack(zlib.crc32(body)) == raw[-_CRC.size :]:
            magic, count, chunks = _SESSIONS_HEAD.unpack_from(body)
            rest = at + count * SESSION.itemsize
            if magic == _SESSIONS_MAGIC and len(body) == rest + chunks * 8:
                sessions = np.frombuffer(body, SESSION, count, at)
                if int(sessions["chunks"].sum(dtype=np.uint64)) == chunks:
                    return SavedSessions(sessions, np.frombuffer(body, "<u8", chunks, rest))
        return SavedSessions(np.empty(0, SESSION), np.empty(0, np.uint64))


class SessionsCommand(NamedTuple):
    """Replace rank 0's file `sessions`. No report follows."""

    content: bytes


Command = (
    WriteCommand
    | FetchCommand
    | CancelCommand
    | ResetCommand
    | AttachCommand
    | DetachCommand
    | SessionsCommand
)

#: A value in `OpReport.codes`: a row with an outcome reported earlier is now released.
RELEASED = 6


@dataclass(frozen=True, slots=True, eq=False)
class OpReport(_Message):
    """A rank's report on some rows of one op: each row's outcome once, and its release once.

    `indexes` is uint32[m]; None for all rows of the op, none of which was reported earlier. `codes`
    is uint8[m] of `errors.code_of` numbers or `RELEASED`; None if all rows are OK. `errnos` is
    int16[m] for I/O errors. `released` is uint8[m]; None if all m rows are released. `seconds` is
    the time from the command to the last of the m outcomes on this rank. A reset has one row.

    `crcs` is uint32, in the order of the report's rows: the payload's CRC-32C for each OK row that
    stored a chunk in every member's cache slot, in a group with several members per set; None if
    there are no such rows. `rank` is the reporting rank, set only with CRCs.
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
    """A rank's only reports on several ops, with all rows OK and released, and without CRCs.

    A step may complete hundreds of one-chunk ops, so their reports are columns too. `ops` is
    uint64[n] and `seconds` is float32[n] (as in `OpReport`), both as bytes.
    """

    ops: bytes
    seconds: bytes

    def columns(self) -> tuple[list[int], list[float]]:
        ops, seconds = np.frombuffer(self.ops, np.uint64), np.frombuffer(self.seconds, np.float32)
        return ops.tolist(), seconds.tolist()


class Verdict(enum.IntEnum):
    """The verdicts on a target, from best to worst (`targets.health`)."""

    OK = 0
    DEGRADED = 1
    SUSPECT = 2
    GONE = 3

    @property
    def usable(self) -> bool:
        return self <= Verdict.DEGRADED

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class VerdictReport(_Message):
    """A rank's verdict on a target. Look-ups find no chunks on an unusable target."""

    rank: int
    target: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class RateReport(_Message):
    """A rank's measured rates on a busy target, in bytes per second; 0 if unknown."""

    rank: int
    target: int
    write_bytes_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LevelReport(_Message):
    """Numbers of chunks in a rank's queues and I/O engine, used only for metrics."""

    rank: int
    stream_slots_used: int = 0
    stream_slot_waiting: int = 0
    read_waiting: int = 0
    prefetch_waiting: int = 0
    write_waiting: int = 0
    reads_in_flight: int = 0
    writes_in_flight: int = 0
    #: The expected wait of a new read, by lane (targets, then peers); 0 if unknown.
    read_waits_s: tuple[float, ...] = ()


Report = OpReport | OpReports | VerdictReport | RateReport | LevelReport


def unpacked(reports: Iterable[Report]) -> Iterator[Report]:
    for report in reports:
        if isinstance(report, OpReports):
            columns = zip(*report.columns(), strict=True)
            yield from (OpReport(op, seconds=seconds) for op, seconds in columns)
        else:
            yield report


@dataclass(frozen=True)
class AdoptedEntries:
    """The entries that one rank found in its table at start, in any order. `places` is int64[n],
    `generations` is uint64[n], and `keys` joins n keys of equal length."""

    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    generations: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    keys: bytes = b""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def key_bytes(self) -> int:
        return len(self.keys) // len(self) if len(self) else 0

    def key_rows(self) -> npt.NDArray[np.void]:
        """Return one opaque, comparable value per key."""
        return np.frombuffer(self.keys, f"V{max(1, self.key_bytes)}")


@dataclass(frozen=True)
class RankHello:
    """A rank's message at start (vLLM's handshake metadata).

    The manager's capacity is the minimum over the ranks, and its index is the intersection of their
    adopted entries. `pool_slots` is for all targets together (`slots_by_target`). `groups` are in
    the same order on all ranks. Most fields after `tag` are only for logs and metrics.
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
    tag: bytes = b""  # the share tag of this run; empty if no later run may adopt its chunks
    fallbacks: tuple[str, ...] = ()  # parts that run slower than they could, and the reasons
    stream_slots: int = 0
    targets: tuple[str, ...] = ()  # directories
    remote: tuple[bool | None, ...] = ()  # by target, whether on another machine; None if unknown
    io_engine: str = "none"
    copy_engine: str = "none"
    checksums: str = ""  # the name of the fastest way to compute CRCs
    adoption_s: float = 0.0
    volatile: tuple[str, ...] = ()  # why nothing is adopted
    replica: int | None = None
    lease_name: str = ""  # the server's name in its group; empty without a group
    sessions: bytes = b""  # rank 0's file `sessions`; empty if there is no file
