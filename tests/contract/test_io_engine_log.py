# SPDX-License-Identifier: Apache-2.0
"""The contract of the log: it agrees with the table, whatever the engine has written."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.logs import Kind, LogRecord, decode_page
from tests.process import wait_until
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.pool.format import FLAG_SINGLE_COPY, decode_table
from vllm_nvmeof_offload.pool.log import RECORDS_PER_PAGE, LogHead
from vllm_nvmeof_offload.pool.slab import Slab
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import PAGE_BYTES

from .rig import Rig, name

MakeRig = Callable[..., Rig]
PAGES = 16


def pages_of(directory: Path) -> list[tuple[LogHead, list[LogRecord | None]]]:
    """The log's pages by their numbers."""
    raw = (directory / "log").read_bytes()
    pages = [decode_page(raw[at : at + PAGE_BYTES]) for at in range(0, len(raw), PAGE_BYTES)]
    return sorted((page for page in pages if page is not None), key=lambda page: page[0].sequence)


def records_of(directory: Path) -> list[LogRecord | None]:
    return [record for _, records in pages_of(directory) for record in records]


def await_records(directory: Path, count: int) -> list[LogRecord | None]:
    """The log's records, once there are so many: no operation waits for them."""
    wait_until("the log's records", lambda: len(records_of(directory)) >= count)
    found = records_of(directory)
    assert len(found) == count
    return found


def table_of(directory: Path) -> dict[int, tuple[bytes, int, int, int]]:
    """Slot → key, generation, epoch, flags."""
    raw = np.fromfile(directory / "table", np.uint8)
    table = decode_table(raw, np.arange(raw.size // 64))
    return {
        slot: (
            table.keys[slot, : int(table.key_bytes[slot])].tobytes(),
            int(table.generations[slot]),
            int(table.epochs[slot]),
            int(table.flags[slot]),
        )
        for slot in np.flatnonzero(table.valid).tolist()
    }


def replayed(records: list[LogRecord | None]) -> dict[int, tuple[bytes, int, int, int]]:
    """The table that the records make, from an empty one."""
    slots = {}
    for record in records:
        assert record is not None
        if record.kind is Kind.PUT:
            slots[record.slot] = record.key, record.generation, record.epoch, record.flags
    return slots


@pytest.mark.parametrize("seed", range(3))
def test_a_replayed_log_is_the_table(make_rig: MakeRig, seed: int) -> None:
    rig = make_rig(targets=2, log_pages=PAGES)
    dice = random.Random(seed)
    logged = [0, 0]
    epochs: list[list[int]] = [[], []]
    for generation in range(1, 200):
        if dice.random() < 0.03:
            rig.reset()
            for target in (0, 1):
                epochs[target].append(rig.pool.superblocks[target].epoch)
            continue
        slot, single = dice.randrange(rig.pool.slots), dice.random() < 0.2
        identity = name(dice.randrange(40), generation)
        rig.fill(0, identity)
        (done,) = rig.run(rig.write(slot, 0, identity, single_copy=single))
        assert done.outcome == OK
        logged[slot % 2] += 1
    for target, directory in enumerate(rig.pool.directories):
        records = await_records(directory, logged[target] + len(epochs[target]))
        assert replayed(records) == table_of(directory)
        assert any(entry[3] == FLAG_SINGLE_COPY for entry in table_of(directory).values())
        resets = [one.epoch for one in records if one is not None and one.kind is Kind.RESET]
        assert resets == epochs[target]
        sequences = [head.sequence for head, _ in pages_of(directory)]
        assert sequences == list(range(PAGES, PAGES + len(sequences))), "pages follow each other"


def test_a_reset_is_logged_before_what_its_epoch_marks(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    rig.store(1, name(1))
    old = rig.engine.stamp.epoch
    rig.reset()
    new = rig.engine.stamp.epoch
    rig.store(1, name(2))
    records = await_records(rig.pool.directories[0], 3)
    assert [(one.kind, one.epoch) for one in records if one is not None] == [
        (Kind.PUT, old),
        (Kind.RESET, new),
        (Kind.PUT, new),
    ]


def test_many_writes_at_a_time_are_logged_each_once(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    count = 5 * 24
    ops = []
    for number in range(count):
        if number and number % 24 == 0:
            assert {one.outcome for one in rig.run(*ops)} == {OK}
            ops = []
        identity = name(number, number + 1)
        rig.fill(number % 24, identity)
        ops.append(rig.write(number % 64, number % 24, identity))
    assert {one.outcome for one in rig.run(*ops)} == {OK}
    records = await_records(rig.pool.directories[0], count)
    found = sorted(one.generation for one in records if one is not None)
    assert found == list(range(1, count + 1))


def test_a_write_that_was_given_up_is_not_logged(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    rig.gate.shut([5])
    rig.fill(0, name(1))
    write = rig.write(5, 0, name(1))
    rig.submit(write)
    rig.gate.wait_started(1)
    rig.engine.cancel([write.token])
    rig.gate.open_all()
    rig.wait(bool)
    rig.store(6, name(2))
    (record,) = await_records(rig.pool.directories[0], 1)
    assert record is not None
    assert record.slot == 6


def test_a_key_that_is_too_long_is_logged_without_itself(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    identity = SlotIdentity(b"k" * 42 + bytes(4), 9)
    rig.store(3, identity)
    (record,) = await_records(rig.pool.directories[0], 1)
    assert record is not None and (record.key, record.key_bytes) == (b"", 46)
    assert (record.slot, record.generation, record.epoch) == (3, 9, rig.engine.stamp.epoch)


def test_the_next_start_goes_on_a_lap_later(make_rig: MakeRig) -> None:
    rig = make_rig(log_pages=PAGES)
    directory = rig.pool.directories[0]
    for number in range(RECORDS_PER_PAGE + 1):
        rig.store(number % 64, name(number, number + 1))
    await_records(directory, RECORDS_PER_PAGE + 1)
    rig.reopen()
    assert rig.pool.log(0).next == PAGES + 1 + PAGES


def test_a_target_that_comes_back_is_logged_a_lap_later(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(log_pages=PAGES)
    directory = rig.pool.directories[0]
    rig.store(1, name(1))
    await_records(directory, 1)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ("slab", "table", "log"):
        (copy / file).write_bytes((directory / file).read_bytes())
    for slab in (None, Slab(copy)):
        if slab is not None and rig.pool.is_direct[0]:
            slab.use_direct()
        close = rig.pool.exchange(0, slab, None)
        rig.engine.replace_target(0)
        close()
    rig.store(2, name(2))
    wait_until("the record after the exchange", lambda: pages_of(copy)[-1][0].sequence > PAGES)
    (head, records) = pages_of(copy)[-1]
    assert head.sequence % PAGES == 0, "where a reader of the page before waits"
    assert [record.slot for record in records if record is not None] == [2]
    assert [record.slot for record in records_of(directory) if record is not None] == [1]


def test_a_gone_target_keeps_no_descriptor_of_its_log(make_rig: MakeRig) -> None:
    """Its file system cannot be unmounted while one is open."""
    rig = make_rig(log_pages=PAGES)
    log = rig.pool.directories[0] / "log"
    rig.store(1, name(1))

    def is_open() -> bool:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue
        return str(log) in links

    assert is_open()
    close = rig.pool.exchange(0, None, None)
    rig.engine.replace_target(0)
    close()
    wait_until("the log to be closed", lambda: not is_open())
