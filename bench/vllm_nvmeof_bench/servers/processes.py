# SPDX-License-Identifier: Apache-2.0
"""What a server's starter asks of the host: a port for it, and whether it has ended."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["ReservedPort", "group_alive"]


class ReservedPort:
    """A TCP port of the loopback address that is given to nobody else while this is open.

    A server may bind and listen on it meanwhile, if it sets SO_REUSEADDR, as servers do.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


def group_alive(group: int) -> bool:
    """Whether a process of the group runs; one that has ended but is not reaped does not."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, pgrp = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and (state not in "ZX" or _other_threads(process)):
                return True
    return False


def _other_threads(process: Path) -> bool:
    """Whether some run yet, as in a killed process that waits for a disk: it has its locks."""
    return sum(1 for _ in (process / "task").iterdir()) > 1
