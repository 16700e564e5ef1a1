# SPDX-License-Identifier: Apache-2.0
"""Verdicts on a target, the watching of its paths, and the search for a lost target."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.contract.rig import ENGINES
from tests.process import numbers_from, wait_until
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.pool.lease import boot_ns
from vllm_nvmeof_offload.protocol import Verdict
from vllm_nvmeof_offload.targets.health import (
    FAILED_SLOTS_MAX,
    FAILURES_MAX,
    PathStates,
    TargetHealth,
)
from vllm_nvmeof_offload.targets.prober import ProbeAnswer, ProbeRequest
from vllm_nvmeof_offload.targets.reattach import Attachments, TargetPaths, TargetWatcher

from .trees import Tree, two_paths

EIO, ENODEV = io_error(errno.EIO), io_error(errno.ENODEV)


class Bench:
    def __init__(self, *, can_return: bool = True) -> None:
        self.health = TargetHealth(can_return=can_return)

    @property
    def verdict(self) -> Verdict:
        return self.health.verdict

    def end(self, outcome: Outcome, slot: int = 0, *, is_write: bool = False) -> Verdict:
        attachment = self.health.attachment
        self.health.began(attachment, 1)
        self.health.ended(attachment, outcome, slot, is_write=is_write)
        self.health.released(attachment, 1, late=0)
        return self.health.verdict


def test_a_target_is_suspect_until_the_kernel_has_returned_everything() -> None:
    bench = Bench()
    bench.health.began(0, 3)
    for _ in range(2):
        bench.health.late(0, 1)
        assert bench.verdict is Verdict.SUSPECT
    bench.health.released(0, 0, late=1)
    bench.health.released(0, 1, late=0)
    assert bench.verdict is Verdict.SUSPECT
    assert not bench.verdict.usable
    bench.health.released(0, 0, late=1)
    assert bench.verdict is Verdict.OK
    assert not bench.health.busy(0)


@pytest.mark.parametrize("number", [0, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.ENOLINK])
def test_a_few_failures_in_a_row_make_a_target_gone(number: int) -> None:
    bench = Bench()
    for _ in range(FAILURES_MAX - 1):
        assert bench.end(io_error(number)) is Verdict.OK
    assert bench.end(io_error(number)) is Verdict.GONE
    assert str(io_error(number)) in bench.health.reason


def test_a_read_only_file_system_stops_writes_and_no_reads() -> None:
    bench = Bench()
    for slot in range(5 * FAILURES_MAX):
        assert bench.end(io_error(errno.EROFS), slot, is_write=True) is Verdict.DEGRADED
        assert bench.end(OK) is Verdict.DEGRADED
    assert bench.health.reason == "not writable: its file system is read-only"
    assert bench.end(OK, is_write=True) is Verdict.OK


def test_eio_on_one_slot_blames_the_slot_and_on_many_the_target() -> None:
    bench = Bench()
    for _ in range(5 * FAILED_SLOTS_MAX):
        assert bench.end(EIO, slot=7) is Verdict.OK
    for slot in range(FAILED_SLOTS_MAX - 2):
        assert bench.end(EIO, slot) is Verdict.OK
    assert bench.end(EIO, slot=100) is Verdict.GONE


def test_a_gone_target_stays_gone_until_it_is_attached() -> None:
    bench = Bench()
    old = bench.health.attachment
    bench.health.began(old, 1)
    bench.health.late(old, 1)
    bench.health.lost("the test says so")
    bench.health.watched(PathStates(2, 2, 2))
    bench.end(OK)
    bench.health.lost("and again")
    assert (bench.verdict, bench.health.reason) == (Verdict.GONE, "the test says so")
    bench.health.attached()
    assert bench.verdict is Verdict.OK
    # Results of the old attachment do not count, but its files are in use.
    assert bench.health.busy(old)
    for slot in range(20):
        bench.health.ended(old, ENODEV, slot, is_write=False)
    assert bench.verdict is Verdict.OK
    bench.health.released(old, 0, late=1)
    assert not bench.health.busy(old)
    assert bench.verdict is Verdict.OK


@pytest.mark.parametrize(
    ("paths", "verdict"),
    [
        (PathStates(), Verdict.OK),
        (PathStates(known=2, carrying=2, best=2), Verdict.OK),
        (PathStates(known=2, carrying=2, best=1), Verdict.DEGRADED),
        (PathStates(known=2, carrying=1, best=0), Verdict.DEGRADED),
        (PathStates(known=2, carrying=0, best=0), Verdict.SUSPECT),
        (PathStates(device=False), Verdict.GONE),
    ],
)
def test_sysfs_states_give_verdicts(paths: PathStates, verdict: Verdict) -> None:
    bench = Bench()
    bench.health.watched(paths)
    assert bench.verdict is verdict
    bench.health.watched(PathStates(known=2, carrying=2, best=2))
    assert bench.verdict is (Verdict.GONE if verdict is Verdict.GONE else Verdict.OK)


def test_results_of_an_older_attachment_do_not_count() -> None:
    bench = Bench()
    bench.health.lost("the test says so")
    bench.health.attached()
    bench.health.watched(PathStates(device=False))
    assert bench.verdict is Verdict.OK
    bench.health.watched(PathStates(device=False, attachment=1))
    assert bench.verdict is Verdict.GONE


def _watch(tree: Tree) -> TargetPaths:
    return TargetPaths("/mnt/kv", str(tree.sysfs), str(tree.mountinfo))


def test_states_are_read_again_each_time(tree: Tree) -> None:
    first, second = two_paths(tree)
    watch = _watch(tree)
    assert watch.states() == PathStates(known=2, carrying=2, best=2)
    (first / "state").write_text("")  # unknown: it may carry I/O
    assert watch.states() == PathStates(known=2, carrying=2, best=1)
    (first / "state").write_text("connecting\n")
    assert watch.states() == PathStates(known=2, carrying=1, best=1)
    (second / "nvme0c1n1" / "ana_state").write_text("non-optimized\n")
    assert watch.states() == PathStates(known=2, carrying=1, best=0)
    (second / "nvme0c1n1" / "ana_state").write_text("inaccessible\n")
    assert watch.states() == PathStates(known=2, carrying=0, best=0)


def test_a_device_that_disappears_is_gone(tree: Tree) -> None:
    two_paths(tree)
    watch = _watch(tree)
    assert watch.states().device
    (tree.sysfs / "dev/block/259:1").unlink()
    assert not watch.states().device


def test_another_mount_counts_after_renew(tree: Tree) -> None:
    first, _ = two_paths(tree)
    watch = _watch(tree)
    watch.states()
    tree.mountinfo.write_text("")
    tree.mount("/mnt/kv", "0:77", "tmpfs", file_system="tmpfs")
    (first / "state").write_text("resetting\n")
    assert watch.states() == PathStates(known=2, carrying=1, best=1)
    watch.renew()
    assert watch.states() == PathStates(attachment=1)


def test_a_controller_that_is_removed_is_still_missed(tree: Tree) -> None:
    """After ctrl_loss_tmo the kernel removes the controller, and one path of two remains."""
    first, _ = two_paths(tree)
    watch = _watch(tree)
    watch.states()
    shutil.rmtree(first)
    assert watch.states() == PathStates(known=2, carrying=1, best=1)
    watch.renew()
    assert watch.states().known == 1, "attached again, one path is all that there is"


PROBER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[2])) as channel:
    channel.recv(1 << 16)
    channel.send(sys.argv[1].encode())
"""


class _Away(Attachments):
    """Always searches for its one target."""

    def __init__(self, directory: Path) -> None:
        self._wanted = ProbeRequest(str(directory), "", False, 0, None)

    def update(self, states: Sequence[PathStates]) -> list[ProbeRequest | None]:
        return [self._wanted]

    def attach(
        self, target: int, request: ProbeRequest, answer: ProbeAnswer, fds: list[int]
    ) -> str:
        raise AssertionError("there was nothing to attach")


def log_of(answer: str, directory: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return the server's log line for this answer of a prober; its thread must survive."""
    with caplog.at_level(logging.WARNING, LOGGER_NAME):
        watcher = TargetWatcher(
            _Away(directory),
            [str(directory)],
            lambda call: call(),
            command=[sys.executable, "-c", PROBER, answer],
        )
        try:
            wait_until("the prober's answer", lambda: bool(caplog.messages), limit_s=30.0)
        finally:
            watcher.stop()
    return caplog.messages[0]


def test_a_server_with_many_descriptors_finds_its_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = ProbeAnswer("no pool is there").encode().decode()
    with numbers_from(1024):
        logged = log_of(answer, tmp_path, caplog)
    assert logged == f"target {tmp_path} is still unavailable: no pool is there"


@pytest.mark.parametrize(
    "answer",
    [
        "not JSON",
        "[" * 10_000,
        "[1]",
        "{}x",
        '{"failure": "", "device": 1, "inode": 2, "later": 3}',
        '{"failure": "", "device": "1", "inode": 2}',
        '{"failure": null}',
    ],
    ids=["text", "deep", "list", "garbled", "later version", "no number", "no reason"],
)
def test_an_invalid_answer_is_a_failure(
    answer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "another version of this package" in log_of(answer, tmp_path, caplog)


#: Leaves its session's number in a file that appears whole.
SESSION_PROBER = """
import os, sys
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getsid(0)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def test_ctrl_c_does_not_reach_a_prober(tmp_path: Path) -> None:
    """The console's SIGINT to the server's process group gives no traceback of a prober."""
    session_file = tmp_path / "session"
    command = [sys.executable, "-c", SESSION_PROBER, str(session_file)]
    watcher = TargetWatcher(_Away(tmp_path), [str(tmp_path)], lambda call: call(), command=command)
    wait_until("a prober", session_file.exists)
    watcher.stop()
    assert int(session_file.read_text()) != os.getsid(0)


def test_a_target_whose_lease_is_lost_is_gone_and_is_not_searched_for(tmp_path: Path) -> None:
    rig = ENGINES["threads-buffered"](tmp_path, targets=2, leased=True)
    for permit in rig.pool.permits:
        permit.grant(1)  # it has run out: an outage, which is no loss
    health = [TargetHealth(), TargetHealth()]
    attachments = Attachments(rig.pool, rig.engine, health)
    states = [PathStates(), PathStates()]
    assert attachments.update(states) == [None, None]
    assert [one.verdict for one in health] == [Verdict.DEGRADED] * 2
    assert "lease could not be renewed" in health[0].reason
    renewed, lost = rig.pool.permits
    renewed.grant(boot_ns() + 10**12)
    lost.lose()
    for _ in range(2):
        assert attachments.update(states) == [None, None], "for good"
        assert [one.verdict for one in health] == [Verdict.OK, Verdict.GONE]
    assert "lease" in health[1].reason
    assert rig.pool.device(1) is None, "its files are closed"
    rig.gate.open_all()
    assert rig.engine.close(20.0)
    rig.pool.close()
