# SPDX-License-Identifier: Apache-2.0
"""Lost threads that return, in the engine that can wait only in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kit import Bench, make_spec, name
from vllm_nvmeof_offload.errors import DEADLINE, OK, Outcome
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
        for first in range(0, SLOTS, THREADS):
            late, slots = time.monotonic() + 0.05, range(first, first + THREADS)
            lost = [bench.read(slot, slot, name(slot), deadline_s=late) for slot in slots]
            assert {done.outcome for done in bench.run(*lost)} == {DEADLINE}
        assert isinstance(bench.engine, ThreadsIoEngine)
        monkeypatch.setattr(bench.engine, "_lock", _Unhurried(bench.engine._lock))
        returned.set()
        bench.wait(lambda found: sum(done.released for done in found) == SLOTS)
    for slot in range(SLOTS):
        (done,) = bench.run(bench.read(slot, 0, name(slot)), wait_s=10)
        assert done.outcome == OK
        assert bench.right(0, name(slot))
