# SPDX-License-Identifier: Apache-2.0
"""The machine over an engine's native lanes does what it does over `submit` and `poll`.

A pipeline over the pool of each engine's rig gets the same commands. Either way the KV cache gets
the same bytes, and reports and counters say the same.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import select
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import Reported, batch_of, begin, geometry_of, place_in, rows_of
from tests.process import wait_until
from tests.unit.pool.kit import make_spec
from vllm_nvmeof_offload.copy.geometry import CacheTensor
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
from vllm_nvmeof_offload.peers.base import PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.pool.format import (
    SlotPlace,
    Superblock,
    read_superblock,
    verify,
    write_superblock,
)
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import (
    OURS,
    AttachCommand,
    ChunkBatch,
    Command,
    DetachCommand,
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
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline
from vllm_nvmeof_offload.worker.regions import FoundPool, OpenRegions, RegionFiles

from .rig import ENGINES, PAYLOAD_BYTES, STAGING_SLOTS, WAIT_S, content, name
from .test_io_engine import put_whole_slot, whole_slot

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
        # Each page in two pieces that do not touch.
        half, base = PAYLOAD_BYTES // 2, self.pages.ctypes.data
        sizes = [(0, half), (half, PAYLOAD_BYTES - half)]
        self.geometry = geometry_of(
            [CacheTensor(base + at, PAYLOAD_BYTES, size, POOL_SLOTS) for at, size in sizes]
        )
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

    def store(self, *chunks: tuple[SlotIdentity, int]) -> int:
        """Store chunks to cache slots, from the page of the same number."""
        op = next(self._ops)
        for identity, slot in chunks:
            self.pages[slot] = np.frombuffer(content(identity), np.uint8)
        batch = self._batch(op, [(identity, slot, None) for identity, slot in chunks])
        begin(self.pipeline, self.geometry, StoreCommand(op, batch), [slot for _, slot in chunks])
        return op

    def load(self, *chunks: Chunk, owner: int = OURS, pages: Sequence[int] = ()) -> int:
        """Load chunks to these pages, which are wiped; none: to 0, 1, 2, …, and all are wiped.
        owner: of the pool slots.
        """
        op = next(self._ops)
        self.pages[list(pages) or slice(None)] = 0
        command = LoadCommand(op, self._batch(op, chunks, owner))
        begin(self.pipeline, self.geometry, command, pages or range(len(chunks)))
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


# -- two engines side by side: one reads what the other has written -------------------

OWNER = 5
CHUNKS = range(8)


class Neighbours:
    """They have written the chunk n to pool slot n."""

    def __init__(self, engine: str, path: Path) -> None:
        patience = {"read_deadline_s": WAIT_S, "write_deadline_s": WAIT_S}
        self.theirs, self.ours = (Rank(engine, path, **patience) for _ in range(2))
        self.theirs.store(*((name(n), n) for n in CHUNKS))
        self.theirs.write(*((name(n), n, n) for n in CHUNKS))
        assert set(self.theirs.done()) == {OK}

    @property
    def superblock(self) -> Superblock:
        return self.theirs.rig.pool.superblocks[0]

    def attach(self) -> None:
        self.ours.attach(OWNER, self.theirs.rig.pool.engine_index, self.superblock.uuid)

    def open_files(self) -> list[str]:
        """Their slabs, as often as our regions have them open."""
        slabs = {str(path / "slab") for path in self.theirs.rig.pool.directories}
        readers = []
        for fd in Path("/proc/self/fd").iterdir():
            try:
                flags = Path(f"/proc/self/fdinfo/{fd.name}").read_text().split("flags:")[1].split()
                if os.readlink(fd) in slabs and int(flags[0], 8) & os.O_ACCMODE == os.O_RDONLY:
                    readers.append(os.readlink(fd))
            except FileNotFoundError:
                continue  # it was closed meanwhile
        return readers

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture(params=LANES)
def neighbours(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Neighbours]:
    both = Neighbours(request.param, tmp_path)
    yield both
    both.close()


def test_chunks_of_another_engine_are_streamed_and_land(neighbours: Neighbours) -> None:
    ours = neighbours.ours
    neighbours.attach()
    ours.load(*((name(n), None if n % 2 else n, n) for n in CHUNKS), owner=OWNER)
    ours.fetch((name(3), 19, 3), owner=OWNER)
    assert ours.done() == [OK] * (1 + len(CHUNKS) + 1)
    for n in CHUNKS:
        assert ours.pages[n].tobytes() == content(name(n))
    ours.load((name(3), 19, None), (name(4), 4, None))
    assert ours.done() == [OK, OK]
    assert ours.pages[0].tobytes() == content(name(3))
    assert ours.pages[1].tobytes() == content(name(4))


def test_a_slot_that_they_have_used_again_is_stale(neighbours: Neighbours) -> None:
    theirs, ours = neighbours.theirs, neighbours.ours
    neighbours.attach()
    theirs.store((name(100), 2))
    theirs.write((name(100), 2, 2))
    theirs.run()
    ours.load((name(2), None, 2), (name(1), None, 1), owner=OWNER)
    assert ours.done() == [OK, STALE, OK]
    theirs.reset(bytes(range(16)))  # of other weights
    theirs.store((name(2), 3))
    theirs.write((name(2), 3, 2))
    theirs.run()
    ours.load((name(2), None, 2), (name(1), None, 1), owner=OWNER)
    assert ours.done() == [STALE, OK]


def test_files_are_closed_after_a_detach_and_at_the_end(neighbours: Neighbours) -> None:
    ours = neighbours.ours
    neighbours.attach()
    assert ours.done() == [OK]
    assert len(neighbours.open_files()) == TARGETS
    neighbours.attach()  # again: the new files take the place of the old ones
    assert ours.done() == [OK]
    wait_until("the close", lambda: len(neighbours.open_files()) == TARGETS)
    ours.pipeline.command(DetachCommand(OWNER))
    ours.pipeline.step()
    wait_until("the close", lambda: not neighbours.open_files())
    ours.load((name(0), None, 0), owner=OWNER)
    assert ours.done() == [io_error(errno.ENOENT)]
    neighbours.attach()
    assert ours.done() == [OK]
    ours.regions.end()
    assert not neighbours.open_files()


def change(**fields: object) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        superblock = read_superblock(directory)
        assert superblock is not None
        write_superblock(directory, replace(superblock, **fields))  # type: ignore[arg-type]

    return rewrite


def damage(directory: Path) -> None:
    page = bytearray((directory / "superblock").read_bytes())
    page[130] ^= 1
    (directory / "superblock").write_bytes(page)


@pytest.mark.parametrize(
    ("what", "number"),
    [
        (lambda directory: (directory / "superblock").unlink(), errno.ENOENT),
        (lambda directory: (directory / "slab").unlink(), errno.ENOENT),
        (change(uuid=bytes(16)), errno.ENOENT),
        (damage, errno.ESTALE),
        (change(payload_bytes=4096), errno.ESTALE),
        (change(world_size=3), errno.ESTALE),
        (change(slots=POOL_SLOTS), errno.ESTALE),
    ],
    ids=["no superblock", "no slab", "uuid", "damaged", "payload", "ranks", "cut short"],
)
def test_what_is_not_that_pool_of_our_shape_is_not_read(
    neighbours: Neighbours, what: Callable[[Path], None], number: int
) -> None:
    uuid = neighbours.superblock.uuid
    for directory in neighbours.theirs.rig.pool.directories:
        what(directory)
    neighbours.ours.attach(OWNER, neighbours.theirs.rig.pool.engine_index, uuid)
    neighbours.ours.load((name(0), None, 0), owner=OWNER)
    assert neighbours.ours.done() == [io_error(number), io_error(errno.ENOENT)]
    assert not neighbours.open_files()


def test_each_rank_of_a_pool_has_a_uuid_of_its_own(tmp_path: Path) -> None:
    """The follower knows that of rank 0 only."""
    specs = [make_spec(tmp_path, rank=rank, world_size=2) for rank in (0, 1, 1)]
    first, theirs, ours = (Pool.open(spec) for spec in specs)
    assert first.superblocks[0].uuid != theirs.superblocks[0].uuid
    assert (first.engine_index, theirs.engine_index, ours.engine_index) == (0, 0, 1)
    files = RegionFiles(ours, lambda: None)
    answers: list[OpenRegions] = []
    files.open(AttachCommand(1, OWNER, 0, first.superblocks[0].uuid), [0])
    wait_until("the region", lambda: bool(answers.extend(files.take()) or answers))
    (answer,) = answers
    assert answer.error == 0
    slot = theirs.superblocks[0].place(0)
    assert (answer.by_target[0].uuid, answer.by_target[0].rank) == (slot.region_uuid, 1)
    files.end()
    for pool in (first, theirs, ours):
        pool.close()


def test_what_only_one_of_two_engines_can_change_may_differ(neighbours: Neighbours) -> None:
    for directory in neighbours.theirs.rig.pool.directories:
        differs = {"epoch": 77, "sequence": 99, "target_count": 5, "slots": 1, "target_index": 3}
        change(**differs)(directory)
    neighbours.attach()
    assert neighbours.ours.done() == [OK]


def test_an_owner_may_have_fewer_targets(neighbours: Neighbours) -> None:
    (neighbours.theirs.rig.pool.directories[1] / "superblock").unlink()
    neighbours.attach()
    neighbours.ours.load((name(0), None, 0), (name(1), None, 1), owner=OWNER)
    assert neighbours.ours.done() == [OK, OK, io_error(errno.EBADF)]
    assert not np.any(neighbours.ours.pages[1])


def test_a_region_is_found_by_its_uuid(neighbours: Neighbours) -> None:
    files, theirs = neighbours.ours.regions, neighbours.superblock
    files.look_for(bytes(16))
    files.look_for(theirs.place(0).region_uuid)
    found: list[FoundPool] = []

    def is_found() -> bool:
        files.look_for(theirs.place(0).region_uuid)
        found.extend(files.take_found())
        return bool(found)

    wait_until("the region", is_found)
    assert set(found) == {FoundPool(neighbours.theirs.rig.pool.engine_index, theirs.uuid)}


def plant(directories: Iterable[Path], uid: int) -> None:
    """Put a keyspace of that user, with an engine 7, in the place of each directory's."""
    for directory in directories:
        space = directory.parents[1]
        space.rename(space.with_name("away"))
        shutil.copytree(space.with_name("away"), space)
        (space / directory.parent.name).rename(space / "engine-7")
        for path in (space, *space.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.chown(path, uid, uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("uid", [0, 54321])
def test_a_keyspace_that_is_put_in_the_place_of_ours_is_not_read(
    neighbours: Neighbours, uid: int
) -> None:
    ours, theirs = neighbours.ours, neighbours.theirs.rig.pool
    plant(theirs.directories, uid)
    neighbours.attach()
    ours.load((name(0), None, 0), owner=OWNER)
    assert ours.done() == [OK, OK], "the engine in the directory that we have"
    assert ours.pages[0].tobytes() == content(name(0))
    ours.attach(OWNER + 1, 7, neighbours.superblock.uuid)
    assert ours.done() == [io_error(errno.ENOENT)]


# -- reads for peers ------------------------------------------------------------------

SERVE_SLOTS = 6


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
