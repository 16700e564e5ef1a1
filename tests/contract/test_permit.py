# SPDX-License-Identifier: Apache-2.0
"""Rule 18: a write to a region with a lease starts only within the permit."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.process import wait_until
from vllm_nvmeof_offload.errors import CANCELLED, OK, Outcome, io_error
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    TABLE_FILE,
    decode_table,
    read_superblock,
)
from vllm_nvmeof_offload.pool.lease import Permit, boot_ns

from .rig import WAIT_S, Rig, content, name
from .test_io_engine import whole_slot

ASLEEP_S = 86_400
MakeRig = Callable[..., Rig]


def permit_of(rig: Rig, target: int = 0) -> Permit:
    return rig.pool.permits[target]


def renew(permit: Permit) -> None:
    permit.grant(boot_ns() + int(1e9 * WAIT_S))


def run_out(permit: Permit) -> None:
    permit.grant(1)


def has_entry(rig: Rig, slot: int) -> bool:
    path, offset = rig.pool.directories[0] / TABLE_FILE, slot * ENTRY_BYTES
    raw = np.fromfile(path, np.uint8, ENTRY_BYTES, offset=offset)
    return bool(decode_table(raw, np.array([slot])).valid.all())


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """One target with a valid permit, and a chunk in slot 1."""
    made = make_rig(leased=True)
    renew(permit_of(made))
    made.store(1, name(1))
    return made


def test_a_write_is_held_back_until_the_permit_is_renewed(rig: Rig) -> None:
    permit = permit_of(rig)
    run_out(permit)
    rig.fill(2, name(2))
    before, started = whole_slot(rig.pool, 5), len(rig.gate.started)
    write = rig.write(5, 2, name(2))
    rig.submit(write)
    read = rig.read(1, 0, name(1))
    assert rig.run(read)[0].outcome == OK, "reads need no permit"
    assert rig.gate.started[started:] == [1]
    assert whole_slot(rig.pool, 5) == before
    renew(permit)
    (completion,) = rig.wait(lambda found: len(found) >= 1)
    assert (completion.token, completion.outcome) == (write.token, OK)
    assert has_entry(rig, 5)
    rig.zero(0)
    assert rig.run(rig.read(5, 0, name(2)))[0].outcome == OK
    assert rig.payload(0) == content(name(2))


def test_a_permit_does_not_outlive_a_sleep(
    make_rig: MakeRig, request: pytest.FixtureRequest
) -> None:
    """In a time namespace whose machine has slept for a day."""
    slept_s = (boot_ns() - time.monotonic_ns()) / 1e9
    if slept_s < ASLEEP_S - 60:
        unshare = ["unshare", "--user", "--map-root-user", "--time", "--fork"]
        unshare += ["--boottime", str(ASLEEP_S)]
        if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this machine allows no time namespace")
        command = [*unshare, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
        subprocess.run([*command, request.node.nodeid], cwd=request.config.rootpath, check=True)
        return
    rig = make_rig(leased=True)
    renew(permit_of(rig))
    rig.store(1, name(1))
    permit_of(rig).grant(time.monotonic_ns() + int(1e9 * WAIT_S))  # of before the sleep
    rig.fill(2, name(2))
    write = rig.write(5, 2, name(2))
    rig.submit(write)
    assert rig.run(rig.read(1, 0, name(1)))[0].outcome == OK
    assert rig.engine.cancel([write.token]) == [write.token]


def test_a_write_that_is_held_back_can_be_taken_back_at_its_deadline(rig: Rig) -> None:
    run_out(permit_of(rig))
    write = rig.write(5, 2, name(2))
    rig.submit(write)
    assert rig.engine.cancel([write.token]) == [write.token]
    renew(permit_of(rig))
    rig.store(6, name(3))
    assert 5 not in rig.gate.started


def test_a_table_that_cannot_be_synced_fails_a_write(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose entry a failed sync has lost has ended, so that the next one fails."""
    rig = make_rig(leased=True)
    renew(permit_of(rig))
    no_table = os.open("/dev/null", os.O_RDWR)  # takes any entry, and has no fdatasync
    slab, _, log = rig.pool.files(0)
    monkeypatch.setattr(rig.pool, "files", lambda _: (slab, no_table, log))
    rig.engine.replace_target(0)
    numbers = itertools.count()

    def outcome() -> Outcome:
        (completion,) = rig.run(rig.write(5, 2, name(next(numbers))))
        return completion.outcome

    assert outcome() == OK
    wait_until("the error of a sync", lambda: outcome() == io_error(errno.EINVAL))
    assert outcome() == OK, "each error fails one write"
    monkeypatch.undo()
    rig.engine.replace_target(0)
    rig.store(6, name(3))
    os.close(no_table)


def test_a_lost_lease_cancels_writes_for_good(rig: Rig) -> None:
    permit = permit_of(rig)
    run_out(permit)
    before = whole_slot(rig.pool, 5)
    waiting = rig.write(5, 2, name(2))
    rig.submit(waiting)
    permit.lose()
    (completion,) = rig.wait(lambda found: len(found) >= 1)
    assert (completion.token, completion.outcome) == (waiting.token, CANCELLED)
    assert rig.run(rig.write(6, 2, name(2)))[0].outcome == CANCELLED, "later ones too"
    assert whole_slot(rig.pool, 5) == before
    assert rig.run(rig.read(1, 0, name(1)))[0].outcome == OK, "what it has can be read"


@pytest.mark.parametrize("lost", [False, True])
def test_no_table_entry_follows_without_a_permit(rig: Rig, lost: bool) -> None:
    """The permit runs out while the data is written."""
    permit, started = permit_of(rig), len(rig.gate.started)
    rig.fill(2, name(2))
    rig.gate.shut([5])
    rig.submit(rig.write(5, 2, name(2)))
    rig.gate.wait_started(started + 1)
    run_out(permit)
    before = whole_slot(rig.pool, 5)
    rig.gate.open_all()
    wait_until("the data", lambda: whole_slot(rig.pool, 5) != before)
    assert rig.run(rig.read(1, 0, name(1)))[0].outcome == OK
    assert not has_entry(rig, 5)
    if lost:
        permit.lose()
    else:
        renew(permit)
    (completion,) = rig.wait(lambda found: len(found) >= 1)
    assert completion.outcome == (CANCELLED if lost else OK)
    assert has_entry(rig, 5) is not lost


def test_a_superblock_waits_for_the_permit(rig: Rig) -> None:
    directory, permit = rig.pool.directories[0], permit_of(rig)
    before = read_superblock(directory)
    run_out(permit)
    (first,) = rig.resets()
    rig.submit(first)
    assert rig.run(rig.read(1, 0, name(1)))[0].outcome == OK
    assert read_superblock(directory) == before
    (second,) = rig.resets()
    rig.submit(second)  # takes the first one's place
    renew(permit)
    found = {one.token: one.outcome for one in rig.wait(lambda found: len(found) >= 2)}
    assert found == {first.token: CANCELLED, second.token: OK}
    assert read_superblock(directory) == rig.pool.superblocks[0] != before


def test_a_lost_region_gets_no_superblock(rig: Rig) -> None:
    before = read_superblock(rig.pool.directories[0])
    permit_of(rig).lose()
    assert rig.run(*rig.resets())[0].outcome == io_error(errno.ENODEV)
    assert read_superblock(rig.pool.directories[0]) == before


def test_each_target_has_a_permit_of_its_own(make_rig: MakeRig) -> None:
    rig = make_rig(leased=True, targets=2)
    renew(permit_of(rig, 0))
    run_out(permit_of(rig, 1))
    rig.fill(2, name(2))
    held = rig.write(3, 2, name(2))
    rig.submit(held)
    rig.store(4, name(1))
    renew(permit_of(rig, 1))
    (completion,) = rig.wait(lambda found: len(found) >= 1)
    assert (completion.token, completion.outcome) == (held.token, OK)
