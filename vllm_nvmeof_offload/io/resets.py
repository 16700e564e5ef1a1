# SPDX-License-Identifier: Apache-2.0
"""Resets for engines whose I/O threads run no Python: one at a time, on a thread of their own.

A reset voids exactly the writes submitted before it. Those carry the stamp of their time, so
they may go on beside it. The ones submitted after it wait behind its *barrier*, a number that
counts up, and are marked with the stamp that the reset left.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import CANCELLED, OK, Outcome, io_error
from vllm_nvmeof_offload.names import LOGGER_NAME

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm_nvmeof_offload.io.base import IoOp
    from vllm_nvmeof_offload.pool.pool import Pool

__all__ = ["Resets"]

logger = logging.getLogger(LOGGER_NAME)


class Resets:
    """`order` is held while a write learns its barrier and is handed over, and while barriers
    are lifted: a write cannot miss the end of the reset that it waits for.
    """

    def __init__(self, pool: Pool, on_end: Callable[[int, int, Outcome], None]) -> None:
        """on_end(token, lifted, outcome): a reset ended; writes behind barriers up to `lifted`
        may start. Called under `order`, on whatever thread it happens.
        """
        self.order = threading.RLock()
        self._pool = pool
        self._on_end = on_end
        self._waiting: deque[tuple[int, IoOp]] = deque()
        self._outstanding: set[int] = set()
        self._last = 0
        self._thread: threading.Thread | None = None

    @property
    def barrier(self) -> int:
        """What a write submitted now waits for; 0: nothing. Ask under `order`."""
        return max(self._outstanding, default=0)

    def add(self, op: IoOp) -> None:
        with self.order:
            self._last += 1
            self._outstanding.add(self._last)
            self._waiting.append((self._last, op))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="io-reset", daemon=True)
                self._thread.start()

    def cancel(self, tokens: Collection[int] | None = None) -> None:
        """End those that have not started; None: all of them."""
        with self.order:
            for item in list(self._waiting):
                if tokens is None or item[1].token in tokens:
                    self._waiting.remove(item)
                    self._end(*item, CANCELLED)

    def join(self, timeout_s: float) -> bool:
        """Wait for the one that runs; False if it still does."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _end(self, barrier: int, op: IoOp, outcome: Outcome) -> None:
        self._outstanding.remove(barrier)
        lifted = min(self._outstanding, default=self._last + 1) - 1
        self._on_end(op.token, lifted, outcome)

    def _run(self) -> None:
        while True:
            with self.order:
                if not self._waiting:
                    self._thread = None
                    return
                barrier, op = self._waiting.popleft()
            outcome = self._reset(op)
            with self.order:
                self._end(barrier, op, outcome)

    def _reset(self, op: IoOp) -> Outcome:
        try:
            self._pool.reset(op.adoptable)
        except OSError as error:
            return io_error(error.errno or errno.EIO)
        return OK
