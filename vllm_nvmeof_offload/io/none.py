# SPDX-License-Identifier: Apache-2.0
"""The I/O engine of a server without a pool: `pool_bytes: 0`, the CPU tier only."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from vllm_nvmeof_offload.errors import OK, io_error
from vllm_nvmeof_offload.io.base import Completion, IoKind, IoOp

__all__ = ["NoIoEngine"]


class NoIoEngine:
    """Completes resets, refuses everything else with ENODEV."""

    name = "none"

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._done: list[Completion] = []

    def submit(self, ops: Sequence[IoOp]) -> int:
        for op in ops:
            outcome = OK if op.kind is IoKind.RESET else io_error(errno.ENODEV)
            self._done.append(Completion(op.token, outcome))
        os.eventfd_write(self._fd, 1)
        return len(ops)

    def cancel(self, tokens: Sequence[int]) -> None:
        return

    def replace_target(self, target: int) -> None:
        return

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._fd)
        return done

    def fileno(self) -> int:
        return self._fd

    def close(self, timeout_s: float = 5.0) -> bool:
        os.close(self._fd)
        return True
