# SPDX-License-Identifier: Apache-2.0
"""Actors on a pool without an engine: an owner on another host, and a reset like the machine's.

`living_elsewhere` renews a page in a lease file while its owner lives. `reset` does what the
machine does for a `ResetCommand`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.pool.lease import LeasePage, PageFile
from vllm_nvmeof_offload.pool.pool import Pool

BEAT_S = 0.05
_WAIT_S = 120.0


def put_page(path: Path, page: LeasePage) -> None:
    """In place, as it does: nobody sees a file that names no owner."""
    path.touch(0o600)
    PageFile(path).write(page.encode())


def page_elsewhere(beat: int = 0, **changes: object) -> LeasePage:
    shape = {"in_group": False, "boot": b"another kernel's"} | changes
    return LeasePage(b"its own sixteen.", 3, beat, 50, 0, "elsewhere", 4711, "", **shape)  # type: ignore[arg-type]


@contextlib.contextmanager
def living_elsewhere(path: Path) -> Iterator[None]:
    """Let it live until the block ends. path: of the lease."""
    ended = threading.Event()
    put_page(path, page_elsewhere())

    def beat() -> None:
        for number in itertools.count(1):
            if ended.wait(BEAT_S):
                return
            put_page(path, page_elsewhere(number))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Reset(NamedTuple):
    """By target: what became of the superblock, and the stamp of what is written from now on."""

    outcomes: list[Outcome]
    stamps: list[Stamp]

    @property
    def ok(self) -> bool:
        """Whether a later start finds nothing from before."""
        return any(outcome.ok for outcome in self.outcomes)


class Superblocks:
    """The superblocks of one reset under way; None: this one has no outcome yet."""

    def __init__(self, pool: Pool, tag: bytes, named: bool = True) -> None:
        """Begin the reset and start every superblock."""
        self.stamp, self.unnamed = pool.begin_reset(tag, named)
        self.outcomes: list[Outcome | None] = [None] * pool.target_count
        self._changed = threading.Condition()
        for target in range(pool.target_count):
            pool.write_superblock(target, lambda outcome, at=target: self._ended(at, outcome))  # type: ignore[misc]

    def _ended(self, target: int, outcome: Outcome) -> None:
        with self._changed:
            assert self.outcomes[target] is None, "one outcome each"
            self.outcomes[target] = outcome
            self._changed.notify_all()

    def wait(self, *targets: int) -> None:
        """Wait for the outcomes of these targets."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: all(self.outcomes[target] is not None for target in targets), _WAIT_S
            )
        assert done, self.outcomes


def reset(pool: Pool, tag: bytes, named: bool = True) -> Reset:
    """Reset, and wait for every target."""
    superblocks = Superblocks(pool, tag, named)
    superblocks.wait(*range(pool.target_count))
    outcomes = [one for one in superblocks.outcomes if one is not None]
    stamp, unnamed = superblocks.stamp, superblocks.unnamed
    return Reset(outcomes, [stamp if outcome.ok else unnamed for outcome in outcomes])
