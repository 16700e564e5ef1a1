# SPDX-License-Identifier: Apache-2.0
"""Reads of other engines' regions: they wait for files, and their failures are the region's."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

import pytest

from tests.chunks import Reported, batch_of, place_in
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    OK,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.io.base import ForeignSlab
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    DetachCommand,
    WriteCommand,
    owned_by,
    owner_of,
)
from vllm_nvmeof_offload.targets.health import FAILED_SLOTS_MAX, FAILURES_MAX, TargetHealth, Verdict
from vllm_nvmeof_offload.worker.regions import FoundPool, OpenRegions

from .bench import READ_S, Bench, identity

A, B = 1, 2  # owners
TARGETS = 2
NO_FILES = io_error(errno.ENOENT)


class Opener:
    """Opens what the test makes it open."""

    def __init__(self) -> None:
        self.asked: list[tuple[AttachCommand, list[int]]] = []
        self.closed: list[int] = []
        self.sought: list[bytes] = []
        self.found: list[FoundPool] = []
        self._answers: list[OpenRegions] = []

    def open(self, command: AttachCommand, targets: Sequence[int]) -> None:
        self.asked.append((command, list(targets)))

    def take(self) -> list[OpenRegions]:
        answers, self._answers = self._answers, []
        return answers

    def close(self, regions: Iterable[ForeignSlab]) -> None:
        self.closed += [region.fd for region in regions]

    def look_for(self, region_uuid: bytes) -> None:
        self.sought.append(region_uuid)

    def take_found(self) -> list[FoundPool]:
        found, self.found = self.found, []
        return found

    def answer(
        self, number: int = -1, *, fds: int = 100, error: int = 0, uuid: bytes = bytes(16)
    ) -> None:
        """Answer one of `asked`. Descriptors: `fds` and what follows, by target."""
        command, targets = self.asked[number]
        found = {at: ForeignSlab(fds + at, uuid, 0) for at in targets if not error}
        self._answers.append(OpenRegions(command, found, error))


class Rig(Bench):
    def __init__(self, health: Sequence[TargetHealth] = ()) -> None:
        self.opener = Opener()
        health = tuple(health) or tuple(TargetHealth() for _ in range(TARGETS))
        self.health = health
        super().__init__(
            stream_slots=8,
            target_count=TARGETS,
            opener=self.opener,
            health=health,  # type: ignore[arg-type]
            pool_slots=16,
        )

    def reads(self) -> list[tuple[int, int]]:
        """Owner and slot of each that has started."""
        return sorted((owner_of(op.place), self.number(op)) for op in self.io.started)

    def attach(self, op: int, owner: int = A) -> None:
        self.pipeline.command(AttachCommand(op, owner, owner, bytes(16)))
        self.pipeline.step()

    def attached(self, op: int = 1, owner: int = A, fds: int = 100) -> None:
        self.attach(op, owner)
        self.opener.answer(fds=fds)
        self.pipeline.step()
        assert Reported(op) in self.reports()

    def borrow_now(self, op: int, pool: int = 0, owner: int = A) -> None:
        self.borrow(op, owner, number=op, pool=pool)
        self.pipeline.step()


def test_a_read_waits_for_the_files_of_its_owner() -> None:
    rig = Rig()
    rig.attach(1)
    rig.borrow_now(2, pool=40)  # another engine's region may be larger than ours
    rig.borrow(3, A, number=3, pool=2, cache=1)
    rig.load(4, 4, None, 0)
    assert rig.reads() == [(0, 0)]
    assert rig.reports() == []
    rig.opener.answer()
    rig.pipeline.step()
    assert set(rig.io.regions) == {(A, 0), (A, 1)}
    assert rig.reads() == [(0, 0), (A, 2), (A, 40)]
    assert rig.reports() == [Reported(1)]
    while rig.turn((0, 1), TARGETS):
        pass
    assert sorted(rig.finished()) == [(2, ()), (3, ()), (4, ())]
    rig.load(5, 3, 1, None)  # it has landed, under its key and generation
    assert len(rig.copy.open) == 1
    assert not rig.opener.closed


def test_a_read_waits_no_longer_than_its_deadline() -> None:
    rig = Rig()
    rig.borrow_now(1)  # of an owner that nobody has named yet
    rig.hang(READ_S / 2)
    rig.attach(2)
    rig.borrow_now(3)
    assert rig.pipeline.deadline_in_s() == READ_S / 2
    rig.hang(READ_S / 2)
    assert rig.finished() == [(1, ((0, DEADLINE),))]
    rig.opener.answer()
    rig.pipeline.step()
    rig.io_done()
    assert {one.outcome for one in rig.reports() if one.op == 2} == {OK}  # type: ignore[union-attr]
    rig.turn()
    assert rig.finished() == [(3, ())]


def test_an_attach_that_hangs_fails_at_its_deadline_and_takes_no_files_later() -> None:
    rig = Rig()
    rig.attach(1)
    rig.borrow_now(2)
    rig.hang()
    assert Reported(1, 0, DEADLINE) in rig.reports()
    rig.borrow_now(3)
    assert {outcome for _, failed in rig.finished() for _, outcome in failed} <= {
        DEADLINE,
        NO_FILES,
    }
    rig.opener.answer(fds=50)
    rig.pipeline.step()
    rig.pipeline.step()
    assert (rig.io.regions, rig.opener.closed) == ({}, [50, 51])
    rig.borrow_now(4)
    assert rig.finished() == [(4, ((0, NO_FILES),))]
    rig.attached(5)  # the manager may ask again
    rig.borrow_now(6)
    assert len(rig.io.ops) == 1


def test_a_failed_attach_fails_its_reads_at_once_and_no_others() -> None:
    rig = Rig()
    rig.attached(1, B)
    rig.attach(2)
    rig.borrow_now(3)
    rig.borrow_now(4, owner=B)
    rig.opener.answer(error=errno.ESTALE)
    rig.pipeline.step()
    assert Reported(2, 0, io_error(errno.ESTALE)) in rig.reports()
    assert rig.finished() == [(3, ((0, NO_FILES),))]
    rig.borrow_now(5)
    assert rig.finished() == [(5, ((0, NO_FILES),))]
    assert [owner_of(op.place) for op in rig.io.ops.values()] == [B]
    assert all(one.verdict is Verdict.OK for one in rig.health)


def test_a_detached_owners_files_are_closed_at_the_last_release() -> None:
    rig = Rig()
    rig.attached()
    rig.borrow_now(2)
    rig.borrow_now(3)
    rig.io.busy = True
    rig.borrow_now(4)
    rig.pipeline.command(DetachCommand(A))
    rig.pipeline.step()
    assert rig.finished() == [(4, ((0, NO_FILES),))], "what was not handed over fails at once"
    assert rig.io.regions == {}
    assert rig.opener.closed == [101], "nothing reads there"
    rig.hang()  # an outcome is no release
    assert rig.opener.closed == [101]
    rig.io_done()
    rig.pipeline.step()
    assert rig.opener.closed == [101]
    rig.io_done()
    rig.pipeline.step()
    assert rig.opener.closed == [101, 100]


def test_a_detach_ends_an_attach_that_is_under_way() -> None:
    rig = Rig()
    rig.attach(1)
    rig.pipeline.command(DetachCommand(A))
    rig.pipeline.step()
    assert rig.reports() == [Reported(1, 0, NO_FILES)]
    rig.opener.answer(fds=50)
    rig.pipeline.step()
    assert (rig.io.regions, rig.opener.closed) == ({}, [50, 51])


def test_reads_that_wait_for_files_can_be_cancelled() -> None:
    rig = Rig()
    rig.attach(1)
    rig.borrow_now(2)
    rig.cancel(2)
    rig.cancel(1)  # an attach goes on
    rig.pipeline.step()
    assert rig.finished() == [(2, ((0, CANCELLED),))]
    rig.opener.answer()
    rig.pipeline.step()
    assert Reported(1) in rig.reports()
    assert not rig.io.ops and rig.idle()


@pytest.mark.parametrize(
    "outcome",
    [
        STALE,
        CHECKSUM_MISMATCH,
        *(io_error(number) for number in (0, errno.EBADF, errno.ENOENT, errno.ESTALE)),
    ],
    ids=str,
)
def test_what_fails_in_a_region_is_not_tried_again_and_says_nothing_of_the_target(
    outcome: Outcome,
) -> None:
    rig = Rig()
    rig.attached()
    for slot in range(FAILED_SLOTS_MAX + FAILURES_MAX):
        rig.borrow_now(2 + slot, pool=TARGETS * slot)
        rig.io_done(outcome)
        assert not rig.io.ops
        assert rig.finished() == [(2 + slot, ((0, outcome),))]
    assert [one.verdict for one in rig.health] == [Verdict.OK] * TARGETS
    for number in range(FAILURES_MAX):
        rig.load(100 + 2 * number, 7, None, TARGETS * number)
        rig.io_done(io_error(errno.ENODEV))
        rig.borrow_now(101 + 2 * number)
        if rig.io.ops:
            rig.io_done(outcome)
    # Nor has it ended the run of the target's own failures.
    assert rig.health[0].verdict is Verdict.GONE


def test_what_a_target_answers_to_a_foreign_read_is_the_targets() -> None:
    rig = Rig()
    rig.attached()
    rig.borrow_now(2)
    rig.io_done(io_error(errno.EIO))
    assert len(rig.io.ops) == 1, "it is tried once more"
    rig.io_done()
    for number in range(FAILURES_MAX):
        rig.borrow_now(3 + number)
        rig.io_done(io_error(errno.ENODEV))
    assert rig.health[0].verdict is Verdict.GONE


def test_a_target_that_is_gone_loses_its_regions_and_has_them_again_when_it_is_back() -> None:
    rig = Rig()
    rig.attached(fds=100)
    rig.borrow_now(2, pool=0)
    rig.health[0].lost("unplugged")
    rig.pipeline.step()
    rig.pipeline.step()
    assert set(rig.io.regions) == {(A, 1)}
    assert not rig.opener.closed
    rig.io_done()
    rig.pipeline.step()
    assert rig.opener.closed == [100]
    rig.health[0].attached()
    rig.pipeline.step()
    assert [targets for _, targets in rig.opener.asked] == [[0, 1], [0, 1]]
    rig.borrow_now(3, pool=0)
    rig.borrow_now(4, pool=1)
    assert not rig.io.ops, "they wait until its files are open again"
    rig.opener.answer(fds=200)
    rig.pipeline.step()
    rig.pipeline.step()
    assert {region.fd for region in rig.io.regions.values()} == {200, 201}
    assert len(rig.io.ops) == 2
    assert rig.opener.closed == [100, 101]


def test_an_owner_named_while_a_target_is_away_is_looked_for_there_later() -> None:
    rig = Rig()
    rig.health[1].lost("unplugged")
    rig.pipeline.step()
    rig.attached()
    assert set(rig.io.regions) == {(A, 0)}
    rig.health[1].attached()
    rig.pipeline.step()
    rig.opener.answer()
    rig.pipeline.step()
    assert set(rig.io.regions) == {(A, 0), (A, 1)}


def test_a_target_that_hangs_is_not_touched_and_is_looked_at_when_it_answers() -> None:
    rig = Rig()
    rig.load(1, 7, None, 1)
    rig.hang()
    assert rig.health[1].verdict is Verdict.SUSPECT
    rig.attached(2)
    assert rig.opener.asked[0][1] == [0]
    rig.io_done()
    rig.pipeline.step()
    assert rig.opener.asked[1][1] == [0, 1]
    rig.opener.answer()
    rig.pipeline.step()
    assert set(rig.io.regions) == {(A, 0), (A, 1)}


def test_only_the_newest_attach_counts() -> None:
    rig = Rig()
    rig.attach(1)
    rig.attach(2)
    rig.opener.answer(0, fds=50)
    rig.pipeline.step()
    assert (rig.io.regions, rig.opener.closed) == ({}, [50, 51])
    rig.opener.answer(1)
    rig.pipeline.step()
    assert rig.reports() == [Reported(1), Reported(2)]
    assert {region.fd for region in rig.io.regions.values()} == {100, 101}


def test_what_was_opened_for_a_target_before_it_went_is_not_used() -> None:
    rig = Rig()
    rig.attach(1)
    rig.health[0].lost("unplugged")
    rig.pipeline.step()
    rig.opener.answer(0, fds=100)  # opened on the file system that is gone now
    rig.pipeline.step()
    assert (A, 0) not in rig.io.regions


def test_nothing_is_written_into_a_region() -> None:
    rig = Rig()
    rig.stored(1, slot=0, number=7)
    rig.attached(2)
    command = WriteCommand(3, batch_of((identity(7), 0, owned_by(A, place_in(2, TARGETS)))))
    with pytest.raises(AssertionError, match="another engine's region"):
        rig.pipeline.command(command)
