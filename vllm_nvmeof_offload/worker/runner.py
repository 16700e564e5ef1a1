# SPDX-License-Identifier: Apache-2.0
"""Runs the pipeline on its own thread, so that transfers go on while the model computes.

The model's thread hands over calls, which run in their order, and picks up results. It waits
only in `wait`, for copies that vLLM must see finished.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable, Iterable

from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import Report
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.tasks import FinishedJob

#: Deadlines wake the I/O engine's eventfd; this is only a backstop.
_POLL_MS = 1000


class PipelineRunner:
    """Owns the pipeline's thread. All methods are called from the model's thread."""

    def __init__(self, pipeline: TransferPipeline, waker: Waker, io_fd: int) -> None:
        self._pipeline = pipeline
        self._waker = waker
        self._io_fd = io_fd
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._finished: list[FinishedJob] = []
        self._reports: list[Report] = []
        self._counters = Counts()
        self._open: set[int] = set()  # stores and loads handed over and not finished
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nvmeof-pipeline", daemon=True)
        self._thread.start()

    def hand_over(self, call: Callable[[TransferPipeline], None], op: int | None = None) -> None:
        """Run `call` on the pipeline's thread. `op`: the store or load that it starts."""
        if op is not None:
            with self._changed:
                self._open.add(op)
        self._inbox.append(lambda: call(self._pipeline))
        self._waker.wake()

    def wait(self, ops: Iterable[int]) -> None:
        """Block until these stores and loads are finished: no DMA works on them."""
        waiting = set(ops)
        with self._changed:
            while waiting & self._open:
                self._raise_failure()
                self._changed.wait(timeout=1.0)

    def take(self) -> tuple[list[FinishedJob], list[Report], Counts]:
        """Finished jobs, reports and counters since the last call; a consistent snapshot."""
        with self._changed:
            self._raise_failure()
            taken = (self._finished, self._reports, self._counters)
            self._finished, self._reports, self._counters = [], [], Counts()
            return taken

    def stop(self) -> None:
        """End the thread. The engines' `close` ends what is under way."""
        self._stopping = True
        self._waker.wake()
        self._thread.join(timeout=5.0)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineError("the transfer pipeline stopped; see the cause") from self._failure

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        poller.register(self._io_fd, select.POLLIN)
        try:
            while not self._stopping:
                self._waker.clear()
                while self._inbox:
                    self._inbox.popleft()()
                self._pipeline.step()
                self._publish()
                poller.poll(_POLL_MS)
        except BaseException as error:  # noqa: BLE001 - handed to the model's thread, which raises
            # A broken invariant: the model's thread must fail too instead of waiting for ever.
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _publish(self) -> None:
        finished = self._pipeline.take_finished()
        reports = self._pipeline.take_reports()
        if not finished and not reports and not self._pipeline.counters:
            return
        with self._changed:
            self._finished += finished
            self._reports += reports
            self._counters.add(self._pipeline.counters)
            self._pipeline.counters.clear()
            self._open.difference_update(job.op for job in finished)
            self._changed.notify_all()
