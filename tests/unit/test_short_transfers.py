# SPDX-License-Identifier: Apache-2.0
"""Short transfers: every completion compares bytes done with bytes asked."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.io.threads import SlotFiles, read_slot, write_slot
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import SlotIdentity

IDENTITY = SlotIdentity(b"k" * 32 + bytes(4), 3)
PAYLOAD_BYTES = 50_000


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    spec = PoolSpec((tmp_path,), 1 << 20, PAYLOAD_BYTES, Keyspace.of({}), o_direct="off")
    pool = Pool.open(spec)
    yield pool
    pool.close()


def shorten(monkeypatch: pytest.MonkeyPatch, name: str, limit: Callable[[int], int]) -> list[int]:
    """Make `os.preadv`/`os.pwritev` transfer at most `limit(asked)` bytes a call."""
    real = getattr(os, name)
    calls: list[int] = []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return int(real(fd, [buffers[0][: limit(len(buffers[0]))]], offset))

    monkeypatch.setattr(os, name, short)
    return calls


def write(pool: Pool) -> Outcome:
    slot = memoryview(bytearray(random.Random(1).randbytes(pool.slot_bytes)))
    return write_slot(pool, slot, SlotFiles.of(pool, 2), IDENTITY, pool.stamp, lambda: True)


def read(pool: Pool) -> Outcome:
    slot = memoryview(bytearray(pool.slot_bytes))
    return read_slot(pool, slot, SlotFiles.of(pool, 2), IDENTITY, pool.stamp.tag)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_short_transfers_continue_at_a_page_boundary(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    dice = random.Random(7)
    calls = shorten(monkeypatch, name, lambda asked: min(asked, dice.randrange(4096, 20_000)))
    assert write(pool) == OK
    assert read(pool) == OK
    assert len(calls) >= 3
    assert {offset % 4096 for offset in calls} == {0}
    monkeypatch.undo()
    assert read(pool) == OK


@pytest.mark.parametrize("progress", [0, 1, 4095])
def test_no_progress_is_an_io_error(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, progress: int
) -> None:
    assert write(pool) == OK
    shorten(monkeypatch, "preadv", lambda asked: progress)
    failure = io_error(errno.EIO if progress else 0)
    assert read(pool) == failure
    shorten(monkeypatch, "pwritev", lambda asked: progress)
    assert write(pool) == failure


def test_a_write_that_fails_has_no_table_entry(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, "pwritev", lambda asked: 0)
    assert not write(pool).ok
    fd, offset = pool.table_fd(2)
    assert not any(os.pread(fd, 64, offset))


def test_the_table_is_written_after_the_data(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("pwritev", "pwrite"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, real=real: (order.append(name), real(*args))[1]
        )
    assert write(pool) == OK
    assert order == ["pwritev", "pwrite"]
