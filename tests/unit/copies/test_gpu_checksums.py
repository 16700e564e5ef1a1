# SPDX-License-Identifier: Apache-2.0
"""The checksums that the GPU makes of stores and loads: the engine over the stub of CUDA.

The stub runs the kernel late and in any order that CUDA leaves open, on what memory holds then.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
from tests.unit.copies.rig import BLOCKS, Rig, Signals
from vllm_nvmeof_offload.copy.base import Backend, Direction, Payloads
from vllm_nvmeof_offload.copy.gpu_checksums import KERNEL_NAME, GpuChecksums, Launch

LAYERS, PAGE = 2, 3 * 512
CHUNK_PIECES = 2 * LAYERS

directions = pytest.mark.parametrize("direction", list(Direction))


class Bench:
    """An engine that makes checksums, over the stub. parts_max: of its table."""

    def __init__(
        self,
        cuda: FakeCuda | None = None,
        backend: Backend = Backend.DMA,
        page: int = PAGE,
        parts_max: int = 4096,
        waker: Signals | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.cuda = cuda or FakeCuda()
        kernel = self.cuda.load_kernel(b"", KERNEL_NAME)
        checksums = GpuChecksums(self.cuda, kernel, launch, parts_max)
        self.rig = Rig(self.cuda, LAYERS, backend, waker, page, checksums)
        self.engine = self.rig.engine
        self.page = page
        assert self.engine.makes_checksums

    def payloads(self, slots: list[int]) -> Payloads:
        count = len(slots)
        return Payloads.of(
            np.full(count, CHUNK_PIECES, np.uint32),
            np.array([self.rig.staging[slot].ctypes.data for slot in slots], np.uint64),
            np.full(count, CHUNK_PIECES * self.page, np.uint64),
        )

    def submit(
        self, direction: Direction, chunks: list[int], fence: object = None
    ) -> tuple[int, Payloads]:
        """Chunk i has the blocks 2i and 2i + 1, and slot i."""
        blocks = [block for chunk in chunks for block in (2 * chunk, 2 * chunk + 1)]
        payloads = self.payloads(chunks)
        pieces = self.rig.pieces(blocks, chunks)
        return self.engine.submit(direction, pieces, fence, payloads), payloads

    def fill(self, direction: Direction) -> None:
        """Fresh bytes at the copies' sources, none at their targets."""
        both = self.rig.cache, self.rig.staging
        source, target = both if direction is Direction.STORE else both[::-1]
        source[:], target[:] = self.rig.fresh(source.shape), 0

    def crcs(self, direction: Direction, chunks: list[int]) -> list[int]:
        """What the library makes of the sources."""
        blocks = [block for chunk in chunks for block in (2 * chunk, 2 * chunk + 1)]
        of_cache = self.rig.in_slot_order(blocks, self.rig.cache)
        slots = of_cache if direction is Direction.STORE else self.rig.staging[chunks]
        return [crc32c(slot.tobytes()) for slot in slots]

    def streams(self, direction: Direction) -> tuple[int, int]:
        """Those of copies and of checksums."""
        mine = self.engine.streams[direction]
        return mine, mine + 1  # the stub numbers them in the order of their creation

    def run_one(self, direction: Direction, chunks: list[int]) -> tuple[bool, list[int]]:
        """A ticket from submission to its end: (OK, its checksums)."""
        self.fill(direction)
        ticket, payloads = self.submit(direction, chunks)
        ((number, ok),) = self.rig.finish()
        assert number == ticket
        return ok, payloads.crcs.tolist()

    def close(self) -> None:
        self.engine.close()
        assert not self.cuda.events and not self.cuda.allocated
        assert list(self.cuda.streams) == [MODEL_STREAM], "a stream was left"


def _round(bench: Bench, rng: random.Random) -> bool:
    """Tickets of one direction in flight together; True if all checksums are right."""
    direction = rng.choice(list(Direction))
    bench.fill(direction)
    order = rng.sample(range(BLOCKS // 2), BLOCKS // 2)
    cut = rng.randrange(1, len(order))
    expected = {}
    for chunks in (order[:cut], order[cut:]):
        crcs = bench.crcs(direction, chunks)
        ticket, payloads = bench.submit(direction, chunks)
        expected[ticket] = payloads, crcs
        for _ in range(rng.randrange(6)):
            bench.cuda.step()
    right = True
    while expected:
        ran = bench.cuda.step()
        for ticket, outcome in bench.engine.poll():
            payloads, crcs = expected.pop(ticket)
            right &= outcome.ok and payloads.crcs.tolist() == crcs
        assert ran or not (expected and bench.cuda.is_idle), "a ticket never ends"
    return right


@given(
    seed=st.integers(0, 2**32),
    backend=st.sampled_from(list(Backend)),
    batch=st.booleans(),
    bytes_max=st.sampled_from([PAGE, 4 * PAGE, 1 << 20]),
)
@settings(max_examples=100, deadline=None)
def test_stores_and_loads_get_the_crcs_of_the_library_in_any_allowed_order(
    seed: int, backend: Backend, batch: bool, bytes_max: int
) -> None:
    launch = Launch(bytes_max=bytes_max)
    bench = Bench(FakeCuda(seed, batch=batch), backend, parts_max=64, launch=launch)
    rng = random.Random(seed)
    assert all(_round(bench, rng) for _ in range(8)), "the table of parts is used again"
    bench.close()


def _is_seen(ignore: tuple[str, ...]) -> bool:
    """Whether some seed shows a wrong checksum when the engine's calls do nothing."""
    for seed in range(30):
        bench = Bench(FakeCuda(seed, ignore=ignore))
        rng = random.Random(seed)
        if not all(_round(bench, rng) for _ in range(3)):
            return True
    return False


def test_the_stub_detects_a_checksum_that_does_not_wait_for_its_copy() -> None:
    assert _is_seen(ignore=("wait_event",))


def test_the_stub_detects_a_load_that_brought_nothing() -> None:
    assert _is_seen(ignore=("copy_batch",))


def test_the_checksum_of_a_load_is_of_what_arrived_and_of_a_store_of_what_was_there() -> None:
    """Whatever staging holds: a bit that flips on the way is seen by a load, not sealed over."""
    bench = Bench()
    for direction in Direction:
        bench.fill(direction)
        copies, checksums = bench.streams(direction)
        expected = bench.crcs(direction, [1])
        _, payloads = bench.submit(direction, [1])
        bench.cuda.drain(copies)
        if direction is Direction.STORE:
            bench.rig.staging[1, 5] ^= 1
        else:
            bench.rig.cache[0, 2, 5] ^= 1
        bench.cuda.drain(checksums)
        ((_, outcome),) = bench.engine.poll()
        assert outcome.ok and (payloads.crcs.tolist() == expected) == (direction is Direction.STORE)
    bench.close()


@directions
def test_a_later_copy_does_not_wait_for_an_earlier_checksum(direction: Direction) -> None:
    bench = Bench()
    bench.fill(direction)
    copies, checksums = bench.streams(direction)
    tickets = [bench.submit(direction, [chunk])[0] for chunk in (0, 1, 2)]
    bench.cuda.drain(copies)
    cached = bench.rig.in_slot_order([0, 1, 2, 3, 4, 5], bench.rig.cache)
    assert cached.any() and (cached == bench.rig.staging[:3]).all(), "all copies have ended"
    assert bench.engine.poll() == [] and not bench.cuda.launched
    bench.cuda.drain(checksums)
    assert [ticket for ticket, _ in bench.engine.poll()] == tickets
    bench.close()


def test_a_store_makes_its_checksum_beside_its_copy_and_ends_after_both() -> None:
    bench = Bench()
    bench.fill(Direction.STORE)
    copies, checksums = bench.streams(Direction.STORE)
    ticket, payloads = bench.submit(Direction.STORE, [0])
    bench.cuda.drain(checksums)
    assert bench.cuda.launched and not bench.rig.staging.any(), "the copy has not begun"
    assert bench.engine.poll() == []
    bench.cuda.drain(copies)
    assert bench.engine.poll() == [], "the end is on the stream of checksums"
    bench.cuda.drain(checksums)
    assert [number for number, _ in bench.engine.poll()] == [ticket]
    assert payloads.crcs.tolist() == bench.crcs(Direction.STORE, [0])
    bench.close()


def test_the_directions_do_not_wait_for_each_others_checksums() -> None:
    bench = Bench()
    load, _ = bench.submit(Direction.LOAD, [0])
    store, _ = bench.submit(Direction.STORE, [1])
    for _ in range(2):
        for stream in bench.streams(Direction.STORE):
            bench.cuda.drain(stream)
    assert [ticket for ticket, _ in bench.engine.poll()] == [store]
    assert [ticket for ticket, _ in bench.rig.finish()] == [load]
    bench.close()


@directions
def test_a_ticket_of_no_pieces_ends_behind_the_checksums_before_it(direction: Direction) -> None:
    bench = Bench()
    copies, _ = bench.streams(direction)
    before, _ = bench.submit(direction, [0])
    nothing = bench.engine.submit(direction, np.empty((0, 3), np.uint64), None)
    bench.cuda.drain(copies)
    assert bench.engine.poll() == []
    assert [ticket for ticket, _ in bench.rig.finish()] == [before, nothing]
    bench.close()


def test_a_store_behind_an_open_fence_is_summed_when_the_model_has_written() -> None:
    bench = Bench()
    fresh = bench.rig.fresh(bench.rig.cache.shape)
    bench.cuda.on_model(partial(np.copyto, bench.rig.cache, fresh))
    _, payloads = bench.submit(Direction.STORE, [3], bench.engine.record_fence())
    for stream in bench.streams(Direction.STORE):
        bench.cuda.drain(stream)
    assert bench.engine.poll() == [] and not bench.cuda.launched
    assert len(bench.rig.finish()) == 1
    assert bench.rig.cache.any() and payloads.crcs.tolist() == bench.crcs(Direction.STORE, [3])
    bench.close()


@directions
def test_without_payloads_nothing_is_launched(direction: Direction) -> None:
    bench = Bench()
    bench.engine.submit(direction, bench.rig.pieces([0, 1], [0]), None)
    assert [ok for _, ok in bench.rig.finish()] == [True] and not bench.cuda.launched
    bench.close()


@directions
def test_payloads_beyond_the_table_get_none_and_its_room_comes_back(direction: Direction) -> None:
    bench = Bench(parts_max=2 * CHUNK_PIECES + 1)
    for _ in range(5):
        ok, crcs = bench.run_one(direction, [0, 2, 3])
        bench_says = bench.crcs(direction, [0, 2])
        assert ok and crcs == [*bench_says, -1]
    ok, crcs = bench.run_one(direction, [1])
    assert ok and crcs == bench.crcs(direction, [1])
    bench.close()


@directions
@pytest.mark.parametrize("call", ["launch", "wait_event"])
def test_an_error_of_the_checksums_leaves_the_copy_alone(
    direction: Direction, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(parts_max=2 * CHUNK_PIECES, launch=Launch(bytes_max=PAGE))
    bench.cuda.fail[call] = bench.cuda.calls[call] + (call == "launch")  # the second launch
    for _ in range(3):
        ok, crcs = bench.run_one(direction, [0, 1])
        assert (ok, crcs) == (True, [-1, -1])
        cached = bench.rig.in_slot_order([0, 1, 2, 3], bench.rig.cache)
        assert cached.any() and (cached == bench.rig.staging[:2]).all()
    errors = [record.getMessage() for record in caplog.records]
    assert errors == [
        f"the GPU cannot compute a copy's checksums, so the CPU does: {call}: CUDA_ERROR_STUB"
    ]
    del bench.cuda.fail[call]
    ok, crcs = bench.run_one(direction, [0, 1])
    assert ok and crcs == bench.crcs(direction, [0, 1]), "the table was given back"
    bench.close()


def test_the_table_of_failed_checksums_stays_in_use_until_their_stream_is_empty() -> None:
    bench = Bench(parts_max=CHUNK_PIECES)
    bench.fill(Direction.STORE)
    copies, checksums = bench.streams(Direction.STORE)
    bench.cuda.fail["wait_event"] = bench.cuda.calls["wait_event"]
    ticket, payloads = bench.submit(Direction.STORE, [0])
    bench.cuda.drain(copies)
    assert bench.engine.poll() == [], "the kernel was launched, and has not run"
    bench.cuda.drain(checksums)
    assert [(number, outcome.ok) for number, outcome in bench.engine.poll()] == [(ticket, True)]
    assert payloads.crcs.tolist() == [-1]
    bench.cuda.fail.clear()
    assert bench.run_one(Direction.STORE, [0])[1] == bench.crcs(Direction.STORE, [0])
    bench.close()


@directions
@pytest.mark.parametrize("call", ["copy_batch", "record_event"])
def test_a_ticket_that_failed_has_no_checksums_and_gives_its_room_back(
    direction: Direction, call: str
) -> None:
    bench = Bench(parts_max=CHUNK_PIECES)
    assert bench.run_one(direction, [0])[0]
    # Of recordings: the one at the ticket's end.
    bench.cuda.fail[call] = bench.cuda.calls[call] + (call == "record_event")
    assert bench.run_one(direction, [0]) == (False, [-1])
    bench.cuda.fail.clear()
    assert bench.run_one(direction, [0]) == (True, bench.crcs(direction, [0]))
    bench.close()


@directions
def test_a_ticket_whose_end_is_not_recorded_ends_after_its_checksums(direction: Direction) -> None:
    bench = Bench()
    copies, checksums = bench.streams(direction)
    bench.cuda.fail["record_event"] = bench.cuda.calls["record_event"] + 1
    ticket, _ = bench.submit(direction, [0])
    bench.cuda.drain(copies)
    assert bench.engine.poll() == [], "the kernel was launched, and has not run"
    bench.cuda.drain(checksums)
    assert [(number, outcome.ok) for number, outcome in bench.engine.poll()] == [(ticket, False)]
    bench.close()


@directions
def test_a_payload_that_is_left_out_does_not_shift_the_others(direction: Direction) -> None:
    bench = Bench()
    bench.fill(direction)
    blocks, chunks = list(range(6)), [0, 1, 2]
    payloads = bench.payloads(chunks)
    payloads.sizes[1] += np.uint64(512)  # its end is not copied
    bench.engine.submit(direction, bench.rig.pieces(blocks, chunks), None, payloads)
    assert len(bench.rig.finish()) == 1
    first, _, third = bench.crcs(direction, chunks)
    assert payloads.crcs.tolist() == [first, -1, third]
    bench.close()


@directions
def test_while_asleep_there_are_none(direction: Direction) -> None:
    bench = Bench()
    bench.engine.asleep = True
    assert bench.run_one(direction, [0]) == (False, [-1])
    bench.engine.asleep = False
    assert bench.run_one(direction, [0]) == (True, bench.crcs(direction, [0]))
    bench.close()


@pytest.mark.parametrize("seed", range(10))
def test_close_waits_for_checksums_in_flight(seed: int) -> None:
    bench = Bench(FakeCuda(seed))
    for direction in Direction:
        for chunk in range(3):
            bench.submit(direction, [chunk])
    bench.submit(Direction.STORE, [3], bench.engine.record_fence())  # held: its fence is open
    bench.close()  # the stub asserts that nothing is freed under way
    assert len(bench.cuda.launched) == 6, "one for each ticket that was not held"


@directions
def test_a_waiter_thread_signals_the_end_of_the_checksums(direction: Direction) -> None:
    signals = Signals()
    bench = Bench(waker=signals)
    copies, _ = bench.streams(direction)
    bench.submit(direction, [0])
    bench.cuda.drain(copies)
    assert bench.engine.poll() == []
    bench.cuda.drain()
    assert signals.acquire(timeout=20)
    assert len(bench.engine.poll()) == 1
    bench.close()
