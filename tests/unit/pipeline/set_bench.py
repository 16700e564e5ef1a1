# SPDX-License-Identifier: Apache-2.0
"""The pipelines of a set of ranks with equal bytes, on one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.chunks import cache_slot
from vllm_nvmeof_offload.copy.base import Pieces
from vllm_nvmeof_offload.native import set_words_bytes
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    ChunkBatch,
    FetchCommand,
    LoadCommand,
    StoreCommand,
    WriteCommand,
    place_of,
)
from vllm_nvmeof_offload.staging import SetMap

from .bench import PIECES, Bench, identity

CACHE_SLOTS, STREAM_SLOTS = 4, 2
#: Of one member's staging to the next one's.
APART = 1 << 20


def words(members: int) -> npt.NDArray[np.uint64]:
    """The words of a set, aligned as a mapping is."""
    size = set_words_bytes(members, CACHE_SLOTS, STREAM_SLOTS)
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.uint64)


class Ranks:
    """All members are given each command, and act when the test makes them."""

    def __init__(self, members: int = 2, *, stream_slots: int = STREAM_SLOTS) -> None:
        self.words = words(members)
        self.addresses = tuple(APART * member for member in range(members))
        self.ranks = [
            Bench(
                stream_slots,
                CACHE_SLOTS,
                members=SetMap(self.words.ctypes.data, member, self.addresses, (members, 1)),
            )
            for member in range(members)
        ]

    def __getitem__(self, member: int) -> Bench:
        return self.ranks[member]

    def batch(
        self, number: int, cache: int | None, pool: int | None, member: int = EVERY_MEMBER
    ) -> ChunkBatch:
        """One chunk. cache, pool: slots; None: the row names none."""
        one = identity(number)
        slot = -1 if cache is None else cache_slot(cache, member)
        place = -1 if pool is None else place_of(0, pool, member)
        return ChunkBatch.of(
            one.key,
            np.array([one.generation], np.uint64),
            np.array([slot], np.int32),
            np.array([place], np.int64),
            np.zeros(1, np.uint8),
        )

    def store(self, op: int, number: int, cache: int, member: int = EVERY_MEMBER) -> None:
        command = StoreCommand(op, self.batch(number, cache, None, member))
        for rank in self.ranks:
            rank.pipeline.store(command, Pieces.of(PIECES), "fence")
        self.step()

    def load(
        self,
        op: int,
        number: int,
        cache: int | None,
        pool: int | None,
        member: int,
        only: Sequence[int] | None = None,
    ) -> None:
        """only: the members that get it now."""
        command = LoadCommand(op, self.batch(number, cache, pool, member))
        for rank in self.ranks if only is None else [self.ranks[one] for one in only]:
            rank.pipeline.load(command, Pieces.of(PIECES), "fence")
        self.step()

    def write(self, op: int, number: int, cache: int, pool: int, member: int) -> None:
        self._command(WriteCommand(op, self.batch(number, cache, pool, member)))

    def fetch(self, op: int, number: int, cache: int, pool: int, member: int) -> None:
        self._command(FetchCommand(op, self.batch(number, cache, pool, member)))

    def _command(self, command: WriteCommand | FetchCommand) -> None:
        for rank in self.ranks:
            rank.pipeline.command(command)
        self.step()

    def step(self) -> None:
        """Twice, so that each sees what the others have done."""
        for rank in self.ranks * 2:
            rank.pipeline.step()

    def pass_time(self, seconds: float, *, hung: Sequence[int] = ()) -> None:
        """Let time pass on all ranks; the threads of `hung` ones do not run."""
        for number, rank in enumerate(self.ranks):
            rank.now_s += seconds
            if number not in hung:
                rank.pipeline.step()

    def finish_copies(self, member: int) -> list[int]:
        """End a member's copies; return their staging addresses."""
        rank = self.ranks[member]
        tickets = list(rank.copy.open)
        addresses = [one for t in tickets for one in rank.copy.submitted[t][2]]
        for ticket in tickets:
            rank.copy.finish(ticket)
        rank.pipeline.step()
        return addresses

    def stored(self, op: int, number: int, cache: int, member: int) -> None:
        self.store(op, number, cache, member)
        self.finish_copies(member)
        for rank in self.ranks:
            rank.reports()
            rank.finished()

    def idle(self) -> bool:
        self.step()
        return all(rank.idle() for rank in self.ranks)
