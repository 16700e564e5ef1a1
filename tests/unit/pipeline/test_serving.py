# SPDX-License-Identifier: Apache-2.0
"""Other servers: reads of their regions, which wait for files, and reads for peers."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from tests.chunks import Reported, batch_of, place_in
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    DEADLINE,
    OK,
    STALE,
    io_error,
)
from vllm_nvmeof_offload.follow.owners import OWNERS_MAX
from vllm_nvmeof_offload.io.base import ForeignSlab
from vllm_nvmeof_offload.peers.base import Served
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    DetachCommand,
    OpKind,
    ResetCommand,
    SlotIdentity,
    Verdict,
    WriteCommand,
    owned_by,
    owner_of,
    slot_of,
    target_of,
)
from vllm_nvmeof_offload.targets.health import FAILURES_MAX, TargetHealth
from vllm_nvmeof_offload.worker.regions import FoundPool, OpenRegions

from .bench import READ_S, REGION_SLOTS, STRIDE, Bench, identity

# -- reads of other engines' regions --------------------------------------------------

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


# -- reads for peers: behind loads here, within their time ----------------------------

NEW_TAG = bytes(16)
EIO = io_error(errno.EIO)


def _started(bench: Bench) -> list[int]:
    return [bench.number(op) for op in bench.io.started]


def _answers(bench: Bench) -> list[Served]:
    bench.pipeline.step()
    return sorted(bench.queue.poll())


def _reset(bench: Bench, op: int = 99) -> None:
    bench.pipeline.command(ResetCommand(op, NEW_TAG, named=True))


def test_few_bytes_are_in_a_device_ahead_of_a_load() -> None:
    bench = Bench(stream_slots=4, serve_slots=8, serve_bytes_in_flight_max=3 * STRIDE)
    bench.serve(*range(8))
    bench.pipeline.step()
    assert _started(bench) == [0, 1, 2]
    bench.stream(1, [20])
    bench.pipeline.step()
    bench.io_done()
    assert _started(bench)[3:] == [20]
    bench = Bench(serve_slots=8, serve_bytes_in_flight_max=STRIDE // 2)
    bench.serve(*range(8))
    bench.pipeline.step()
    assert _started(bench) == [0], "one may always go"


def test_what_waits_ends_at_its_deadline() -> None:
    bench = Bench(serve_slots=2)
    bench.io.busy = True
    soon = replace(bench.asked(0, 5), deadline_s=1.0)
    late = replace(bench.asked(1, 6), deadline_s=math.inf)
    bench.queue.serve([soon, late])
    bench.pipeline.step()
    assert bench.pipeline.deadline_in_s() == 1.0
    bench.hang(1.0)
    assert _answers(bench) == [Served(0, DEADLINE)]
    bench.hang(READ_S - 1.0)
    assert _answers(bench) == [Served(1, DEADLINE)], "ours is the longest"
    assert not bench.io.started


def test_what_hangs_keeps_its_slot_until_it_is_released() -> None:
    bench = Bench(serve_slots=2)
    bench.queue.serve([replace(bench.asked(0, 5), deadline_s=1.0)])
    bench.pipeline.step()
    (op,) = bench.io.started
    bench.hang(1.0)
    assert bench.io.cancelled == [op.token]
    assert not _answers(bench)
    assert not bench.idle()
    bench.io.complete(op.token)
    assert _answers(bench) == [Served(0, DEADLINE)]
    assert bench.idle()


def test_one_that_fails_is_tried_once_more_within_its_deadline() -> None:
    bench = Bench(serve_slots=2)
    bench.queue.serve([replace(bench.asked(0, 5), deadline_s=1.0)])
    bench.pipeline.step()
    bench.io_done(EIO)
    assert _started(bench) == [5, 5]
    bench.hang(1.0)
    assert len(bench.io.cancelled) == 1
    bench.io_done(EIO)
    assert _answers(bench) == [Served(0, DEADLINE)]
    bench.serve(6)
    bench.pipeline.step()
    bench.io_done(EIO)
    bench.io_done(EIO)
    assert _answers(bench) == [Served(0, EIO)]


def test_a_reset_ends_what_waits_and_drops_what_runs() -> None:
    bench = Bench(serve_slots=4, reads_in_flight_max=2, serve_share=1.0)
    bench.serve(5, 6, 7)
    bench.pipeline.step()
    assert _started(bench) == [5, 6]
    _reset(bench)
    assert sorted(bench.io.cancelled) == sorted([bench.io_of(5), bench.io_of(6)])
    bench.queue.serve([bench.asked(3, 8)])
    assert _answers(bench) == [Served(2, CANCELLED), Served(3, STALE)], "asked for old weights"
    bench.io.complete(bench.io_of(5))
    bench.io.complete(bench.io_of(6))
    assert _answers(bench) == [Served(0, CANCELLED), Served(1, CANCELLED)]
    bench.queue.serve([replace(bench.asked(3, 8), tag=NEW_TAG)])
    bench.pipeline.step()
    (op,) = [op for op in bench.io.started if bench.number(op) == 8]
    assert op.stamp is not None
    assert op.stamp.tag == NEW_TAG


def test_what_is_not_wanted_is_not_begun_and_not_answered() -> None:
    bench = Bench(serve_slots=4, reads_in_flight_max=2, serve_share=1.0)
    bench.serve(5, 6, 7)
    bench.pipeline.step()
    running = bench.io_of(5)
    bench.queue.cancel([0, 2, 77])
    assert _answers(bench) == [Served(2, CANCELLED)]
    assert bench.io.cancelled == [running]
    bench.io.complete(running)
    bench.io.complete(bench.io_of(6))
    assert _answers(bench) == [Served(0, CANCELLED), Served(1, OK)]
    assert _started(bench) == [5, 6]


def test_one_that_is_cancelled_before_it_was_seen_is_not_begun() -> None:
    bench = Bench(serve_slots=4)
    bench.serve(5)
    bench.queue.cancel([0])
    assert _answers(bench) == [Served(0, CANCELLED)]
    assert not bench.io.started


def test_what_cannot_be_there_is_refused() -> None:
    bench = Bench(serve_slots=6)
    read = bench.asked(0, 5)
    elsewhere = replace(read, place=SlotPlace(b"x" * 16, 0, 5))
    behind = replace(bench.asked(1, 5), place=SlotPlace(read.place.region_uuid, 0, REGION_SLOTS))
    of_others = replace(bench.asked(2, 5), tag=NEW_TAG)
    of_another_length = replace(bench.asked(3, 5), payload_bytes=STRIDE)
    with_a_short_key = replace(bench.asked(4, 5), identity=SlotIdentity(b"short", 7))
    bench.queue.serve(
        [elsewhere, behind, of_others, of_another_length, with_a_short_key, bench.asked(5, 9)]
    )
    answers = _answers(bench)
    assert answers == [Served(0, None), Served(1, STALE), Served(2, STALE), Served(3, STALE)]
    keys = {bench.number(op): op.identity for op in bench.io.started}
    assert keys == {5: SlotIdentity(b"short", 7), 9: identity(9)}


def test_a_region_that_nobody_here_has_named_is_looked_for_and_opened() -> None:
    opener, uuid = Opener(), bytes(15) + b"f"
    bench = Bench(target_count=2, serve_slots=2, opener=opener)
    foreign = replace(bench.asked(0, 5), place=SlotPlace(uuid, 0, 7))
    bench.queue.serve([foreign])
    assert _answers(bench) == [Served(0, None)]
    assert opener.sought == [uuid]
    opener.found.append(FoundPool(4, bytes(16)))
    bench.pipeline.step()
    (command, targets), owner = opener.asked[0], OWNERS_MAX + 1
    assert (command.owner, command.engine_index, targets) == (owner, 4, [0, 1])
    opener.answer(uuid=uuid)
    bench.pipeline.step()
    bench.queue.serve([foreign])
    bench.pipeline.step()
    (op,) = bench.io.started
    assert (owner_of(op.place), target_of(op.place), slot_of(op.place)) == (owner, 0, 7)
    bench.io_done()
    assert _answers(bench) == [Served(0, OK)]
    assert not bench.reports(), "the manager has not asked for it"


def test_writes_keep_their_cap_beside_what_is_read_for_peers() -> None:
    bench = Bench(serve_slots=1, write_bytes_beside_reads_max=STRIDE)
    for n in range(3):
        bench.stored(1 + n, slot=n, number=n)
    for n in range(3):
        bench.write(10 + n, n, cache=n, pool=100 + n)
    bench.serve(5)
    bench.pipeline.step()
    assert _started(bench) == [5, 100]
    bench.io_done()
    assert [op.kind for op in bench.io.started[2:]] == [OpKind.WRITE] * 2
