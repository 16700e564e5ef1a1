# SPDX-License-Identifier: Apache-2.0
"""CPU time of a process group, from /proc.

A process counts with its own user and system time and with that of its children that have
ended and been waited for, so that nothing is lost or counted twice when a child ends. The
kernel counts in ticks of 10 ms, a process at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["cpu_of_group", "cpu_of_groups", "wait_until_quiet"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: In /proc/PID/stat, counted from the state, which follows the name: group, utime to cstime.
_GROUP, _TIMES = 2, slice(11, 15)
_WINDOW_S = 0.25
#: An idle server's timers may cost a tick in each of two processes.
_QUIET_TICKS = 2
_QUIET_S_MAX = 120.0


def cpu_of_group(group: int) -> float:
    """CPU seconds that the processes of `group` have used so far."""
    return cpu_of_groups((group,))[group]


def cpu_of_groups(groups: tuple[int, ...]) -> dict[int, float]:
    """CPU seconds of each group, in one look at all processes."""
    ticks = dict.fromkeys(groups, 0)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile; its parent has its time
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if (group := int(fields[_GROUP])) in ticks:
                ticks[group] += sum(map(int, fields[_TIMES]))
    return {group: count / _TICKS_PER_S for group, count in ticks.items()}


def wait_until_quiet(
    cpu_s: Callable[[], float],
    now_s: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until `cpu_s` hardly grows any more; return how many seconds that took.

    Writes behind the last token, and the engine's steps that wait for their reports, end here:
    they belong to the requests before. vLLM's own processes spin for a second behind their last
    step, with and without offloading.

    Raises:
        BenchError: the server goes on working for `_QUIET_S_MAX`.
    """
    start_s, before = now_s(), cpu_s()
    while True:
        window_start_s = now_s()
        sleep(_WINDOW_S)
        after = cpu_s()
        if after - before <= _QUIET_TICKS / _TICKS_PER_S:
            return window_start_s - start_s
        if now_s() - start_s > _QUIET_S_MAX:
            raise BenchError(
                f"a server still uses {(after - before) / _WINDOW_S:.0%} of a core "
                f"{_QUIET_S_MAX:.0f} s after its last token"
            )
        before = after
