# SPDX-License-Identifier: Apache-2.0
"""A rank that runs when its process may have no more threads, or no more descriptors.

`python -m tests.faults.limits_child DIRECTORY ENGINE WHAT CGROUP`: WHAT is "hang", a read that
hangs past its deadline, or "leave", another server that leaves. CGROUP limits threads; empty:
descriptors are limited. A load from a cache slot follows. It prints "ok", or fails.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from tests.contract.rig import name
from tests.contract.test_native_lanes import Rank
from vllm_nvmeof_offload.errors import DEADLINE, OK
from vllm_nvmeof_offload.protocol import DetachCommand

OWNER = 5


def _limit(cgroup: str) -> None:
    if cgroup:
        group = Path(cgroup)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        (group / "pids.max").write_text((group / "pids.current").read_text())
    else:
        number = os.open("/dev/null", os.O_RDONLY)
        os.close(number)  # the lowest that is free
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, most))


def main() -> None:
    path, engine, what, cgroup = sys.argv[1:]
    theirs, ours = (Rank(engine, Path(path), read_deadline_s=0.5) for _ in range(2))
    for rank in (theirs, ours):
        rank.store(*((name(n), n) for n in range(4)))
        rank.write(*((name(n), n, n) for n in range(4)))
        assert rank.done() == [OK] * 8
    pool = theirs.rig.pool
    ours.attach(OWNER, pool.engine_index, pool.superblocks[0].uuid)
    assert ours.done() == [OK]
    _limit(cgroup)
    if what == "hang":
        ours.rig.gate.shut([1])
        ours.load((name(1), None, 1))
        (row,) = ours.run(until=1)
        assert row.outcome == DEADLINE
    else:
        ours.pipeline.command(DetachCommand(OWNER))
    ours.rig.engine.replace_target(0)
    ours.load((name(2), 2, None))
    (row,) = ours.run(until=1)
    assert row.outcome == OK
    print("ok", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
