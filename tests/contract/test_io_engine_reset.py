# SPDX-License-Identifier: Apache-2.0
"""The contract of RESET: it voids what was written before it, on disk too, target by target.

That no write overtakes it, in either direction, is the machine's affair (tests/unit/pipeline,
tests/sim).
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from vllm_nvmeof_offload.errors import CANCELLED, OK, STALE, io_error
from vllm_nvmeof_offload.io.base import Completion
from vllm_nvmeof_offload.pool.format import read_superblock
from vllm_nvmeof_offload.pool.pool import Pool

from .rig import Rig, content, name

MakeRig = Callable[..., Rig]


def test_a_reset_voids_only_the_writes_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4)
    for number in range(3):
        rig.store(number, name(1 + number))
    rig.reset()
    rig.store(3, name(4))
    assert rig.reopen().adopt().keys == name(4).key


def test_a_reset_goes_on_beside_reads(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(1, name(1))
    before = len(rig.gate.started)
    rig.gate.shut([1])
    read = rig.read(1, 5, name(1))
    rig.submit(read)
    rig.gate.wait_started(before + 1)
    rig.reset()
    rig.gate.open_all()
    assert rig.wait(bool) == [Completion(read.token, OK)], "its caller knows what it is worth"


def test_writes_that_no_superblock_names_are_not_adopted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(0, name(1))
    rig.reset(named=False)
    rig.store(1, name(2))
    rig.zero(5)
    assert [c.outcome for c in rig.run(rig.read(1, 5, name(2)))] == [OK]
    assert rig.payload(5) == content(name(2))
    assert rig.reopen().adopt().keys == b""


def test_a_read_accepts_the_tag_of_its_submission_only(make_rig: MakeRig) -> None:
    """Chunks of other weights, for which somebody asks nevertheless."""
    rig = make_rig()
    rig.store(0, name(1))
    ours = rig.pool.stamp.tag
    for tag, outcome in ((bytes(range(16)), STALE), (ours, OK)):
        rig.reset(tag)
        rig.zero(5)
        assert [c.outcome for c in rig.run(rig.read(0, 5, name(1)))] == [outcome]
    assert rig.payload(5) == content(name(1))


def test_writes_between_two_resets_are_voided(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4)
    for number in range(6):
        rig.store(number, name(number))
        rig.reset()
    rig.store(20, name(20))
    assert rig.reopen().adopt().keys == name(20).key


def test_a_hung_write_delays_neither_a_reset_nor_the_writes_after_it(make_rig: MakeRig) -> None:
    rig = make_rig(threads=4, targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    rig.gate.shut([2])
    hung = rig.write(2, 1, name(3))
    rig.fill(1, name(3))
    rig.submit(hung)
    rig.gate.wait_started(3)
    assert rig.engine.cancel([hung.token]) == []
    rig.reset()
    rig.store(3, name(4), staging_slot=2)
    found = [read_superblock(directory) for directory in rig.pool.directories]
    assert {one.epoch for one in found if one is not None} == {rig.pool.stamp.epoch}
    rig.gate.open_all()
    assert rig.wait(bool) == [Completion(hung.token, CANCELLED)]
    pool = rig.reopen()
    assert pool.adopt().keys == name(4).key
    # Its header has the earlier epoch, so the slot is void even if the table is lost.
    pool.close()
    for directory in pool.directories:
        (directory / "table").write_bytes(b"")
    rig.pool = Pool.open(rig.spec)
    assert rig.pool.adopt().keys == name(4).key


def test_each_target_gets_its_superblock_on_its_own(make_rig: MakeRig) -> None:
    rig = make_rig(targets=2)
    rig.store(0, name(1))
    rig.store(1, name(2))
    before = rig.pool.stamp.epoch
    away, other = rig.resets()
    assert [c.outcome for c in rig.run(other)] == [OK]
    epochs = [one.epoch for one in map(read_superblock, rig.pool.directories) if one]
    assert epochs == [before, rig.pool.stamp.epoch]
    rig.pool.exchange(0, None, None)()
    rig.engine.replace_target(0)
    assert [c.outcome for c in rig.run(away)] == [io_error(errno.ENODEV)]
    assert rig.reopen().adopt().keys == b"", "one of them is enough"
