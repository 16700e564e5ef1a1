# SPDX-License-Identifier: Apache-2.0
"""The takeover of a region whose owner is dead, decided without a common clock.

`Takeover` watches lease pages (`lease`). An owner counts as dead if its page stays unchanged for
`TAKEOVER_S`, 30 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.pool.lease import TAKEOVER_S, LeasePage, is_locked, lease_of, read_lease
from vllm_nvmeof_offload.units import printable

POLL_S = 0.05  # the interval at which a waiting claim checks again

_T = TypeVar("_T")


class UnsettledError(Exception):
    """An answer that is not known yet: try again after the page has been watched for longer."""


@dataclass(slots=True)
class _Watched:
    page: Hashable
    since_s: float
    has_beaten: bool = False
    died_here: bool = False


@dataclass
class Takeover:
    """A watcher of owners on other hosts, which determines whether they are dead. Two hosts' clocks
    may differ, so a time in a page proves nothing. But a live owner keeps changing its page: a page
    that has not changed for `takeover_s`, by this process's own clock, names a dead owner."""

    takeover_s: float = TAKEOVER_S
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    _watched: dict[Path, _Watched] = field(default_factory=dict)
    _logged: bool = False

    def _watch(self, path: Path, page: Hashable) -> _Watched:
        """Record the page just read from `path`, and return its record."""
        seen = self._watched.setdefault(path, _Watched(page, self.clock()))
        if page != seen.page:
            seen = self._watched[path] = _Watched(page, self.clock(), has_beaten=True)
        return seen

    def is_dead(self, path: Path, page: Hashable) -> bool:
        """Return whether the owner in this page is dead. Raises UnsettledError if not known yet."""
        seen = self._watch(path, page)
        if self.clock() - seen.since_s >= self.takeover_s:
            return True
        if seen.has_beaten:
            return False
        if not self._logged:
            logger.warning(
                "%s is held by %s; waiting up to %.0f s for a renewal before taking it over",
                *(path, page, self.takeover_s),
            )
            self._logged = True
        raise UnsettledError

    def settled(self, ask: Callable[[], _T]) -> _T:
        """Call `ask` until it raises no UnsettledError. This takes up to `takeover_s` if the pages
        are already being watched."""
        while True:
            try:
                return ask()
            except UnsettledError:
                self.wait(POLL_S)

    def look(self, directory: Path) -> OwnerState:
        """Return the state of a region's owner, judged from the pages seen so far. Writes nothing.
        Raises OSError if the page or the lock cannot be read."""
        path = lease_of(directory).path
        page = read_lease(lease_of(directory))
        if page is None or page.is_free:
            return OwnerState("free", page)
        seen = self._watch(path, page)
        unchanged_s = self.clock() - seen.since_s
        if not page.in_group and not seen.died_here:
            # Probing locks the directory for a moment, which can turn away a starting server. So it
            # is not repeated after the owner was found dead.
            if is_locked(directory):
                return OwnerState("live", page, unchanged_s)
            seen.died_here = page.died_here
        if seen.died_here or unchanged_s >= self.takeover_s:
            return OwnerState("dead", page, unchanged_s)
        return OwnerState("live" if seen.has_beaten else "silent", page, unchanged_s)

    def watch(self, directories: Iterable[Path]) -> None:
        """Start watching all of these regions now, so that one wait covers all of them."""
        for directory in directories:
            self.look(directory)

    def observe(self, directories: Sequence[Path]) -> list[OwnerState]:
        """Watch these regions until each owner that may be alive has shown or missed a beat."""
        while True:
            found = [self.look(directory) for directory in directories]
            if not any(one.is_undecided for one in found):
                return found
            self.wait(POLL_S)


@dataclass(frozen=True, slots=True)
class OwnerState:
    """The owner of a region as seen by this process. `kind` is "free" (no owner), "live" (its flock
    or a beat was seen), "dead", or "silent" (no beat was seen yet). `page` is None if the region
    was never claimed. `unchanged_s` is how long this process has seen the page unchanged."""

    kind: str
    page: LeasePage | None = None
    unchanged_s: float = 0.0

    @property
    def may_live(self) -> bool:
        return self.kind in ("live", "silent")

    @property
    def is_undecided(self) -> bool:
        """Whether the owner has neither shown nor missed a beat."""
        if self.kind != "silent":
            return False
        assert self.page is not None
        return self.unchanged_s < min(TAKEOVER_S, 1.5 * self.page.beat_ms / 1000)

    def __str__(self) -> str:
        page = self.page
        if page is None:
            return self.kind
        who = f"generation {page.generation}, epoch {page.epoch}"
        if self.kind == "free":
            return f"free; {who}; last owner {printable(page.name)}"
        age = f", no beat in {self.unchanged_s:.0f} s of watching" if self.kind == "silent" else ""
        return f"{self.kind}: {printable(page.name)}, {page}{age}; {who}"
