# SPDX-License-Identifier: Apache-2.0
"""The native table of other engines' chunks, and which of them the manager accepts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.unit.follow.kit import COMPLETE, DEAD, NONE, SCANNING, Others
from vllm_nvmeof_offload.native import (
    Batch,
    ForeignReader,
    ForeignWriter,
    OwnerRecord,
    Tiers,
    Whereabouts,
)
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    owned_by,
    owner_of,
    place_of,
    slot_of,
)

TAG, OTHER_TAG = b"t" * 16, b"o" * 16
LOAD, WRITE, FETCH = 1, 2, 3
OK, IO_ERROR, STALE = 0, 1, 3
MISS, CPU, POOL, SHARED = range(4)
FROM_CPU, FROM_POOL = 1, 2


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(4)


class Bench:
    """Tiers of one rank, and an owner, 1, whom they accept."""

    def __init__(self, cache: int = 4, **options: object) -> None:
        self.others = Others(TAG)
        self.foreign = self.others.foreign
        self.foreign.set_tag(TAG)
        self.others.owner(1)
        self.tiers = Tiers(
            cache,
            [8],
            key_bytes=8,
            foreign=self.foreign,
            **options,  # type: ignore[arg-type]
        )

    def load(self, *numbers: int, land_max: int = 9) -> Batch:
        return self.tiers.plan_load([key(number) for number in numbers], land_max)

    def report(self, batch: Batch, *codes: int, kind: int = LOAD, errno: int = 0) -> None:
        """The rank has reported and released all rows."""
        self.tiers.report(
            kind,
            batch,
            np.arange(len(codes), dtype=np.uint32),
            np.array(codes, np.uint8),
            np.full(len(codes), errno, np.int16),
        )

    def source(self, number: int = 0, sources: int = FROM_CPU | FROM_POOL) -> int:
        return self.tiers.lookup(key(number), sources)


# -- owners ---------------------------------------------------------------------------


def test_weights_without_a_name_accept_nobody_not_even_those_without_one() -> None:
    bench = Bench()
    bench.others.offer(key(0), 5)
    bench.foreign.set_tag(b"")
    assert bench.source() == MISS
    bench.others.owner(1, tag=bytes(16))
    assert bench.source() == MISS
    bench.foreign.set_tag(bytes(16))
    assert bench.source() == MISS


# -- rows -----------------------------------------------------------------------------


def test_members_who_differ_do_not_share_others_single_copies() -> None:
    bench = Bench(ranks=2, set_sizes=[2], equal_min=1)
    bench.others.offer(key(0), 5, member=1)
    bench.others.offer(key(1), 5, member=EVERY_MEMBER)
    stored, _, _, _ = bench.tiers.plan_store([key(7)], None, 1)
    row = np.zeros(1, np.uint32)
    for rank in range(2):
        crcs = np.array([rank], np.uint32)
        bench.tiers.report(0, stored, row, None, None, None, crcs, rank)
    assert bench.tiers.take_unequal() == [0]
    assert [bench.source(number) for number in range(2)] == [MISS, SHARED]


# -- failures -------------------------------------------------------------------------


def test_refused_rows_are_bounded() -> None:
    """The 4,096 newest ones are kept. Of many owners, so that none is distrusted."""
    bench = Bench()
    for number in range(4_200):
        owner = 1 + number // 50
        bench.others.owner(owner)
        bench.others.offer(key(number), number, owner=owner)
        bench.report(bench.load(number, land_max=0), STALE)
    sources = [bench.source(number) for number in range(4_200)]
    assert sources == [SHARED] * 104 + [MISS] * 4_096


def test_an_owner_of_whose_chunks_many_fail_is_distrusted_for_half_a_minute() -> None:
    bench = Bench()
    for number in range(200):
        bench.others.offer(key(number), number)
    for number in range(63):
        bench.report(bench.load(number, land_max=0), STALE if number < 2 else OK)
        assert bench.foreign.accepts(1)
    bench.report(bench.load(63, land_max=0), OK)  # 2 of 64
    assert not bench.foreign.accepts(1)
    bench.foreign.set_time(29.9)
    assert not bench.foreign.accepts(1)
    bench.foreign.set_time(30.0)
    assert bench.foreign.accepts(1)
    bench.report(bench.load(100, land_max=0), STALE)
    assert bench.foreign.accepts(1), "it is counted from the start"


def test_an_owner_is_trusted_with_one_failure_of_a_hundred_and_a_good_past_fades() -> None:
    bench = Bench()
    for number in range(3_000):
        bench.others.offer(key(number), number)
    for number in range(2_000):
        bench.report(bench.load(number, land_max=0), STALE if number % 100 == 50 else OK)
        assert bench.foreign.accepts(1)
    failures = 0
    while bench.foreign.accepts(1):
        bench.report(bench.load(2_000 + failures, land_max=0), STALE)
        failures += 1
    assert failures < 25


# -- borrowed chunks in the CPU tier --------------------------------------------------


def test_an_intended_borrow_is_dropped_without_a_trace() -> None:
    bench = Bench(cache=1)
    bench.others.offer(key(0), 5)
    row, _, _ = bench.tiers.begin_fetch(key(0), 0) or (-1, 0, 0)
    assert bench.source() == CPU
    bench.tiers.drop_fetch(0, row)
    assert (bench.tiers.fetches_intended, bench.tiers.cache_taken, len(bench.tiers)) == (0, 0, 0)
    assert bench.source() == SHARED


# -- chunks that need not be written --------------------------------------------------


class DedupeBench(Bench):
    """Writes are taken at once. The chunk 0 is the first owner's, at `place`."""

    def __init__(self, **options: object) -> None:
        super().__init__(writes_max=4, **options)
        self.place = self.others.offer(key(0), 5, generation=77)

    def withdraw(self) -> None:
        self.others.writer.remove(key(0), self.place, 77)

    def borrow(self) -> None:
        self.report(self.load(0), OK)

    def use(self, times: int = 1) -> None:
        """So many requests that used the chunk end."""
        for _ in range(times):
            self.tiers.touch([key(0)], ended=True)

    def written(self) -> list[int]:
        """The generations of the writes that begin now."""
        self.tiers.drain()
        return self.tiers.take_writes().generations.tolist()

    @property
    def deduped(self) -> int:
        return self.tiers.take_counts()[-1]


def test_on_eviction_a_lost_chunk_waits_until_the_cpu_tier_is_full() -> None:
    bench = DedupeBench(cache=2, demotes=True)
    bench.borrow()
    bench.use(2)
    assert bench.tiers.backlog == 0
    bench.withdraw()
    bench.use()
    assert (bench.tiers.backlog, bench.written()) == (1, [])
    bench.tiers.plan_store([key(7)], None, 200)
    assert bench.written() == [77]


def test_the_failure_of_a_write_of_an_earlier_life_leaves_the_new_one() -> None:
    bench = DedupeBench(cache=2)
    bench.borrow()
    bench.use(2)
    bench.withdraw()
    bench.use()
    bench.tiers.drain()
    write = bench.tiers.take_writes()
    bench.report(bench.load(0), IO_ERROR)  # its copy failed: the row is gone
    assert bench.source() == MISS
    bench.others.offer(key(0), 5, generation=77)
    again = bench.load(0)
    assert (again.rows.tolist(), again.generations.tolist()) == (write.rows.tolist(), [77])
    bench.report(write, OK, kind=WRITE)
    assert bench.tiers.entries()[0][0] == 7, "it is still being borrowed"
    bench.report(again, OK)
    assert bench.source(0, FROM_CPU) == CPU
    assert (bench.tiers.pool_taken, bench.tiers.writes_pending) == (0, 0)


# -- remembered answers ---------------------------------------------------------------


def whereabouts(bench: Bench) -> Whereabouts:
    found = bench.tiers.whereabouts([key(0)], FROM_CPU | FROM_POOL)
    assert found is not None
    return found


def unmoved(bench: Bench, before: Whereabouts) -> bool:
    return bench.tiers.unmoved(before, [key(0)], FROM_CPU | FROM_POOL)


@pytest.mark.parametrize("change", ["state", "tag", "distrust", "refusal", "load", "reset"])
def test_an_answer_is_void_when_acceptance_changes(change: str) -> None:
    bench = Bench()
    bench.others.offer(key(0), 5)
    streamed = bench.load(0, land_max=0)
    before = whereabouts(bench)
    if change == "state":
        bench.others.owner(1, state=SCANNING)
    elif change == "tag":
        bench.others.owner(1, tag=OTHER_TAG)
    elif change == "distrust":
        assert bench.foreign.take_attachments()
        bench.foreign.attach_failed(1)
    elif change == "refusal":
        bench.report(streamed, STALE)
    elif change == "load":
        bench.load(0)
    else:
        bench.tiers.reset()
    assert not unmoved(bench, before)


@pytest.mark.parametrize("state", [COMPLETE, DEAD])
def test_an_answer_is_void_when_we_store_a_chunk_that_it_has_of_others(state: int) -> None:
    bench = Bench()
    bench.others.owner(1, state=state)
    bench.others.offer(key(0), 5)
    before = whereabouts(bench)
    assert len(bench.tiers.plan_store([key(1)], None, 1)[0]) == 1
    assert unmoved(bench, before), "another chunk"
    assert len(bench.tiers.plan_store([key(0)], np.zeros(1, np.uint8), 2)[0]) == 0
    assert unmoved(bench, before), "a chunk that is not stored"
    assert len(bench.tiers.plan_store([key(0)], None, 3)[0]) == 1
    assert not unmoved(bench, before)


# -- attachments ----------------------------------------------------------------------


def test_owners_that_are_gone_or_others_are_detached() -> None:
    bench = Bench()
    bench.others.owner(2)
    bench.others.offer(key(0), 5)
    bench.others.offer(key(1), 6, owner=2)
    bench.others.offer(key(2), 7, owner=2)
    bench.load(0, 1)
    bench.others.owner(1, state=NONE)
    assert bench.foreign.take_detachments() == [], "they are not attached yet"
    bench.foreign.take_attachments()
    assert bench.foreign.take_detachments() == [1]
    assert bench.foreign.take_detachments() == []
    bench.others.owner(2, state=SCANNING)
    assert bench.foreign.take_detachments() == [], "its slots prove themselves"
    bench.others.owner(2, uuid=b"w" * 16)
    assert bench.source(2) == MISS, "the ranks have the files of another pool"
    assert bench.foreign.is_used, "there may be something to detach"
    assert bench.foreign.take_detachments() == [2]
    assert not bench.foreign.is_used
    assert bench.source(2) == SHARED


def test_an_owner_that_could_not_be_attached_is_distrusted_until_its_record_changes() -> None:
    bench = Bench()
    bench.others.offer(key(0), 5)
    bench.others.offer(key(1), 6)
    bench.load(0)
    bench.foreign.take_attachments()
    bench.foreign.attach_failed(1)
    bench.others.owner(1, rows=7)  # which is for people
    bench.foreign.set_time(1e6)
    assert bench.source(1) == MISS
    assert bench.foreign.detach(1)
    assert not bench.foreign.detach(1)
    assert bench.source(1) == MISS
    bench.others.owner(1, state=DEAD)
    assert bench.source(1) == SHARED
    bench.load(1)
    assert [owner for owner, _, _ in bench.foreign.take_attachments()] == [1]


# The foreign table in shared memory: the engine's process finds the rows that a follower adds.


READ_WHOLE = 2


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8 + bytes(4)


def place(owner: int, slot: int) -> int:
    return owned_by(owner, place_of(0, slot))


def test_rows_are_those_of_a_dictionary(file: int) -> None:
    """Puts and removals of many keys by several owners, through several growths."""
    writer = ForeignWriter(file, 10)
    reader = ForeignReader(file)
    random_ = random.Random(1)
    rows: dict[bytes, set[tuple[int, int]]] = {}
    listed: list[tuple[bytes, tuple[int, int]]] = []
    for step in range(30_000):
        if listed and random_.random() < 0.4:
            at = random_.randrange(len(listed))
            listed[at], listed[-1] = listed[-1], listed[at]
            key, row = listed.pop()
            assert writer.remove(key, *row)
            assert not writer.remove(key, *row)
            rows[key].remove(row)
        else:
            key = key_of(random_.randrange(8_000))
            row = place(random_.randrange(1, 4), step), random_.getrandbits(64)
            writer.put(key, *row)
            rows.setdefault(key, set()).add(row)
            listed.append((key, row))
    assert writer.rows == reader.rows == len(listed) > 4_096
    for number in range(8_000):
        key = key_of(number)
        found = reader.rows_of(key)
        assert len(found) == len(set(found))
        assert set(found) == rows.get(key, set())


def test_an_owner_is_read_back(file: int) -> None:
    writer = ForeignWriter(file, 10)
    reader = ForeignReader(file)
    assert reader.owner(7).state == 0
    writer.set_owner(7, OwnerRecord(3, b"t" * 16, b"u" * 16, 5, READ_WHOLE, 9))
    found = reader.owner(7)
    assert (found.version, found.tag, found.pool_uuid) == (3, b"t" * 16, b"u" * 16)
    assert (found.engine_index, found.state, found.rows) == (5, READ_WHOLE, 9)


def test_a_file_without_a_table_is_refused(file: int) -> None:
    os.ftruncate(file, 4096)
    with pytest.raises(AssertionError, match="not a foreign table"):
        ForeignReader(file)
    with pytest.raises(AssertionError, match="not a foreign table"):
        ForeignWriter(file, 10)
    assert os.fstat(file).st_size == 4096, "another file is left as it is"


def test_a_second_writer_finds_an_empty_table_with_the_owners_of_the_first(file: int) -> None:
    first = ForeignWriter(file, 10)
    reader = ForeignReader(file)
    first.put(key_of(1), place(1, 2), 3)
    first.set_owner(1, OwnerRecord(0, b"t" * 16, b"u" * 16, 5, READ_WHOLE, 1))
    version = reader.ask_anew()
    second = ForeignWriter(file, 10)
    assert reader.rows == second.rows == 0
    assert reader.rows_of(key_of(1)) == []
    assert (second.owner(1).engine_index, second.version_asked) == (5, version)
    for number in range(20_000):  # through several growths
        second.put(key_of(number), place(2, number), number)
    assert all(reader.rows_of(key_of(n)) == [(place(2, n), n)] for n in range(20_000))


# -- a reader beside the writer -------------------------------------------------------


def _write_all_the_time(fd: int) -> None:
    """Move rows of 2,000 keys about. A row's generation is its slot, plus its key's number."""
    writer = ForeignWriter(fd, 10)
    random_ = random.Random(2)
    at: dict[int, int] = {}
    os.write(fd_ready, b"x")
    while True:
        number = random_.randrange(2_000)
        if number in at:
            slot = at.pop(number)
            writer.remove(key_of(number), place(1, slot), slot + number)
        else:
            at[number] = random_.randrange(1 << 20)
            writer.put(key_of(number), place(1, at[number]), at[number] + number)


fd_ready = -1


@contextlib.contextmanager
def _child(run: Callable[[int], None], file: int) -> Iterator[None]:
    """A process that writes to the table, and has begun to."""
    global fd_ready
    told, fd_ready = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=run, args=(file,), daemon=True)
    child.start()
    try:
        os.read(told, 1)
        yield
    finally:
        child.kill()
        child.join()
        os.close(told)
        os.close(fd_ready)
        fd_ready = -1


def test_a_reader_beside_the_writer_finds_whole_rows(file: int) -> None:
    with _child(_write_all_the_time, file):
        reader = ForeignReader(file)
        found = torn = 0
        while found < 100_000:
            number = found % 2_000
            for where, generation in reader.rows_of(key_of(number)) or ((place(1, 0), number),):
                found += 1
                torn += (generation - slot_of(where)) % (1 << 64) != number
                assert owner_of(where) == 1
        assert torn <= found // 1_000  # a row that moves meanwhile may be torn; rarely
