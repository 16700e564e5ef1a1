# SPDX-License-Identifier: Apache-2.0
"""A target that is lost and returns, on a real file system (FUSE), is served without a restart.

Pool slots with even numbers are on the faulty target, the others on a second, healthy target.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.owners import page_elsewhere, put_page
from tests.small_disk import tmpfs
from vllm_nvmeof_offload.errors import DEADLINE, OK, Outcome, io_error
from vllm_nvmeof_offload.pool.format import read_superblock
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import Verdict
from vllm_nvmeof_offload.targets import reattach
from vllm_nvmeof_offload.targets.health import FAILED_SLOTS_MAX, FAILURES_MAX, PathStates
from vllm_nvmeof_offload.targets.reattach import TargetPaths
from vllm_nvmeof_offload.units import MIB

from .fuse_mount import FaultyMount
from .kit import adopted, make_spec, name
from .survive_rig import Survivor, closing, mount_id_of, open_files_on, own_threads, probers

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("own_mount_table")]

SLOTS = 2 * FAILED_SLOTS_MAX + 4
FAULTY, HEALTHY = range(0, SLOTS, 2), range(1, SLOTS, 2)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory: a shared disk can stall for longer than these deadlines."""
    (place := tmp_path / "memory").mkdir()
    with tmpfs(place, 256 * MIB) as directory:
        yield directory


@pytest.fixture
def survivor(engine_name: str, faulty_mount: FaultyMount, tmp_path: Path) -> Iterator[Survivor]:
    """All slots hold `name(slot)`."""
    spec = make_spec(faulty_mount.place / "t", tmp_path / "healthy", slots=SLOTS // 2)
    survivor = Survivor(engine_name, Pool.open(spec), SLOTS)
    yield survivor
    survivor.close()


def lose(survivor: Survivor) -> list[Outcome]:
    """Read until the target has the verdict gone."""
    outcomes = []
    for slot in FAULTY:
        outcomes.append(survivor.read(slot, name(slot)))
        if survivor.health[0].verdict is Verdict.GONE:
            break
    survivor.wait_verdict(0, Verdict.GONE)
    return outcomes


def test_a_target_that_is_gone_and_returns(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    mount = mount_id_of(faulty_mount.place)
    assert open_files_on(mount)
    faulty_mount.kill()
    outcomes = lose(survivor)
    assert all(not outcome.ok for outcome in outcomes)
    assert len(outcomes) <= FAILED_SLOTS_MAX
    # From now on nothing is sent to the gone target; the healthy one serves.
    assert survivor.read(2, name(2)) == DEADLINE
    assert survivor.read(1, name(1)) == OK
    # The target's files are closed, so that the dead mount can be unmounted.
    survivor.wait_until(lambda: not open_files_on(mount))
    faulty_mount.unmount()
    faulty_mount.mount()
    survivor.wait_verdict(0, Verdict.OK)
    for slot in range(SLOTS):
        assert survivor.read(slot, name(slot)) == OK
    assert survivor.write(1, 0, name(1)) == OK
    assert survivor.read(0, name(1)) == OK


def test_a_device_that_fails_for_a_while(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    faulty_mount.rules({"op": "read", "do": "errno", "value": errno.EIO})
    outcomes = lose(survivor)
    assert outcomes == [io_error(errno.EIO)] * (FAILED_SLOTS_MAX - 1) + [DEADLINE]
    # Only probers access it, and each of them once.
    struck = faulty_mount.fired()
    assert survivor.read(FAULTY[-1], name(FAULTY[-1])) == DEADLINE
    survivor.wait_until(lambda: faulty_mount.fired() >= struck + 2)
    assert survivor.health[0].verdict is Verdict.GONE
    faulty_mount.rules()
    survivor.wait_verdict(0, Verdict.OK)
    assert all(survivor.read(slot, name(slot)) == OK for slot in FAULTY)


def test_an_errno_that_means_gone_gives_the_verdict_earlier(
    survivor: Survivor, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules({"op": "read", "do": "errno", "value": errno.ENODEV})
    assert lose(survivor) == [io_error(errno.ENODEV)] * FAILURES_MAX


def test_writes_that_fail_while_reads_succeed_lose_the_target(
    survivor: Survivor, faulty_mount: FaultyMount
) -> None:
    faulty_mount.rules({"op": "write", "do": "errno", "value": errno.ENODEV})
    for _ in range(FAILURES_MAX):
        assert survivor.write(1, 0, name(1)) == io_error(errno.ENODEV)
        assert survivor.read(2, name(2)) == (
            OK if survivor.health[0].verdict is Verdict.OK else DEADLINE
        )
    survivor.wait_verdict(0, Verdict.GONE)


def test_a_read_only_file_system_is_read(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    faulty_mount.rules({"op": "write", "do": "errno", "value": errno.EROFS})
    for _ in range(2 * FAILURES_MAX):
        assert survivor.write(1, 0, name(1)) == io_error(errno.EROFS)
        assert survivor.read(2, name(2)) == OK
    survivor.wait_verdict(0, Verdict.DEGRADED)
    faulty_mount.rules()
    assert survivor.write(1, 0, name(1)) == OK
    survivor.wait_verdict(0, Verdict.OK)


def test_a_mount_over_one_that_hangs(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    """An operation may hang forever: the kernel keeps its buffer, and all others continue."""
    faulty_mount.rules({"op": "read", "do": "hang"})
    op, _ = survivor.start_read(0, name(0))
    assert survivor.outcome(op) == DEADLINE
    survivor.wait_verdict(0, Verdict.SUSPECT)
    hanging = mount_id_of(faulty_mount.place)
    assert survivor.read(2, name(2)) == DEADLINE
    faulty_mount.mount_over()
    survivor.wait_verdict(0, Verdict.OK)
    assert all(survivor.read(slot, name(slot)) == OK for slot in FAULTY)
    assert open_files_on(hanging), "the kernel has not returned everything"
    faulty_mount.kill_beneath()
    survivor.wait_released(op)
    survivor.wait_until(lambda: not open_files_on(hanging))
    assert survivor.read(0, name(0)) == OK


def test_the_dead_mount_below_is_not_a_return(
    survivor: Survivor, faulty_mount: FaultyMount, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_mount.kill()
    lose(survivor)
    survivor.wait_until(lambda: "is still unavailable" in caplog.text)
    faulty_mount.unmount()
    # Only an empty directory remains at the path.
    survivor.wait_until(lambda: "No such file" in caplog.text or "no pool" in caplog.text)
    assert list(faulty_mount.place.iterdir()) == []
    assert survivor.health[0].verdict is Verdict.GONE
    faulty_mount.mount()
    survivor.wait_verdict(0, Verdict.OK)


def test_a_prober_that_hangs_is_abandoned(
    survivor: Survivor,
    faulty_mount: FaultyMount,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reattach, "_ANSWER_S_MAX", 2.0)  # enough to start Python
    monkeypatch.setattr(reattach, "_LOOK_S", 0.02)
    looks = 0
    states = TargetPaths.states

    def look(watch: TargetPaths) -> PathStates:
        nonlocal looks
        looks += 1
        return states(watch)

    monkeypatch.setattr(TargetPaths, "states", look)
    faulty_mount.rules(
        {"name": "reads", "op": "read", "do": "errno", "value": errno.ENODEV},
        {"name": "opens", "op": "open", "path": "superblock", "do": "hang"},
    )
    lose(survivor)
    survivor.wait_until(lambda: "opening it hangs" in caplog.text)
    enough = looks + 150  # the next probe would be due by then
    most = 0

    def has_looked_enough() -> bool:
        nonlocal most
        # On a busy machine the first one is killed before it opens anything, and none is there.
        most = max(most, len(probers()))
        return looks >= enough

    survivor.wait_until(has_looked_enough)
    assert most == 1, "one at a time"
    assert survivor.read(1, name(1)) == OK
    faulty_mount.rules()
    survivor.wait_verdict(0, Verdict.OK)
    survivor.wait_until(lambda: not probers())


def test_a_server_of_another_owner_is_not_joined(
    survivor: Survivor, faulty_mount: FaultyMount, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_mount.kill()
    lose(survivor)
    survivor.wait_until(lambda: survivor.pool.device(0) is None)
    faulty_mount.unmount()
    (lease,) = faulty_mount.backing.glob("t/*/engine-0/rank-0/lease")
    put_page(lease, page_elsewhere())
    faulty_mount.mount()
    survivor.wait_until(lambda: "is held by" in caplog.text)
    assert survivor.health[0].verdict is Verdict.GONE


def test_a_reset_that_the_lost_target_missed(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    faulty_mount.kill()
    lose(survivor)
    survivor.wait_until(lambda: survivor.pool.device(0) is None)
    assert survivor.reset() == OK
    epoch = survivor.pool.stamp.epoch
    faulty_mount.unmount()
    faulty_mount.mount()
    survivor.wait_verdict(0, Verdict.OK)
    found = read_superblock(survivor.pool.directories[0])
    assert found is not None
    assert found.epoch == epoch


def test_a_reset_while_every_target_is_gone_is_made_durable_later(
    engine_name: str, faulty_mount: FaultyMount
) -> None:
    """The target returns with its superblock; only what is written from then on is adopted."""
    spec = make_spec(faulty_mount.place / "t", slots=8)
    survivor = Survivor(engine_name, Pool.open(spec), 8)
    faulty_mount.rules({"op": "read", "do": "errno", "value": errno.ENODEV})
    for slot in range(3, 3 + FAILURES_MAX):
        assert not survivor.read(slot, name(slot)).ok
    survivor.wait_until(lambda: survivor.pool.device(0) is None)
    assert survivor.reset() == io_error(errno.ENODEV)
    faulty_mount.rules()
    survivor.wait_verdict(0, Verdict.OK)
    assert survivor.write(0, 1, name(0)) == OK
    found = read_superblock(survivor.pool.directories[0])
    assert found == survivor.pool.superblocks[0]
    survivor.close()
    pool = Pool.open(spec)
    assert adopted(pool) == {1: name(0)}
    pool.close()


@pytest.mark.slow
def test_twenty_losses_and_returns(survivor: Survivor, faulty_mount: FaultyMount) -> None:
    """The numbers of threads and of descriptors do not grow."""
    sizes = []
    for _ in range(20):
        faulty_mount.kill()
        lose(survivor)
        survivor.wait_until(lambda: survivor.pool.device(0) is None)
        faulty_mount.unmount()
        faulty_mount.mount()
        survivor.wait_verdict(0, Verdict.OK)
        assert survivor.read(0, name(0)) == OK
        survivor.wait_until(lambda: not probers() and not closing())
        sizes.append((len(own_threads()), len(os.listdir("/proc/self/fd"))))
    for what in (0, 1):
        # A thread that happens to be working at one of these moments is not growth.
        first, last = ([size[what] for size in part] for part in (sizes[:5], sizes[-5:]))
        assert min(last) <= max(first), sizes
