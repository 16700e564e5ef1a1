# SPDX-License-Identifier: Apache-2.0
"""The keeper: a process that renews a server's leases, `python -m …pool.keeper PID FD`.

The server sends its leases to this companion (`child`) through a pipe. Each lease has its own
thread, so that a hung lease blocks no other. The keeper reopens the page for each renewal, so that
it never prevents an unmount, and holds no flock, because flocks must end with the server. PID is
the server's, for display. FD is the memory of the permits (`lease`), which both processes share.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm_nvmeof_offload.child import Companion, accompany, child_command
from vllm_nvmeof_offload.pool.lease import (
    DirectoryLock,
    FileId,
    Lease,
    LeasePage,
    PageFile,
    PageIo,
    Permit,
    Permits,
    boot_ns,
    read_lease,
)


class Keeper:
    """The keeper of one lease and its permit. Not thread-safe; every call may wait for the disk.

    A permit is open for a third of the takeover time, from the start of a renewal that found its
    owner's name. A page that stays unchanged for the whole takeover time may be claimed. A keeper
    that has not renewed for that long is *late*: it opens no permit, and yields to any other owner.
    If it finds its own name, either no other owner has claimed the page, or its own slow write has
    replaced a claim. So it claims again, in two steps of half a takeover time each (`_wait_ns`):

    1. It only reads. Another live owner would restore its own page, because a claim never writes a
       lower generation than that of an owner who renews.
    2. It writes the next generation, to which every other owner yields, and waits. If its name is
       still there at the end, no other owner has found its own name for longer than a permit lasts.

    The second wait follows each write that ends at least half a takeover time after the last
    renewal began, because that write may have replaced a claim. So two permits are never open at
    once, unless a claimant stalls between its read and its write for longer than a claim takes to
    settle.
    """

    def __init__(
        self,
        owner: bytes,
        takeover_s: float,
        permit: Permit,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._owner = owner
        self._takeover_ns = round(1e9 * takeover_s)
        self._permit_ns = self._takeover_ns // 3
        self._wait_ns = self._takeover_ns // 2
        self._permit = permit
        self._clock = clock
        self._page: LeasePage | None = None  # the newest page with our name, read or written
        #: The start of the last renewal that found our name and ended before it was late.
        self._renewed_ns = permit.until_ns - self._permit_ns
        self._watched_ns = 0  # when this late keeper first found our name, and no other name since
        self._opens_ns = 0  # renewals that started before this time open no permit

    def renew(self, io: PageIo, epoch: int) -> None:
        """Renew once, restore the page, or claim it again. Does nothing if the lease is lost.
        Raises OSError if the page cannot be read or written."""
        begun_ns = self._clock()
        if self._permit.is_lost:
            return
        found = read_lease(io)
        is_late = self._is_late()
        newest = 0 if self._page is None else self._page.generation
        is_ours = False
        if found is not None and found.is_intact:
            is_ours = found.owner == self._owner and found.generation >= newest
            if found.owner != self._owner and (is_late or found.generation >= newest):
                self._permit.lose()
                return
        if is_ours:
            self._page = found
        if self._page is None:
            raise OSError(errno.EIO, "the page names no owner or is damaged")
        claims = is_late and is_ours
        self._watched_ns = (self._watched_ns or self._clock()) if claims else 0
        if claims and begun_ns < self._watched_ns + self._wait_ns:
            return
        newest, beat = self._page.generation + claims, self._page.beat + 1
        self._page = replace(self._page, generation=newest, beat=beat, epoch=epoch)
        io.write(self._page.encode())
        written_ns = self._clock()
        if written_ns >= self._renewed_ns + self._wait_ns:
            self._opens_ns = written_ns + self._wait_ns
        if claims or (is_ours and not self._is_late()):
            self._renewed_ns = begun_ns
            if begun_ns >= self._opens_ns:
                self._permit.grant(begun_ns + self._permit_ns)

    def _is_late(self) -> bool:
        return self._clock() - self._renewed_ns >= self._takeover_ns


# -- the server's side ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Region:
    """A claimed region. `lock` is None while the target is lost, until the pool sets a new one."""

    lock: DirectoryLock | None
    lease: Lease

    def release(self) -> None:
        """Clear the region's owner and unlock the region, unless its target is lost."""
        if self.lock is None:
            self.lease.permit.lose()
        else:
            self.lease.release(self._file_of(self.lock))
            self.lock.release()

    def order(self) -> Order | None:
        """Return the order to renew the lease, or None if the target is lost and there is no group.
        Thread-safe."""
        lease, lock = self.lease, self.lock
        if lock is None and not lease.leasing.in_group:
            return None
        page, takeover_s = lease.page, lease.leasing.takeover_s
        what = str(lease.path), self._file_of(lock), page.owner.hex(), page.epoch
        return Order(*what, takeover_s, lease.number, lease.leasing.in_group)

    def _file_of(self, lock: DirectoryLock | None) -> FileId | None:
        """Return our page's file, or None for any file at its path: a group may remount it."""
        return None if lock is None or self.lease.leasing.in_group else lock.lease


@dataclass(frozen=True, slots=True)
class Order:
    """A lease to renew. `permit` is the number of its permit."""

    path: str
    file: tuple[int, int] | None
    owner: str
    epoch: int
    takeover_s: float
    permit: int
    in_group: bool


def keep(regions: Sequence[Region], permits: Permits) -> Companion:
    """Renew the leases of these regions until stopped. `permits` holds their permits. Without a
    group, the first renewal comes after one interval, so that a short hold starts no process."""
    leasings = [region.lease.leasing for region in regions]
    period_s = min(leasing.beat_s for leasing in leasings)
    is_urgent = any(leasing.in_group for leasing in leasings)  # permits expire soon

    def lines() -> list[bytes]:
        orders = filter(None, [region.order() for region in regions])
        return [json.dumps(asdict(order)).encode() + b"\n" for order in orders]

    command = [*child_command("pool.keeper"), str(os.getpid())]
    first_s = 0.0 if is_urgent else period_s
    return Companion("keeper of leases", command, permits.fd, period_s, lines, period_s, first_s)


# -- the child ------------------------------------------------------------------------


class _Renewed:
    """A thread that renews one lease whenever a renewal is due."""

    def __init__(self, order: Order, permits: Permits) -> None:
        permit = permits.word(order.permit, is_limited=order.in_group)
        owner = bytes.fromhex(order.owner)
        self._keeper = Keeper(owner, order.takeover_s, permit)
        self._order = order
        self._due = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def is_due(self, order: Order) -> None:
        self._order = order
        self._due.set()

    def _run(self) -> None:
        failing = False
        while True:
            self._due.wait()
            self._due.clear()
            order = self._order
            file = None if order.file is None else FileId(*order.file)
            try:
                self._keeper.renew(PageFile(Path(order.path), file), order.epoch)
                failing = False
            except OSError as error:
                if not failing:  # log once until it works again
                    print(f"cannot renew the lease {order.path}: {error}", file=sys.stderr)
                failing = True


def main(fd: int) -> None:
    """Renew the leases named by the lines on stdin. `fd` is the memory of their permits."""
    permits = Permits(fd)
    known: dict[str, _Renewed] = {}
    for line in sys.stdin.buffer:
        order = Order(**json.loads(line))
        if order.owner not in known:
            known[order.owner] = _Renewed(order, permits)
        known[order.owner].is_due(order)


if __name__ == "__main__":
    accompany(main)
