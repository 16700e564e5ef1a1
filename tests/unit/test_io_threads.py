# SPDX-License-Identifier: Apache-2.0
"""Lost threads that return, in the engine that can wait only in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kit import Bench, make_spec, name
from vllm_nvmeof_offload.errors import OK, Outcome
from vllm_nvmeof_offload.io import threads
from vllm_nvmeof_offload.io.threads import ThreadsIoEngine
from vllm_nvmeof_offload.pool.pool import Pool

THREADS = 4  # of the kit's engine; three times as many may be lost
SLOTS = 4 * THREADS


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench("threads", Pool.open(make_spec(tmp_path, slots=SLOTS)), SLOTS)
    bench.store((slot, name(slot)) for slot in range(SLOTS))
    yield bench
    assert bench.close()


class _Unhurried:
    """A lock whose holder makes no progress for a while after releasing it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread().name.startswith("io-"):
            time.sleep(0.01)


def test_lost_threads_that_return_together_leave_enough_threads(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stalled: twelve threads too many, and each of them sees that."""
    returned = threading.Event()

    def hang(*_: object) -> Outcome:
        returned.wait()
        return OK

    with monkeypatch.context() as patch:
        patch.setattr(threads, "read_slot", hang)
        assert isinstance(bench.engine, ThreadsIoEngine)
        for first in range(0, SLOTS, THREADS):
            lost = [bench.read(slot, slot, name(slot)) for slot in range(first, first + THREADS)]
            bench.submit(*lost)
            tokens = {op.token for op in lost}
            while not tokens <= bench.engine._running.keys():
                time.sleep(0.001)
            assert bench.engine.cancel(list(tokens)) == []
        assert bench.engine.room() == (0, 0), "no thread is left, and no further one begins"
        monkeypatch.setattr(bench.engine, "_lock", _Unhurried(bench.engine._lock))
        returned.set()
        bench.wait(lambda found: len(found) == SLOTS)
    assert bench.engine.room() == (2 * THREADS, THREADS - 1)
    for slot in range(SLOTS):
        (done,) = bench.run(bench.read(slot, 0, name(slot)), wait_s=10)
        assert done.outcome == OK
        assert bench.right(0, name(slot))
