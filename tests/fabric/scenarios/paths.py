# SPDX-License-Identifier: Apache-2.0
"""One of two paths is lost, in every way, and the other takes over; then both are lost briefly."""

from __future__ import annotations

import time

from tests.fabric.nvmet import Timeouts
from tests.fabric.stage import Stage


def path_lost(stage: Stage) -> None:
    """A link is cut: its I/O stalls until the keep-alive times out, and moves to the other path."""
    (target,) = stage.connect(Timeouts(keep_alive_tmo=2))
    stage.load(target)
    stage.pass_time(2)
    stage.record("the link of path 1 is cut")
    cut_s = time.monotonic()
    stage.fabric.cut(1)
    stage.until_verdict("suspect", within_s=6)
    stage.until_verdict("ok", "degraded", within_s=10)
    stage.recovers(within_s=3)
    stage.record(f"outcomes since: {stage.counts(cut_s)}")
    stage.check("live" in stage.fabric.controllers().values(), "one path is live")
    stage.until_verdict("degraded", within_s=5)
    stage.record("the link is back")
    stage.fabric.mend(1)
    stage.until_states("live", "live", within_s=20)
    stage.until_verdict("ok", within_s=5)
    stage.recovers(within_s=3)
    stage.finish_load()


def port_removed(stage: Stage) -> None:
    """The target removes a port: the connection breaks at once, without a timeout."""
    (target,) = stage.connect(Timeouts())
    stage.load(target)
    stage.pass_time(1)
    stage.record("the target removes port 1")
    removed_s = time.monotonic()
    stage.fabric.remove_port(1)
    stage.pass_time(4)
    stage.record(f"outcomes since: {stage.counts(removed_s)}")
    stage.only_ok(removed_s, "no operation fails")
    stage.until_verdict("degraded", within_s=5)
    stage.record("the port is back")
    stage.fabric.add_port(1)
    stage.until_states("live", "live", within_s=20)
    stage.until_verdict("ok", within_s=5)
    stage.recovers(within_s=3)
    stage.finish_load()


def ana_change(stage: Stage) -> None:
    """Paths become inaccessible by ANA, one after the other; with both, I/O is held, not failed."""
    (target,) = stage.connect(Timeouts())
    stage.load(target)
    stage.pass_time(1)
    stage.record("path 1 becomes inaccessible, path 2 non-optimized")
    changed_s = time.monotonic()
    stage.fabric.set_ana(1, "inaccessible")
    stage.fabric.set_ana(2, "non-optimized")
    stage.pass_time(3)
    stage.record(f"outcomes since: {stage.counts(changed_s)}")
    stage.only_ok(changed_s, "no operation fails while one path carries I/O")
    stage.until_verdict("degraded", within_s=3)
    stage.record("path 2 becomes inaccessible as well")
    held_s = time.monotonic()
    stage.fabric.set_ana(2, "inaccessible")
    stage.until_verdict("suspect", within_s=5)
    stage.pass_time(4)
    stage.only_late(held_s)
    stage.record("both become optimized")
    stage.fabric.set_ana(1, "optimized")
    stage.fabric.set_ana(2, "optimized")
    stage.until_verdict("ok", within_s=5)
    stage.recovers(within_s=3)
    stage.finish_load()


def controller_reset(stage: Stage) -> None:
    """Controllers are reset in turn while reads and writes are in flight: no operation is lost."""
    (target,) = stage.connect(Timeouts())
    stage.fabric.slow_disk(1, 60)  # so that I/O is in flight at every reset
    child = stage.load(target, interval_s=0.03)
    stage.pass_time(1)
    began_s, resets = time.monotonic(), []
    for round_number in range(6):
        controller = list(stage.fabric.controllers())[round_number % 2]
        stage.record(f"{controller} is reset")
        resets.append(time.monotonic())
        stage.fabric.reset(controller)
        stage.pass_time(1.5)
    stage.fabric.slow_disk(1, 0)
    stage.until_states("live", "live", within_s=10)
    for kind in ("load", "write"):
        met = sum(
            any(op.began_s < reset_s < op.ended_s for reset_s in resets)
            for op in child.ops
            if op.kind == kind
        )
        stage.check(met > 0, f"resets came while a {kind} was under way ({met} of them)")
    stage.record(f"outcomes since: {stage.counts(began_s)}")
    stage.only_ok(began_s, "no operation fails")
    stage.until_verdict("ok", within_s=5)
    stage.finish_load()
