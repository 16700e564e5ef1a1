# SPDX-License-Identifier: Apache-2.0
"""Reads for peers: behind loads here, within their time, and of nothing that is not there."""

from __future__ import annotations

import errno
import math
from dataclasses import replace

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, STALE, io_error
from vllm_nvmeof_offload.follow.owners import OWNERS_MAX
from vllm_nvmeof_offload.peers.base import Levels, Served
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    DetachCommand,
    OpKind,
    ResetCommand,
    SlotIdentity,
    Urgency,
    owner_of,
    slot_of,
    target_of,
)
from vllm_nvmeof_offload.targets.health import TargetHealth, Verdict
from vllm_nvmeof_offload.worker.regions import FoundPool

from .bench import READ_S, REGION_SLOTS, STRIDE, TAG, Bench, identity
from .test_foreign_regions import Opener

NEW_TAG = bytes(16)
EIO = io_error(errno.EIO)


def _started(bench: Bench) -> list[int]:
    return [bench.number(op) for op in bench.io.started]


def _answers(bench: Bench) -> list[Served]:
    bench.pipeline.step()
    return sorted(bench.queue.poll())


def _reset(bench: Bench, op: int = 99) -> None:
    bench.pipeline.command(ResetCommand(op, NEW_TAG, named=True))


def test_a_chunk_is_read_into_the_serve_slot_and_reported_to_nobody_else() -> None:
    bench = Bench(stream_slots=3, cache_slots=4, target_count=2, serve_slots=2)
    bench.serve(11, 8)
    bench.pipeline.step()
    (first, second) = bench.io.started
    assert (bench.number(first), bench.number(second)) in [(11, 8), (8, 11)], (
        "each target in its turn"
    )
    ours = {bench.number(op): op for op in bench.io.started}
    assert ours[11].address == (4 + 3) * STRIDE
    assert ours[8].address == (4 + 3 + 1) * STRIDE
    assert (ours[11].identity, ours[11].urgency) == (identity(11), Urgency.SERVE)
    assert ours[11].is_read
    assert not bench.queue.poll()
    assert not bench.idle()
    bench.io_done()
    bench.io_done()
    assert _answers(bench) == [Served(0, OK), Served(1, OK)]
    assert not bench.reports()
    assert not bench.finished()
    assert bench.idle()


def test_loads_and_urgent_fetches_go_before_and_other_fetches_and_writes_behind() -> None:
    bench = Bench(stream_slots=1, target_count=2, serve_slots=2)
    bench.stored(1, slot=0, number=7)
    bench.io.busy = True
    bench.write(2, 7, cache=0, pool=10)
    bench.fetch(3, number=8, pool=21, cache=1)
    bench.serve(51, 60)
    bench.fetch(4, number=9, pool=30, cache=2, urgent=True)
    bench.stream(5, [41])
    bench.pipeline.step()
    bench.io.busy = False
    bench.pipeline.step()
    started = _started(bench)
    assert (started[:2], set(started[2:4]), started[4:]) == ([41, 30], {51, 60}, [21, 10])


def test_what_is_free_for_loads_is_not_served() -> None:
    bench = Bench(stream_slots=8, serve_slots=8, reads_in_flight_max=8, serve_share=0.75)
    bench.serve(*range(8))
    bench.pipeline.step()
    assert _started(bench) == [0, 1, 2, 3, 4, 5], "while nothing else waits, too"
    bench.stream(1, [20, 21, 22])
    bench.pipeline.step()
    assert _started(bench)[6:] == [20, 21], "at once"
    bench.io_done()
    assert _started(bench)[8:] == [22], "a load before a peer"
    bench.io_done()
    assert _started(bench)[9:] == [6], "in the order in which they came"


def test_the_share_is_of_bytes_too_and_one_may_always_go() -> None:
    bench = Bench(serve_slots=8, read_bytes_in_flight_max=4 * STRIDE, serve_share=0.5)
    bench.serve(*range(4))
    bench.pipeline.step()
    assert _started(bench) == [0, 1]
    bench = Bench(serve_slots=8, reads_in_flight_max=1, serve_share=0.5)
    bench.serve(*range(4))
    bench.pipeline.step()
    assert _started(bench) == [0]


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


def test_half_as_many_bytes_are_read_for_peers_where_loads_have_just_read() -> None:
    bench = Bench(
        stream_slots=4, target_count=2, serve_slots=8, serve_bytes_in_flight_max=3 * STRIDE
    )
    bench.stream(1, [20])
    bench.pipeline.step()
    bench.serve(*range(8))
    bench.pipeline.step()
    assert _started(bench) == [20, 0, 1, 3, 5], "the other target reads as ever"
    bench.now_s = 2.9
    bench.io.complete(bench.io_of(20))
    bench.io.complete(bench.io_of(0))
    bench.pipeline.step()
    assert _started(bench)[5:] == [2]
    bench.now_s = 4.8
    bench.io.complete(bench.io_of(2))
    bench.pipeline.step()
    assert _started(bench)[6:] == [4], "less than 2 s after the load"
    bench.now_s = 4.95
    bench.pipeline.step()
    assert _started(bench)[7:] == [6]


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


def test_other_engines_regions_are_read_while_they_are_open() -> None:
    opener = Opener()
    bench = Bench(target_count=2, serve_slots=2, opener=opener)
    foreign = replace(bench.asked(0, 5), place=SlotPlace(bytes(15) + b"f", 0, 7))
    bench.queue.serve([foreign])
    assert _answers(bench) == [Served(0, None)]
    bench.pipeline.command(AttachCommand(1, 3, engine_index=1, pool_uuid=bytes(16)))
    opener.answer(uuid=bytes(15) + b"f")
    bench.pipeline.step()
    bench.queue.serve([foreign])
    bench.pipeline.step()
    (op,) = bench.io.started
    assert (owner_of(op.place), target_of(op.place), slot_of(op.place)) == (3, 0, 7)
    bench.pipeline.command(DetachCommand(3))
    bench.pipeline.step()
    assert opener.closed == [101], "the other one is read"
    bench.io_done()
    assert _answers(bench) == [Served(0, OK)]
    bench.pipeline.step()
    assert opener.closed == [101, 100]
    bench.queue.serve([foreign])
    assert _answers(bench) == [Served(0, None)]


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


def test_a_target_that_is_away_is_not_tried() -> None:
    health = TargetHealth()
    bench = Bench(serve_slots=2, health=(health,))
    for _ in range(20):
        if health.verdict is not Verdict.OK:
            break
        bench.serve(5)
        bench.pipeline.step()
        bench.io_done(io_error(errno.ENODEV))
        bench.queue.poll()
    assert health.verdict is not Verdict.OK, "what peers ask for says how a target is"
    before = len(bench.io.started)
    bench.serve(5)
    assert _answers(bench) == [Served(0, DEADLINE)]
    assert len(bench.io.started) == before


def test_levels_count_what_is_read_before_what_a_peer_asks_for_now() -> None:
    bench = Bench(stream_slots=2, serve_slots=4, reads_in_flight_max=2)
    assert bench.queue.levels() == Levels(0, 0.0)
    bench.stream(1, range(10, 13))
    bench.serve(1, 2)
    bench.pipeline.step()
    assert bench.queue.levels() == Levels(5 * STRIDE, 0.0)
    own, *_ = bench.pipeline.read_queues()
    assert own == (3 * STRIDE, 0.0), "a load does not wait for peers"
    for _ in range(5):
        bench.now_s += 0.1
        bench.turn()
    bench.pipeline.step()
    queued, rate = bench.queue.levels()
    assert queued == 0
    assert rate > 0


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


def test_tags_of_ours_are_those_of_the_engine() -> None:
    bench = Bench(serve_slots=1)
    bench.serve(5)
    bench.pipeline.step()
    (op,) = bench.io.started
    assert op.stamp is not None
    assert op.stamp.tag == TAG
