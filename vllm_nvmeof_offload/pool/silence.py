# SPDX-License-Identifier: Apache-2.0
"""Decides whether a holder on another host is dead, without comparing two hosts' clocks.

Two hosts' clocks may be hours apart, so no time in a record proves a death. A live holder changes
its record all the time, and that can be observed: a record that has not changed for `TAKEOVER_S`
on this process's own clock names a dead holder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vllm_nvmeof_offload import logger

TAKEOVER_S = 30.0
#: Interval at which a claim looks again at what it waits for.
POLL_S = 0.05

_T = TypeVar("_T")


class UnsettledError(Exception):
    """A record has not been watched for long enough: try again in a moment."""


@dataclass(slots=True)
class _Watched:
    record: Hashable
    since_s: float
    has_moved: bool = False


@dataclass
class Silence:
    """The records of holders on other hosts, and since when each has not changed."""

    takeover_s: float = TAKEOVER_S
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    _watched: dict[Path, _Watched] = field(default_factory=dict)
    _logged: bool = False

    def watch(self, path: Path, record: Hashable) -> float:
        """Take in the record that was just read from `path`.

        Returns the seconds for which it has been seen unchanged.
        """
        now_s = self.clock()
        seen = self._watched.setdefault(path, _Watched(record, now_s))
        if record != seen.record:
            self._watched[path] = _Watched(record, now_s, has_moved=True)
            return 0.0
        return now_s - seen.since_s

    def has_moved(self, path: Path) -> bool:
        """Return whether the record has changed while it was watched."""
        return path in self._watched and self._watched[path].has_moved

    def is_dead(self, path: Path, record: Hashable, holder: object) -> bool:
        """Return whether the holder is dead whose record was just read from `path`.

        holder: the same, for people. UnsettledError: it is not known yet.
        """
        if self.watch(path, record) >= self.takeover_s:
            return True
        if self.has_moved(path):
            return False
        if not self._logged:
            logger.warning(
                "%s names %s; waiting up to %.0f s for a sign of life before taking it over",
                *(path, holder, self.takeover_s),
            )
            self._logged = True
        raise UnsettledError

    def settled(self, ask: Callable[[Silence], _T]) -> _T:
        """Call `ask` until it returns: `takeover_s` at most for all records watched before."""
        while True:
            try:
                return ask(self)
            except UnsettledError:
                self.wait(POLL_S)
