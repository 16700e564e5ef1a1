# SPDX-License-Identifier: Apache-2.0
"""What peers ask for, read from real pools on the pipeline's own thread, beside loads."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chunks import place_in
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, OK, STALE
from vllm_nvmeof_offload.peers.base import PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.pool.format import SlotPlace, verify
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import ResetCommand
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner

from .rig import PAYLOAD_BYTES, WAIT_S, content, name
from .test_io_engine_place import put_whole_slot, whole_slot
from .test_native_lanes import LANES, Rank

SERVE_SLOTS = 6
OWNER = 5
CHUNKS = range(8)


class Server:
    """Our rank reads for peers, on its own thread: from its pool and from a neighbour's."""

    def __init__(self, engine: str, path: Path) -> None:
        patience = {"read_deadline_s": WAIT_S, "write_deadline_s": WAIT_S}
        self.theirs = Rank(engine, path, **patience)
        self.ours = Rank(engine, path, serve_slots=SERVE_SLOTS, **patience)
        for rank in (self.theirs, self.ours):
            rank.store(*((name(n), n) for n in CHUNKS))
            rank.write(*((name(n), n, n) for n in CHUNKS))
            assert set(rank.done()) == {OK}
        rig = self.ours.rig
        base = self.ours.staging.serve_address
        self.memory = SlotMemory(base, rig.pool.slot_bytes, SERVE_SLOTS)
        self.queue = self.ours.queue
        self.runner: PipelineRunner | None = None
        self._tokens = 0

    def start(self) -> None:
        ours = self.ours
        self.runner = PipelineRunner(ours.pipeline, ours.waker, ours.rig.engine.fileno())

    def attach(self) -> None:
        pool = self.theirs.rig.pool
        self.ours.attach(OWNER, pool.engine_index, pool.superblocks[0].uuid)
        assert self.ours.done() == [OK]

    def read(self, pool: Pool, number: int, slot: int) -> PeerRead:
        """Ask for the chunk with this number of a pool, into a serve slot."""
        self._tokens += 1
        return PeerRead(
            self._tokens,
            self.memory.address_of(slot),
            PAYLOAD_BYTES,
            name(number),
            pool.slot_place(place_in(number, pool.target_count)),
            self.ours.rig.pool.stamp.tag,
            time.monotonic() + WAIT_S,
        )

    def load(self) -> None:
        self.ours.load(*((name(n), None, n) for n in CHUNKS))

    def slot(self, number: int) -> memoryview:
        rig = self.ours.rig
        start = self.memory.address_of(number) - rig.base_address
        return memoryview(rig.memory)[start : start + rig.pool.slot_bytes]

    def ends(self, count: int) -> dict[int, Served]:
        """Wait for so many, as a server does: asleep until the queue wakes it."""
        found: list[Served] = []
        end_s = time.monotonic() + WAIT_S
        while len(found) < count:
            ready = select.select([self.queue.fileno()], [], [], end_s - time.monotonic())
            assert ready[0], f"{found}, and no more comes"
            found += self.queue.poll()
        assert len(found) == count
        return {one.token: one for one in found}

    def ask(self, *reads: PeerRead) -> list[Served]:
        """The ends, in the order of the reads."""
        self.queue.serve(reads)
        ends = self.ends(len(reads))
        return [ends[read.token] for read in reads]

    def close(self) -> None:
        if self.runner is not None:
            self.runner.stop()
        self.ours.close()
        self.theirs.close()


@pytest.fixture(params=LANES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    one = Server(request.param, tmp_path)
    yield one
    one.close()


def _outcomes(ends: Sequence[Served]) -> list[object]:
    return [one.outcome for one in ends]


def test_peers_get_whole_slots_of_both_pools(server: Server) -> None:
    server.attach()
    server.start()
    ours, theirs = server.ours.rig.pool, server.theirs.rig.pool
    reads = [server.read(ours if n % 2 else theirs, n, slot=n) for n in range(SERVE_SLOTS)]
    assert _outcomes(server.ask(*reads)) == [OK] * SERVE_SLOTS
    for n, read in enumerate(reads):
        found = verify(server.slot(n), name(n), PAYLOAD_BYTES, read.place, read.tag)
        assert found == OK, "a peer can prove it"
        assert bytes(server.slot(n))[4096 : 4096 + PAYLOAD_BYTES] == content(name(n))


def test_a_region_that_is_not_open_is_not_there(server: Server) -> None:
    server.start()
    theirs = server.theirs.rig.pool
    assert _outcomes(server.ask(server.read(theirs, 3, slot=0))) == [None]


def test_what_is_not_that_chunk_is_refused(server: Server) -> None:
    ours = server.ours.rig.pool
    slot = bytearray(whole_slot(ours, 1))
    slot[-PAYLOAD_BYTES // 2] ^= 1
    put_whole_slot(ours, 1, bytes(slot))
    server.start()
    good, damaged, other, behind = (server.read(ours, n, slot=n) for n in range(4))
    other = replace(other, identity=name(7))
    uuid = behind.place.region_uuid
    behind = replace(behind, place=SlotPlace(uuid, behind.place.rank, 1 << 31))
    assert _outcomes(server.ask(good, damaged, other, behind)) == [
        OK,
        CHECKSUM_MISMATCH,
        STALE,
        STALE,
    ]


def test_what_hangs_keeps_its_slot_and_the_others_go_on(server: Server) -> None:
    server.start()
    ours, gate = server.ours.rig.pool, server.ours.rig.gate
    started = len(gate.started)
    gate.shut([2])
    hung = replace(server.read(ours, 2, slot=2), deadline_s=time.monotonic() + 0.2)
    server.queue.serve([hung])
    gate.wait_started(started + 1)
    assert _outcomes(server.ask(server.read(ours, 5, slot=0))) == [OK]
    ready = select.select([server.queue.fileno()], [], [], 0.4)
    assert not ready[0], "the device may still write into the slot"
    gate.open_all()
    assert server.ends(1)[hung.token].outcome == DEADLINE


def test_new_weights_end_what_was_asked_for(server: Server) -> None:
    server.start()
    assert server.runner is not None
    ours = server.ours.rig.pool
    old = server.read(ours, 3, slot=0)
    command = ResetCommand(1000, b"new weights 0001", named=True)
    server.runner.hand_over(lambda pipeline: pipeline.command(command))
    assert _outcomes(server.ask(old)) == [STALE]
    new = replace(server.read(ours, 3, slot=1), tag=command.tag)
    assert _outcomes(server.ask(new)) == [STALE], "the chunk is of the old ones"


def test_many_ask_and_cancel_while_we_load(server: Server) -> None:
    """Every read has one end, and every load is whole."""
    server.attach()
    server.start()
    runner, dice = server.runner, random.Random(3)
    assert runner is not None
    pools = server.ours.rig.pool, server.theirs.rig.pool
    free, ended, loads = set(range(SERVE_SLOTS)), 0, 0
    asked: dict[int, tuple[PeerRead, int]] = {}
    runner.hand_over(lambda _: server.load())
    while ended < 400 or loads < 20:
        if free:
            slots = dice.sample(sorted(free), dice.randint(1, len(free)))
            reads = [server.read(dice.choice(pools), dice.choice(CHUNKS), n) for n in slots]
            free -= set(slots)
            asked |= {read.token: (read, n) for read, n in zip(reads, slots, strict=True)}
            server.queue.serve(reads)
        if dice.random() < 0.1:
            server.queue.cancel([dice.choice(sorted(asked))])
        assert select.select([server.queue.fileno()], [], [], WAIT_S)[0]
        for token, outcome in server.queue.poll():
            read, slot = asked.pop(token)
            free.add(slot)
            ended += 1
            assert outcome in (OK, CANCELLED)
            if outcome == OK:
                wanted = read.identity, PAYLOAD_BYTES, read.place, read.tag
                assert verify(server.slot(slot), *wanted) == OK
        for job in runner.take()[0]:
            assert not job.failures
            loads += 1
            for n in CHUNKS:
                assert server.ours.pages[n].tobytes() == content(name(n))
            runner.hand_over(lambda _: server.load())
    assert len(server.ends(len(asked))) == len(asked)
    end_s = time.monotonic() + WAIT_S
    while server.queue.levels().bytes_per_s == 0:  # all that may have taken less than its period
        assert time.monotonic() < end_s, "the rate of our reads is not told"
        assert _outcomes(server.ask(server.read(pools[0], 0, slot=0))) == [OK]
