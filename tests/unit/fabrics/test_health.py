# SPDX-License-Identifier: Apache-2.0
"""Verdicts: the causes that make a target suspect or gone, and that end this."""

from __future__ import annotations

import errno

import pytest

from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    OK,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.targets.health import (
    FAILED_SLOTS_MAX,
    FAILURES_MAX,
    PathStates,
    TargetHealth,
    Verdict,
)

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


@pytest.mark.parametrize("answer", [OK, CHECKSUM_MISMATCH])
def test_a_success_restarts_the_count_of_its_direction(answer: Outcome) -> None:
    bench = Bench()
    for slot in range(10):
        assert bench.end(ENODEV, slot) is Verdict.OK
        assert bench.end(answer) is Verdict.OK
    for _ in range(FAILURES_MAX - 1):  # reads go on, and yet writes are over
        assert bench.end(ENODEV, is_write=True) is Verdict.OK
        assert bench.end(OK) is Verdict.OK
    assert bench.end(ENODEV, is_write=True) is Verdict.GONE


@pytest.mark.parametrize("outcome", [DEADLINE, CANCELLED])
def test_no_answer_is_neither_success_nor_failure(outcome: Outcome) -> None:
    bench = Bench()
    for _ in range(FAILURES_MAX - 1):
        bench.end(ENODEV)
        for _ in range(20):
            assert bench.end(outcome) is Verdict.OK
    assert bench.end(ENODEV) is Verdict.GONE


def test_errors_of_a_single_slot_do_not_count_against_the_target() -> None:
    bench = Bench()
    for slot in range(50):
        for number in (errno.ENOSPC, errno.ENODATA, errno.EILSEQ):
            assert bench.end(io_error(number), slot) is Verdict.OK


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


def test_without_reattachment_failures_do_not_make_a_target_gone() -> None:
    bench = Bench(can_return=False)
    for slot in range(50):
        assert bench.end(ENODEV, slot) is Verdict.OK
    bench.health.watched(PathStates(device=False))
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
