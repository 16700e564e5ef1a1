# SPDX-License-Identifier: Apache-2.0
"""Two ranks of latent attention keep one copy between them, in threads and in processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from tests.chunks import cache_slot
from tests.process import wait_until
from tests.unit.pipeline.set_rank import (
    CACHE_SLOTS,
    CHUNK_BYTES,
    PER_CHUNK,
    SLOT_BYTES,
    Options,
    Rank,
    serve,
)
from vllm_nvmeof_offload.errors import OutcomeKind
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    ChunkBatch,
    FetchCommand,
    WriteCommand,
    place_of,
)
from vllm_nvmeof_offload.worker.membership import NoSetError, SetLayout, join_set

CHUNKS = 20
#: Of a holder that does not answer; one that does answers within it on a busy machine too.
DEADLINE_MS = 2000
_OK, _DEADLINE = 0, list(OutcomeKind).index(OutcomeKind.DEADLINE)


class _Process:
    """A rank in a process of its own, with the methods of `Rank`."""

    def __init__(self, options: Options, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, options, rank), daemon=True)
        self.process.start()
        theirs.close()
        self._set_size: int | None = None

    def set_size(self) -> int:
        if self._set_size is None:
            assert self._connection.poll(120), "the rank did not start"
            self._set_size = int(self._connection.recv())
        return self._set_size

    def send(self, name: str, *arguments: Any) -> None:
        self.set_size()
        self._connection.send((name, arguments))

    def answer(self) -> Any:
        assert self._connection.poll(120), "the rank does not answer"
        return self._connection.recv()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.send(name, *arguments)
            return self.answer()

        return call

    def close(self) -> None:
        if self.process.is_alive():
            self.send("close")
            self.answer()
        self.process.join(60)


class _Set:
    """Both ranks, and a manager that does what the test says."""

    def __init__(self, ranks: Sequence[Any], *, single: bool = True) -> None:
        self.ranks, self.single = ranks, single
        self.counters: list[Counter[Any]] = [Counter() for _ in ranks]
        self.crcs: list[list[int]] = [[] for _ in ranks]
        self._codes: dict[tuple[int, int], list[int]] = {}
        self._op = self._rows = 0  # of the last command

    def member(self, chunk: int) -> int:
        return chunk % len(self.ranks) if self.single else EVERY_MEMBER

    def batch(
        self, chunks: Sequence[int], *, cached: bool = False, pooled: bool = False
    ) -> ChunkBatch:
        """Each chunk has its row of cache slots and its pool slot; parts of one are divided."""
        self._rows = len(chunks)
        rows = [chunk // 2 if self.single else chunk for chunk in chunks]
        slots = [cache_slot(row, self.member(n)) for n, row in zip(chunks, rows, strict=True)]
        places = [place_of(0, row, self.member(n)) for n, row in zip(chunks, rows, strict=True)]
        return ChunkBatch.of(
            b"".join(b"chunk %04d" % chunk + bytes(4) for chunk in chunks),
            np.array([1000 + chunk for chunk in chunks], np.uint64),
            np.array(slots if cached else [-1] * len(rows), np.int32),
            np.array(places if pooled else [-1] * len(rows), np.int64),
            np.zeros(len(rows), np.uint8),
        )

    def store(self, chunks: Sequence[int]) -> None:
        self._op += 1
        batch = self.batch(chunks, cached=True)
        for rank in self.ranks:
            rank.store(self._op, batch, _blocks(chunks))
        assert self.codes() == [_OK]

    def write(self, chunks: Sequence[int]) -> None:
        self._op += 1
        for rank in self.ranks:
            rank.command(WriteCommand(self._op, self.batch(chunks, cached=True, pooled=True)))
        assert self.codes() == [_OK]

    def fetch(self, chunks: Sequence[int]) -> None:
        self._op += 1
        for rank in self.ranks:
            rank.command(FetchCommand(self._op, self.batch(chunks, cached=True, pooled=True)))
        assert self.codes() == [_OK]

    def begin_load(
        self, chunks: Sequence[int], only: Sequence[int] | None = None, **where: bool
    ) -> None:
        """only: the ranks that get the command."""
        self._op += 1
        batch = self.batch(chunks, **where)
        for rank in self.ranks if only is None else [self.ranks[one] for one in only]:
            rank.load(self._op, batch, _elsewhere(chunks))

    def load(self, chunks: Sequence[int], **where: bool) -> None:
        """Load into other blocks, and compare the bytes on all ranks."""
        for rank in self.ranks:
            rank.clear(_elsewhere(chunks))
        self.begin_load(chunks, **where)
        assert self.codes() == [_OK]
        for rank in self.ranks:
            assert rank.blocks(_elsewhere(chunks)) == rank.blocks(_blocks(chunks))

    def codes(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Wait until these ranks have reported all of the last op; the outcomes of its rows."""
        wanted = range(len(self.ranks)) if ranks is None else ranks

        def reported() -> bool:
            for rank in wanted:
                self._take(rank)
            return all(len(self._codes.get((self._op, rank), [])) >= self._rows for rank in wanted)

        wait_until("every rank's report", reported, 60)
        return sorted({code for rank in wanted for code in self._codes[self._op, rank]})

    def _take(self, rank: int) -> None:
        taken = self.ranks[rank].take()
        self.counters[rank].update(taken.counters)
        for op, codes, crcs in taken.reports:
            self._codes.setdefault((op, rank), []).extend(codes)
            self.crcs[rank] += crcs or []

    def moved(self) -> dict[str, float]:
        """Bytes stored, written and read on all ranks together."""
        total: Counter[Any] = sum(self.counters, Counter())
        return {
            "stored": total["transfer_bytes", "store", "gpu"],
            "written": total["transfer_bytes", "store", "pool"],
            "read": total["transfer_bytes", "load", "pool"],
            "loaded": total["transfer_bytes", "load", "gpu"],
        }


def _blocks(chunks: Sequence[int]) -> list[int]:
    return [PER_CHUNK * chunk + at for chunk in chunks for at in range(PER_CHUNK)]


def _elsewhere(chunks: Sequence[int]) -> list[int]:
    return [PER_CHUNK * CHUNKS + block for block in _blocks(chunks)]


def _options(directory: Path, **more: Any) -> Options:
    return Options(str(directory), uuid.uuid4().hex, **more)


@contextmanager
def _in_threads(options: Options) -> Iterator[list[Rank]]:
    with ThreadPoolExecutor(options.ranks) as pool:
        ranks = list(pool.map(lambda rank: Rank(options, rank), range(options.ranks)))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


@contextmanager
def _in_processes(options: Options) -> Iterator[list[_Process]]:
    ranks = [_Process(options, rank) for rank in range(options.ranks)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def _travel(ranks: _Set) -> dict[str, float]:
    """Store, write, and load from every tier, in parts, so that stores and loads overlap."""
    chunks = list(range(CHUNKS))
    for start in range(0, CHUNKS, 5):
        ranks.store(chunks[start : start + 5])
    ranks.load(chunks, cached=True)
    ranks.write(chunks)
    ranks.load(chunks, pooled=True)  # through stream slots, far fewer than chunks
    ranks.fetch(chunks[:10])
    ranks.load(chunks[:10], cached=True)
    ranks.load(chunks[10:], cached=True, pooled=True)  # landing
    return ranks.moved()


@pytest.mark.parametrize("io_engine", ["auto", "threads"])
def test_one_copy_moves_half_of_the_bytes(tmp_path: Path, io_engine: str) -> None:
    moved = {}
    for single in (True, False):
        directory = tmp_path / str(single)
        with _in_threads(_options(directory, io_engine=io_engine)) as ranks:
            assert [rank.set_size() for rank in ranks] == [2, 2]
            moved[single] = _travel(_Set(ranks, single=single))
    assert moved[False]["stored"] == 2 * CHUNKS * CHUNK_BYTES
    assert moved[False]["written"] == 2 * CHUNKS * SLOT_BYTES
    assert moved[False]["read"] == 2 * 2 * CHUNKS * SLOT_BYTES
    for name in ("stored", "written", "read"):
        assert moved[True][name] * 2 == moved[False][name]
    assert moved[True]["loaded"] == moved[False]["loaded"], "every rank needs all of it"


def test_two_processes_keep_one_copy(tmp_path: Path) -> None:
    with _in_processes(_options(tmp_path)) as ranks:
        assert [rank.set_size() for rank in ranks] == [2, 2]
        moved = _travel(_Set(ranks))
    assert moved["stored"] == CHUNKS * CHUNK_BYTES
    assert moved["written"] == CHUNKS * SLOT_BYTES
    assert moved["read"] == 2 * CHUNKS * SLOT_BYTES


def test_whole_rows_report_the_same_crcs(tmp_path: Path) -> None:
    with _in_threads(_options(tmp_path)) as ranks:
        both = _Set(ranks, single=False)
        both.store(range(4))
        pages = [
            b"".join(
                layer[block].tobytes() for block in _blocks([chunk]) for layer in ranks[0].cache
            )
            for chunk in range(4)
        ]
    assert both.crcs == [[crc32c(page) for page in pages]] * 2


def test_a_killed_holder_fails_the_others_rows_and_the_server_goes_on(tmp_path: Path) -> None:
    with _in_processes(_options(tmp_path, read_deadline_ms=DEADLINE_MS)) as ranks:
        both = _Set(ranks)
        both.store(range(CHUNKS))
        both.write(range(CHUNKS))
        ranks[1].process.kill()
        ranks[1].process.join(60)
        began_s = time.monotonic()
        both.begin_load([1, 3, 5], only=[0], pooled=True)
        assert both.codes([0]) == [_DEADLINE]
        assert 0.9 * DEADLINE_MS / 1000 < time.monotonic() - began_s < 60
        both.begin_load([1, 3], only=[0], cached=True)
        assert both.codes([0]) == [_OK], "what it had stored is still in memory"
        for where in ({"cached": True}, {"pooled": True}):
            ranks[0].clear(_elsewhere([0, 2]))
            both.begin_load([0, 2], only=[0], **where)
            assert both.codes([0]) == [_OK]
            assert ranks[0].blocks(_elsewhere([0, 2])) == ranks[0].blocks(_blocks([0, 2]))


def test_a_holder_that_stops_for_a_while_comes_back(tmp_path: Path) -> None:
    with _in_processes(_options(tmp_path, read_deadline_ms=DEADLINE_MS)) as ranks:
        both = _Set(ranks)
        both.store(range(CHUNKS))
        both.write(range(CHUNKS))
        pid = ranks[1].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            batch, blocks = both.batch([1, 3, 5], pooled=True), _elsewhere([1, 3, 5])
            both.begin_load([1, 3, 5], only=[0], pooled=True)
            ranks[1].send("load", both._op, batch, blocks)
            assert both.codes([0]) == [_DEADLINE]
        finally:
            os.kill(pid, signal.SIGCONT)
        ranks[1].answer()
        assert both.codes([1]) == [_OK]
        for _ in range(3):  # more than there are stream slots: all have come back
            both.load(range(CHUNKS), pooled=True)


def test_a_rank_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        options = _options(tmp_path, read_deadline_ms=60_000)
        first, second = pool.map(lambda rank: Rank(options, rank), range(2))
    both = _Set([first, second])
    both.store(range(4))
    both.write(range(4))
    both.begin_load([1, 3], only=[0], pooled=True)
    began_s = time.monotonic()
    second.close()
    assert both.codes([0]) == [_DEADLINE]
    assert time.monotonic() - began_s < options.read_deadline_ms / 1000 / 2
    first.close()


# -- how the ranks meet ---------------------------------------------------------------------


def _layout(name: str = "", **more: Any) -> SetLayout:
    facts = {"members": 2, "set_sizes": (2,), "slot_bytes": 8192, "cache_slots": CACHE_SLOTS}
    return SetLayout(name or uuid.uuid4().hex, "keyspace", **{**facts, "stream_slots": 2, **more})


@pytest.mark.parametrize("member", [0, 1])
def test_a_rank_alone_gets_no_set(member: int) -> None:
    with pytest.raises(NoSetError, match=r"did not connect within 0 s"):
        join_set(_layout(), member, timeout_s=0.2)


def test_ranks_with_other_slots_are_no_set() -> None:
    one = _layout()
    other = _layout(one.name, cache_slots=CACHE_SLOTS - 1)
    failures: list[str] = []

    def join(layout: SetLayout, member: int) -> None:
        with pytest.raises(NoSetError) as caught:
            join_set(layout, member, timeout_s=10)
        failures.append(str(caught.value))

    threads = [threading.Thread(target=join, args=pair) for pair in ((one, 0), (other, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(failures) == [
        "the first rank did not send the set's shared memory",
        "the ranks want different slot layouts",
    ]


def test_three_ranks_map_the_same_memory() -> None:
    layout = _layout(members=3, set_sizes=(3,))
    with ThreadPoolExecutor(3) as pool:
        maps = list(pool.map(lambda member: join_set(layout, member), range(3)))
    for member, one in enumerate(maps):
        one.part(member)[:4] = b"own%d" % member
    for one in maps:
        assert [bytes(one.part(member)[:4]) for member in range(3)] == [b"own0", b"own1", b"own2"]
        assert one.map.addresses[1] - one.map.addresses[0] == layout.staging_bytes
        one.close()
