# SPDX-License-Identifier: Apache-2.0
"""The foreign table in shared memory: the engine's process finds the rows that a follower adds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator

import pytest

from vllm_nvmeof_offload.native import ForeignReader, ForeignWriter, OwnerRecord
from vllm_nvmeof_offload.protocol import owned_by, owner_of, place_of, slot_of

COMPLETE = 2


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
    writer.set_owner(7, OwnerRecord(3, b"t" * 16, b"u" * 16, 5, COMPLETE, 9))
    found = reader.owner(7)
    assert (found.version, found.tag, found.pool_uuid) == (3, b"t" * 16, b"u" * 16)
    assert (found.engine_index, found.state, found.rows) == (5, COMPLETE, 9)


def test_versions_are_asked_for_by_the_reader(file: int) -> None:
    writer = ForeignWriter(file, 10)
    reader = ForeignReader(file)
    assert [writer.version_asked, reader.ask_anew(), writer.version_asked] == [0, 1, 1]
    assert writer.version_of_all == 0
    assert [reader.ask_anew(from_now=False), writer.version_asked, writer.version_of_all] == [2] * 3
    assert [reader.ask_anew(), writer.version_asked, writer.version_of_all] == [3, 3, 2]
    again = ForeignWriter(file, 1)
    assert (again.version_asked, again.version_of_all) == (3, 2)


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
    first.set_owner(1, OwnerRecord(0, b"t" * 16, b"u" * 16, 5, COMPLETE, 1))
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
