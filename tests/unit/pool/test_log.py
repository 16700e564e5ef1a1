# SPDX-License-Identifier: Apache-2.0
"""The log of a region: its format, its writer, and its place in a rank's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pool.kit import make_spec
from vllm_nvmeof_offload.commands.pool.check import Damage, fsck
from vllm_nvmeof_offload.commands.pool.offline import remove
from vllm_nvmeof_offload.commands.pool.show import inspect_rank
from vllm_nvmeof_offload.pool.format import Superblock, read_superblock, write_superblock
from vllm_nvmeof_offload.pool.log import (
    LOG_PAGES_MAX,
    LOG_PAGES_MIN,
    RECORDS_PER_PAGE,
    Kind,
    LogFile,
    LogHead,
    LogRecord,
    LogWriter,
    decode_page,
    log_pages_of,
    newest_head,
    next_sequence,
)
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import disk_bytes, find, survey
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, SlotIdentity
from vllm_nvmeof_offload.units import MIB, PAGE_BYTES

PAGES = 4

keys = st.binary(min_size=1, max_size=46)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
puts = st.builds(
    lambda slot, key, generation, epoch, single: LogRecord.put(
        slot, SlotIdentity(key, generation), epoch, single_copy=single
    ),
    *(u32, keys, u64, u32, st.booleans()),
)
hints = st.builds(LogRecord.hint, st.binary(min_size=16, max_size=16), u32, u64, u32)
records = st.one_of(puts, st.builds(LogRecord.reset, u32), hints)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    os.ftruncate(opened, PAGES * PAGE_BYTES)
    yield opened
    os.close(opened)


def put(number: int) -> LogRecord:
    return LogRecord.put(number, SlotIdentity(number.to_bytes(36, "little"), 100 + number), 5)


def page_at(fd: int, position: int) -> tuple[LogHead, list[LogRecord | None]] | None:
    return decode_page(os.pread(fd, PAGE_BYTES, position * PAGE_BYTES))


@given(records, u64, st.integers(0, RECORDS_PER_PAGE - 1))
def test_a_record_is_found_at_its_position_only(
    record: LogRecord, sequence: int, index: int
) -> None:
    raw = record.encode(sequence, index)
    assert len(raw) == 64
    assert LogRecord.decode(raw, sequence, index) == record
    assert LogRecord.decode(raw, sequence ^ 1, index) is None, "a page of another lap"
    assert LogRecord.decode(raw, sequence, index + 1) is None


@given(records, st.integers(0, 511))
def test_any_damaged_bit_of_a_record_is_found(record: LogRecord, bit: int) -> None:
    raw = bytearray(record.encode(7, 3))
    raw[bit // 8] ^= 1 << bit % 8
    assert LogRecord.decode(bytes(raw), 7, 3) is None


@given(st.integers(0, 255))
def test_any_damaged_bit_of_a_header_is_found(bit: int) -> None:
    raw = bytearray(LogHead(9, 2, 3, 4).encode())
    assert LogHead.decode(bytes(raw)) == LogHead(9, 2, 3, 4)
    raw[bit // 8] ^= 1 << bit % 8
    assert LogHead.decode(bytes(raw)) is None


def test_a_key_that_does_not_fit_is_left_out() -> None:
    record = LogRecord.put(1, SlotIdentity(b"k" * 41, 2), 3)
    assert (record.key, record.key_bytes) == (b"", 41)
    assert LogRecord.decode(record.encode(1, 0), 1, 0) == record


def test_a_hint_names_a_region() -> None:
    record = LogRecord.hint(b"r" * 16, 8, 9, 3, member=2)
    assert record.key == b"r" * 16 + (3).to_bytes(4, "little")
    assert (record.kind, record.slot, record.generation, record.member) == (Kind.HINT, 8, 9, 2)
    assert record.key_bytes == 20


def test_pages_are_filled_one_after_another(fd: int) -> None:
    writer = LogWriter(LogFile(fd, PAGES, next_sequence(fd, PAGES), lease_generation=6))
    written = [put(number) for number in range(RECORDS_PER_PAGE + 2)]
    writer.add(written[:1])
    assert page_at(fd, 0) == (LogHead(PAGES, 1, 6, 5), written[:1])
    writer.add(written[1:])
    assert page_at(fd, 0) == (LogHead(PAGES, 63, 6, 5), written[:63])
    assert page_at(fd, 1) == (LogHead(PAGES + 1, 2, 6, 5), written[63:])
    assert page_at(fd, 2) is None
    writer.close()


@pytest.mark.parametrize("count", [0, 1, RECORDS_PER_PAGE, PAGES * RECORDS_PER_PAGE - 1])
def test_a_start_goes_on_a_lap_later_where_readers_wait(fd: int, count: int) -> None:
    first = LogWriter(LogFile(fd, PAGES, next_sequence(fd, PAGES)))
    first.add(put(number) for number in range(count))
    first.close()
    newest = newest_head(fd, PAGES)
    # A reader that has taken everything waits there.
    waits_for = PAGES if newest is None else newest.sequence + (newest.records == 63)
    found = next_sequence(fd, PAGES)
    assert found == (PAGES if newest is None else waits_for + PAGES)
    second = LogWriter(LogFile(fd, PAGES, found))
    second.add([put(1)])
    second.close()
    assert page_at(fd, waits_for % PAGES) == (LogHead(found, 1, 0, 5), [put(1)])


def test_a_page_that_could_not_be_written_leaves_a_gap_of_a_lap(fd: int, tmp_path: Path) -> None:
    writer = LogWriter(LogFile(fd, PAGES, PAGES))
    writer.replace(os.open(tmp_path / "log", os.O_RDONLY))  # every write fails
    writer.add(put(number) for number in range(RECORDS_PER_PAGE + 1))
    assert page_at(fd, 0) is None
    writer.replace(fd)
    writer.add([put(3)])
    head, _ = page_at(fd, 0) or (None, None)
    assert head is not None
    assert head.sequence > PAGES
    assert head.sequence % PAGES == 0
    writer.close()
    writer.add([put(4)])
    assert page_at(fd, 0) == (head, [put(3)])


def test_a_log_belongs_to_a_pool_and_counts_in_its_size(tmp_path: Path) -> None:
    assert log_pages_of(1 * MIB) == 0
    assert log_pages_of(4 * MIB) == LOG_PAGES_MIN
    assert log_pages_of(1 << 40) == LOG_PAGES_MAX
    spec = make_spec(tmp_path, pool_bytes=8 * MIB)
    assert spec.log_pages_per_target == 32
    with_log = spec.slots_per_target * (spec.slot_bytes + 64) + 32 * PAGE_BYTES
    assert 8 * MIB - spec.slot_bytes - 64 < with_log <= 8 * MIB
    pool = Pool.open(spec)
    (directory,) = pool.directories
    assert (directory / "log").stat().st_size == 32 * PAGE_BYTES
    assert pool.superblocks[0].log_pages == 32
    (found,) = find([tmp_path])
    assert disk_bytes(found.path) >= with_log
    LogWriter(pool.log(0)).add([put(1)])
    pool.close()
    shown = inspect_rank(survey([found])[0])["log"]
    assert shown == {
        "pages": 32,
        "sequence": 32,
        "records": 1,
        "lease_generation": 0,
        "epoch": 5,
    }
    assert remove([found])[0].left == ()
    assert not directory.exists()


def test_a_region_without_a_log_is_given_one_and_keeps_its_chunks(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, pool_bytes=8 * MIB)
    Pool.open(replace(spec, log_pages=0)).close()
    (found,) = find([tmp_path])
    before = read_superblock(found.path)
    assert before is not None
    assert before.log_pages == 0
    assert inspect_rank(survey([found])[0])["log"] is None
    pool = Pool.open(spec)
    after = pool.superblocks[0]
    assert after == replace(before, log_pages=32, slots=after.slots)
    assert pool.log(0)[1:] == (32, 32, 0)
    pool.close()
    assert read_superblock(found.path) == after


def test_a_log_of_another_size_begins_again(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, pool_bytes=8 * MIB)
    pool = Pool.open(spec)
    LogWriter(pool.log(0)).add([put(1)])
    pool.close()
    pool = Pool.open(spec)
    assert pool.log(0).next == 64
    pool.close()
    pool = Pool.open(replace(spec, log_pages=16))
    assert pool.log(0).next == 16
    pool.close()


def test_fsck_notes_a_log_that_is_lost_or_damaged(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, pool_bytes=8 * MIB)
    pool = Pool.open(spec)
    pool.close()
    found = find([tmp_path])
    assert fsck(found)[0].counts == {}
    (log,) = tmp_path.rglob("log")
    with log.open("r+b") as file:
        file.write(b"x")
    (report,) = fsck(found)
    assert (report.worst, list(report.counts)) == (
        Damage.NOTE,
        ["log has 1 damaged pages, which are written again"],
    )
    log.unlink()
    (report,) = fsck(found)
    assert (report.worst, list(report.counts)) == (
        Damage.NOTE,
        ["log has 0 of 32 pages; the next start extends it"],
    )


def test_a_disk_without_space_for_a_log_has_a_pool_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_nvmeof_offload.pool import slab

    real = slab.reserve

    def reserve(fd: int, size: int) -> None:
        if size == 32 * PAGE_BYTES:
            raise OSError(28, "no space")
        real(fd, size)

    monkeypatch.setattr(slab, "reserve", reserve)
    pool = Pool.open(make_spec(tmp_path, pool_bytes=8 * MIB))
    assert pool.superblocks[0].log_pages == 0
    pool.close()


def test_a_superblock_with_a_log_is_alike(tmp_path: Path) -> None:
    pool = Pool.open(make_spec(tmp_path))
    superblock: Superblock = pool.superblocks[0]
    pool.close()
    assert superblock.is_alike(replace(superblock, log_pages=77))
    write_superblock(tmp_path, replace(superblock, log_pages=77))
    assert read_superblock(tmp_path) == replace(superblock, log_pages=77)
    assert LogRecord.hint(bytes(16), 0, 0, 1).member == EVERY_MEMBER
