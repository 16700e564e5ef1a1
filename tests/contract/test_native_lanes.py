# SPDX-License-Identifier: Apache-2.0
"""The machine over an engine's native lanes does what it does over `submit` and `poll`.

A pipeline over the pool of each engine's rig gets the same commands. Either way the KV cache gets
the same bytes, and reports and counters say the same.
"""

from __future__ import annotations

import errno
import itertools
import random
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import Reported, batch_of, place_in, rows_of
from vllm_nvmeof_offload.copy.base import Pieces
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    OK,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.io.base import NoIoEngine, Waker
from vllm_nvmeof_offload.pool.format import read_superblock
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import (
    OURS,
    AttachCommand,
    ChunkBatch,
    Command,
    FetchCommand,
    LoadCommand,
    OpReport,
    ResetCommand,
    SlotIdentity,
    StoreCommand,
    WriteCommand,
    owned_by,
    unpacked,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.worker.peer_reads import OwnRegion, Serve, ServeQueue
from vllm_nvmeof_offload.worker.pipeline import TransferLimits, TransferPipeline
from vllm_nvmeof_offload.worker.regions import RegionFiles

from .rig import ENGINES, PAYLOAD_BYTES, STAGING_SLOTS, WAIT_S, content, name

#: Rings, threads, and lanes that come from Python.
LANES = ("uring-buffered", "threads-buffered", "faulty-threads")
TARGETS, POOL_SLOTS, CACHE_SLOTS = 2, 24, 20
#: Identity, cache slot, pool slot; None: the row has none.
Chunk = tuple[SlotIdentity, int | None, int | None]


def own_regions(pool: Pool) -> dict[bytes, OwnRegion]:
    return {
        one.place(0).region_uuid: OwnRegion(target, one.slots)
        for target, one in enumerate(pool.superblocks)
    }


class Rank:
    """One rank's pipeline over a real pool, stepped by the test. The KV cache is one page per
    pool slot.
    """

    def __init__(self, engine: str, path: Path, serve_slots: int = 0, **limits: float) -> None:
        """engine: one of the rig's; "null": that of a server without a pool."""
        files = "threads-buffered" if engine == "null" else engine
        self.rig = ENGINES[files](path, targets=TARGETS, slots=POOL_SLOTS, threads=4)
        self.io = NoIoEngine() if engine == "null" else self.rig.engine
        self.pages = np.zeros((POOL_SLOTS, PAYLOAD_BYTES), np.uint8)
        self.waker = Waker()
        self.copy = HostCopyEngine(self.waker.wake)
        self.staging = StagingMap(
            self.rig.base_address,
            self.rig.pool.slot_bytes,
            CACHE_SLOTS,
            STAGING_SLOTS - CACHE_SLOTS - serve_slots,
            serve_slots=serve_slots,
        )
        self.queue = ServeQueue(self.waker.wake)
        self.regions = RegionFiles(self.rig.pool, lambda: None)
        self.pipeline = TransferPipeline(
            self.staging,
            self.copy,
            self.io,
            TransferLimits(
                group_bytes=(self.rig.pool.payload_bytes,),
                target_count=TARGETS,
                pool_slots=POOL_SLOTS,
                **limits,  # type: ignore[arg-type]
            ),
            opener=self.regions,
            serve=Serve(self.queue, own_regions(self.rig.pool)) if serve_slots else None,
        )
        self._ops = itertools.count(1)
        self._sizes: dict[int, int] = {}
        self.rows: list[Reported] = []
        self.given: dict[int, SlotIdentity] = {}  # what the last fill of a cache slot brings

    def _batch(self, op: int, chunks: Iterable[Chunk], owner: int = OURS) -> ChunkBatch:
        rows = [
            (identity, cache, None if pool is None else owned_by(owner, place_in(pool, TARGETS)))
            for identity, cache, pool in chunks
        ]
        self._sizes[op] = len(rows)
        return batch_of(*rows)

    def _pieces(self, pages: Iterable[int]) -> Pieces:
        """Each page in two pieces."""
        half = PAYLOAD_BYTES // 2
        rows = [
            np.array([[at, 0, half], [at + half, half, PAYLOAD_BYTES - half]], np.uint64)
            for at in (self.pages[page].ctypes.data for page in pages)
        ]
        return Pieces.of(rows)

    def store(self, *chunks: tuple[SlotIdentity, int]) -> int:
        """Store chunks to cache slots, from the page of the same number."""
        op = next(self._ops)
        for identity, slot in chunks:
            self.pages[slot] = np.frombuffer(content(identity), np.uint8)
        batch = self._batch(op, [(identity, slot, None) for identity, slot in chunks])
        self.pipeline.store(StoreCommand(op, batch), self._pieces(s for _, s in chunks), None)
        return op

    def load(self, *chunks: Chunk, owner: int = OURS, pages: Sequence[int] = ()) -> int:
        """Load chunks to these pages, which are wiped; none: to 0, 1, 2, …, and all are wiped.
        owner: of the pool slots.
        """
        op = next(self._ops)
        self.pages[list(pages) or slice(None)] = 0
        pieces = self._pieces(pages or range(len(chunks)))
        self.pipeline.load(LoadCommand(op, self._batch(op, chunks, owner)), pieces, None)
        return op

    def write(self, *chunks: Chunk) -> int:
        op = next(self._ops)
        return self._command(op, WriteCommand(op, self._batch(op, chunks)))

    def fetch(self, *chunks: Chunk, owner: int = OURS) -> int:
        op = next(self._ops)
        return self._command(op, FetchCommand(op, self._batch(op, chunks, owner)))

    def attach(self, owner: int, engine_index: int, pool_uuid: bytes) -> int:
        op = next(self._ops)
        self._sizes[op] = 1
        return self._command(op, AttachCommand(op, owner, engine_index, pool_uuid))

    def reset(self, tag: bytes = b"") -> int:
        """tag: of what follows; empty: the same as before."""
        op = next(self._ops)
        self._sizes[op] = 1
        tag = tag or self.rig.pool.stamp.tag
        return self._command(op, ResetCommand(op, tag, named=True))

    def _command(self, op: int, command: Command) -> int:
        self.pipeline.command(command)
        return op

    def run(self, until: int | None = None) -> list[Reported]:
        """Step until nothing is under way, or until there are so many rows; return the rows, by
        op.
        """
        end_s = time.monotonic() + WAIT_S
        while not (self.pipeline.idle() if until is None else len(self.rows) >= until):
            self.pipeline.step()
            for report in unpacked(self.pipeline.take_reports()):
                if isinstance(report, OpReport):
                    self.rows += rows_of(report, self._sizes[report.op])
            self.pipeline.take_finished()
            assert time.monotonic() < end_s, f"the pipeline does not come to rest: {self.rows}"
            select.select([self.io.fileno(), self.waker.fd], [], [], 0.05)
            self.waker.clear()
        rows, self.rows = self.rows, []
        return sorted(rows, key=lambda row: (row.op, row.row))

    def done(self) -> list[Outcome | None]:
        return [row.outcome for row in self.run()]

    def counts(self) -> dict[str, int]:
        """The counters, without times and numbers of copies, which depend on when things end."""
        counted = {str(series): amount for series, amount in self.pipeline.counters.items()}
        return {
            series: int(amount)
            for series, amount in counted.items()
            if "seconds" not in series and not ("operations" in series and "gpu" in series)
        }

    def close(self) -> None:
        self.rig.gate.open_all()
        assert self.rig.engine.close(WAIT_S)
        self.copy.close()
        self.regions.end()
        self.rig.pool.close()


@pytest.fixture(params=LANES)
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rank]:
    one = Rank(request.param, tmp_path, read_deadline_s=WAIT_S, write_deadline_s=WAIT_S)
    yield one
    one.close()


def _stored(rank: Rank, *pool_slots: int) -> None:
    """Chunk n goes to cache slot n and pool slot n."""
    rank.store(*((name(n), n) for n in pool_slots))
    rank.write(*((name(n), n, n) for n in pool_slots))
    assert set(rank.done()) == {OK}


def test_bytes_go_to_the_pool_and_come_back(rank: Rank) -> None:
    _stored(rank, *range(12))
    chunks: list[Chunk] = [(name(n), None if n % 2 else n, n) for n in range(12)]
    rank.load(*chunks)
    assert rank.done() == [OK] * 12
    for n in range(12):
        assert rank.pages[n].tobytes() == content(name(n))
    rank.fetch((name(5), 15, 5))
    assert rank.done() == [OK]
    rank.load((name(5), 15, None))
    assert rank.done() == [OK]
    assert rank.pages[0].tobytes() == content(name(5))


def test_without_a_pool_the_cpu_tier_serves_and_all_else_fails_at_once(tmp_path: Path) -> None:
    rank = Rank("null", tmp_path)
    gone = io_error(errno.ENODEV)
    rank.store((name(0), 0))
    assert rank.done() == [OK]
    rank.write((name(0), 0, 0))
    assert rank.done() == [gone]
    rank.load((name(0), 0, None), (name(1), None, 1))
    assert rank.done() == [OK, gone]
    assert rank.pages[0].tobytes() == content(name(0))
    rank.fetch((name(2), 2, 2))
    assert rank.done() == [gone]
    rank.reset()
    assert rank.done() == [OK]
    rank.close()


def test_a_damaged_slot_and_one_of_another_chunk_fail_their_rows_only(rank: Rank) -> None:
    _stored(rank, 0, 1, 2)
    rank.rig.damage(1, HEADER_BYTES + PAYLOAD_BYTES // 2)
    rank.load((name(0), None, 0), (name(1), None, 1), (name(7), None, 2))
    assert rank.done() == [OK, CHECKSUM_MISMATCH, STALE]
    assert rank.pages[0].tobytes() == content(name(0))
    assert not rank.pages[1:].any(), "nothing is copied"


@pytest.mark.parametrize("engine", LANES)
def test_a_copy_finds_the_damage_that_its_read_has_left_to_it(engine: str, tmp_path: Path) -> None:
    waits = {"read_deadline_s": WAIT_S, "write_deadline_s": WAIT_S}
    rank = Rank(engine, tmp_path, copies_check=True, **waits)
    _stored(rank, 0, 1, 2)
    rank.rig.damage(1, HEADER_BYTES + PAYLOAD_BYTES // 2)
    rank.load((name(0), None, 0), (name(1), None, 1), (name(7), None, 2))
    assert rank.done() == [OK, CHECKSUM_MISMATCH, STALE]
    assert rank.pages[0].tobytes() == content(name(0))
    assert rank.pages[1].any(), "its read does not look at the payload"
    rank.load((name(0), 10, 0), (name(1), 11, 1))
    assert rank.done() == [OK, CHECKSUM_MISMATCH]
    rank.load((name(0), 10, None), (name(1), 11, None))
    assert rank.done() == [OK, STALE], "the cache slot of the damaged one is empty"
    assert rank.pages[0].tobytes() == content(name(0))
    rank.close()


def test_a_target_without_files_fails_its_rows_only(rank: Rank) -> None:
    _stored(rank, 0, 1)
    path = rank.rig.pool.directories[0]
    close = rank.rig.pool.exchange(0, None, None)
    rank.rig.engine.replace_target(0)
    rank.load((name(0), None, 0), (name(1), None, 1))
    assert rank.done() == [io_error(errno.EBADF), OK]
    close()
    rank.rig.pool.exchange(0, Slab(path), None)
    rank.rig.engine.replace_target(0)
    rank.load((name(0), None, 0))
    assert rank.done() == [OK]
    assert rank.pages[0].tobytes() == content(name(0))


@pytest.mark.parametrize("engine", LANES)
def test_a_read_past_its_deadline_is_released_later(engine: str, tmp_path: Path) -> None:
    rank = Rank(engine, tmp_path, read_deadline_s=2.0, write_deadline_s=WAIT_S)
    _stored(rank, 0, 1)
    rank.rig.gate.shut([0])
    fetch = rank.fetch((name(0), 10, 0))
    assert rank.run(until=1) == [Reported(fetch, 0, DEADLINE, released=False)]
    load = rank.load((name(0), 10, None))
    assert rank.run(until=1) == [Reported(load, 0, STALE)]
    rank.rig.gate.open_all()
    assert rank.run(until=1) == [Reported(fetch, 0, None)]
    rank.load((name(0), None, 0), (name(1), None, 1))
    assert rank.done() == [OK, OK]
    rank.close()


def test_what_waits_in_the_engine_is_cancelled(rank: Rank) -> None:
    _stored(rank, *range(12))
    rank.rig.gate.shut(range(12))
    op = rank.load(*((name(n), None, n) for n in range(12)))
    rank.pipeline.step()
    rank.pipeline.cancel(op)
    rank.rig.gate.open_all()
    assert rank.done() == [CANCELLED] * 12
    assert not rank.pages.any(), "nothing is copied"


def test_only_what_is_written_after_a_reset_is_adopted(rank: Rank) -> None:
    """Writes from before, around and behind two resets; the last have the newest epoch."""
    _stored(rank, 0, 1)
    rank.store((name(2), 2), (name(3), 3), (name(4), 4))
    rank.run()
    before = rank.rig.pool.stamp.epoch
    rank.rig.gate.shut([2])
    started = len(rank.rig.gate.started)
    rank.write((name(2), 2, 2))
    rank.pipeline.step()
    rank.rig.gate.wait_started(started + 1)
    first = rank.reset()
    rank.write((name(3), 3, 3))
    second = rank.reset()
    last = rank.write((name(4), 4, 4))
    rank.pipeline.step()
    rank.rig.gate.open_all()
    outcomes = {row.op: row.outcome for row in rank.run()}
    assert (outcomes[first], outcomes[second], outcomes[last]) == (OK, OK, OK)
    assert outcomes[second - 1] == CANCELLED, "the second reset voids it where it waits"
    assert rank.rig.pool.stamp.epoch != before
    found = [read_superblock(directory) for directory in rank.rig.pool.directories]
    assert {one.epoch for one in found if one} == {rank.rig.pool.stamp.epoch}
    assert rank.rig.reopen().adopt().keys == name(4).key


@pytest.mark.parametrize("key_bytes", [0, 47])
def test_a_key_that_the_format_cannot_hold_is_refused(rank: Rank, key_bytes: int) -> None:
    rank.fetch((SlotIdentity(bytes(key_bytes), 1), 0, 0))
    with pytest.raises(ValueError, match="1 to 46"):
        rank.pipeline.step()


@pytest.mark.parametrize("copies_check", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_commands_end_alike(seed: int, copies_check: bool, tmp_path: Path) -> None:
    """Rounds of commands in any order: the same outcomes, bytes and counters over both."""
    waits = {"read_deadline_s": WAIT_S, "write_deadline_s": WAIT_S}
    ranks = [
        Rank(engine, tmp_path / engine, copies_check=copies_check, **waits) for engine in LANES
    ]
    dice = random.Random(seed)
    for number in range(25):
        steps = [dice.choice(("store", "write", "write", "load", "load", "fetch", "reset"))]
        steps += dice.choices(("store", "write", "load", "fetch"), k=3)
        state = dice.getstate()
        found = []
        for rank in ranks:
            dice.setstate(state)
            # No two of a round's commands use one slot or page: which goes first would be chance.
            slots = dice.sample(range(CACHE_SLOTS), 4 * len(steps))
            for at, step in enumerate(steps):
                _random_command(rank, step, slots[4 * at :][:4], dice)
            found.append((rank.run(), rank.pages.copy(), rank.counts()))
        rows, pages, counts = found[0]
        for rows_2, pages_2, counts_2 in found[1:]:
            assert rows == rows_2, f"round {number}: {steps}"
            assert (pages == pages_2).all()
            assert counts == counts_2
    for rank in ranks:
        rank.close()


def _random_command(rank: Rank, step: str, slots: list[int], dice: random.Random) -> None:
    """On some of these cache slots and the pool slots of the same numbers."""
    some = slots[: dice.randint(1, 4)]
    # Now and then another chunk than the one that is there. What is read from a cache slot is what
    # its last fill was to bring.
    names = {slot: name(slot, dice.choice((1, 1, 1, 2))) for slot in some}
    how = {slot: dice.choice(((True, False), (False, True), (True, True))) for slot in some}
    given = {slot: rank.given[slot] for slot in some if slot in rank.given}
    match step:
        case "store":
            rank.store(*((names[slot], slot) for slot in some))
            rank.given |= names
        case "write":
            if given:
                rank.write(*((identity, slot, slot) for slot, identity in given.items()))
        case "fetch":
            rank.fetch(*((names[slot], slot, slot) for slot in some))
            rank.given |= names
        case "load":
            chunks: list[Chunk] = []
            for slot, (cache, pool) in how.items():
                if cache and not pool:
                    chunks += [(given[slot], slot, None)] if slot in given else []
                else:
                    chunks.append((names[slot], slot if cache else None, slot))
                    rank.given |= {slot: names[slot]} if cache else {}
            if chunks:
                rank.load(*chunks, pages=slots[: len(chunks)])
        case "reset":
            rank.reset()
