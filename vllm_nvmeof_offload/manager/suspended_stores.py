# SPDX-License-Identifier: Apache-2.0
"""The requests whose chunks are not stored, because weights may have changed since their KV was
computed. All other requests are stored. `vllm_adapter/old_kv.py` finds these requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from vllm_nvmeof_offload.names import LOGGER_NAME

logger = logging.getLogger(LOGGER_NAME)

#: Between two log lines about the same suspension.
_LOG_PERIOD_S = 60.0


class Suspension:
    """Used on the scheduler side, by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: set[str] = set()
        self._began_s = 0.0
        self._logged_s = -_LOG_PERIOD_S
        self._announced = False  # the beginning was logged, so the end is logged as well

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> frozenset[str]:
        return frozenset(self._requests)

    def begin(self, call: str, requests: Iterable[str], *, known: bool) -> None:
        """vLLM did `call`, which changes weights (known) or may, while `requests` had KV."""
        self._requests = set(requests)
        self._began_s = self._clock()
        if self._began_s - self._logged_s < _LOG_PERIOD_S:
            return
        self._logged_s = self._began_s
        self._announced = bool(self._requests)
        logger.warning(
            "%s %s the weights: everything offloaded before is void, and a later start does not "
            "adopt what is stored from now on; %s%s",
            call,
            "changed" if known else "may have changed",
            f"{len(self._requests)} requests with KV of before are not stored"
            if self._requests
            else "every request is stored",
            "" if known else " (set weights_never_change if such a call leaves the weights alone)",
        )

    def add(self, request_id: str) -> None:
        """A request took over KV of a suspended one."""
        self._requests.add(request_id)

    def ended(self, request_id: str) -> None:
        """A request has ended, or computes everything again."""
        self._requests.discard(request_id)
        if self._announced and not self._requests:
            self._announced = False
            lasted_s = self._clock() - self._began_s
            logger.info("every request is stored again, %.0f s after that call", lasted_s)

    def log_while_it_lasts(self) -> None:
        """Log the number of requests once a minute. Called in each step."""
        if not self._requests:
            return
        now_s = self._clock()
        if now_s - self._logged_s < _LOG_PERIOD_S:
            return
        self._logged_s, self._announced = now_s, True
        logger.warning(
            "%d requests are still not stored, %.0f s after a call that may have changed the "
            "weights: they began before it",
            len(self._requests),
            now_s - self._began_s,
        )
