# SPDX-License-Identifier: Apache-2.0
"""The ledger of operations: what was sent to the ranks, and the reports that are still awaited.

An op gets its number when its command is sent. Until then, a write or fetch is only planned, and
`Tiers` can drop it. The state of each row of an op is in the op's batch (native/tiers/tiers.h).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.manager.request_log import LoadRecord
from vllm_nvmeof_offload.protocol import ChunkBatch, OpKind

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native import Batch


@dataclass(eq=False)
class Op:
    """An operation in progress. `batch` holds its rows; it is None for a reset or an attach, each
    of which has one row. Most ops leave the later fields at the defaults of the class, which cost
    nothing per op."""

    number: int
    kind: OpKind
    issued_s: float
    batch: Batch | None
    ranks_left: int  # for a one-row op: the number of ranks that have not reported
    failure: Outcome | None = field(default=None, init=False)  # for a one-row op
    owner: int = field(default=0, init=False)  # for an attach
    # The following are for loads.
    lanes: Sequence[int] = field(default=(), init=False)  # the bytes to read, by target
    reads: int = field(default=0, init=False)  # the rows that are read from the pool
    tokens: range = field(default=range(0), init=False)  # the request's tokens that it covers
    lost: int = field(default=0, init=False)  # the number of `tokens` that have failed so far
    predicted_s: float = field(default=0.0, init=False)  # as in `Decision`
    record: LoadRecord | None = field(default=None, init=False)  # part of the request's record
    probe: bool = field(default=False, init=False)  # whether this fetch is only a measurement
    #: For a load or fetch: the seconds that the model had spent on prompts when the op began.
    prompts_s: float = field(default=0.0, init=False)

    @property
    def outcomes_owed(self) -> bool:
        return bool(self.batch.undecided) if self.batch is not None else self.ranks_left > 0

    @property
    def over(self) -> bool:
        """Whether every rank has reported and released every row."""
        return self.batch.over if self.batch is not None else not self.ranks_left


def columns_of(batch: Batch) -> ChunkBatch:
    """Copy a batch's columns for the ranks, because the batch's rows change later."""
    return ChunkBatch(batch.columns())


class Ledger:
    """The ops in progress, oldest first. `prompts_s` is as in `ManagerCore`."""

    def __init__(
        self,
        world_size: int,
        clock: Callable[[], float],
        prompts_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.prompts_s = prompts_s
        self._world_size = world_size
        self._clock = clock
        self._last = 0
        self._ops: dict[int, Op] = {}

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops.values())

    def __getitem__(self, number: int) -> Op:
        assert number in self._ops, f"a report on op {number}, which has ended"
        return self._ops[number]

    def open(self, kind: OpKind, batch: Batch | None = None) -> Op:
        self._last += 1
        op = Op(self._last, kind, self._clock(), batch, self._world_size)
        if kind is OpKind.LOAD or kind is OpKind.FETCH:
            op.prompts_s = self.prompts_s()
        self._ops[self._last] = op
        return op

    def close(self, op: Op) -> None:
        """Remove an op that every rank has reported and released completely."""
        del self._ops[op.number]


# Values that the native index reports: an entry's state, and the tier of a look-up's hit.


class Source(enum.Enum):
    """The tier in which a look-up found a chunk."""

    CPU = "cpu"
    POOL = "pool"
    SHARED = "shared"  # another engine's pool


class State(enum.IntEnum):
    """The state of an entry (native/common/transitions.def); no entry is ABSENT or DOOMED."""

    STORING = 1
    CACHED = 2
    WRITING = 3
    BOTH = 4
    POOLED = 5
    FETCHING = 6
    BORROWING = 7


class Entry(NamedTuple):
    """An entry, for inspection. `cache` and `place` are -1 if there is none."""

    state: State
    generation: int
    cache: int
    place: int
    key: bytes
