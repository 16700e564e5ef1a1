# SPDX-License-Identifier: Apache-2.0
"""Faults behind the paths: a namespace is removed, a medium hangs, an operator disconnects."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np

from tests.fabric.nvmet import Timeouts
from tests.fabric.stage import READY_S_MAX, Stage
from vllm_nvmeof_offload.units import KIB, MIB

_FORK = multiprocessing.get_context("fork")
_HUGE_PAGE_BYTES = 2 * MIB


def huge_pages_written(stage: Stage) -> None:
    """The target takes writes whose pieces reach from one huge page into the next."""
    (target,) = stage.connect(Timeouts())
    # In a process of its own: a write that the target never answers cannot be interrupted.
    writer = _FORK.Process(target=_write_across_huge_pages, args=(target / "file",), daemon=True)
    writer.start()
    stage.until(lambda: writer.exitcode is not None, READY_S_MAX, "the writes end")
    stage.equal("status of the writes", writer.exitcode, 0)


def _write_across_huge_pages(path: Path) -> None:
    """Write 256 KiB around every border of 32 huge pages, some of which lie side by side."""
    memory = mmap.mmap(-1, 33 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    octets = np.frombuffer(memory, np.uint8)
    octets[:] = 1
    first = -octets.ctypes.data % _HUGE_PAGE_BYTES
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    for border in range(first + _HUGE_PAGE_BYTES, len(octets) - 128 * KIB, _HUGE_PAGE_BYTES):
        piece = memoryview(memory)[border - 128 * KIB : border + 128 * KIB]
        assert os.pwrite(fd, piece, 0) == len(piece)
    os._exit(0)


def namespace_disabled(stage: Stage) -> None:
    """The target disables the namespace and enables it again, under another device name."""
    (target,) = stage.connect(Timeouts())
    stage.load(target)
    stage.pass_time(1)
    before = stage.fabric.device(1)
    stage.record("the namespace is disabled")
    stage.fabric.enable_namespace(1, on=False)
    stage.until_verdict("gone", within_s=10)
    stage.pass_time(3)
    stage.record("the namespace is enabled")
    stage.fabric.enable_namespace(1)
    stage.until(lambda: stage.fabric.device(1) is not None, 10, "the namespace exists")
    stage.record(f"its device was {before} and is {stage.fabric.device(1)}")
    stage.remount()
    stage.until_verdict("ok", within_s=30)
    stage.recovers(within_s=3)
    stage.finish_load()


def medium_fails(stage: Stage) -> None:
    """Every operation on the target's device fails for a while, and then succeeds again."""
    (target,) = stage.connect(Timeouts())
    stage.load(target)
    stage.pass_time(1)
    stage.record("the target's device fails")
    failed_s = time.monotonic()
    stage.fabric.break_disk(1)
    stage.until_verdict("suspect", "gone", within_s=5)
    stage.pass_time(3)
    counts = stage.counts(failed_s)
    stage.record(f"outcomes since: {counts}")
    for kind in ("load", "write"):
        failed = [what for what in counts if what.startswith(f"{kind} miss: io_error(")]
        stage.check(bool(failed), f"a {kind} ends with the device's error")
    stage.record("the target's device works again")
    stage.fabric.slow_disk(1, 0)
    stage.pass_time(3)
    if stage.verdict() == "gone":
        stage.remount()
    stage.until_verdict("ok", within_s=30)
    stage.recovers(within_s=3)
    stage.finish_load()


def medium_hangs(stage: Stage) -> None:
    """The target's device hangs for a while: no operation ends, and no path is lost."""
    _hang(stage, 10)


def medium_hangs_past_io_timeout(stage: Stage) -> None:
    """The target's device hangs for longer than the initiator's I/O timeout of 30 s."""
    _hang(stage, 40)


def _hang(stage: Stage, seconds: float) -> None:
    (target,) = stage.connect(Timeouts())
    stage.load(target)
    stage.pass_time(1)
    stage.record("the target's device hangs")
    hung_s = time.monotonic()
    stage.fabric.hang_disk(1)
    stage.until_verdict("suspect", within_s=5)
    stage.pass_time(seconds - 5)
    stage.only_late(hung_s)
    stage.record("the target's device answers again")
    stage.fabric.hang_disk(1, on=False)
    # A controller that was reset meanwhile may need a minute more; the other one still works.
    stage.until_verdict("ok", "degraded", within_s=10)
    stage.recovers(within_s=3)
    stage.finish_load()


def disconnected_while_mounted(stage: Stage) -> None:
    """An operator disconnects the target under a mounted file system."""
    (target,) = stage.connect(Timeouts())
    stage.load(target)
    stage.pass_time(1)
    stage.record("all controllers are deleted")
    stage.fabric.disconnect()
    stage.until_verdict("gone", within_s=10)
    stage.pass_time(2)
    stage.record("connecting again")
    stage.fabric.connect(Timeouts())
    stage.remount()
    stage.until_verdict("ok", within_s=30)
    stage.recovers(within_s=3)
    stage.finish_load()
