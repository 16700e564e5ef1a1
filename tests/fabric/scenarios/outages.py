# SPDX-License-Identifier: Apache-2.0
"""All paths are lost, for shorter and for longer than each of the kernel's timeouts."""

from __future__ import annotations

import time

from tests.fabric.nvmet import Timeouts
from tests.fabric.stage import Stage

KILL_S_MAX = 1.0
#: The time after which the devices vanish, by ctrl_loss_tmo in seconds. The kernel counts attempts:
#: over TCP each ends at once, because the link is down. Over RDMA each waits for an answer.
VANISH_S_MAX = {"tcp": {15: 40, 600: 700}, "rdma": {15: 400}}


def all_lost_briefly(stage: Stage) -> None:
    """Both links are cut for less than fast_io_fail_tmo and ctrl_loss_tmo: late, never wrong."""
    (target,) = stage.connect(Timeouts(ctrl_loss_tmo=60, fast_io_fail_tmo=30))
    stage.load(target)
    stage.pass_time(1)
    _cut_both(stage)
    cut_s = time.monotonic()
    stage.until_verdict("suspect", within_s=5)
    stage.pass_time(12)
    stage.only_late(cut_s)
    _mend_both(stage)
    stage.until_states("live", "live", within_s=20)
    stage.until_verdict("ok", within_s=10)
    stage.recovers(within_s=3)
    stage.finish_load()


def all_lost_past_fast_io_fail(stage: Stage) -> None:
    """Past fast_io_fail_tmo hanging I/O ends with an error; the controllers reconnect."""
    (target,) = stage.connect(Timeouts(ctrl_loss_tmo=120, fast_io_fail_tmo=5))
    stage.load(target)
    stage.pass_time(1)
    _cut_both(stage)
    stage.until_verdict("suspect", within_s=5)
    stage.pass_time(25)
    _mend_both(stage)
    stage.until_states("live", "live", within_s=20)
    stage.pass_time(5)
    if stage.verdict() == "gone":
        stage.remount()
    stage.until_verdict("ok", within_s=30)
    stage.recovers(within_s=3)
    stage.finish_load()


def all_lost_past_ctrl_loss(stage: Stage) -> None:
    """Past ctrl_loss_tmo the devices vanish; after reconnect and mount the target serves again."""
    (target,) = stage.connect(Timeouts(ctrl_loss_tmo=15))
    stage.load(target)
    stage.pass_time(1)
    _cut_both(stage)
    stage.until_verdict("suspect", within_s=5)
    took_s = _until_device_vanishes(stage, 15)
    stage.record(f"the device has vanished {took_s:.1f} s after the target was found suspect")
    stage.until_verdict("gone", within_s=10)
    _mend_both(stage)
    _reconnect(stage, Timeouts(ctrl_loss_tmo=15))


def default_timeouts(stage: Stage) -> None:
    """The kernel's defaults: I/O survives two minutes without a path; devices vanish at 600 s."""
    (target,) = stage.connect(Timeouts(None, None, None, None))
    stage.look_s = 1.0
    stage.load(target, interval_s=1.0)
    _cut_both(stage)
    cut_s = time.monotonic()
    stage.until_verdict("suspect", within_s=10)
    stage.pass_time(120)
    stage.only_late(cut_s)
    _mend_both(stage)
    stage.until_states("live", "live", within_s=30)
    stage.until_verdict("ok", within_s=10)
    stage.recovers(within_s=10)
    _cut_both(stage)
    took_s = _until_device_vanishes(stage, 600)
    stage.record(f"the device has vanished {took_s:.1f} s after the links were cut")
    stage.check(took_s > 600, "the kernel waits for 600 s")
    stage.until_verdict("gone", within_s=10)
    _mend_both(stage)
    _reconnect(stage, Timeouts(None, None, None, None))


def killed_while_lost(stage: Stage) -> None:
    """SIGKILL ends the process at once, even with I/O that never returns."""
    (target,) = stage.connect(Timeouts(ctrl_loss_tmo=600))
    child = stage.load(target)
    stage.pass_time(1)
    _cut_both(stage)
    stage.until_verdict("suspect", within_s=5)
    stage.pass_time(8)
    stage.record(f"threads by state: {child.thread_states()}")
    took_s, stage.child = child.kill(), None
    stage.check(took_s <= KILL_S_MAX, f"reaped {took_s:.2f} s after SIGKILL")
    _mend_both(stage)
    stage.until_states("live", "live", within_s=20)
    stage.record("a new process adopts the pool")
    stage.load(target)
    stage.recovers(within_s=3)
    stage.finish_load()


def _cut_both(stage: Stage) -> None:
    stage.record("both links are cut")
    stage.fabric.cut(1, 2)


def _mend_both(stage: Stage) -> None:
    stage.record("both links are back")
    stage.fabric.mend(1, 2)


def _until_device_vanishes(stage: Stage, ctrl_loss_s: int) -> float:
    within_s = VANISH_S_MAX[stage.fabric.transport][ctrl_loss_s]
    return stage.until(lambda: stage.fabric.device(1) is None, within_s, "the device vanishes")


def _reconnect(stage: Stage, timeouts: Timeouts) -> None:
    stage.record("connecting again")
    stage.fabric.connect(timeouts)
    stage.remount()
    stage.until_verdict("ok", within_s=30)
    # At the load's rate, because some of the requested slots were never written.
    stage.recovers(within_s=5 + 20 * stage.pace_s)
    stage.finish_load()
