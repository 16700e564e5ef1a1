# SPDX-License-Identifier: Apache-2.0
"""One owner of a leased region: `python -m tests.faults.late_child JSON`.

It fills its slots, prints a line, and resets when it is sent one; it holds the region until its
stdin ends. In its reset it stops itself, as SIGSTOP from outside would by chance, and prints what
became of the superblock when it goes on. The epoch of its reset, or of its start, is a fixed one:
that two processes draw the same is too rare to wait for.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.pool.kit import SLOT_BYTES, make_spec, name
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool import pool as superblock_writer
from vllm_nvmeof_offload.pool import recovery
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.pool import Background, Pool
from vllm_nvmeof_offload.units import PAGE_BYTES

from .kit import WAIT_S, Bench

ENGINE, SLOTS, EPOCH = 1, 32, 4711
_LOG_PAGES = 4
#: Where it stops: before it asks whether it may still write the superblock, or right after.
BEFORE, AFTER = "before the permit", "after the permit"


def open_pool(target: Path, engine: int, server: str) -> Pool:
    """With the shortest lease that a busy machine can keep."""
    leasing = Leasing(server, takeover_s=3.0, settle_s=0.5)
    pool_bytes = SLOTS * (SLOT_BYTES + ENTRY_BYTES) + _LOG_PAGES * PAGE_BYTES
    shape = {"log_pages": _LOG_PAGES, "pool_bytes": pool_bytes, "o_direct": "on"}
    return Pool.open(make_spec(target, engine_index=engine, leasing=leasing, **shape))


def _taken_over(target: Path, server: str) -> Pool:
    """As a supervisor does: start again while the owner was seen to live."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return open_pool(target, ENGINE, server)
        except PoolLockedError:
            if time.monotonic() > end_s:
                raise


def _draw_one_epoch() -> None:
    same: Callable[[object], int] = lambda used: EPOCH  # noqa: E731
    superblock_writer.new_epoch = recovery.new_epoch = same


def _stop_at(where: str) -> None:
    """Stop this process there once; all of its threads stop."""
    hooks = {BEFORE: (Background, "run"), AFTER: (superblock_writer, "write_superblock")}
    owner, hook = hooks[where]
    real = getattr(owner, hook)

    def stopping(*what: object) -> None:
        setattr(owner, hook, real)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread stops first
        real(*what)

    setattr(owner, hook, stopping)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    if job["same_epoch"]:
        _draw_one_epoch()
    pool = _taken_over(Path(job["target"]), job["server"])
    adopted = len(pool.adopt().generations)
    bench = Bench("uring", pool)
    bench.store((slot, name(slot, job["first"] + slot)) for slot in range(SLOTS))
    print(json.dumps({"adopted": adopted}), flush=True)
    if line := sys.stdin.readline():
        order = json.loads(line)
        _draw_one_epoch()
        _stop_at(order["stop"])
        (outcome,) = bench.reset(tag=bytes.fromhex(order["tag"]))
        print(json.dumps({"superblock": str(outcome)}), flush=True)
        sys.stdin.read()
    assert bench.close()


if __name__ == "__main__":
    main()
