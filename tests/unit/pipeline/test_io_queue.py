# SPDX-License-Identifier: Apache-2.0
"""The order of operations to the engine: classes, bounds per target, fetches that a load awaits."""

from __future__ import annotations

import errno
import math

from tests.chunks import Reported
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, STALE, io_error
from vllm_nvmeof_offload.protocol import OpKind, Urgency
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.units import MIB

from .bench import READ_S, STRIDE, WRITE_S, Bench


def _started(bench: Bench) -> list[int]:
    return [bench.number(op) for op in bench.io.started]


def test_demand_then_urgent_fetches_then_fetches_then_writes() -> None:
    bench = Bench(stream_slots=1, target_count=2)
    bench.stored(1, slot=0, number=7)
    bench.io.busy = True
    bench.write(2, 7, cache=0, pool=10)
    bench.fetch(3, number=8, pool=21, cache=1)
    bench.fetch(4, number=9, pool=30, cache=2, urgent=True)
    bench.stream(5, [41])
    bench.pipeline.step()
    bench.io.busy = False
    bench.pipeline.step()
    assert _started(bench) == [41, 30, 21, 10], "over all targets"


def test_fetches_hold_at_most_half_of_a_targets_reads() -> None:
    bench = Bench(stream_slots=4, cache_slots=8, reads_in_flight_max=4)
    for n in range(6):
        bench.fetch(1 + n, number=n, pool=n, cache=n, urgent=n >= 4)
    bench.pipeline.step()
    assert _started(bench) == [4, 5]
    bench.stream(10, range(100, 103))
    bench.pipeline.step()
    assert _started(bench) == [4, 5, 100, 101], "the other half, at once"
    bench.io_done()
    assert _started(bench)[4:] == [102], "a load before a fetch"
    bench.io_done()
    assert _started(bench)[5:] == [0], "first come, first served"


def test_a_single_read_at_a_time_may_be_a_fetch() -> None:
    bench = Bench(reads_in_flight_max=1)
    bench.fetch(1, number=7, pool=3, cache=0)
    bench.pipeline.step()
    assert _started(bench) == [3]


def test_a_target_at_its_bound_does_not_stop_the_others() -> None:
    bench = Bench(stream_slots=20, target_count=2, reads_in_flight_max=4, writes_in_flight_max=2)
    for slot in range(4):
        bench.stored(1 + slot, slot=slot, number=slot)
    for slot in range(4):
        bench.write(10 + slot, slot, cache=slot, pool=(0, 2, 4, 1)[slot])
    bench.stream(20, [100, 102, 104, 106])
    bench.stream(21, [101])
    bench.pipeline.step()
    reads = [bench.number(op) for op in bench.io.started if op.is_read]
    writes = [bench.number(op) for op in bench.io.started if op.kind is OpKind.WRITE]
    assert sorted(reads) == [100, 101, 102]
    assert sorted(writes) == [0, 1]


def test_a_full_engine_is_offered_every_target_in_turn() -> None:
    bench = Bench(stream_slots=20, target_count=2)
    bench.io.room_max = 1
    bench.stream(1, range(0, 20, 2))
    bench.stream(2, range(1, 21, 2))
    for _ in range(4):
        bench.pipeline.step()
    assert sorted(bench.number(op) % 2 for op in bench.io.started) == [0, 0, 1, 1]


def test_an_engine_gets_no_more_than_its_room_of_each_kind() -> None:
    bench = Bench(stream_slots=4, cache_slots=8, target_count=2)
    for slot in (0, 1):
        bench.stored(1 + slot, slot=slot, number=slot)
    bench.io.busy = True
    bench.write_chunks(3, [(0, 0, 10), (1, 1, 11)])
    bench.fetch(4, number=8, pool=21, cache=2)
    bench.stream(5, [40, 41])
    bench.pipeline.step()
    assert not bench.io.started
    bench.io.room_max = 1
    bench.pipeline.step()
    assert [op.kind for op in bench.io.started] == [OpKind.LOAD, OpKind.WRITE]


# -- bytes ----------------------------------------------------------------------------


def test_bytes_in_flight_are_capped_per_target_and_direction() -> None:
    bench = Bench(
        stream_slots=20,
        cache_slots=8,
        target_count=2,
        read_bytes_in_flight_max=4 * STRIDE,
        write_bytes_in_flight_max=3 * STRIDE,
    )
    for slot in range(5):
        bench.stored(10 + slot, slot=slot, number=slot)
    bench.stream(1, range(0, 12, 2))
    bench.stream(2, range(1, 3, 2))
    bench.pipeline.step()
    assert sorted(_started(bench)) == [0, 1, 2, 4, 6], "the other target is not held back"
    bench.io.complete(bench.io_of(2))
    bench.pipeline.step()
    assert _started(bench)[-1] == 8
    while bench.turn([0, 1], target_count=2):
        pass
    bench.write_chunks(20, [(slot, slot, 100 + 2 * slot) for slot in range(5)])
    bench.pipeline.step()
    assert len(bench.io.ops) == 3


def test_more_bytes_are_ahead_of_a_target_that_writes_faster() -> None:
    bound = 60 * MIB
    count = bound // STRIDE + 1
    bench = Bench(cache_slots=count, writes_in_flight_max=count, write_bytes_in_flight_max=bound)
    slots = range(count)
    bench.store_chunks(1, [(slot, slot) for slot in slots])
    bench.pipeline.step()
    bench.copy.finish(bench.copy.submitted[-1][0])
    bench.pipeline.step()

    def written(op: int, bytes_per_s: float) -> int:
        """Write every chunk at this rate; the bytes that were with the engine at a time."""
        bench.write_chunks(op, [(slot, slot, slot) for slot in slots])
        bench.pipeline.step()
        most = len(bench.io.ops) * STRIDE
        while bench.io.ops:
            bench.now_s += len(bench.io.ops) * STRIDE / bytes_per_s
            for token in list(bench.io.ops):
                bench.io.complete(token)
            bench.pipeline.step()
        bench.now_s += 1
        bench.pipeline.step()
        bench.reports()
        return most

    assert written(2, 4e9) == 32 * MIB, "not known yet"
    assert 50e6 - STRIDE < written(3, 8e9) <= 50e6, "12.5 ms"
    assert written(4, 8e9) == bound, "less than 75 MB"
    for op in range(5, 9):
        written(op, 1e9)
    assert written(9, 1e9) == 32 * MIB


def test_few_bytes_are_written_while_reads_wait_or_run() -> None:
    bench = Bench(stream_slots=4, cache_slots=8, write_bytes_beside_reads_max=2 * STRIDE)
    for slot in range(6):
        bench.stored(1 + slot, slot=slot, number=slot)
    bench.stream(10, [50, 51])
    bench.write_chunks(11, [(slot, slot, 100 + slot) for slot in range(6)])
    bench.pipeline.step()
    assert _started(bench) == [50, 51, 100, 101]
    bench.io.complete(bench.io_of(50))
    bench.pipeline.step()
    assert len(bench.io.ops) == 3, "one still runs"
    bench.io.complete(bench.io_of(51))
    bench.pipeline.step()
    assert _started(bench)[4:] == [102, 103, 104, 105]


def test_one_write_goes_on_beside_reads_whatever_its_size() -> None:
    bench = Bench(stream_slots=2, write_bytes_beside_reads_max=1, read_bytes_in_flight_max=1)
    for slot in (0, 1):
        bench.stored(1 + slot, slot=slot, number=slot)
    bench.stream(3, [50, 51])
    bench.write_chunks(4, [(0, 0, 100), (1, 1, 101)])
    bench.pipeline.step()
    assert _started(bench) == [50, 100], "and one read, if a read is larger than its bound"


def test_fetches_hold_at_most_half_of_the_bytes_of_reads() -> None:
    bench = Bench(stream_slots=4, cache_slots=8, read_bytes_in_flight_max=4 * STRIDE)
    bench.fetch_chunks(1, [(n, n, n) for n in range(4)])
    bench.pipeline.step()
    assert _started(bench) == [0, 1]
    bench.stream(10, [100, 101, 102])
    bench.pipeline.step()
    assert _started(bench) == [0, 1, 100, 101]


# -- deadlines ------------------------------------------------------------------------


def test_an_operation_past_its_deadline_does_not_count_against_the_bounds() -> None:
    """The engine gives it up, and work goes on when the target's files are other ones."""
    health = TargetHealth()
    bench = Bench(cache_slots=8, write_bytes_in_flight_max=STRIDE, health=(health,))  # type: ignore[arg-type]
    for slot in (0, 1, 2):
        bench.stored(1 + slot, slot=slot, number=slot)
    bench.write_chunks(4, [(0, 0, 0)])
    bench.pipeline.step()
    bench.hang(WRITE_S)
    assert bench.io.cancelled == [bench.io_of(0)]
    health.attached()
    bench.write_chunks(5, [(1, 1, 1), (2, 2, 2)])
    bench.pipeline.step()
    assert _started(bench) == [0, 1], "one at a time, beside the one that hangs"


def test_a_deadline_comes_whether_the_engine_answers_or_not() -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    assert bench.pipeline.deadline_in_s() == READ_S
    bench.hang(READ_S - 0.001)
    assert bench.reports() == []
    bench.hang(0.001)
    assert Reported(1, 0, DEADLINE, released=False) in bench.reports()
    bench.hang(1000.0)
    assert bench.pipeline.deadline_in_s() == math.inf
    bench.io_done(io_error(errno.EIO))
    assert Reported(1, 0, None) in bench.reports(), "its release is all that counts now"
    assert len(bench.io.started) == 1, "it is not tried again"
    assert bench.idle()


def test_what_the_engine_has_not_started_is_released_at_its_deadline() -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    bench.io.queued = set(bench.io.ops)
    bench.hang()
    assert bench.reports() == [Reported(1, 0, DEADLINE)], "and the target is not suspected"
    assert bench.idle()


def test_an_end_before_its_deadline_counts_even_if_it_is_seen_later() -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    bench.io.complete(bench.io_of(3), ended_s=1.0)
    bench.hang(10 * READ_S)
    assert bench.reports()[0] == Reported(1, 0)


def test_an_engine_that_takes_nothing_is_waited_for_as_long_as_a_deadline() -> None:
    bench = Bench()
    bench.io.busy = True
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    assert bench.pipeline.deadline_in_s() == READ_S
    bench.hang()
    assert bench.reports() == [Reported(1, 0, DEADLINE)]
    assert bench.pipeline.deadline_in_s() == math.inf


def test_a_retry_goes_before_the_rest_of_its_load() -> None:
    bench = Bench(stream_slots=4, reads_in_flight_max=1)
    bench.stream(1, [3, 4, 5])
    bench.pipeline.step()
    bench.io_done(io_error(errno.EIO))
    assert _started(bench) == [3, 3]


def test_a_retry_keeps_the_deadline() -> None:
    bench = Bench()
    bench.stream(1, [3])
    bench.pipeline.step()
    bench.now_s += 1.0
    bench.io_done(io_error(errno.EIO))
    assert _started(bench) == [3, 3]
    assert bench.pipeline.deadline_in_s() == READ_S - 1.0
    bench.hang(READ_S - 1.0)
    assert bench.finished() == [(1, ((0, DEADLINE),))]


def test_a_retry_that_waits_fails_at_its_deadline() -> None:
    bench = Bench(stream_slots=4, cache_slots=8, target_count=2)
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    bench.hang(READ_S - 1.0)
    bench.io.busy = True
    bench.io_done(io_error(errno.EIO))
    bench.load(2, 7, cache=0, pool=None)  # promotes it
    bench.stream(3, [5])
    bench.hang(1.0)
    assert [one for one in bench.reports() if isinstance(one, Reported)] == [
        Reported(2, 0, STALE),
        Reported(1, 0, DEADLINE),
    ]
    assert bench.finished() == [(2, ((0, STALE),))], "what waits for the first time waits on"


def test_a_fetch_that_a_load_waits_for_gets_the_priority_of_loads() -> None:
    bench = Bench(reads_in_flight_max=2)
    for n in range(3):
        bench.fetch(1 + n, number=n, pool=n, cache=n)
    bench.pipeline.step()
    assert _started(bench) == [0]
    bench.load(9, 2, cache=2, pool=None)
    assert _started(bench) == [0, 2]
    assert bench.io.started[-1].urgency is Urgency.DEMAND
    bench.io.complete(bench.io.started[-1].token)
    bench.pipeline.step()
    assert Reported(3) in bench.reports()
    assert len(bench.copy.submitted) == 1
    bench.turn()
    assert bench.finished() == [(9, ())]
    while bench.turn():
        pass
    assert bench.idle()


def test_a_fetch_that_waits_for_its_slot_is_promoted_there() -> None:
    bench = Bench(reads_in_flight_max=1)
    bench.stored(1, slot=0, number=7)
    bench.load(2, 7, cache=0, pool=None)  # its copy holds the slot
    bench.fetch(3, number=8, pool=3, cache=0)
    bench.load(4, 8, cache=0, pool=None)
    bench.copy.finish(1)
    bench.pipeline.step()
    assert [op.urgency for op in bench.io.started] == [Urgency.DEMAND]


def test_a_submitted_fetch_stays_and_its_retry_is_promoted() -> None:
    bench = Bench(reads_in_flight_max=2)
    for n in range(2):
        bench.fetch(1 + n, number=n, pool=n, cache=n)
    bench.pipeline.step()
    bench.load(9, 0, cache=0, pool=None)
    assert not bench.io.cancelled
    bench.io_done(io_error(errno.EIO))
    assert {bench.number(op): op.urgency for op in bench.io.ops.values()} == {
        0: Urgency.DEMAND,
        1: Urgency.PREFETCH,
    }, "both: the retry does not count as a fetch"
    while bench.turn():
        pass
    assert bench.finished() == [(9, ())]
    assert bench.idle()


def test_promoted_fetches_count_toward_the_share_of_their_load() -> None:
    bench = Bench(stream_slots=8, cache_slots=40, reads_in_flight_max=2)
    for n in range(40):
        bench.fetch(100 + n, number=n, pool=n, cache=n)
    bench.load_chunks(1, [(n, n, None) for n in range(40)])
    bench.stream(2, range(1000, 1006))
    bench.pipeline.step()
    while not (done := bench.finished()):
        assert bench.turn()
    assert done == [(2, ())]
    assert len(_started(bench)) <= 2 * 6 + 2


def test_a_cancelled_fetch_leaves_nothing_and_its_load_finds_nothing() -> None:
    for where in ("gate", "queue", "engine"):
        bench = Bench(reads_in_flight_max=1)
        bench.stored(1, slot=0, number=7)
        bench.load(2, 7, cache=0, pool=None)
        if where != "gate":
            bench.turn()
        bench.io.busy = where == "queue"
        bench.fetch(3, number=8, pool=3, cache=0)
        bench.load(4, 8, cache=0, pool=None)
        bench.reports()
        bench.cancel(3)
        bench.io.busy = False
        bench.pipeline.step()
        released = where != "engine"
        assert Reported(3, 0, CANCELLED, released) in bench.reports(), where
        if where == "engine":
            bench.io_done(io_error(errno.EIO))  # retryable, but no load wants it
            assert bench.reports() == [Reported(3, 0, None)]
        while bench.turn():
            pass
        assert len(bench.io.started) == (where == "engine")
        assert (4, ((0, STALE),)) in bench.finished(), where
        assert bench.idle(), where


def test_a_cancelled_fetch_whose_retry_waits_leaves_nothing() -> None:
    bench = Bench(reads_in_flight_max=1)
    bench.fetch(1, number=7, pool=3, cache=0)
    bench.pipeline.step()
    bench.io.busy = True
    bench.io_done(io_error(errno.EIO))
    bench.cancel(1)
    assert bench.reports() == [Reported(1, 0, CANCELLED)]
    assert bench.idle()
    bench.io.busy = False
    bench.stream(2, [5])
    bench.pipeline.step()
    bench.io_done(OK)
    assert _started(bench) == [3, 5]
