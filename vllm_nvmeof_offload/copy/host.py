# SPDX-License-Identifier: Apache-2.0
"""Copies between a KV cache in CPU memory and staging, on one background thread.

Each ticket is one native call. It also computes the payloads' checksums, while their bytes are in
the CPU's caches. On vLLM's CPU engine the forward pass has completed when vLLM calls the worker, so
no fence is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm_nvmeof_offload.copy.base import Columns, Descriptors, Direction, Payloads, sides
from vllm_nvmeof_offload.errors import OK, EngineError, Outcome
from vllm_nvmeof_offload.native import core


class HostCopyEngine:
    """Implements `copy.base.CopyEngine`. The copying thread calls `on_done` after each ticket. CPU
    memory stays valid while vLLM sleeps, so `asleep` has no effect."""

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        self.asleep = False
        self.makes_checksums = True
        self._on_done = on_done
        self._done: deque[int] = deque()
        self._failure: Exception | None = None
        self._next = 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nvmeof-copy")

    def record_fence(self) -> object:
        return None

    def has_passed(self, fence: object) -> bool:
        return True

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        ticket = self._next
        self._next += 1
        self._thread.submit(self._run, ticket, direction, pieces, payloads)
        return ticket

    def poll(self) -> list[tuple[int, Outcome]]:
        if self._failure is not None:
            raise EngineError("a copy in host memory failed; see the cause") from self._failure
        return [(self._done.popleft(), OK) for _ in range(len(self._done))]

    def close(self) -> None:
        self._thread.shutdown()

    def _run(
        self, ticket: int, direction: Direction, pieces: Descriptors, payloads: Payloads | None
    ) -> None:
        try:
            _copy(direction, sides(direction, pieces), payloads)
        except Exception as error:  # noqa: BLE001 - a broken invariant, which `poll` raises
            self._failure = error
        else:
            self._done.append(ticket)
        self._on_done()


def _copy(direction: Direction, columns: Columns, payloads: Payloads | None) -> None:
    if payloads is None:
        core.copy(*columns)
    else:
        which = payloads.counts, payloads.addresses, payloads.sizes
        core.copy_payloads(*columns, *which, payloads.crcs, direction is Direction.LOAD)
