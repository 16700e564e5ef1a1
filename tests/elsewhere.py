# SPDX-License-Identifier: Apache-2.0
"""A holder on another host: its record in a lock file, which it renews while it lives."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_nvmeof_offload.pool.lock import Holder

BEAT_S = 0.05


def put_record(path: Path, heartbeat: float) -> None:
    """In place, as it does: nobody sees a file that names no holder."""
    with path.open("r+b") as file:
        file.write(Holder("elsewhere", 4711, "another-kernel", heartbeat).record())


@contextlib.contextmanager
def living_elsewhere(path: Path, ahead_s: float = 0.0) -> Iterator[None]:
    """Let it live until the block ends. ahead_s: its clock is ahead of ours by so much."""
    ended = threading.Event()
    path.touch()
    put_record(path, time.time() + ahead_s)

    def beat() -> None:
        for number in itertools.count(1):
            if ended.wait(BEAT_S):
                return
            put_record(path, time.time() + ahead_s + number)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
