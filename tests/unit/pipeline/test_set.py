# SPDX-License-Identifier: Apache-2.0
"""Ranks with equal bytes share one copy of a chunk: one rank reads it, the others copy from it."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tests.chunks import Reported, cache_slot
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    DEADLINE,
    STALE,
    io_error,
)
from vllm_nvmeof_offload.native import set_words_bytes
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    ChunkBatch,
    FetchCommand,
    LoadCommand,
    OpReport,
    StoreCommand,
    WriteCommand,
    place_of,
)
from vllm_nvmeof_offload.staging import SetMap

from .bench import READ_S, Bench, identity

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
            rank.begin(command)
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
            rank.begin(command)
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


# -- cache slots ----------------------------------------------------------------------------


def test_a_load_is_stale_after_the_holders_store_failed() -> None:
    ranks = Ranks()
    ranks.store(1, 7, 2, 1)
    ranks.load(2, 7, 2, None, 1)
    ranks[1].copy.finish(0, io_error(errno.EIO))
    ranks[1].pipeline.step()
    ranks.step()
    assert ranks[0].finished() == [(1, ()), (2, ((0, STALE),))]
    assert sorted(ranks[1].finished()) == [(1, ((0, io_error(errno.EIO)),)), (2, ((0, STALE),))]
    assert ranks.idle()


def test_the_fill_of_an_old_generation_is_not_accepted() -> None:
    ranks = Ranks()
    ranks.stored(1, 6, 2, 1)
    ranks.store(2, 7, 2, 1)  # still to be copied
    ranks.load(3, 7, 2, None, 1)
    assert not ranks[0].copy.submitted
    ranks.pass_time(READ_S, hung=[1])
    assert ranks[0].finished() == [(2, ()), (3, ((0, DEADLINE),))]


@pytest.mark.parametrize("members", [2, 3])
def test_a_hung_holder_fails_the_others_rows_at_the_deadline(members: int) -> None:
    ranks = Ranks(members)
    ranks.fetch(1, 7, 0, 3, 1)
    ranks.load(2, 8, None, 4, 1)
    ranks.load(3, 9, 1, 5, 1)
    for member in set(range(members)) - {1}:
        ranks[member].finished()
    assert ranks[0].pipeline.deadline_in_s() == pytest.approx(READ_S)
    ranks.pass_time(READ_S - 0.1, hung=[1])
    assert ranks[0].reports() == []
    ranks.pass_time(0.2, hung=[1])
    for member in set(range(members)) - {1}:
        reports = ranks[member].reports()
        assert len(reports) == 3
        assert all(Reported(op, 0, DEADLINE) in reports for op in (1, 2, 3))
    # It comes back, and what it announces is released by all.
    for pool in (3, 4, 5):
        ranks[1].io.complete(ranks[1].io_of(pool))
    ranks.step()
    ranks.finish_copies(1)
    ranks.step()
    assert ranks.idle()


def test_a_holder_with_much_to_read_is_waited_for() -> None:
    """A row that waits longer than a deadline, behind others, does not fail for it."""
    ranks = Ranks()
    ranks.fetch(1, 7, 0, 3, 1)
    ranks[1].io.busy = True
    ranks.fetch(2, 8, 1, 4, 1)
    for number, pool in ((1, 3), (2, 4)):
        ranks.pass_time(0.8 * READ_S)
        ranks[1].io.complete(ranks[1].io_of(pool))
        ranks[1].io.busy = False
        ranks.step()
        assert ranks[0].reports() == [Reported(number)]


def test_a_member_that_leaves_is_not_waited_for() -> None:
    ranks = Ranks()
    ranks.fetch(1, 7, 0, 3, 1)
    ranks.load(2, 8, None, 4, 1)
    ranks[1].pipeline.leave_set()
    ranks[0].pipeline.step()
    assert ranks[0].reports() == [Reported(1, 0, DEADLINE), Reported(2, 0, DEADLINE)]
    ranks[0].finished()
    assert ranks[0].idle()


# -- stream slots ---------------------------------------------------------------------------


def test_a_reader_that_has_given_up_holds_nothing() -> None:
    ranks = Ranks()
    ranks.load(1, 7, None, 3, 1)
    ranks[0].pipeline.cancel(1)
    assert ranks[0].finished() == [(1, ((0, CANCELLED),))]
    ranks[1].io_done()
    ranks.step()
    ranks.finish_copies(1)
    assert ranks[1].finished() == [(1, ())]
    assert ranks.idle()


def test_a_hung_reader_costs_its_slots_only() -> None:
    """Loads that could only get slots which may never return fail instead of waiting."""
    ranks = Ranks(stream_slots=1)
    ranks.load(1, 7, None, 3, 1, only=[1])
    ranks[1].io_done()
    ranks.finish_copies(1)
    ranks.load(2, 8, None, 4, 1, only=[1])
    assert not ranks[1].io.ops
    ranks.pass_time(READ_S, hung=[0])
    assert ranks[1].finished() == [(1, ()), (2, ((0, DEADLINE),))]
    for op, pool in ((1, 3), (2, 4)):
        ranks.load(op, 6 + op, None, pool, 1, only=[0])
    ranks.finish_copies(0)
    assert sorted(ranks[0].finished()) == [(1, ()), (2, ((0, CANCELLED),))]
    assert ranks.idle()


def test_many_failures_are_announced_in_turn() -> None:
    ranks = Ranks()
    for op in range(1, 201):
        ranks.load(op, op, None, op, 1, only=[1])
        ranks[1].pipeline.cancel(op)
    for op in range(1, 201):
        ranks.load(op, op, None, op, 1, only=[0])
    for _ in range(10):
        ranks.step()
    assert [failures for _, failures in ranks[0].finished()] == [((0, CANCELLED),)] * 200
    for token in list(ranks[1].io.ops):
        ranks[1].io.complete(token)
    assert ranks.idle()


# -- samples --------------------------------------------------------------------------------


def test_the_crcs_of_whole_rows_are_reported() -> None:
    ranks = Ranks()
    ranks.store(1, 7, 2)
    for member, rank in enumerate(ranks.ranks):
        rank.copy.finish(0, crc=70 + member)
        rank.pipeline.step()
        (report,) = rank.take()
        assert isinstance(report, OpReport) and report.crcs is not None
        assert (report.rank, report.crcs.tolist()) == (0, [70 + member])
    ranks.store(2, 8, 3, 0)
    ranks.finish_copies(0)
    for rank in ranks.ranks:
        assert [one.crcs for one in rank.take() if isinstance(one, OpReport)] == [None]
