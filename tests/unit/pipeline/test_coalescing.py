# SPDX-License-Identifier: Apache-2.0
"""The pipeline's thread lets completions wait where it may, and nothing else."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner

WAIT_S = 60
FOR_EVER_S = 3600.0


class CountedPipeline:
    """Counts its turns; for a made-up time completions may be coalesced."""

    def __init__(self, coalesce_s: float) -> None:
        self._coalesce_s = coalesce_s
        self.counters = Counts()
        self.turns = 0
        self.turned = threading.Semaphore(0)

    def step(self) -> None:
        self.turns += 1
        self.turned.release()

    def coalesce_s(self) -> float:
        return self._coalesce_s

    def deadline_in_s(self) -> float:
        return FOR_EVER_S

    def await_set(self, *_: object) -> bool:
        return False

    def take_finished(self) -> list[Any]:
        return []

    def take_reports(self) -> list[Any]:
        return []


class Running:
    """A runner over it. Its I/O has ended all the time."""

    def __init__(self, coalesce_s: float) -> None:
        self.pipeline: Any = CountedPipeline(coalesce_s)
        self.io_fd = os.eventfd(1)
        self.runner = PipelineRunner(self.pipeline, Waker(), self.io_fd)

    def turn(self) -> None:
        assert self.pipeline.turned.acquire(timeout=WAIT_S)

    def close(self) -> None:
        self.runner.stop()
        os.close(self.io_fd)


@pytest.mark.parametrize("coalesce_s", [0.0, 0.0005])
def test_completions_bring_a_turn_at_once_or_soon(coalesce_s: float) -> None:
    one = Running(coalesce_s)
    for _ in range(20):
        one.turn()
    one.close()


def test_completions_wait_and_commands_do_not() -> None:
    one = Running(FOR_EVER_S)
    one.turn()
    called = threading.Event()
    one.runner.hand_over(lambda _: called.set())
    assert called.wait(WAIT_S)
    one.turn()
    assert one.pipeline.turns == 2, "what has ended brought no turn"
    one.close()
    assert one.pipeline.turns <= 3
