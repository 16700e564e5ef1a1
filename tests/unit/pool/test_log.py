# SPDX-License-Identifier: Apache-2.0
"""The log of a region: its format, its writer, and its place in a rank's directory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.logs import Log, LogRecord, decode_page
from tests.unit.pool.kit import make_spec
from vllm_nvmeof_offload.commands.pool.check import Damage, check
from vllm_nvmeof_offload.commands.pool.offline import remove
from vllm_nvmeof_offload.commands.pool.show import inspect_rank
from vllm_nvmeof_offload.pool.format import read_superblock
from vllm_nvmeof_offload.pool.log import (
    LOG_PAGES_MAX,
    LOG_PAGES_MIN,
    RECORDS_PER_PAGE,
    LogFile,
    LogHead,
    damaged_pages,
    log_pages_of,
    newest_head,
    next_sequence,
)
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import disk_bytes, find, survey
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import MIB, PAGE_BYTES

PAGES = 4

keys = st.binary(min_size=1, max_size=46)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
identities = st.builds(SlotIdentity, keys, u64)
#: Method of `Log` and its arguments.
puts = st.tuples(st.just("put"), st.tuples(u32, identities, u32))
resets = st.tuples(st.just("reset"), st.tuples(u32))
records = st.one_of(puts, resets)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    os.ftruncate(opened, PAGES * PAGE_BYTES)
    yield opened
    os.close(opened)


def put(log: Log, *numbers: int) -> list[LogRecord]:
    name = lambda number: SlotIdentity(number.to_bytes(36, "little"), 100 + number)  # noqa: E731
    return [log.put(number, name(number), 5) for number in numbers]


def raw_of(what: tuple[str, tuple[Any, ...]], sequence: int, index: int) -> tuple[bytes, LogRecord]:
    """The 64 bytes of a record at this position, and what it says."""
    fd = os.memfd_create("log", os.MFD_CLOEXEC)
    try:
        log = Log(LogFile(fd, PAGES, sequence))
        for _ in range(index):
            log.reset(1)
        method, arguments = what
        record = getattr(log, method)(*arguments)
        at = sequence % PAGES * PAGE_BYTES + 64 + 64 * index
        return os.pread(fd, 64, at), record
    finally:
        os.close(fd)


def page_at(fd: int, position: int) -> tuple[LogHead, list[LogRecord | None]] | None:
    return decode_page(os.pread(fd, PAGE_BYTES, position * PAGE_BYTES))


@given(records, st.integers(0, (1 << 63) - 1), st.integers(0, RECORDS_PER_PAGE - 2))
def test_a_record_is_found_at_its_position_only(
    what: tuple[str, tuple[Any, ...]], sequence: int, index: int
) -> None:
    raw, record = raw_of(what, sequence, index)
    assert LogRecord.decode(raw, sequence, index) == record
    assert LogRecord.decode(raw, sequence ^ 1, index) is None, "a page of another lap"
    assert LogRecord.decode(raw, sequence, index + 1) is None


@given(records, st.integers(0, 511))
def test_any_damaged_bit_of_a_record_is_found(what: tuple[str, tuple[Any, ...]], bit: int) -> None:
    fd = os.memfd_create("log", os.MFD_CLOEXEC)
    try:
        method, arguments = what
        getattr(Log(LogFile(fd, PAGES, PAGES)), method)(*arguments)
        os.ftruncate(fd, PAGES * PAGE_BYTES)
        assert damaged_pages(fd, PAGES) == 0
        raw = bytearray(os.pread(fd, 64, 64))
        raw[bit // 8] ^= 1 << bit % 8
        os.pwrite(fd, raw, 64)
        assert damaged_pages(fd, PAGES) == 1
    finally:
        os.close(fd)


def test_a_record_of_another_position_is_damaged(fd: int) -> None:
    put(Log(LogFile(fd, PAGES, PAGES)), 1, 2)
    assert damaged_pages(fd, PAGES) == 0
    os.pwrite(fd, os.pread(fd, 64, 64), 128)
    assert damaged_pages(fd, PAGES) == 1


def test_any_damaged_bit_of_a_header_is_found(fd: int) -> None:
    log = Log(LogFile(fd, PAGES, 9, lease_generation=3))
    log.reset(8)
    log.reset(4)
    raw = bytearray(os.pread(fd, PAGE_BYTES, PAGE_BYTES))
    assert LogHead.decode(bytes(raw)) == LogHead(9, 2, 3, 4)
    for bit in range(256):
        raw[bit // 8] ^= 1 << bit % 8
        assert LogHead.decode(bytes(raw)) is None
        raw[bit // 8] ^= 1 << bit % 8


def test_each_field_is_at_the_offset_of_the_format(fd: int) -> None:
    log = Log(LogFile(fd, PAGES, 8, lease_generation=6))
    log.put(0x01020304, SlotIdentity(b"k" * 36, 0x1122334455667788), 0xA1B2C3D4, single_copy=True)
    page = os.pread(fd, PAGE_BYTES, 0)
    head = (0x474C564E, 1, 8, 6, 0xA1B2C3D4)
    assert page[:28] == struct.pack("<IIQQI", *head)
    assert page[28:32] == crc32c(page[:28]).to_bytes(4, "little")
    assert page[32:64] == bytes(32)
    body = bytes.fromhex("d4c3b2a1 8877665544332211 04030201 08 00 01 24") + b"k" * 36 + bytes(4)
    assert page[68:128] == body
    crc = crc32c(struct.pack("<QI", 8, 0) + body)
    assert page[64:68] == crc.to_bytes(4, "little")


def test_a_key_that_does_not_fit_is_left_out() -> None:
    raw, _ = raw_of(("put", (1, SlotIdentity(b"k" * 41, 2), 3)), 1, 0)
    record = LogRecord.decode(raw, 1, 0)
    assert record is not None
    assert (record.key, record.key_bytes) == (b"", 41)


def test_pages_are_filled_one_after_another(fd: int) -> None:
    log = Log(LogFile(fd, PAGES, next_sequence(fd, PAGES), lease_generation=6))
    written = put(log, 0)
    assert page_at(fd, 0) == (LogHead(PAGES, 1, 6, 5), written)
    written += put(log, *range(1, RECORDS_PER_PAGE + 2))
    assert page_at(fd, 0) == (LogHead(PAGES, 63, 6, 5), written[:63])
    assert page_at(fd, 1) == (LogHead(PAGES + 1, 2, 6, 5), written[63:])
    assert page_at(fd, 2) is None


@pytest.mark.parametrize("count", [0, 1, RECORDS_PER_PAGE, PAGES * RECORDS_PER_PAGE - 1])
def test_a_start_goes_on_a_lap_later_where_readers_wait(fd: int, count: int) -> None:
    put(Log(LogFile(fd, PAGES, next_sequence(fd, PAGES))), *range(count))
    newest = newest_head(fd, PAGES)
    # A reader that has taken everything waits there.
    waits_for = PAGES if newest is None else newest.sequence + (newest.records == 63)
    found = next_sequence(fd, PAGES)
    assert found == (PAGES if newest is None else waits_for + PAGES)
    written = put(Log(LogFile(fd, PAGES, found)), 1)
    assert page_at(fd, waits_for % PAGES) == (LogHead(found, 1, 0, 5), written)


def test_a_page_that_could_not_be_written_leaves_a_gap_of_a_lap(fd: int, tmp_path: Path) -> None:
    log = Log(LogFile(fd, PAGES, PAGES))
    read_only = os.open(tmp_path / "log", os.O_RDONLY)
    log.replace(read_only)  # every write fails
    os.close(read_only)
    put(log, *range(RECORDS_PER_PAGE + 1))
    assert page_at(fd, 0) is None
    log.replace(fd)
    written = put(log, 3)
    head, found = page_at(fd, 0) or (LogHead(0, 0), [])
    assert found == written
    assert head.sequence > PAGES
    assert head.sequence % PAGES == 0
    log.close()
    put(log, 4)
    assert page_at(fd, 0) == (head, written)


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
    put(Log(pool.log(0)), 1)
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
    put(Log(pool.log(0)), 1)
    pool.close()
    pool = Pool.open(spec)
    assert pool.log(0).next == 64
    pool.close()
    pool = Pool.open(replace(spec, log_pages=16))
    assert pool.log(0).next == 16
    pool.close()


def test_a_check_notes_a_log_that_is_lost_or_damaged(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, pool_bytes=8 * MIB)
    pool = Pool.open(spec)
    pool.close()
    found = find([tmp_path])
    assert check(found)[0].counts == {}
    (log,) = tmp_path.rglob("log")
    with log.open("r+b") as file:
        file.write(b"x")
    (report,) = check(found)
    assert (report.worst, list(report.counts)) == (
        Damage.NOTE,
        ["log has 1 damaged pages, which servers rewrite"],
    )
    log.unlink()
    (report,) = check(found)
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
