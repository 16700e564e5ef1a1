# SPDX-License-Identifier: Apache-2.0
"""Finds the requests whose KV depends on weights that may have changed since.

What was *stored* before the change is void by a reset: `reset_cache` of the connector and of
`manager.core`, sent to the workers as `protocol.ResetCommand`. This module has the rest of it: the
requests that run on.

KV depends on all KV before it. So a request is *old* if it had GPU blocks when the weights changed,
or has taken over a block that an old request computed. It stays old until it ends, or has lost its
blocks and is admitted again without any of them. Old requests are not stored.

The change empties vLLM's prefix cache, blocks in use included, and each step takes out of it what
old requests have added. In between, another request may find such a block: while
vLLM schedules the very step that completes it, or, with asynchronous scheduling, right after an
output. Each admission is therefore compared with what old requests have added since the last step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_offload.manager.requests import Suspension
from vllm_nvmeof_offload.vllm_adapter.scheduler_view import SchedulerView


@dataclass(frozen=True, slots=True)
class _Admission:
    """A request got blocks. found: in GPU memory; loadable: tokens found there or by us."""

    request: Any
    found: frozenset[int]
    loadable: int


class OldKV:
    """Keeps the `suspension` of one connector's scheduler side up to date."""

    def __init__(self, suspension: Suspension, view: SchedulerView) -> None:
        self._old = suspension
        self._view = view
        self._looked_up: dict[str, int] = {}  # in this step: request → tokens in GPU memory
        self._admitted: dict[str, _Admission] = {}  # in this step
        self._forgotten: dict[str, int] = {}  # old request → its first blocks that are forgotten

    def began(self, call: str, requests: Iterable[str], *, known: bool) -> None:
        """Weights may have changed just now. requests: all requests of vLLM."""
        self._looked_up.clear()
        self._admitted.clear()
        self._forgotten.clear()
        old = [name for name in requests if self._blocks(name) or self._manager is None]
        self._old.begin(call, old, known=known)
        for name in old:
            self._forget(name)
        self._forget_all()

    def looked_up(self, request_id: str, local: int) -> None:
        """vLLM has found `local` tokens in GPU memory for a request that has no blocks yet."""
        if self._old.requests:
            self._looked_up[request_id] = local

    def admitted(self, request: Any, blocks: Any, external: int) -> None:
        """A request got blocks. external: tokens that we will load."""
        local = self._looked_up.pop(request.request_id, None)
        if local is None:  # it had blocks before
            return
        of_group = blocks.blocks[self._view.leading_id]
        found = of_group[: local // self._view.tokens_per_block]
        ids = frozenset(block.block_id for block in found)
        self._admitted[request.request_id] = _Admission(request, ids, local + external)

    def step(self, preempted: Iterable[str]) -> None:
        """vLLM has scheduled a step; called before the step's stores are made."""
        self._looked_up.clear()
        admitted, self._admitted = self._admitted, {}
        if not self._old.requests:
            return
        lost = [name for name in preempted if name in self._old.requests]
        for name in [*lost, *admitted]:
            self._forgotten.pop(name, None)
        taint: set[int] = set()
        for name in self._old.requests - admitted.keys():
            taint |= self._forget(name)
        for name, admission in admitted.items():
            # Another connector may have loaded KV of earlier weights.
            foreign = admission.request.num_computed_tokens > admission.loadable
            if foreign or (admission.found and (lost or not taint.isdisjoint(admission.found))):
                self._old.requests.add(name)
                taint |= self._forget(name)
            elif name in self._old.requests:
                self._old.ended(name)
                self._view.store_from_the_first(name)
        if lost:  # the blocks that they had are unknown by now
            self._forget_all()

    def finished(self, request_id: str) -> None:
        """A request ends, and still has its blocks."""
        self._looked_up.pop(request_id, None)
        self._admitted.pop(request_id, None)
        if request_id in self._old.requests:
            self._forget(request_id)
            self._forgotten.pop(request_id, None)

    @property
    def _manager(self) -> Any:
        return self._view.kv_cache_manager()

    def _blocks(self, request_id: str) -> Any:
        """Those of the leading group: vLLM finds no prefix without them."""
        if not self._manager:
            return ()
        return self._manager.get_blocks(request_id).blocks[self._view.leading_id]

    def _forget(self, request_id: str) -> set[int]:
        """Remove from the prefix cache the blocks that the request added since the last call."""
        first = self._forgotten.get(request_id, 0)
        added = {
            index: block.block_id
            for index, block in enumerate(self._blocks(request_id)[first:], first)
            if block.block_hash is not None
        }
        if added:
            self._forgotten[request_id] = max(added) + 1
            self._manager.evict_blocks(set(added.values()))
        return set(added.values())

    def _forget_all(self) -> None:
        manager = self._manager
        if manager is None:
            return
        pool = manager.block_pool
        # vLLM reserves one block. If others are in use, its reset does nothing.
        if pool.get_num_free_blocks() < pool.num_gpu_blocks - 1:
            manager.evict_blocks(set(range(pool.num_gpu_blocks)))
        else:
            manager.reset_prefix_cache()
