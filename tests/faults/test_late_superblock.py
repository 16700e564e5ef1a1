# SPDX-License-Identifier: Apache-2.0
"""An owner that was stopped during its reset continues after another has taken its region.

The reset was to weights that the other owner does not have, and both have drawn the same epoch. If
the first one's superblock lands after all, it says of the other's chunks that its own weights have
computed them: then only the tag in each slot's header keeps them from being believed. Processes,
files, leases, follower and reads are real.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.process import wait_until
from tests.unit.follow.kit import COMPLETE, Following, row
from tests.unit.pool.kit import OTHER_TAG, PAYLOAD_BYTES, TAG, name
from vllm_nvmeof_offload.errors import OK, STALE, Outcome
from vllm_nvmeof_offload.io.base import ForeignSlab
from vllm_nvmeof_offload.pool.format import (
    Superblock,
    parse_header,
    read_superblock,
    verify,
)
from vllm_nvmeof_offload.protocol import owned_by
from vllm_nvmeof_offload.units import HEADER_BYTES

from .kit import Bench
from .late_child import AFTER, BEFORE, ENGINE, EPOCH, SLOTS, open_pool

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
READY_S = 60.0
OWNER = 1
#: The generations of what the two owners store.
FIRST, SECOND = 1000, 5000
StartServer = Callable[..., "Server"]


class Server:
    """One owner's process, which has filled the region."""

    def __init__(self, target: Path, server: str, first: int, same_epoch: bool) -> None:
        self._target = target
        job = {"target": str(target), "server": server, "first": first, "same_epoch": same_epoch}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.late_child", json.dumps(job)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.adopted = self._line()["adopted"]

    def _line(self) -> dict[str, Any]:
        child = self._child
        assert child.stdout is not None
        assert select.select([child.stdout], [], [], READY_S)[0], "it says nothing"
        line = child.stdout.readline()
        assert line, child.communicate()[1]
        found: dict[str, Any] = json.loads(line)
        return found

    def stop_in_its_reset(self, stop: str, tag: bytes) -> None:
        """Return when none of its threads runs any more."""
        assert self._child.stdin is not None
        print(json.dumps({"stop": stop, "tag": tag.hex()}), file=self._child.stdin, flush=True)
        _, status = os.waitpid(self._child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), self._child.communicate()[1]

    def go_on(self) -> str:
        """Return what became of its superblock."""
        self._child.send_signal(signal.SIGCONT)
        outcome: str = self._line()["superblock"]
        return outcome

    def end(self) -> None:
        self._child.communicate(timeout=READY_S)
        assert self._child.returncode == 0

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    servers: list[Server] = []

    def make(server: str, first: int, same_epoch: bool = False) -> Server:
        servers.append(Server(tmp_path, server, first, same_epoch))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


class Reader:
    """A server that has a pool of its own there, follows the region, and borrows from it."""

    def __init__(self, target: Path) -> None:
        self.directory = next(target.glob(f"*/engine-{ENGINE}/rank-0"))
        table = os.memfd_create("foreign")
        self._following = Following(table, [target])
        os.close(table)
        self._bench = Bench("uring", open_pool(target, 0, "reader"))
        self._fd = os.open(self.directory / "slab", os.O_RDONLY | os.O_DIRECT)
        region = ForeignSlab(self._fd, self.superblock.place(0).region_uuid, 0)
        self._bench.engine.attach_region(OWNER, 0, region)

    @property
    def superblock(self) -> Superblock:
        found = read_superblock(self.directory)
        assert found is not None
        return found

    def has_tag(self, tag: bytes) -> None:
        """Its weights are these from now on."""
        assert self._bench.reset(tag=tag) == [OK]

    def follows(self, tag: bytes, first: int) -> bool:
        """Whether the follower says that the owner has that tag, and these chunks and no others."""
        self._following.scan()
        owner = self._following.owner(OWNER)
        rows = [self._following.rows(name(slot).key) for slot in range(SLOTS)]
        wanted = [{row(OWNER, slot, first + slot)} for slot in range(SLOTS)]
        return owner.state == COMPLETE and owner.tag == tag and rows == wanted

    def borrow_all(self, first: int) -> set[Outcome]:
        """Read every chunk; what is accepted is right."""
        outcomes = set()
        for slot in range(SLOTS):
            identity = name(slot, first + slot)
            read = self._bench.read(slot, 0, identity)
            (end,) = self._bench.run(replace(read, place=owned_by(OWNER, read.place)))
            assert end.outcome != OK or self._bench.right(0, identity)
            outcomes.add(end.outcome)
        return outcomes

    def believed_without_tag(self, first: int) -> int:
        """How many chunks pass all other checks: the control."""
        believed = 0
        for slot in range(SLOTS):
            identity = name(slot, first + slot)
            size = self.superblock.slot_bytes
            with (self.directory / "slab").open("rb") as slab:
                page = os.pread(slab.fileno(), size, slot * size)
            header = parse_header(memoryview(page)[:HEADER_BYTES])
            assert header is not None
            wanted = identity, PAYLOAD_BYTES, self.superblock.place(slot), header.stamp.tag
            is_believed = verify(memoryview(page), *wanted) == OK
            believed += is_believed and header.stamp.epoch == self.superblock.epoch
        return believed

    def close(self) -> None:
        os.close(self._fd)
        assert self._bench.close()


@pytest.fixture
def reader(start: StartServer, tmp_path: Path) -> Iterator[Callable[[], Reader]]:
    readers: list[Reader] = []

    def make() -> Reader:
        readers.append(Reader(tmp_path))
        return readers[-1]

    yield make
    for one in readers:
        one.close()


def test_a_late_superblock_makes_nobody_believe_other_weights(
    start: StartServer, reader: Callable[[], Reader]
) -> None:
    late = start("late", FIRST)
    borrower = reader()
    wait_until("the first owner's chunks", lambda: borrower.follows(TAG, FIRST))
    assert borrower.borrow_all(FIRST) == {OK}
    late.stop_in_its_reset(AFTER, OTHER_TAG)
    heir = start("heir", SECOND, same_epoch=True)
    assert heir.adopted == 0
    wait_until("the second owner's chunks", lambda: borrower.follows(TAG, SECOND))
    assert borrower.borrow_all(SECOND) == {OK}
    # The superblock lands.
    assert late.go_on() == str(OK)
    assert (borrower.superblock.tag, borrower.superblock.epoch) == (OTHER_TAG, EPOCH)
    late.kill()
    borrower.has_tag(OTHER_TAG)
    wait_until("the lie", lambda: borrower.follows(OTHER_TAG, SECOND))
    assert borrower.borrow_all(SECOND) == {STALE}
    assert borrower.believed_without_tag(SECOND) == SLOTS
    # The heir's next start finds that the region names other weights.
    heir.end()
    assert start("heir", SECOND).adopted == 0


@pytest.mark.slow  # a lease runs out in real time
def test_an_owner_that_lost_its_lease_meanwhile_writes_no_superblock(
    start: StartServer, reader: Callable[[], Reader]
) -> None:
    late = start("late", FIRST)
    borrower = reader()
    late.stop_in_its_reset(BEFORE, OTHER_TAG)
    heir = start("heir", SECOND, same_epoch=True)
    assert late.go_on() != str(OK)
    assert (borrower.superblock.tag, borrower.superblock.epoch) == (TAG, EPOCH)
    wait_until("the second owner's chunks", lambda: borrower.follows(TAG, SECOND))
    assert borrower.borrow_all(SECOND) == {OK}
    heir.end()
    # The first owner lives and has its lock, which keeps nobody out.
    assert start("heir", SECOND).adopted == SLOTS
