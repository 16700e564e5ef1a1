# SPDX-License-Identifier: Apache-2.0
"""An owner on another host: its page in a lease file, which it renews while it lives."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

from vllm_nvmeof_offload.pool.lease import LeasePage, PageFile

BEAT_S = 0.05


def put_page(path: Path, page: LeasePage) -> None:
    """In place, as it does: nobody sees a file that names no owner."""
    path.touch(0o600)
    PageFile(path).write(page.encode())


def page_elsewhere(beat: int = 0, **changes: object) -> LeasePage:
    shape = {"in_group": False, "boot": b"another kernel's"} | changes
    return LeasePage(b"its own sixteen.", 3, beat, 50, 0, "elsewhere", 4711, "", **shape)  # type: ignore[arg-type]


@contextlib.contextmanager
def living_elsewhere(path: Path) -> Iterator[None]:
    """Let it live until the block ends. path: of the lease."""
    ended = threading.Event()
    put_page(path, page_elsewhere())

    def beat() -> None:
        for number in itertools.count(1):
            if ended.wait(BEAT_S):
                return
            put_page(path, page_elsewhere(number))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
