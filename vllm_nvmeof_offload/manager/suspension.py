# SPDX-License-Identifier: Apache-2.0
"""Which requests' chunks are not stored: weights may have changed since their KV was computed.

Everything else is stored. `integration/old_kv.py` finds these requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from vllm_nvmeof_offload.names import LOGGER_NAME

__all__ = ["Suspension"]

logger = logging.getLogger(LOGGER_NAME)

#: Between two log lines that begin or go on with the same story.
_LOG_PERIOD_S = 60.0


class Suspension:
    """Scheduler side, one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: set[str] = set()
        self._began_s = 0.0
        self._said_s = -_LOG_PERIOD_S
        self._announced = False  # that it lasts was logged, so its end is, too

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> frozenset[str]:
        return frozenset(self._requests)

    def begin(self, call: str, requests: Iterable[str], *, known: bool) -> None:
        """vLLM did `call`, which changes weights (known) or can, while `requests` had KV."""
        self._requests = set(requests)
        self._began_s = self._clock()
        if self._began_s - self._said_s < _LOG_PERIOD_S:
            return
        self._said_s = self._began_s
        self._announced = bool(self._requests)
        logger.warning(
            "%s %s the weights: what was offloaded before is void, and what follows will not "
            "be found by another start; %s%s",
            call,
            "changes" if known else "may have changed",
            f"of {len(self._requests)} requests, computed in part before, nothing is stored"
            if self._requests
            else "what is computed from now on is stored",
            "" if known else "; weights_never_change says that such a call does not",
        )

    def add(self, request_id: str) -> None:
        """A request took over KV of one of these."""
        self._requests.add(request_id)

    def ended(self, request_id: str) -> None:
        """A request is over, or computes everything again."""
        self._requests.discard(request_id)
        if self._announced and not self._requests:
            self._announced = False
            lasted_s = self._clock() - self._began_s
            logger.info("%.0f s after the weights may have changed all is stored again", lasted_s)

    def say(self) -> None:
        """Log, once a minute, that it lasts. Called in each step."""
        if not self._requests:
            return
        now_s = self._clock()
        if now_s - self._said_s < _LOG_PERIOD_S:
            return
        self._said_s, self._announced = now_s, True
        logger.warning(
            "%.0f s after the weights may have changed %d requests computed in part before are "
            "still there: nothing of them is stored",
            now_s - self._began_s,
            len(self._requests),
        )
