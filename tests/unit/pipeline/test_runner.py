# SPDX-License-Identifier: Apache-2.0
"""The runner gives the pipeline to one thread at a time, and keeps the order of its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from tests.process import wait_until
from tests.unit.imported_vllm import ImportedVllm
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.protocol import ChunkBatch, LoadCommand, StoreCommand, place_of
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankWorker
from vllm_nvmeof_offload.worker.pipeline import FinishedJob, PipelineRunner, TransferPipeline

Call = Callable[[TransferPipeline], None]


class _Pipeline:
    """Records who calls it, and fails if two threads do so at once."""

    def __init__(self) -> None:
        self.in_set = False
        self.calls: list[tuple[str, str]] = []  # name, thread
        self.steps = 0
        self.needs_step = False
        self.gate = threading.Event()  # closed: a step waits in its middle
        self.gate.set()
        self.inside = threading.Event()
        self._alone = threading.Lock()

    def called(self, name: str) -> None:
        assert self._alone.acquire(blocking=False), "two threads call the pipeline"
        self.calls.append((name, threading.current_thread().name))
        self._alone.release()

    def step(self) -> None:
        assert self._alone.acquire(blocking=False), "two threads call the pipeline"
        self.steps += 1
        self.inside.set()
        self.gate.wait(60)
        self._alone.release()

    def submit_copies(self) -> bool:
        self.called("submit")
        return self.needs_step

    def take_finished(self) -> list[FinishedJob]:
        return []

    def take_reports(self) -> list[Any]:
        return []

    def deadline_in_s(self) -> float:
        return 1e9

    def await_set(self, fds: object, seconds: float) -> bool:
        return False


@pytest.fixture
def pipeline() -> _Pipeline:
    return _Pipeline()


@pytest.fixture
def runner(pipeline: _Pipeline) -> Iterator[PipelineRunner]:
    waker, io = Waker(), Waker()
    one = PipelineRunner(cast(TransferPipeline, pipeline), waker, io.fd)
    wait_until("the first turn", lambda: pipeline.steps > 0)
    yield one
    pipeline.gate.set()
    one.stop()


def _started(runner: PipelineRunner, pipeline: _Pipeline, name: str = "mine") -> bool:
    """Start a call; return whether this thread ran it."""
    runner.start(lambda _: pipeline.called(name))
    wait_until("the call", lambda: name in dict(pipeline.calls))
    return dict(pipeline.calls)[name] == threading.current_thread().name


def test_during_a_turn_a_call_waits_for_its_own(
    runner: PipelineRunner, pipeline: _Pipeline
) -> None:
    pipeline.gate.clear()
    pipeline.inside.clear()
    runner.hand_over(lambda _: pipeline.called("first"))
    assert pipeline.inside.wait(60)
    runner.hand_over(lambda _: pipeline.called("second"))
    runner.start(lambda _: pipeline.called("third"))
    assert [name for name, _ in pipeline.calls] == ["first"]
    pipeline.gate.set()
    wait_until("all calls", lambda: len(pipeline.calls) == 3)
    thread = "nvmeof-pipeline"
    assert pipeline.calls == [("first", thread), ("second", thread), ("third", thread)]


def test_a_call_that_fails_ends_the_pipeline(runner: PipelineRunner, pipeline: _Pipeline) -> None:
    def fail(_: TransferPipeline) -> None:
        raise AssertionError("a broken rule")

    def has_failed() -> bool:
        try:
            runner.start(fail, 7)
            runner.take()
        except (AssertionError, EngineError):
            return True
        return False

    wait_until("the failure", has_failed)
    with pytest.raises(EngineError, match="stopped"):
        runner.wait([7])
    steps = pipeline.steps
    runner.start(lambda _: pipeline.called("later"))
    assert "later" not in dict(pipeline.calls)
    runner.stop()
    assert pipeline.steps <= steps + 1


def test_in_a_set_every_call_is_handed_over(runner: PipelineRunner, pipeline: _Pipeline) -> None:
    pipeline.in_set = True
    for number in range(20):
        assert not _started(runner, pipeline, f"call {number}")


def test_threads_that_hand_over_and_start_never_meet(
    runner: PipelineRunner, pipeline: _Pipeline
) -> None:
    """The calls of each thread run in their order, each once."""
    count = 2000

    def other() -> None:
        for number in range(count):
            runner.hand_over(lambda _, name=f"other {number}": pipeline.called(name))

    thread = threading.Thread(target=other)
    thread.start()
    for number in range(count):
        call = runner.hand_over if number % 3 == 0 else runner.start
        call(lambda _, name=f"mine {number}": pipeline.called(name))
    thread.join()

    def of(who: str) -> list[str]:
        return [name for name, _ in pipeline.calls if name.startswith(who)]

    wait_until("all calls", lambda: len(of("mine")) == len(of("other")) == count)
    runner.take()  # no assertion has ended the thread
    assert of("mine") == [f"mine {number}" for number in range(count)]
    assert of("other") == [f"other {number}" for number in range(count)]


class _Recorder:
    """A runner that records how each job is handed over."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def start(self, call: Call, *ops: int) -> None:
        self.used.append("start")

    def hand_over(self, call: Call, *ops: int) -> None:
        self.used.append("hand over")


def _how(is_store: bool, chunks: int, place: int = -1) -> list[str]:
    """Return how a worker with two tensors hands over a job of `chunks` chunks of one block."""
    recorder, copy = _Recorder(), SimpleNamespace(record_fence=lambda: None)
    tensors = [CacheTensor(base << 40, 1024, 512, 4096) for base in (1, 2)]
    geometry = CacheGeometry([(Group(0, GroupKind.FULL, 16), tensors)])
    parts = cast(Any, SimpleNamespace(runner=recorder, geometry=geometry, copy=copy))
    worker = NVMeoFOffloadingWorker(cast(RankWorker, parts))
    ones, places = np.ones(chunks, np.uint64), np.full(chunks, -1, np.int64)
    places[-1] = place
    slots, groups = np.arange(chunks, dtype=np.int32), np.zeros(chunks, np.uint8)
    batch = ChunkBatch.of(b"k" * chunks, ones, slots, places, groups)
    blocks = GPULoadStoreSpec(list(range(chunks)), [chunks], [0])
    if is_store:
        worker.submit_store(1, blocks, CommandSpec(StoreCommand(1, batch)))
    else:
        worker.submit_load(1, CommandSpec(LoadCommand(1, batch)), blocks)
    return recorder.used


def test_only_short_loads_from_the_cpu_tier_are_started_by_the_model_s_thread() -> None:
    assert _how(is_store=False, chunks=128) == ["start"]
    assert _how(is_store=False, chunks=129) == ["hand over"], "too many pieces"
    assert _how(is_store=True, chunks=1) == ["hand over"], "its fence has not passed"
    assert _how(is_store=False, chunks=3, place=place_of(1, 5)) == ["hand over"], "it reads"


_STATUS = 7
_CHUNKS = 65_536  # they keep the thread busy for 20 ms
_EXITING = f"""
import time
from vllm_nvmeof_bench import chunks

def leave(seconds):
    raise SystemExit({_STATUS})

one = chunks.Worker({_CHUNKS})
time.sleep = leave  # `measure` has handed over everything and waits
keys = chunks.random_keys([1], {_CHUNKS})
one.measure(chunks.Recorder("ours", {_CHUNKS}, 0), chunks.batches_of(keys, {_CHUNKS}))
"""


def test_a_process_can_end_while_transfers_run(imported_vllm: ImportedVllm) -> None:
    """An uncaught exception may end it. A real pipeline in a child; its engines answer at once."""
    child = imported_vllm.run(["-c", _EXITING])
    assert child.returncode == _STATUS, child.stderr
    assert "terminate called" not in child.stderr
