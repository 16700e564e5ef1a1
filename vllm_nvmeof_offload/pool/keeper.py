# SPDX-License-Identifier: Apache-2.0
"""The keeper: a process that renews a server's leases, `python -m …pool.keeper PID FD`.

A write or an fdatasync on a lost path waits in the kernel and cannot be killed; a server with a
thread in such a call could not be stopped. So the server sends the names of its leases to a child
through a pipe, and never waits for the child, which has a thread per lease, so that one that hangs
blocks no other. The child opens the page for each renewal, so that it never prevents an unmount. It
holds no flock, which must end with the server. PID is the server's, for display. FD is the memory
of the leases' permits (`lease`), which both share.
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

from vllm_nvmeof_offload.child import Companion, child_command
from vllm_nvmeof_offload.pool.lease import (
    Lease,
    LeasePage,
    PageFile,
    PageIo,
    Permit,
    Permits,
    boot_ns,
    read_lease,
)
from vllm_nvmeof_offload.pool.lock import DirectoryLock, FileId


class Keeper:
    """Renews one lease and advances its permit. One thread; every call may wait for the disk.

    A permit is open for a third of the takeover time from the start of a renewal that found our
    name. A page that is unchanged for the whole takeover time may be claimed. A keeper without a
    renewal for that long is *late*: it opens no permit, and obeys any other owner. Its own name
    there is either unclaimed or a slow write of its own that has replaced a claim. So it claims
    again, in two steps of half a takeover (`_wait_ns`):

    1. It only reads. A live owner replaces a page of a lower generation than its own,
       because no claim writes one while that owner renews.
    2. It writes the next generation, which every other owner obeys, and waits. If its name is still
       there at the end, no other has found its own for longer than a permit lasts.

    The second wait follows each write that ends half a takeover after the last renewal began, which
    may have replaced such a claim. So no two permits are open at once, unless a claimant stalls
    between its read and its write for longer than it lets its claim settle.
    """

    def __init__(
        self,
        io: PageIo,
        owner: bytes,
        takeover_s: float,
        permit: Permit,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._io = io
        self._owner = owner
        self._takeover_ns = round(1e9 * takeover_s)
        self._permit_ns = self._takeover_ns // 3
        self._wait_ns = self._takeover_ns // 2
        self._permit = permit
        self._clock = clock
        #: Our newest page that was seen or written.
        self._page: LeasePage | None = None
        #: The start of the last renewal that found our name and ended before it was late.
        self._renewed_ns = permit.until_ns - self._permit_ns
        #: When our name was first found late, with no other since; 0 if it was not.
        self._watched_ns = 0
        #: Renewals that started before this time open no permit.
        self._opens_ns = 0

    def renew(self, epoch: int, io: PageIo | None = None) -> None:
        """Renew once, put the page back, or claim it again. Does nothing if the lease is lost.

        `io` is the page from now on, if it is another one. Raises OSError if the page cannot be
        read or written.
        """
        self._io = io or self._io
        begun_ns = self._clock()
        if self._permit.is_lost:
            return
        found = read_lease(self._io)
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
            raise OSError(errno.EIO, "no owner is named, or the page is damaged")
        claims = is_late and is_ours
        self._watched_ns = (self._watched_ns or self._clock()) if claims else 0
        if claims and begun_ns < self._watched_ns + self._wait_ns:
            return
        newest, beat = self._page.generation + claims, self._page.beat + 1
        self._page = replace(self._page, generation=newest, beat=beat, epoch=epoch)
        self._io.write(self._page.encode())
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
    """A region that we have claimed. `lock` is None if its target is lost. The pool replaces it."""

    lock: DirectoryLock | None
    lease: Lease

    def release(self) -> None:
        """Leave the region without an owner, and unlock it, unless its target is lost."""
        if self.lock is None:
            self.lease.permit.lose()
        else:
            self.lease.release(self._file_of(self.lock))
            self.lock.release()

    def order(self) -> Order | None:
        """Return what the child must know to renew the lease, or None if its target is lost.

        A group's lease must still be renewed. For any thread.
        """
        lease, lock = self.lease, self.lock
        if lock is None and not lease.leasing.in_group:
            return None
        page, takeover_s = lease.page, lease.leasing.takeover_s
        what = str(lease.path), self._file_of(lock), page.owner.hex(), page.epoch
        return Order(*what, takeover_s, lease.number, lease.leasing.in_group)

    def _file_of(self, lock: DirectoryLock | None) -> FileId | None:
        """Return our page, or None for the one at its path. A group's may be mounted again."""
        return None if lock is None or self.lease.leasing.in_group else lock.lease


@dataclass(frozen=True, slots=True)
class Order:
    """A lease to renew. `permit` is the number of its word."""

    path: str
    file: tuple[int, int] | None
    owner: str
    epoch: int
    takeover_s: float
    permit: int
    in_group: bool


def keep(regions: Sequence[Region], permits: Permits) -> Companion:
    """Renew these regions as often as their leases need, until a stop. `permits` are theirs.

    If no region is a group's, a lease that is held only for a moment needs no process.
    """
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
    """A lease that is renewed whenever that is due, on a separate thread."""

    def __init__(self, order: Order, permits: Permits) -> None:
        permit = permits.word(order.permit, is_limited=order.in_group)
        owner = bytes.fromhex(order.owner)
        self._keeper = Keeper(PageFile(Path(order.path)), owner, order.takeover_s, permit)
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
                self._keeper.renew(order.epoch, PageFile(Path(order.path), file))
                failing = False
            except OSError as error:
                if not failing:  # log once until it works again
                    print(f"the lease {order.path} is not renewed: {error}", file=sys.stderr)
                failing = True


def main(permits: Permits) -> None:
    """Renew the leases that lines on stdin name."""
    if os.fork():
        os._exit(0)
    known: dict[str, _Renewed] = {}
    for line in sys.stdin.buffer:
        order = Order(**json.loads(line))
        if order.owner not in known:
            known[order.owner] = _Renewed(order, permits)
        known[order.owner].is_due(order)
    os._exit(0)  # do not wait for threads that hang


if __name__ == "__main__":
    main(Permits(int(sys.argv[2])))
