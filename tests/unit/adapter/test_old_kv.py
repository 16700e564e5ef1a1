# SPDX-License-Identifier: Apache-2.0
"""Requests that depend on KV from before a change of weights, and forgotten prefix cache blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="imports the view of vLLM's scheduler")

from vllm_nvmeof_offload.manager.requests import Suspension
from vllm_nvmeof_offload.vllm_adapter.new_weights import OldKV

BLOCK = 16


class GpuMemory:
    """The part of vLLM's KV cache manager that we read: requests' blocks, some with hashes."""

    def __init__(self, count: int = 32) -> None:
        self.all = [SimpleNamespace(block_id=i, block_hash=None) for i in range(count)]
        self.of: dict[str, list[Any]] = {}
        self.resets = 0
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=count,
            get_num_free_blocks=lambda: count - 1 - sum(map(len, self.of.values())),
        )

    def give(self, request_id: str, *ids: int, cached: bool = True) -> None:
        """More blocks for a request. cached: they are full, and in the prefix cache."""
        for number in ids:
            self.all[number].block_hash = f"{request_id}/{number}" if cached else None
            self.of.setdefault(request_id, []).append(self.all[number])

    def cached(self) -> set[int]:
        return {block.block_id for block in self.all if block.block_hash}

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self.of.get(request_id, []),))

    def evict_blocks(self, block_ids: set[int]) -> None:
        for number in block_ids:
            self.all[number].block_hash = None

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        self.evict_blocks(set(range(len(self.all))))
        return True


class Bench:
    """An engine whose weights may change."""

    def __init__(self) -> None:
        self.gpu = GpuMemory()
        self.old = Suspension(lambda: 0.0)
        self.stored_again: list[str] = []
        view: Any = SimpleNamespace(
            tokens_per_block=BLOCK,
            leading_id=0,
            kv_cache_manager=lambda: self.gpu,
            store_from_the_first=self.stored_again.append,
        )
        self.kv = OldKV(self.old, view)

    def changed(self, *requests: str) -> None:
        self.kv.began("reload_weights", requests, known=True)

    def admit(self, name: str, found: tuple[int, ...], *fresh: int, foreign: int = 0) -> None:
        """Give a request blocks: some found in GPU memory, and fresh ones."""
        local = BLOCK * len(found)
        self.gpu.of[name] = [self.gpu.all[number] for number in found]
        self.kv.looked_up(name, local)
        self.gpu.give(name, *fresh)
        request = SimpleNamespace(request_id=name, num_computed_tokens=local + foreign)
        self.kv.admitted(request, self.gpu.get_blocks(name), 0)


def test_requests_with_blocks_are_old_and_cached_blocks_are_forgotten() -> None:
    bench = Bench()
    bench.gpu.give("runs", 1, 2)
    bench.gpu.all[9].block_hash = "of one that has ended"
    bench.changed("runs", "waits")
    assert bench.old.requests == {"runs"}
    assert bench.gpu.cached() == set()
    assert not bench.gpu.resets  # vLLM's reset would refuse: blocks are in use


def test_without_running_requests_nothing_is_suspended() -> None:
    bench = Bench()
    bench.gpu.all[9].block_hash = "of one that has ended"
    bench.changed("waits")
    assert not bench.old.requests
    assert bench.gpu.resets == 1


def test_requests_admitted_later_are_stored_while_an_old_one_runs() -> None:
    bench = Bench()
    bench.gpu.give("runs", 1, 2)
    bench.changed("runs", "new")
    bench.admit("new", (), 3, 4)
    bench.kv.step(())
    bench.admit("newer", (3, 4), 5)  # found what a new one has computed
    bench.kv.step(())
    assert bench.old.requests == {"runs"}
    assert bench.gpu.cached() == {3, 4, 5}


def test_blocks_that_an_old_request_adds_to_the_prefix_cache_are_forgotten() -> None:
    bench = Bench()
    bench.gpu.give("runs", 1)
    bench.gpu.give("runs", 2, cached=False)
    bench.changed("runs")
    bench.gpu.all[2].block_hash = "full by now"
    bench.gpu.give("runs", 3, 4)
    bench.kv.step(())
    assert bench.gpu.cached() == set()
    bench.gpu.give("runs", 5)
    bench.kv.finished("runs")  # still has its blocks
    assert bench.gpu.cached() == set()


def test_a_request_that_finds_a_block_of_an_old_one_in_the_same_step_is_old() -> None:
    bench = Bench()
    bench.gpu.give("runs", 1)
    bench.changed("runs")
    bench.gpu.give("runs", 2)
    bench.admit("new", (2,), 3)
    bench.admit("third", (3,), 4)  # … and so is a request that finds that one's blocks
    bench.admit("other", (), 5)
    bench.kv.step(())
    assert bench.old.requests == {"runs", "new", "third"}
    assert bench.gpu.cached() == {5}


def test_a_preempted_old_request_that_starts_over_is_not_old() -> None:
    bench = Bench()
    bench.gpu.give("runs", 1, 2)
    bench.changed("runs")
    bench.gpu.give("runs", 3)
    del bench.gpu.of["runs"]  # block 3 is free, and cached
    bench.admit("new", (3,), 4)
    bench.kv.step(("runs",))
    assert bench.old.requests == {"runs", "new"}
    assert bench.gpu.cached() == set()
    bench.admit("runs", (), 5)
    bench.kv.step(())
    assert bench.old.requests == {"new"}
    assert bench.stored_again == ["runs"]


def test_an_announced_admission_that_did_not_happen_is_ignored() -> None:
    bench = Bench()
    bench.gpu.give("runs", 1)
    bench.changed("runs")
    bench.kv.looked_up("runs", 0)  # no room
    bench.kv.step(())
    request = SimpleNamespace(request_id="runs", num_computed_tokens=0)
    bench.kv.admitted(request, bench.gpu.get_blocks("runs"), 0)  # its load has come
    bench.kv.step(())
    assert bench.old.requests == {"runs"}


def test_kv_loaded_by_another_connector_is_old() -> None:
    bench = Bench()
    bench.gpu.give("runs", 1)
    bench.changed("runs")
    bench.admit("new", (), 2, foreign=BLOCK)
    bench.kv.step(())
    assert "new" in bench.old.requests
