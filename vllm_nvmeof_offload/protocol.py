# SPDX-License-Identifier: Apache-2.0
"""Messages between the manager and the workers.

Commands go manager → workers with a step's metadata and are applied in order. Reports go
workers → manager with a step's output. An *op* is one command; its number is unique in a
process's life and the same on every rank. Each rank reports on each op:

* an `OpReport` once, when the op's outcome is known on that rank;
* `released=True` in it, or a later `ReleaseReport`, when neither the kernel nor the GPU
  touches that op's buffers on that rank any more.

A fact holds when all ranks have reported it; a failure on any rank is the fact's failure.
All types are plain data: they are pickled inside vLLM's metadata.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import Outcome


class OpKind(enum.Enum):
    """The command that an op is."""

    STORE = "store"
    LOAD = "load"
    WRITE = "write"
    FETCH = "fetch"
    RESET = "reset"


class Urgency(enum.IntEnum):
    """How urgent an I/O operation is, the most urgent first. The native core has the same one."""

    DEMAND = 0  # a read that a load waits for
    URGENT = 1  # a fetch that goes before other fetches
    PREFETCH = 2
    WRITE = 3


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """The required content of a slot; every copy, read and write names it."""

    key: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """GPU blocks → cache slot `cache_slot`."""

    identity: SlotIdentity
    cache_slot: int


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """Copy chunks into cache slots. vLLM's own job has the GPU blocks."""

    op: int
    chunks: tuple[StoreChunk, ...]


@dataclass(frozen=True, slots=True)
class LoadChunk:
    """One chunk of a load, and its source.

    `pool_slot` None: copy from `cache_slot`. Otherwise read the pool slot: into `cache_slot` if
    it is given (the chunk then stays there), else through one of the worker's stream slots.
    """

    identity: SlotIdentity
    cache_slot: int | None
    pool_slot: int | None


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Load chunks into GPU blocks, which vLLM's own job has."""

    op: int
    chunks: tuple[LoadChunk, ...]


@dataclass(frozen=True, slots=True)
class WriteCommand:
    """Cache slot → pool slot, then the table entry."""

    op: int
    identity: SlotIdentity
    cache_slot: int
    pool_slot: int


@dataclass(frozen=True, slots=True)
class FetchCommand:
    """Pool slot → cache slot, ahead of need."""

    op: int
    identity: SlotIdentity
    pool_slot: int
    cache_slot: int
    urgency: Urgency = Urgency.PREFETCH


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Cancel the parts of op `target_op` that have not started; its report still comes."""

    target_op: int


@dataclass(frozen=True, slots=True)
class ResetCommand:
    """Everything stored so far is void, on disk too.

    adoptable: chunks stored from now on may be adopted at a later start.
    """

    op: int
    adoptable: bool


Command = WriteCommand | FetchCommand | CancelCommand | ResetCommand


@dataclass(frozen=True, slots=True)
class OpReport:
    """One rank's outcome of one op: the chunks that failed, by their index in the command.

    The chunk of a single-chunk op has index 0. Empty `failures`: OK. seconds: from the command to
    the outcome, on this rank.
    """

    op: int
    failures: tuple[tuple[int, Outcome], ...] = ()
    released: bool = True
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """The buffers of an op whose `OpReport` had `released=False` are free on this rank."""

    op: int


#: Verdicts on a target, from best to worst, as in `targets.health`. The first two are usable.
VERDICTS = ("ok", "degraded", "suspect", "gone")


@dataclass(frozen=True, slots=True)
class VerdictReport:
    """This rank's verdict on one target. No look-up hits on a target that is not usable."""

    rank: int
    target: int
    verdict: str

    @property
    def usable(self) -> bool:
        return self.verdict in VERDICTS[:2]


@dataclass(frozen=True, slots=True)
class RateReport:
    """This rank's rates on one busy target, in bytes per second; 0: unknown."""

    rank: int
    target: int
    write_bytes_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LevelReport:
    """Chunks in this rank's queues and with its I/O engine, for metrics only."""

    rank: int
    stream_slots_used: int = 0
    stream_slot_waiting: int = 0
    read_waiting: int = 0
    prefetch_waiting: int = 0
    write_waiting: int = 0
    reads_in_flight: int = 0
    writes_in_flight: int = 0


#: Rates and levels are sent along with the others only; the engine does not step for them.
Report = OpReport | ReleaseReport | VerdictReport | RateReport | LevelReport


@dataclass(frozen=True)
class AdoptedEntries:
    """Entries that one rank found in its table at start, in no particular order.

    pool_slots: int64[n], generations: uint64[n], keys: n offload keys.
    """

    pool_slots: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    generations: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    keys: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class RankHello:
    """Sent once at start by each rank (vLLM's handshake metadata).

    The manager's capacity is the minimum over the ranks, its index the intersection of their
    adopted entries. Pool slot p is on target `p % target_count`. Fields after `adopted` are for
    logs and metrics only.
    """

    rank: int
    engine_index: int
    keyspace: str
    cache_slots: int
    pool_slots: int
    target_count: int
    slot_bytes: int
    adopted: AdoptedEntries = field(default_factory=AdoptedEntries)
    fallbacks: tuple[str, ...] = ()  # parts that run slower than they could, and why
    stream_slots: int = 0
    targets: tuple[str, ...] = ()  # directories
    io_engine: str = "none"
    copy_engine: str = "none"
    adoption_s: float = 0.0
    volatile: tuple[str, ...] = ()  # why nothing is adopted
    replica: int | None = None
