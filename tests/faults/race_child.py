# SPDX-License-Identifier: Apache-2.0
"""The processes of the race for slots: `python -m tests.faults.race_child JSON`.

The owner writes slots of its pool again and again, as fast as it can, until its stdin ends. A
reader reads them as the table named them a few milliseconds ago, or as a follower of the log knew
them then, through its own pipeline, until it has read enough and its stdin has ended. It compares
every word of what it was given as right with what that key and generation wrote. Beside it run
controls, each of which leaves out one check and so must be given wrong bytes.

A key comes back to its slot under other generations, so that nothing but the generation tells
its chunks apart. Half of the writes and reads are of a few slots.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from tests.chunks import identity_of, rows_of
from tests.logs import CountedRegion
from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE
from vllm_nvmeof_offload.follow.follower import Source
from vllm_nvmeof_offload.io.base import IoOp, Waker
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.native import ForeignReader, ForeignWriter
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    Keyspace,
    SlotHeader,
    Superblock,
    decode_table,
    parse_header,
    read_superblock,
    verify,
)
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    ChunkBatch,
    FetchCommand,
    OpKind,
    OpReport,
    SlotIdentity,
    Urgency,
    owned_by,
    place_of,
    unpacked,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import HEADER_BYTES, KIB, PAGE_BYTES
from vllm_nvmeof_offload.worker.pipeline import TransferLimits, TransferPipeline
from vllm_nvmeof_offload.worker.regions import RegionFiles

#: Three pages with the header, each of which is a transfer of its own.
PAYLOAD_BYTES = 8000
WORDS = PAYLOAD_BYTES // 8
LIMITS = Tuning(io_split_bytes=4 * KIB)
SLOTS, HOT = 256, 16
KEYS_OF_SLOT = 2
KEY_BYTES = 36
KEYS = [number.to_bytes(KEY_BYTES, "little") for number in range(SLOTS * KEYS_OF_SLOT)]
#: A reader that gets no processor for a third of a second at full speed has to scan again.
LOG_PAGES = 64
WRITES = 32
OWNER = 1
BATCH, BATCHES = 64, 4
REFRESH_S = 0.01
#: Of every so many batches, a turn of each control follows one.
CONTROL_PERIOD, CONTROL_READS = 4, 16
WAIT_S = 120.0
_RAMP = np.arange(WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def words_of(key: bytes, generation: int) -> npt.NDArray[np.uint64]:
    """The one right payload, as words: each differs from that of every other generation."""
    number = int.from_bytes(key[:8], "little")
    first = number * 0xC2B2AE3D27D4EB4F + generation * 0xD6E8FEB86659FD93
    return _RAMP + np.uint64(first & (1 << 64) - 1)


def open_pool(target: Path, slots: int, engine: int) -> Pool:
    spec = PoolSpec((target,), 1, PAYLOAD_BYTES, Keyspace.of({"race": 1}), log_pages=LOG_PAGES)
    pool_bytes = slots * (spec.slot_bytes + ENTRY_BYTES) + LOG_PAGES * PAGE_BYTES
    return Pool.open(replace(spec, pool_bytes=pool_bytes, engine_index=engine))


def has_ended(pipe: TextIO) -> bool:
    """Nothing is ever sent through it."""
    return pipe in select.select([pipe], [], [], 0)[0]


def pick(dice: np.random.Generator) -> int:
    return int(dice.integers(HOT if dice.random() < 0.5 else SLOTS))


class Staging:
    """Slots in memory, all of which are words too."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.memory = mmap.mmap(-1, slots * slot_bytes)
        self.view = memoryview(self.memory)
        array = np.frombuffer(self.memory, np.uint8)
        self.address = array.ctypes.data
        rows = array.view(np.uint64).reshape(slots, slot_bytes // 8)
        self.payloads = rows[:, HEADER_BYTES // 8 : HEADER_BYTES // 8 + WORDS]


# -- the owner ------------------------------------------------------------------------


def own(target: Path, seed: int) -> dict[str, int]:
    """Fill the pool of the first engine, print where it is, and write until stdin ends."""
    pool = open_pool(target, SLOTS, engine=0)
    staging = Staging(WRITES, pool.slot_bytes)
    engine, _ = choose_io_engine("auto", pool, staging.view, staging.address, LIMITS)
    dice = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    free, busy = list(range(WRITES)), {}
    generation = int(dice.integers(1 << 62))
    first = list(range(SLOTS))
    ready = False
    while True:
        while free and engine.room().writes and len(busy) < WRITES:
            slot = first.pop() if first else pick(dice)
            if slot in {one for _, one in busy.values()}:
                continue
            generation += 1
            number = slot * KEYS_OF_SLOT + int(dice.integers(KEYS_OF_SLOT))
            at, key = free.pop(), KEYS[number]
            staging.payloads[at] = words_of(key, generation)
            address = staging.address + at * pool.slot_bytes
            what = SlotIdentity(key, generation), PAYLOAD_BYTES
            op = IoOp(
                generation,
                OpKind.WRITE,
                Urgency.WRITE,
                place_of(0, slot),
                address,
                *what,
                engine.stamp,
            )
            engine.submit([op])
            busy[generation] = at, slot
        select.select([engine.fileno()], [], [], 0.1)
        for one in engine.poll():
            free.append(busy.pop(one.token)[0])
            counts[str(one.outcome)] += 1
        if not ready and counts["ok"] >= SLOTS:
            ready = True
            where = {"directory": str(pool.directories[0]), "engine": pool.engine_index}
            print(json.dumps(where), flush=True)
        if ready and has_ended(sys.stdin):
            break
    assert engine.close(WAIT_S)
    pool.close()
    return dict(counts)


# -- a reader -------------------------------------------------------------------------


@dataclass
class Snapshot:
    """What was known at one time: slot → identity; by row of the columns."""

    slots: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint8]
    generations: npt.NDArray[np.uint64]

    @staticmethod
    def read(table_fd: int) -> Snapshot:
        raw = np.frombuffer(os.pread(table_fd, SLOTS * ENTRY_BYTES, 0), np.uint8)
        slots = np.arange(SLOTS, dtype=np.int64)
        table = decode_table(raw, slots)
        found = np.flatnonzero(table.valid)
        keys = table.keys[found, :KEY_BYTES]
        return Snapshot(slots[found], keys, table.generations[found].copy())

    def identity(self, row: int) -> SlotIdentity:
        return SlotIdentity(self.keys[row].tobytes(), int(self.generations[row]))


class Followed:
    """What a follower of the owner knows by the log: the rows of a foreign table of its own."""

    def __init__(self, directory: Path, superblock: Superblock) -> None:
        assert superblock.log_pages == LOG_PAGES
        fd = os.memfd_create("foreign")
        self._table = ForeignWriter(fd, len(KEYS))
        self._reader = ForeignReader(fd)
        os.close(fd)
        rows = CountedRegion((OWNER, 0, 0), superblock.slots, [(0, 1)], 0)
        self._source = Source(directory, superblock, rows, self._table)
        self._source.begin(superblock.epoch, False)
        self.polls = 0

    def read(self) -> Snapshot:
        """Take in what was logged since."""
        self.polls += 1
        self._source.poll(time.monotonic())
        found = [(at, row) for at, key in enumerate(KEYS) for row in self._reader.rows_of(key)]
        numbers = np.array([at for at, _ in found], np.int64)
        slots = numbers // KEYS_OF_SLOT
        places = [place for _, (place, _) in found]
        assert places == (slots | owned_by(OWNER, place_of(0, 0))).tolist()
        keys = np.frombuffer(b"".join(KEYS), np.uint8).reshape(-1, KEY_BYTES)[numbers]
        generations = np.array([generation for _, (_, generation) in found], np.uint64)
        return Snapshot(slots, keys, generations)

    @property
    def overruns(self) -> int:
        return CountedRegion.overruns

    def close(self) -> None:
        self._source.close()


def choose(snapshot: Snapshot, dice: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """Rows, half of them of hot slots."""
    most = np.where(dice.random(count) < 0.5, min(HOT, len(snapshot.slots)), len(snapshot.slots))
    return dice.integers(most)


class Reader:
    """Fetches batches through a pipeline of its own."""

    def __init__(
        self, target: Path, owner: dict[str, Any], engine: int, seed: int, by: str
    ) -> None:
        """engine: its own number. by: "table" or "log", from which it knows what is in the owner's
        slots.
        """
        self.dice = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()
        self._pool = open_pool(target, slots=8, engine=engine)  # theirs is larger
        rows = BATCH * BATCHES
        self._staging = Staging(rows + 1, self._pool.slot_bytes)
        memory = self._staging.view, self._staging.address
        self._engine, _ = choose_io_engine("auto", self._pool, *memory, LIMITS)
        self._waker = Waker()
        self._regions = RegionFiles(self._pool, self._waker.wake)
        self._copy = HostCopyEngine()
        limits = TransferLimits(
            group_bytes=(PAYLOAD_BYTES,), reads_in_flight_max=2 * rows, read_deadline_s=WAIT_S
        )
        self._pipeline = TransferPipeline(
            StagingMap(self._staging.address, self._pool.slot_bytes, rows, 1),
            self._copy,
            self._engine,
            limits,
            opener=self._regions,
        )
        self._op = 0
        self._under_way: dict[int, tuple[int, list[SlotIdentity]]] = {}  # op → batch, identities
        self._left: dict[int, int] = {}  # op → rows that are not reported
        self._directory = Path(owner["directory"])
        superblock = read_superblock(self._directory)
        assert superblock is not None
        self.superblock = superblock
        self._table_fd = os.open(self._directory / "table", os.O_RDONLY)
        self._followed = Followed(self._directory, superblock) if by == "log" else None
        self._attach(AttachCommand(1, OWNER, owner["engine"], superblock.uuid))

    def _attach(self, command: AttachCommand) -> None:
        self._pipeline.command(command)
        self._op = command.op
        while not (reports := [r for r in self._step() if r.op == command.op]):
            pass
        assert rows_of(reports[0])[0].outcome == OK

    def _step(self) -> list[OpReport]:
        fds = [self._waker.fd, self._engine.fileno()]
        if self._waker.fd in select.select(fds, [], [], 0.01)[0]:
            self._waker.clear()
        self._pipeline.step()
        reports = unpacked(self._pipeline.take_reports())
        return [one for one in reports if isinstance(one, OpReport)]

    def run(self, reads: int) -> None:
        snapshot, next_s, batches = self._look(), 0.0, 0
        controls = Controls(self._directory, snapshot, self)
        free = list(range(BATCHES))
        while self.counts["reads"] < reads or not has_ended(sys.stdin):
            if time.monotonic() >= next_s:
                snapshot, next_s = self._look(), time.monotonic() + REFRESH_S
            while free:
                self._fetch(free.pop(), snapshot)
                batches += 1
                if batches % CONTROL_PERIOD == 0:
                    controls.turn(snapshot)
            for report in self._step():
                free += self._take(report)

    def _look(self) -> Snapshot:
        return self._followed.read() if self._followed else Snapshot.read(self._table_fd)

    def _fetch(self, batch: int, snapshot: Snapshot) -> None:
        rows = choose(snapshot, self.dice, BATCH)
        at = np.arange(batch * BATCH, (batch + 1) * BATCH, dtype=np.int32)
        self._staging.payloads[at] = 0xDEAD  # what is not overwritten shows
        first = owned_by(OWNER, place_of(0, 0))
        columns = ChunkBatch.of(
            snapshot.keys[rows].tobytes(),
            snapshot.generations[rows],
            at,
            first | snapshot.slots[rows],
            np.zeros(BATCH, np.uint8),
        )
        self._op += 1
        self._under_way[self._op] = batch, [identity_of(columns, row) for row in range(BATCH)]
        self._left[self._op] = BATCH
        self._pipeline.command(FetchCommand(self._op, columns, Urgency.URGENT))

    def _take(self, report: OpReport) -> list[int]:
        """Compare what was given; return the batch if it has ended."""
        batch, identities = self._under_way[report.op]
        rows = rows_of(report, BATCH)
        for one in rows:
            assert one.released
            self.counts[str(one.outcome)] += 1
            if one.outcome == OK:
                found = self._staging.payloads[batch * BATCH + one.row]
                identity = identities[one.row]
                right = (found == words_of(identity.key, identity.generation)).all()
                self.counts["wrong"] += not right
            else:
                assert one.outcome in (STALE, CHECKSUM_MISMATCH), one.outcome
        self.counts["reads"] += len(rows)
        self._left[report.op] -= len(rows)
        if self._left[report.op]:
            return []
        del self._left[report.op], self._under_way[report.op]
        return [batch]

    def close(self) -> None:
        while not self._pipeline.idle():
            self._step()
        assert self._engine.close(WAIT_S)
        self._copy.close()
        self._regions.end()
        os.close(self._table_fd)
        if self._followed:
            self._followed.close()
            self.counts["polls"] = self._followed.polls
            self.counts["overruns"] = self._followed.overruns
        self._pool.close()


class Controls:
    """Readers that leave out one check each. They are given wrong bytes."""

    def __init__(self, directory: Path, old: Snapshot, reader: Reader) -> None:
        self._fd = os.open(directory / "slab", os.O_RDONLY)
        self._superblock = reader.superblock
        self._dice, self._counts = reader.dice, reader.counts
        self._slot_bytes = reader.superblock.slot_bytes
        self._old = old

    def turn(self, snapshot: Snapshot) -> None:
        rows = choose(snapshot, self._dice, CONTROL_READS).tolist()
        self._without_payload_crc(snapshot, rows)
        for row in rows:
            self._without_generation(snapshot, row)
        for row in choose(self._old, self._dice, CONTROL_READS).tolist():
            self._without_refresh(row)

    def _without_payload_crc(self, snapshot: Snapshot, rows: Sequence[int]) -> None:
        """A right header, and then its payload, which nothing ties to it."""
        headers = [self._read(snapshot, row, 0, HEADER_BYTES) for row in rows]
        for row, page in zip(rows, headers, strict=True):
            header, identity = parse_header(memoryview(page)), snapshot.identity(row)
            if self._is_at_home(header, snapshot, row) and header.identity == identity:
                payload = self._read(snapshot, row, HEADER_BYTES, PAYLOAD_BYTES)
                self._compare("payload_crc", payload, identity)

    def _without_generation(self, snapshot: Snapshot, row: int) -> None:
        """Everything is right but the generation."""
        slot, identity = self._whole(snapshot, row), snapshot.identity(row)
        header = parse_header(memoryview(slot)[:HEADER_BYTES])
        if not self._is_at_home(header, snapshot, row) or header.identity.key != identity.key:
            return
        if self._is_intact(slot, header):
            self._compare("generation", slot[HEADER_BYTES:], identity)

    def _without_refresh(self, row: int) -> None:
        """An intact slot is believed to have what the table said once; it is not read again."""
        slot = self._whole(self._old, row)
        header = parse_header(memoryview(slot)[:HEADER_BYTES])
        if self._is_at_home(header, self._old, row) and self._is_intact(slot, header):
            self._compare("refresh", slot[HEADER_BYTES:], self._old.identity(row))

    def _is_at_home(self, header: SlotHeader | None, snapshot: Snapshot, row: int) -> bool:
        place = self._superblock.place(int(snapshot.slots[row]))
        return header is not None and header.place == place

    def _is_intact(self, slot: bytes, header: SlotHeader) -> bool:
        wanted = header.identity, PAYLOAD_BYTES, header.place, self._superblock.tag
        return verify(memoryview(slot), *wanted) == OK

    def _read(self, snapshot: Snapshot, row: int, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, int(snapshot.slots[row]) * self._slot_bytes + offset)

    def _whole(self, snapshot: Snapshot, row: int) -> bytes:
        return self._read(snapshot, row, 0, HEADER_BYTES + PAYLOAD_BYTES)

    def _compare(self, without: str, payload: bytes, identity: SlotIdentity) -> None:
        words = np.frombuffer(payload, np.uint64, WORDS)
        right = (words == words_of(identity.key, identity.generation)).all()
        self._counts[f"without {without}"] += 1
        self._counts[f"wrong without {without}"] += not right


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    target = Path(job["target"])
    if job["role"] == "owner":
        print(json.dumps(own(target, job["seed"])))
        return
    reader = Reader(target, job["owner"], job["engine"], job["seed"], job["by"])
    print(json.dumps("reads"), flush=True)
    began_s = time.monotonic()
    reader.run(job["reads"])
    reader.counts["ms"] = round(1000 * (time.monotonic() - began_s))
    reader.close()
    print(json.dumps(reader.counts))


if __name__ == "__main__":
    main()
