# SPDX-License-Identifier: Apache-2.0
"""A claimant of one lease page: `python -m tests.faults.lease_child DIRECTORY SEED STALL`.

It claims, keeps and gives up the lease again and again, with late reads and writes. A line for each
time that it could write: begin and end by CLOCK_BOOTTIME, which all processes of a machine share.
STALL: the longest time for which one write in ten stalls, in seconds; 0: none does.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from vllm_nvmeof_offload.pool.keeper import Keeper
from vllm_nvmeof_offload.pool.lease import (
    Lease,
    LeasePage,
    Leasing,
    PageFile,
    Permits,
    boot_ns,
    lease_of,
    read_lease,
)
from vllm_nvmeof_offload.pool.takeover import Takeover, UnsettledError

LEASING = Leasing("child", takeover_s=2.0, settle_s=1.0)
SLOW_S = 0.02
RUN_S = 12.0


class LateFile:
    """A page whose reads and writes are late."""

    def __init__(self, file: PageFile, rng: random.Random, stall_s: float) -> None:
        self._file, self._rng, self._stall_s = file, rng, stall_s

    def read(self) -> bytes:
        time.sleep(SLOW_S * self._rng.random())
        return self._file.read()

    def write(self, page: bytes) -> None:
        stalls = self._stall_s and self._rng.random() < 0.1
        time.sleep((self._stall_s if stalls else SLOW_S) * self._rng.random())
        self._file.write(page)
        time.sleep(SLOW_S * self._rng.random())


def wait_free(io: LateFile, path: Path) -> LeasePage | None:
    """Return the page when its owner is dead or gone."""
    takeover = Takeover(LEASING.takeover_s)
    while True:
        page = read_lease(io)
        try:
            if page is None or page.is_free or takeover.is_dead(path, page):
                return page
        except UnsettledError:
            pass
        time.sleep(0.02)


def keep(lease: Lease, rng: random.Random) -> None:
    """Hold it for a while; then release it, or leave it as a killed process does."""
    permit, grants = lease.permit, []
    keeper = Keeper(lease.page.owner, LEASING.takeover_s, permit)
    end_s = time.monotonic() + 2 * rng.random()
    while not permit.is_lost:
        grants.append((boot_ns(), permit.until_ns))
        if time.monotonic() >= end_s:
            break
        time.sleep(LEASING.beat_s)
        keeper.renew(lease.io, epoch=1)
    ended_ns = boot_ns()
    if rng.random() < 0.5:
        lease.release()
    permit.lose()
    for begin_ns, until_ns in grants:
        if begin_ns < (end_ns := min(until_ns, ended_ns)):
            print(begin_ns, end_ns, flush=True)


def main(directory: Path, seed: int, stall_s: float) -> None:
    rng = random.Random(seed)
    file = lease_of(directory)
    file.path.touch(0o600)
    io, permit = LateFile(file, rng, stall_s), Permits.new(1).word(0)
    end_s = time.monotonic() + RUN_S
    while time.monotonic() < end_s:
        lease = Lease.claim(io, LEASING, permit, wait_free(io, file.path))
        while boot_ns() < lease.settles_ns:
            time.sleep(0.01)
        if lease.is_ours():
            keep(lease, rng)
        time.sleep(0.3 * rng.random())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
