# SPDX-License-Identifier: Apache-2.0
"""Failed operations as log lines: the first of a kind at once, then one line a minute at most.

A kind is an operation with an outcome on a target. A line has the number of chunks since the
last one of its kind, so that none is left out.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind
from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.names import LOGGER_NAME

__all__ = ["PERIOD_S", "Complaints"]

logger = logging.getLogger(LOGGER_NAME)

PERIOD_S = 60.0

#: Operation → what could not be done, and what follows from that.
_SAID = {
    "store": ("copied from the GPU", "they are not offloaded"),
    "load": ("loaded", "their tokens are computed again"),
    "fetch": ("fetched ahead of need", "who needs them computes them again"),
    "write": ("written", "they stay in the CPU tier alone"),
    "reset": ("voided on disk", "what this server stores is not found by another start"),
}


class Complaints:
    """`look` after every step's reports; says nothing of what was cancelled."""

    def __init__(self, core: ManagerCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._targets: Sequence[str] = ()
        self._seen: Counter[str] = Counter()
        self._said_s: dict[str, float] = {}

    def attach(self, targets: Sequence[str]) -> None:
        """targets: their directories."""
        self._targets = targets

    def look(self) -> None:
        """Say what is new, and due."""
        for name, outcome in self._core.last_failures.items():
            new = self._core.counters[name] - self._seen[name]
            if not new or outcome.kind is OutcomeKind.CANCELLED:
                continue
            now_s = self._clock()
            if now_s - self._said_s.get(name, float("-inf")) < PERIOD_S:
                continue
            self._said_s[name] = now_s
            self._seen[name] += new
            self._say(name, new, outcome)

    def _say(self, name: str, chunks: int, outcome: Outcome) -> None:
        _, operation, _, target = name.split(":")
        number = int(target) if target.isdigit() else None
        place = ""
        if number is not None:
            known = number < len(self._targets)
            place = f" on target {self._targets[number] if known else number}"
        what = "1 chunk" if chunks == 1 else f"{chunks} chunks"
        done, follows = _SAID[operation]
        logger.warning("%s could not be %s%s: %s; %s", what, done, place, outcome, follows)
