# SPDX-License-Identifier: Apache-2.0
"""vLLM's jobs moved by a worker, over several KV cache groups."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult

from tests.chunks import rows_of
from tests.process import wait_until
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import OK, STALE, EngineError
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.io.base import NoIoEngine, Waker
from vllm_nvmeof_offload.protocol import ChunkBatch, LoadCommand, OpReport, StoreCommand, unpacked
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankWorker
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

BLOCKS, STRIDE, SLOTS = 40, 512, 24
PER_CHUNK = 2
#: Kind and bytes of a block; all groups share the memory, as vLLM's do.
FULL, WINDOW, EMPTY, STATE = (
    *((GroupKind.FULL, 512), (GroupKind.WINDOW, 384)),
    *((GroupKind.WINDOW, 0), (GroupKind.STATE, 200)),
)


def _spec(blocks: list[list[int]], firsts: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(chain(*blocks)), [len(one) for one in blocks], firsts)


class _Rank:
    """A worker whose KV cache has blocks of random bytes."""

    def __init__(self, *groups: tuple[GroupKind, int], reports_blocks: bool = False) -> None:
        self.cache = np.random.default_rng(1).integers(1, 256, (BLOCKS, STRIDE), np.uint8)
        base = self.cache.ctypes.data
        self.geometry = CacheGeometry(
            [
                (
                    Group(number, kind, 16 * PER_CHUNK, PER_CHUNK),
                    [CacheTensor(base, STRIDE, size, BLOCKS)] if size else [],
                )
                for number, (kind, size) in enumerate(groups)
            ]
        )
        slot_bytes = slot_stride_bytes(self.geometry.payload_bytes)
        self._memory = mmap.mmap(-1, slot_bytes * SLOTS)
        self.staging = np.frombuffer(self._memory, np.uint8).reshape(SLOTS, slot_bytes)
        waker, io = Waker(), NoIoEngine()
        self.copy = HostCopyEngine(on_done=waker.wake)
        staging = StagingMap(self.staging.ctypes.data, slot_bytes, SLOTS - 1, 1)
        limits = TransferLimits(group_bytes=self.geometry.group_bytes)
        pipeline = TransferPipeline(staging, self.copy, io, limits)
        self.runner = PipelineRunner(pipeline, waker, io.fileno())
        nothing = cast(Any, SimpleNamespace(close=lambda: None))
        parts = RankWorker(self.runner, self.geometry, self.copy, io, nothing, None, None)
        self.worker = NVMeoFOffloadingWorker(parts, reports_blocks=reports_blocks)
        self._op = 0

    def close(self) -> None:
        self.runner.stop()
        self.copy.close()

    def _batch(self, slots: Sequence[Sequence[int]]) -> ChunkBatch:
        """Chunks of each group in these cache slots; -1: the chunk is gone."""
        groups = np.repeat(np.arange(len(slots)), [len(one) for one in slots]).astype(np.uint8)
        cache = np.array([slot for one in slots for slot in one], np.int32)
        keys = b"".join(
            b"%08d" % slot + int(group).to_bytes(4, "big")
            for slot, group in zip(cache, groups, strict=True)
        )
        generations = np.ones(len(cache), np.uint64)
        return ChunkBatch.of(keys, generations, cache, np.full(len(cache), -1, np.int64), groups)

    def store(
        self, slots: list[list[int]], blocks: list[list[int]], firsts: list[int]
    ) -> list[bool]:
        """Whether each chunk was stored; the others are STALE. firsts: indexes in the request."""
        self._op += 1
        spec = _spec(blocks, firsts)
        command = StoreCommand(self._op, self._batch(slots))
        self.worker.submit_store(self._op, spec, CommandSpec(command))
        return self._outcomes(len(command.batch))

    def load(
        self, slots: list[list[int]], blocks: list[list[int]], firsts: list[int]
    ) -> list[bool]:
        """Whether each chunk was loaded; the others are STALE."""
        self._op += 1
        spec = _spec(blocks, firsts)
        command = LoadCommand(self._op, self._batch(slots))
        self.worker.note_requests({self._op: f"request {self._op}"})
        self.worker.submit_load(self._op, CommandSpec(command), spec)
        return self._outcomes(len(command.batch))

    def _outcomes(self, rows: int) -> list[bool]:
        finished: list[TransferResult] = []

        def take() -> bool:
            finished.extend(self.worker.get_finished())
            return bool(finished)

        wait_until("the end of the job", take)
        assert [(one.job_id, one.success) for one in finished] == [(self._op, True)]
        reports, self.counters = self.worker.take_reports()
        (report,) = [one for one in unpacked(reports) if isinstance(one, OpReport)]
        outcomes = [one.outcome for one in rows_of(report, rows)]
        assert set(outcomes) <= {OK, STALE}
        return [outcome is not None and outcome.ok for outcome in outcomes]

    def payload(self, slot: int, size: int) -> bytes:
        return self.staging[slot, HEADER_BYTES:][:size].tobytes()

    def pages(self, blocks: list[int], size: int) -> bytes:
        return self.cache[blocks, :size].tobytes()


@pytest.fixture
def rank() -> Iterator[_Rank]:
    with closing(_Rank(FULL, WINDOW, EMPTY, STATE)) as one:
        yield one


def test_every_group_comes_back_into_other_blocks(rank: _Rank) -> None:
    slots = [[0, 1], [2], [3], [4]]
    before = rank.cache.copy()
    assert rank.store(slots, [[0, 1, 2, 3], [4, 5], [6, 7], [8]], [0, 2, 2, 1]) == [True] * 5
    assert rank.payload(0, 1024) == rank.pages([0, 1], 512)
    assert rank.payload(1, 1024) == rank.pages([2, 3], 512)
    assert rank.payload(2, 769) == rank.pages([4, 5], 384) + b"\0", "no more than the pages"
    assert not any(rank.payload(3, 1024)), "a group without layers has headers only"
    assert rank.payload(4, 201) == rank.pages([8], 200) + b"\0", "a state is one block"
    rank.cache[20:] = 0
    assert rank.load(slots, [[20, 21, 22], [23, 24], [25], [26]], [1, 2, 3, 1]) == [True] * 5
    assert (rank.cache[20:23] == before[1:4]).all(), "the first chunk was loaded in part"
    assert (rank.cache[[23, 24], :384] == before[[4, 5], :384]).all()
    assert (rank.cache[26, :200] == before[8, :200]).all()
    assert not rank.cache[23:25, 384:].any() and not rank.cache[26, 200:].any()
    assert not rank.cache[25].any() and not rank.cache[27:].any()
    assert rank.counters["unstored_chunks", "incomplete"] == 0


def test_a_load_that_runs_in_this_step_is_refused(rank: _Rank) -> None:
    """Its failure could not be reported in time (docs/decisions/no-synchronous-loads.md)."""
    command = CommandSpec(LoadCommand(1, ChunkBatch((b"",) * 5)))
    with pytest.raises(AssertionError, match="sync_load_budget_bytes"):
        rank.worker.submit_load(1, command, _spec([[]], [0]), expedited=True)


def test_an_incomplete_chunk_is_not_stored_and_its_slot_is_empty(rank: _Rank) -> None:
    assert (
        rank.store([[0], [1], [2], [3]], [[0, 1], [2, 3], [4, 5], [6]], [0, 0, 0, 0]) == [True] * 4
    )
    # The window has lost the first block of its first chunk. Slot 1 is filled again.
    stored = rank.store([[4], [1, 5], [6], []], [[7, 8], [9, 10, 11], [12], []], [2, 3, 3, 0])
    assert stored == [True, False, True, True]
    assert rank.counters["unstored_chunks", "incomplete"] == 1
    assert rank.payload(1, 768) == rank.pages([2, 3], 384), "nothing was copied"
    assert rank.payload(5, 768) == rank.pages([10, 11], 384)
    assert rank.load([[], [1], [], []], [[], [30, 31], [], []], [0, 0, 0, 0]) == [False]


def test_a_hole_in_the_middle_fails_all_chunks_of_its_group(rank: _Rank) -> None:
    stored = rank.store([[0], [1, 2], [], [3]], [[0, 1], [2, 3, 4], [], [5]], [0, 4, 0, 1])
    assert stored == [True, False, False, True]
    assert rank.counters["unstored_chunks", "incomplete"] == 2
    assert not any(rank.payload(1, 768)) and not any(rank.payload(2, 768))


def test_a_failed_load_of_several_groups_names_the_request(rank: _Rank) -> None:
    rank.store([[0], [1], [2], [3]], [[0, 1], [2, 3], [4, 5], [6]], [0, 0, 0, 0])
    loaded = rank.load([[0, -1], [1], [2], [3]], [[20, 21, 22], [23], [24], [25]], [0, 1, 1, 0])
    assert loaded == [True, False, True, True, True]
    assert rank.worker.take_invalid_blocks() == set()
    assert rank.worker.take_failed_requests() == {"request 2"}
    assert rank.worker.take_failed_requests() == set()
    assert rank.load([[0], [], [], []], [[30, 31], [], [], []], [0, 0, 0, 0]) == [True]
    assert rank.worker.take_failed_requests() == set()


@pytest.mark.parametrize(
    ("reports_blocks", "blocks", "requests"), [(True, {22}, set()), (False, set(), {"request 2"})]
)
def test_a_failed_load_names_blocks_or_its_request(
    reports_blocks: bool, blocks: set[int], requests: set[str]
) -> None:
    with closing(_Rank(FULL, reports_blocks=reports_blocks)) as rank:
        assert rank.store([[0]], [[0, 1]], [0]) == [True]
        assert rank.load([[0, -1]], [[20, 21, 22]], [0]) == [True, False]
        assert rank.worker.take_invalid_blocks() == blocks
        assert rank.worker.take_failed_requests() == requests


def test_chunks_of_groups_in_another_order_are_an_error(rank: _Rank) -> None:
    batch = rank._batch([[0], [1], [], []])
    turned = ChunkBatch.of(
        batch.keys, batch.generations, batch.cache, batch.places, batch.groups[::-1].copy()
    )
    spec = GPULoadStoreSpec([0, 1, 2, 3], [2, 2, 0, 0], [0, 0, 0, 0])
    rank.worker.submit_store(1, spec, CommandSpec(StoreCommand(1, turned)))
    with pytest.raises(EngineError) as stopped:
        rank.worker.wait({1})
    assert "not sorted by group" in str(stopped.value.__cause__)


def test_the_helpers_of_a_load_reach_the_pipeline_through_a_pickle(
    rank: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers: list[dict[int, int]] = []
    pipeline = SimpleNamespace(transfer=lambda *given: helpers.append(given[-1]))
    for name in ("start", "hand_over"):
        monkeypatch.setattr(rank.runner, name, lambda call, *ops: call(pipeline))
    batch, blocks = rank._batch([[0], [], [], []]), _spec([[1, 2], [], [], []], [0] * 4)
    commands: list[StoreCommand | LoadCommand] = [
        StoreCommand(1, batch),
        LoadCommand(2, batch, 0b101),
        LoadCommand(3, batch),
        LoadCommand(4, batch, 0),
    ]
    specs = [pickle.loads(pickle.dumps(CommandSpec(command))) for command in commands]
    assert [spec.command for spec in specs] == commands
    assert [type(spec.command) for spec in specs] == [type(one) for one in commands]
    rank.worker.submit_store(1, blocks, specs[0])
    for job, spec in enumerate(specs[1:], 2):
        rank.worker.submit_load(job, spec, blocks, urgent=True)
    assert helpers == [{}, {2: 0b101}, {}, {4: 0}]
