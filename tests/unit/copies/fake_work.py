# SPDX-License-Identifier: Apache-2.0
"""What waits on the streams of `FakeCuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field


class Mark:
    """One recording of an event."""

    done = False


@dataclass
class Move:
    """One copy on its way. early: the source's bytes, read in the call."""

    destination: int
    source: int
    count: int
    early: bytes | None = None

    def run(self) -> None:
        content = ctypes.string_at(self.source, self.count) if self.early is None else self.early
        ctypes.memmove(self.destination, content, self.count)


@dataclass
class Work:
    """One operation of a stream: a wait, a recording, a batch of moves, or a kernel."""

    wait: Mark | None = None
    record: Mark | None = None
    moves: list[Move] = field(default_factory=list)
    kernel: Callable[[], None] | None = None
