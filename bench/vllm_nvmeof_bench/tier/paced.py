# SPDX-License-Identifier: Apache-2.0
"""The host's copy engine, which can be made as slow as a link: without taking CPU for it.

A copy ends no sooner than its bytes would have passed at `bytes_per_s`, one after the other,
as a DMA engine's would. With None it is the host's copy engine as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import Outcome

__all__ = ["PacedCopyEngine"]


class PacedCopyEngine:
    """Implements `copy.base.CopyEngine`. `bytes_per_s` is set only while nothing is under way."""

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        self.bytes_per_s: int | None = None
        self._on_done = on_done
        self._under_way: deque[tuple[int, float]] = deque()  # bytes, when submitted
        self._free_s = 0.0  # when the link has passed all that came before
        self._done: deque[tuple[int, Outcome]] = deque()
        self._host = HostCopyEngine(on_done=self._copied)

    def record_fence(self) -> object:
        return self._host.record_fence()

    def submit(self, direction: Direction, pieces: Descriptors, fence: object) -> int:
        self._under_way.append((int(pieces[:, 2].sum()), time.perf_counter()))
        return self._host.submit(direction, pieces, fence)

    def poll(self) -> list[tuple[int, Outcome]]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        self._host.close()

    def _copied(self) -> None:
        """On the host engine's thread, which copies in order and does nothing meanwhile."""
        for ticket, outcome in self._host.poll():
            count, submitted_s = self._under_way.popleft()
            if self.bytes_per_s is not None:
                self._free_s = max(self._free_s, submitted_s) + count / self.bytes_per_s
                time.sleep(max(0.0, self._free_s - time.perf_counter()))
            self._done.append((ticket, outcome))
        self._on_done()
