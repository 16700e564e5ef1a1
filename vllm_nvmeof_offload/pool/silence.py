# SPDX-License-Identifier: Apache-2.0
"""Whether a holder on another host is dead, where its heartbeat is old by this host's clock.

Two hosts' clocks may be hours apart, so the age of a heartbeat proves no death. A live holder
renews its record, and that can be seen: the record is read again after more than a heartbeat's
period, timed by this host alone. A record that has not changed by then names a dead holder.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.lock import HEARTBEAT_PERIOD_S, Holder, read_holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["SILENCE_S", "Silence", "UnsettledError"]

logger = logging.getLogger(LOGGER_NAME)

_T = TypeVar("_T")

SILENCE_S = HEARTBEAT_PERIOD_S + 1.0
_POLL_S = 0.1


class UnsettledError(Exception):
    """A record has not been watched for long enough: try again in a moment."""


class Silence:
    """Records of holders on other hosts, and since when each of them has been watched."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._wait = wait
        self._watched: dict[Path, tuple[Holder, float]] = {}
        self._said = False

    def watch(self, paths: Iterable[Path]) -> None:
        """Watch these lock files from now on: many together cost one wait."""
        me = Holder.myself()
        for path in paths:
            holder = read_holder(path)
            if holder is not None and not holder.shares_kernel_with(me):
                self._watched.setdefault(path, (holder, self._clock()))

    def is_dead(self, path: Path, holder: Holder) -> bool:
        """Whether `holder`, read just now from `path`, has been silent; False: it has beaten.

        Raises:
            UnsettledError: it has not been watched for `SILENCE_S` yet.
        """
        first, since_s = self._watched.setdefault(path, (holder, self._clock()))
        if holder != first:
            return False
        if self._clock() - since_s >= SILENCE_S:
            return True
        if not self._said:
            logger.warning(
                "%s names pid %d on host %s, whose heartbeat is old by this host's clock; "
                "waiting %.0f s for another heartbeat before taking it over",
                *(path, holder.pid, holder.host, SILENCE_S),
            )
            self._said = True
        raise UnsettledError

    def settled(self, ask: Callable[[Silence], _T]) -> _T:
        """Ask until there is an answer; `SILENCE_S` for the lock files watched before it."""
        while True:
            try:
                return ask(self)
            except UnsettledError:
                self._wait(_POLL_S)
