# SPDX-License-Identifier: Apache-2.0
"""The worker of vLLM's pull request 56076, driven by a stand-in of that vLLM's own resolution."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from tests.unit.adapter.pull_request_56076 import DevicePointers, pointing, resolved
from vllm_nvmeof_offload.errors import IntegrationError
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.protocol import ChunkBatch, LoadCommand, StoreCommand
from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter import worker as ours
from vllm_nvmeof_offload.vllm_adapter.manager import CommandSpec
from vllm_nvmeof_offload.vllm_adapter.worker import NVMeoFOffloadingWorker
from vllm_nvmeof_offload.worker.build import RankWorker

if TYPE_CHECKING:
    from vllm_nvmeof_offload.worker.pipeline import Transfer

BLOCKS = 50


def kv_caches(groups: Sequence[Sequence[int]]) -> Any:
    """Tensors of other strides than pages; groups: the tensors of each."""
    rows = [
        torch.zeros(BLOCKS * stride, dtype=torch.int8).as_strided((BLOCKS, 64), (stride, 1))
        for stride in (64, 64, 192, 256)
    ]
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=one, page_size_bytes=64) for one in rows],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=number, page_size_bytes=64) for number in one]
            for one in groups
        ],
    )


class _Runner:
    """Calls what is handed over at once."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.helpers: list[dict[int, int]] = []

    def hand_over(self, call: Any, *ops: int) -> None:
        call(self)

    def transfer(
        self,
        geometry: object,
        transfers: list[Transfer],
        fence: object,
        helpers: dict[int, int],
    ) -> None:
        self.transfers += transfers
        self.helpers.append(helpers)


def rank_of(groups: int) -> tuple[RankWorker, _Runner]:
    ranks = [RankGroup(Group(number, GroupKind.FULL, 32, 2), 64) for number in range(groups)]
    geometry = SimpleNamespace(groups=ranks)
    runner = _Runner()
    parts = SimpleNamespace(
        runner=runner, geometry=geometry, copy=SimpleNamespace(record_fence=lambda: None)
    )
    return cast(RankWorker, parts), runner


def batch(groups: Sequence[int]) -> ChunkBatch:
    rows = len(groups)
    keys = b"".join(b"key%04d" % n + g.to_bytes(4, "big") for n, g in enumerate(groups))
    return ChunkBatch.of(
        keys,
        np.ones(rows, np.uint64),
        np.arange(rows, dtype=np.int32),
        np.full(rows, -1, np.int64),
        np.array(groups, np.uint8),
    )


CASES = [
    ([[0, 1]], [[7, 3, 9, 4]], [2]),
    ([[0, 1], [2, 3]], [[7, 3], [5, 11, 12]], [0, 7]),
    ([[2], [2, 3]], [[], [49, 0]], [4, 0]),
    ([[0], []], [[1, 2], [30, 31]], [0, 0]),  # a pipeline stage without a layer of the second
]


@pytest.mark.parametrize(("tensors", "blocks", "firsts"), CASES)
def test_pointers_give_the_same_columns_as_block_ids(
    tensors: list[list[int]], blocks: list[list[int]], firsts: list[int]
) -> None:
    caches = kv_caches(tensors)
    parts, runner = rank_of(len(tensors))
    worker = ours.PointersWorker(parts, caches)
    chunks = [number for number, ids in enumerate(blocks) for _ in ids[::2]]
    pointers = resolved(blocks, firsts, caches)
    assert worker.submit_store(1, pointers, CommandSpec(StoreCommand(1, batch(chunks))))
    assert worker.submit_load(2, CommandSpec(LoadCommand(2, batch(chunks))), pointers, urgent=True)
    plain, by_ids = rank_of(len(tensors))
    ids = np.array([one for some in blocks for one in some], np.int32)
    spec: Any = SimpleNamespace(
        block_ids=ids, group_sizes=[*map(len, blocks)], block_indices=firsts
    )
    NVMeoFOffloadingWorker(plain).submit_store(1, spec, CommandSpec(StoreCommand(1, batch(chunks))))
    *_, expected_sizes, expected_firsts = by_ids.transfers[0]
    assert [is_store for _, is_store, *_ in runner.transfers] == [True, False]
    for _, _, rows, found, sizes, transfer_firsts in runner.transfers:
        shown = [ids if refs else 0 for refs, ids in zip(tensors, blocks, strict=True)]
        wanted = np.concatenate(
            [
                np.array(one or [0] * len(of), np.int32)
                for one, of in zip(shown, blocks, strict=True)
            ]
        )
        assert found.dtype == np.int32 and found.tolist() == wanted.tolist()
        assert [*sizes] == [*expected_sizes] and [*transfer_firsts] == [*expected_firsts]
        assert rows == batch(chunks)


def test_the_helpers_of_a_load_reach_the_pipeline_through_a_pickle() -> None:
    caches = kv_caches([[0]])
    parts, runner = rank_of(1)
    worker = ours.PointersWorker(parts, caches)
    pointers = resolved([[1, 2]], [0], caches)
    commands: list[StoreCommand | LoadCommand] = [
        StoreCommand(1, batch([0])),
        LoadCommand(2, batch([0]), 0b101),
        LoadCommand(3, batch([0])),
        LoadCommand(4, batch([0]), 0),
    ]
    specs = [pickle.loads(pickle.dumps(CommandSpec(command))) for command in commands]
    assert [spec.command for spec in specs] == commands
    assert [type(spec.command) for spec in specs] == [type(one) for one in commands]
    worker.submit_store(1, pointers, specs[0])
    for job, spec in enumerate(specs[1:], 2):
        worker.submit_load(job, spec, pointers, urgent=True)
    assert [one for one in runner.helpers if one] == [{2: 0b101}, {4: 0}]


def test_pointers_that_are_no_blocks_of_the_cache_are_refused() -> None:
    caches = kv_caches([[0, 2]])
    parts, _ = rank_of(1)
    worker = ours.PointersWorker(parts, caches)
    right = resolved([[1, 2]], [0], caches)

    def store(pointers: DevicePointers) -> None:
        worker.submit_store(1, pointers, CommandSpec(StoreCommand(1, batch([0]))))

    inside, beyond = right.ptrs.copy(), resolved([[1, BLOCKS]], [0], caches).ptrs
    inside[1] += 1
    exchanged = right.ptrs[[0, 1, 3, 2]]  # the second tensor's blocks in another order
    for wrong in (inside, beyond, exchanged):
        with pytest.raises(IntegrationError, match="do not point to blocks of its KV cache"):
            store(replace(right, ptrs=wrong))
    with pytest.raises(IntegrationError, match=r"name .* tensors per group"):
        store(replace(right, group_data_ref_counts=(1,)))
    with pytest.raises(IntegrationError, match="5 device pointers, but the groups have 4"):
        store(replace(right, ptrs=np.append(right.ptrs, right.ptrs[:1])))


def test_the_worker_that_fits_this_vllm_is_made() -> None:
    parts, _ = rank_of(1)
    assert ours.worker_class() is NVMeoFOffloadingWorker
    assert type(ours.make_worker(parts, None)) is NVMeoFOffloadingWorker
    with pointing():
        assert vllm_release.DEVICE_BLOCKS.form == vllm_release.POINTERS
        assert ours.worker_class() is ours.PointersWorker
        assert type(ours.make_worker(parts, kv_caches([[0]]))) is ours.PointersWorker
