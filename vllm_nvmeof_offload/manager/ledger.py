# SPDX-License-Identifier: Apache-2.0
"""The ledger of operations: what was sent to the ranks, and the reports that they still owe.

An op gets its number when its command leaves. Until then a write or a fetch is an intent, which
`Tiers` keeps and can drop. What is known of each row of an op is in its batch
(native/tiers/tiers.h).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.protocol import ChunkBatch, OpKind

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native import Batch


@dataclass(eq=False)
class Op:
    """One operation under way.

    batch: its rows, as the manager knows them; None: a reset or an attach, which has one row.

    Most ops never set the later fields: their defaults are the class's and cost no op anything.
    """

    number: int
    kind: OpKind
    issued_s: float
    batch: Batch | None
    ranks_left: int  # of an op of one row: ranks that have not reported
    failure: Outcome | None = field(default=None, init=False)  # of it, on some rank
    owner: int = field(default=0, init=False)  # of an attach
    #: For a load: bytes by target that it reads.
    lanes: Sequence[int] = field(default=(), init=False)
    #: Of a load: rows that are read from the pool.
    reads: int = field(default=0, init=False)
    #: Of a load: the request's tokens that it brings; and how many of them it has lost by now.
    tokens: range = field(default=range(0), init=False)
    lost: int = field(default=0, init=False)
    #: Of a load: as in `Decision`.
    predicted_s: float = field(default=0.0, init=False)
    #: A fetch that is there to be timed.
    probe: bool = field(default=False, init=False)
    #: For a load or fetch: how long the model had computed prompts when it was planned.
    prompts_s: float = field(default=0.0, init=False)

    @property
    def outcomes_owed(self) -> bool:
        return bool(self.batch.undecided) if self.batch is not None else self.ranks_left > 0

    @property
    def over(self) -> bool:
        """Every rank has reported and released every row."""
        return self.batch.over if self.batch is not None else not self.ranks_left


def columns_of(batch: Batch) -> ChunkBatch:
    """The columns of a batch that go to the ranks. They are copies: the rows change later."""
    return ChunkBatch(batch.columns())


class Ledger:
    """Ops under way, oldest first. prompts_s: for how long the model has computed prompts."""

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
        assert number in self._ops, f"a report on op {number}, which is over"
        return self._ops[number]

    def named(self, numbers: Iterable[int]) -> list[Op]:
        """Several ops on which there are reports."""
        try:
            return [self._ops[number] for number in numbers]
        except KeyError as over:
            raise AssertionError(f"a report on op {over}, which is over") from None

    def open(self, kind: OpKind, batch: Batch | None = None) -> Op:
        self._last += 1
        op = Op(self._last, kind, self._clock(), batch, self._world_size)
        if kind is OpKind.LOAD or kind is OpKind.FETCH:
            op.prompts_s = self.prompts_s()
        self._ops[self._last] = op
        return op

    def close(self, op: Op) -> None:
        """Every rank has reported and released all of it."""
        del self._ops[op.number]


# What the native index says of its entries: their state, and the tier that a look-up found.


class Source(enum.Enum):
    """The tier in which a look-up found a chunk."""

    CPU = "cpu"
    POOL = "pool"
    SHARED = "shared"  # another engine's pool


class State(enum.IntEnum):
    """A state of an entry; ABSENT and DOOMED of native/common/transitions.def are no entry's."""

    STORING = 1
    CACHED = 2
    WRITING = 3
    BOTH = 4
    POOLED = 5
    FETCHING = 6
    BORROWING = 7


class Entry(NamedTuple):
    """One entry, for inspection. cache: -1: no cache slot. place: -1: none in the pool."""

    state: State
    generation: int
    cache: int
    place: int
    key: bytes
